"""Many threads on one pool, with the interpreter switching as often as it can; bounded by counts, not by time.

Each thread does what one kind of user does, and some do what nobody should. Every slot carries a stamp of its
block; a reader compares it for as long as it holds its lease, and a writer finds its slot without another owner.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle

from kvstore.blocks.priority import Priority, Retention
from kvstore.errors import ChainBroken, LeaseReleased
from kvstore.pool.eviction.make import make_policy
from kvstore.pool.pool import Grant, Pool, StoreTicket
from kvstore.runtime import clock
from poolcheck.chains import LATER_S, NAMESPACES, chain_of

_STAMP = 32
_JOIN_S = 60.0


@dataclass
class Hammered:
    """A pool, its memory, and the books of who writes where."""

    pool: Pool
    memory: bytearray
    writer_of: list[str | None]
    counts: dict[str, int] = field(default_factory=dict)
    leases: list[int] = field(default_factory=list)
    priorities: Iterator[Priority] = field(default_factory=lambda: cycle((*Priority, Priority.NORMAL)))
    #: Some end at once, some while the pool is hammered, some never.
    priority_times: Iterator[float] = field(default_factory=lambda: cycle((0.0, 0.01, 0.1, math.inf, 1e-3)))

    def claim(self, tokens: str, owner: str, start: int = 0, **more: object) -> StoreTicket:
        """Prepare a store, of any priority; its slots must be nobody else's."""
        retention = Retention(next(self.priorities), clock.now_s() + next(self.priority_times))
        ticket = self.pool.prepare_store(chain_of(tokens, start=start), owner, retention=retention, **more)
        for slot in ticket.slots:
            assert self.writer_of[slot] is None, f"slot {slot} is written by {self.writer_of[slot]} and {owner}"
            self.writer_of[slot] = owner
        return ticket

    def fill(self, tokens: str, ticket: StoreTicket, start: int = 0) -> None:
        """Write the stamps, byte by byte in two goes."""
        chain = chain_of(tokens, start=start)
        for half in (slice(0, _STAMP // 2), slice(_STAMP // 2, _STAMP)):
            for index, slot in zip(ticket.indexes, ticket.slots, strict=True):
                at = slot * _STAMP
                self.memory[at + half.start : at + half.stop] = chain.hash_at(index)[half]

    def leave(self, slots: tuple[int, ...], owner: str) -> None:
        """Note that writing is over, before the pool hears it."""
        for slot in slots:
            assert self.writer_of[slot] == owner, f"slot {slot} changed hands under {owner}"
            self.writer_of[slot] = None

    def verify(self, tokens: str, grant: Grant) -> None:
        """Compare every pinned slot with its block."""
        chain = chain_of(tokens)
        for index, slot in enumerate(grant.slots):
            found = self.memory[slot * _STAMP : (slot + 1) * _STAMP]
            assert found == chain.hash_at(index), f"slot {slot} holds the bytes of another block, or half of one"


def _tokens(rng: random.Random, letters: str = "abc") -> str:
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, 4)))


def evictor(h: Hammered, rng: random.Random, me: str) -> None:
    """Stores what nobody has, so that something has to go."""
    tokens = str(rng.randint(0, 9)) + _tokens(rng)
    ticket = h.claim(tokens, me)
    h.fill(tokens, ticket)
    h.leave(ticket.slots, me)
    if ticket.write_id:
        h.pool.complete_store(ticket.write_id, me)


def pinner(h: Hammered, rng: random.Random, me: str) -> None:
    """Pins, compares, compares again, releases, and once too often."""
    tokens = _tokens(rng)
    grant = h.pool.pin_prefix(chain_of(tokens), me, LATER_S)
    h.leases.append(grant.lease_id)
    before = h.pool.generations(grant.slots)
    for _ in range(3):
        h.verify(tokens, grant)
    assert h.pool.generations(grant.slots) == before, "a pinned slot began another life"
    assert h.pool.renew(grant.lease_id, me, 5.0), "a lease was gone before its time"
    h.verify(tokens, grant)
    assert h.pool.release(grant.lease_id, me), "a lease was gone before its time"
    assert not h.pool.release(grant.lease_id, me), "a lease was released twice"


def writer(h: Hammered, rng: random.Random, me: str) -> None:
    """Stores, gives up half of the time, and now and then leaves slots aside for a while."""
    tokens = _tokens(rng)
    ticket = h.claim(tokens, me)
    h.fill(tokens, ticket)
    if not ticket.write_id:
        return
    way = rng.random()
    if way < 0.5:
        h.leave(ticket.slots, me)
        h.pool.complete_store(ticket.write_id, me)
    elif way < 0.8:
        h.leave(ticket.slots, me)
        assert h.pool.abort_store(ticket.write_id, me) == len(ticket.slots)
    else:
        name = f"late-{me}"
        assert h.pool.abort_store(ticket.write_id, me, quarantine=name) == len(ticket.slots)
        h.fill(tokens, ticket)
        h.leave(ticket.slots, me)
        assert h.pool.end_quarantine(name) == len(ticket.slots)


def onboarder(h: Hammered, rng: random.Random, me: str) -> None:
    """Brings blocks behind a prefix, publishes as they come, and reads what it brought."""
    tokens = _tokens(rng) + _tokens(rng)
    lease = h.pool.pin_prefix(chain_of(tokens), me, LATER_S)
    start = len(lease.slots)
    if start < len(tokens):
        ticket = h.claim(tokens, me, start, needs_parent=False)
        h.fill(tokens, ticket, start)
        for count in range(1, len(ticket.slots) + 1):
            h.leave(ticket.slots[count - 1 : count], me)
            h.pool.complete_store(ticket.write_id, me, count=count)
        more = h.pool.pin_prefix(chain_of(tokens, start=start), me, LATER_S, lease.lease_id)
        lease = Grant(lease.lease_id, lease.packed_slots + more.packed_slots)
    h.verify(tokens, lease)
    assert h.pool.release(lease.lease_id, me), "a lease was gone before its time"


def liar(h: Hammered, rng: random.Random, me: str) -> None:
    """Names leases and writes that are stale, foreign or never were."""
    stolen = rng.choice(h.leases[-8:] or [1])
    for lease_id in (stolen, rng.getrandbits(40), -1):
        assert not h.pool.release(lease_id, me)
        assert not h.pool.renew(lease_id, me, 0.0)
        assert h.pool.complete_store(lease_id, me) == h.pool.abort_store(lease_id, me) == 0
    try:
        h.pool.pin_prefix(chain_of("a"), me, LATER_S, stolen)
    except LeaseReleased:
        pass
    else:
        raise AssertionError("a foreign lease grew")
    try:
        h.pool.prepare_store(chain_of("zzz" + _tokens(rng), start=3), me)
    except ChainBroken:
        pass
    else:
        raise AssertionError("a run without its parent was attached")
    assert h.pool.end_quarantine("nobody's") == 0


def janitor(h: Hammered, rng: random.Random, me: str) -> None:
    """Looks on, lets time pass, clears, and gives up an owner that holds something."""
    h.pool.check_integrity()
    assert h.pool.expire(1.0) == 0, "a lease ended before its time"
    way = rng.random()
    if way < 0.15:
        h.pool.clear(NAMESPACES[0])
    elif way < 0.5:
        dead = f"{me}-dead"
        tokens = _tokens(rng)
        h.pool.pin_prefix(chain_of(tokens), dead, LATER_S)
        h.leave(h.claim(tokens, dead).slots, dead)
        assert h.pool.release_owner(dead) >= 1


ROLES: tuple[Callable[[Hammered, random.Random, str], None], ...] = (
    evictor,
    pinner,
    pinner,
    writer,
    onboarder,
    liar,
    janitor,
)


def hammer_threads(num_slots: int, num_rounds: int, seed: int, eviction: str = "lru") -> Hammered:
    """Run all roles at once, `num_rounds` each; raises what the first of them raised."""
    pool = Pool(num_slots, max_pinned=num_slots - 2, eviction=make_policy(eviction, num_slots))
    h = Hammered(pool, bytearray(num_slots * _STAMP), [None] * num_slots)
    errors: list[BaseException] = []
    start = threading.Barrier(len(ROLES))

    def work(number: int) -> None:
        role, rng, me = ROLES[number], random.Random(f"{seed}-{number}"), f"{ROLES[number].__name__}-{number}"
        try:
            start.wait(_JOIN_S)
            for _ in range(num_rounds):
                if errors:
                    return
                role(h, rng, me)
                h.counts[me] = h.counts.get(me, 0) + 1
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(ROLES))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_JOIN_S)
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
    return h


def assert_at_rest(pool: Pool) -> None:
    """Assert that nothing is held, every slot is somewhere, and the events tell what is resident."""
    pool.check_integrity()
    stats = pool.stats()
    held = (stats.num_pinned, stats.num_writing, stats.num_quarantined, stats.num_leases, stats.num_writes)
    assert held == (0, 0, 0, 0, 0), f"pinned, writing, quarantined, leases, writes at the end: {held}"
    assert stats.num_free + stats.num_idle == stats.num_slots, "slots are lost"
    found: set[bytes] = set()
    if (events := pool.drain_events()) is not None:  # Those of a long run are not kept.
        for present, block_hash in events:
            (found.add if present else found.remove)(block_hash)
        assert found == set(pool.resident_hashes()), "the events replayed are not what is resident"

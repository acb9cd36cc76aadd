"""A real pool with memory behind it: what is written carries a stamp, and whoever reads compares.

The verbs here do what a worker does: claim, write half, write the other half, publish; pin, read, release. They say
`step()` where another thread may come between, and keep their own books of who may touch which slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

from kvstore.pool.eviction.learned import LearnedReuse
from kvstore.pool.eviction.lru import LeastRecentlyUsed
from kvstore.pool.eviction.policy import EvictionPolicy
from kvstore.pool.eviction.reuse import NUM_BUCKETS
from kvstore.pool.pool import Grant, Pool, StoreTicket
from kvstore.pool.tenants.limits import TenantLimits
from kvstore.pool.tenants.table import TenantTable
from poolcheck.chains import LATER_S, NAMESPACES, chain_of
from poolcheck.run import Run

_HALF = 8


def make_eviction(num_slots: int) -> EvictionPolicy:
    """Return the policy of the pools of worlds; a test may put another function in the place of this one."""
    return LeastRecentlyUsed(num_slots)


def learned_eviction(num_slots: int) -> EvictionPolicy:
    """Return learned reuse with few ghosts, a clock that goes on with each look, and estimates that favour the new."""
    policy = LearnedReuse(num_slots, map(float, count()).__next__, num_ghosts=2)
    policy.hazards = [[4.0] * NUM_BUCKETS, [3.0] * NUM_BUCKETS, [2.0] * NUM_BUCKETS, [1.0] * NUM_BUCKETS]
    return policy


class World:
    """One pool under one run of the explorer.

    Args:
        run: whose points the pool's lock and the verbs here are.
        num_slots: of the pool.
        max_pinned: of the pool.
        quotas: of its tenants.
    """

    def __init__(
        self, run: Run, num_slots: int, max_pinned: int | None = None, quotas: dict[str, TenantLimits] | None = None
    ) -> None:
        #: By the clock that ends priorities.
        self.now_s = 0.0
        self.pool = Pool(
            num_slots, max_pinned, epoch=b"one life", eviction=make_eviction(num_slots), now_s=lambda: self.now_s,
            tenants=TenantTable(num_slots, quotas) if quotas else None,
        )  # fmt: skip
        self.pool._lock = run.lock()
        # From 1 on in each run: where two come to one state, their numbers are the same.
        self.pool.new_id = self.pool.leases.new_id = self.pool.writes.new_id = count(1).__next__
        self.step: Callable[[str], None] = run.step
        self.memory = bytearray(num_slots * 2 * _HALF)
        self.writers: dict[int, str] = {}
        self.readers: Counter[int] = Counter()
        self.num_slots = num_slots
        self.checks = True
        run.check = self.check

    # Bytes.

    def stamp(self, slot: int, block_hash: bytes) -> None:
        """Write a block, in two halves."""
        at = slot * 2 * _HALF
        self.memory[at : at + _HALF] = block_hash[:_HALF]
        self.step("half written")
        self.memory[at + _HALF : at + 2 * _HALF] = block_hash[:_HALF]

    def stamp_half(self, slot: int, part: int, block_hash: bytes) -> None:
        """Write the half of a block that is one rank's."""
        at = (2 * slot + part) * _HALF
        self.memory[at : at + _HALF] = block_hash[:_HALF]

    def verify(self, slot: int, block_hash: bytes) -> None:
        """Read a block, in two halves, and compare."""
        at = slot * 2 * _HALF
        for half in (self.memory[at : at + _HALF], self.memory[at + _HALF : at + 2 * _HALF]):
            assert half == block_hash[:_HALF], f"slot {slot} holds the bytes of another block, or half of one"

    # What workers do.

    def claim(self, tokens: str, owner: str, start: int = 0, **more: object) -> StoreTicket:
        """Prepare a store and note who writes."""
        ticket = self.pool.prepare_store(chain_of(tokens, start=start), owner, **more)
        for slot in ticket.slots:
            assert slot not in self.writers, f"slot {slot} is written by {self.writers[slot]} and {owner}"
            assert not self.readers[slot], f"slot {slot} was given to {owner} while it is read"
            self.writers[slot] = owner
        return ticket

    def fill(self, tokens: str, ticket: StoreTicket, start: int = 0) -> None:
        """Write what a ticket names."""
        chain = chain_of(tokens, start=start)
        for index, slot in zip(ticket.indexes, ticket.slots, strict=True):
            self.stamp(slot, chain.hash_at(index))

    def forget(self, ticket: StoreTicket) -> None:
        """Note that nobody writes these any more; before the pool is told, since it gives them on at once."""
        for slot in ticket.slots:
            del self.writers[slot]

    def store(self, tokens: str, owner: str, start: int = 0, **more: object) -> StoreTicket:
        """Claim, write, publish."""
        ticket = self.claim(tokens, owner, start, **more)
        self.fill(tokens, ticket, start)
        self.forget(ticket)
        if ticket.write_id:
            self.pool.complete_store(ticket.write_id, owner)
        return ticket

    def pin(self, tokens: str, owner: str, deadline_s: float = LATER_S, start: int = 0) -> Grant:
        """Pin what is readable and note who reads."""
        grant = self.pool.pin_prefix(chain_of(tokens, start=start), owner, deadline_s)
        for slot in grant.slots:
            assert slot not in self.writers, f"slot {slot} was pinned by {owner} while {self.writers[slot]} writes it"
            self.readers[slot] += 1
        return grant

    def verify_all(self, tokens: str, grant: Grant, start: int = 0) -> None:
        """Read every pinned block, letting others run between."""
        chain = chain_of(tokens, start=start)
        for index, slot in enumerate(grant.slots):
            self.verify(slot, chain.hash_at(index))
            self.step("block read")

    def unpin(self, grant: Grant, owner: str) -> bool:
        """Release; whether it was still held."""
        for slot in grant.slots:
            self.readers[slot] -= 1
        return self.pool.release(grant.lease_id, owner)

    def read(self, tokens: str, owner: str, start: int = 0) -> int:
        """Pin, read, release; returns how many blocks that were."""
        grant = self.pin(tokens, owner, start=start)
        before = self.pool.generations(grant.slots)
        self.verify_all(tokens, grant, start)
        assert self.pool.generations(grant.slots) == before, "a pinned slot began another life"
        assert self.unpin(grant, owner), "the lease was gone"
        return len(grant.slots)

    # What must hold.

    def check(self) -> None:
        """Assert what holds between any two steps."""
        self.pool.check_integrity()
        stats = self.pool.stats()
        total = stats.num_free + stats.num_writing + stats.num_idle + stats.num_pinned + stats.num_quarantined
        assert total == stats.num_slots, f"{total} of {stats.num_slots} slots are somewhere"

    def at_rest(self, *chains: str) -> None:
        """Assert that nothing is held, and that what can be found is what it says."""
        self.check()
        stats = self.pool.stats()
        held = (stats.num_pinned, stats.num_writing, stats.num_quarantined, stats.num_leases, stats.num_writes)
        assert held == (0, 0, 0, 0, 0), f"pinned, writing, quarantined, leases, writes at the end: {held}"
        for tokens in chains:
            self.read(tokens, "last")
        events: set[bytes] = set()
        for present, block_hash in self.pool.drain_events():
            (events.add if present else events.remove)(block_hash)
        assert events == set(self.pool.resident_hashes()), "the events replayed are not what is resident"
        self.pool.clear(NAMESPACES[0])
        assert self.pool.stats().num_free == self.num_slots, "slots are lost"

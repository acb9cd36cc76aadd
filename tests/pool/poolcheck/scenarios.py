"""Two or three threads each that meet where a block pool can go wrong; the explorer runs them in every order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kvstore.blocks.priority import Priority, Retention
from kvstore.errors import StoreUnavailable
from kvstore.pool.handover.image import PoolImage
from kvstore.pool.pool import Pool
from kvstore.pool.tenants.limits import TenantLimits
from poolcheck.chains import LATER_S, NAMESPACES, chain_of
from poolcheck.run import Run
from poolcheck.world import World


def claim_pin_evict(run: Run):
    """A reader pins what a writer has to evict to make room."""
    world = World(run, 2)
    world.store("ab", "before")

    def reader():
        world.read("ab", "r")

    def writer():
        ticket = world.store("xy", "w")
        assert len(ticket.slots) + ticket.num_refused == 2

    return [reader, writer], lambda: world.at_rest("ab", "xy")


def two_readers_and_eviction(run: Run):
    """Two leases on one block end while a writer wants it: the second's pin must count."""
    world = World(run, 1)
    world.store("a", "before")

    def reader(owner):
        return lambda: world.read("a", owner)

    return [reader("r1"), reader("r2"), lambda: world.store("x", "w")], lambda: world.at_rest("a", "x")


def two_writers_one_victim(run: Run):
    """Two writers want the one slot that can be evicted."""
    world = World(run, 2)
    world.store("ab", "before")
    held = world.pin("a", "r")

    def at_end():
        world.verify_all("a", held)
        assert world.unpin(held, "r")
        world.at_rest("ab", "x", "y")

    return [lambda: world.store("x", "w1"), lambda: world.store("y", "w2")], at_end


def write_clear_read(run: Run):
    """A namespace is cleared while it is written and read; what was claimed before is never found after."""
    world = World(run, 4)
    world.store("a", "before")
    claimed: list[bool] = []
    late: list[bool] = []

    def writer():
        ticket = world.claim("ab", "w")
        claimed.append(True)
        world.fill("ab", ticket)
        world.forget(ticket)
        if ticket.write_id:
            world.pool.complete_store(ticket.write_id, "w")

    def clearer():
        late.extend(claimed)
        world.pool.clear(NAMESPACES[0])
        check_gone()

    def check_gone():
        # What a writer had claimed before the clearing began can never be found again.
        assert not late or world.pool.lookup(chain_of("ab")) == 0, "a block outlived the clearing"
        assert not late or world.pool.lookup(chain_of("ab", start=1)) == 0, "a write that a clearing met was published"

    def at_end():
        check_gone()
        world.at_rest("ab")

    return [writer, clearer, lambda: world.read("ab", "r")], at_end


def clear_in_pieces(run: Run):
    """What is cleared comes back block by block, while it is read, and while others store the same and need room."""
    world = World(run, 3)
    world.pool.swept_at_once = 1
    world.store("ab", "before")
    stored_again: list[bool] = []

    def clearer():
        world.pool.begin_clear(NAMESPACES[0])
        num_found = world.pool.lookup(chain_of("a"))
        assert stored_again or not num_found, "a block outlived the clearing"
        while world.pool.sweep():
            pass

    def writer():
        stored_again.append(True)  # Or soon: from now on the same may be found.
        world.store("abc", "w")

    return [clearer, writer, lambda: world.read("ab", "r")], lambda: world.at_rest("abc")


def clear_under_reader(run: Run):
    """A cleared block that is read keeps its slot; the same block is stored again meanwhile."""
    world = World(run, 2)
    world.store("a", "before")

    def clearer():
        world.pool.clear(NAMESPACES[0])
        world.store("a", "w")

    return [lambda: world.read("a", "r"), clearer], lambda: world.at_rest("a")


def cancelled_transfer(run: Run):
    """A fetch gives up while its transfer still writes; another writer wants slots."""
    world = World(run, 2)
    posted: list[tuple[int, ...]] = []
    aborted: list[int] = []

    def fetch():
        ticket = world.claim("ab", "fetch")
        posted.append(ticket.slots)
        world.step("posted")
        world.forget(ticket)
        num_slots = world.pool.abort_store(ticket.write_id, "fetch", quarantine="read-1")
        assert num_slots == len(ticket.slots)
        aborted.append(num_slots)

    def transfer():
        run.wait_until(lambda: bool(posted), "transfer")
        for slot in posted[0]:
            world.stamp(slot, b"late bytes")
        run.wait_until(lambda: bool(aborted), "abort")
        assert world.pool.end_quarantine("read-1") == len(posted[0])

    def writer():
        world.store("x", "w")

    return [fetch, transfer, writer], lambda: world.at_rest("x")


def expire_renew_evict(run: Run):
    """A lease is renewed while its first deadline passes and a writer waits for its slot."""
    world = World(run, 1)
    world.store("a", "before")

    def reader():
        grant = world.pin("a", "r", deadline_s=10.0)
        if not grant.slots:
            world.pool.release(grant.lease_id, "r")
            return
        if not world.pool.renew(grant.lease_id, "r", 30.0):
            # It had passed: the bytes may be anything from here on.
            world.readers.clear()
            assert not world.pool.release(grant.lease_id, "r")
            return
        # Asking for less must not take away what was promised.
        assert world.pool.renew(grant.lease_id, "r", 5.0), "a renewed lease is held until its new deadline"
        world.verify_all("a", grant)
        world.verify_all("a", grant)
        assert world.unpin(grant, "r"), "a renewed lease is held until its new deadline"

    def clock():
        world.readers.clear()
        world.pool.expire(20.0)

    def writer():
        # Not `store`: whether the reader may still read is for the reader to say.
        ticket = world.pool.prepare_store(chain_of("x"), "w")
        world.fill("x", ticket)
        if ticket.write_id:
            world.pool.complete_store(ticket.write_id, "w")

    return [reader, clock, writer], lambda: world.at_rest("a", "x")


def release_meets_expire(run: Run):
    """A lease is released and expired at once: its pin goes exactly once, the neighbour's stays."""
    world = World(run, 2)
    world.store("a", "before")
    neighbour = world.pin("a", "n")
    ended: list[int] = []

    def releaser():
        ended.append(int(world.pool.release(grant.lease_id, "r")))

    def clock():
        ended.append(world.pool.expire(20.0))

    grant = world.pool.pin_prefix(chain_of("a"), "r", 10.0)

    def at_end():
        assert sum(ended) == 1, f"a lease ended {sum(ended)} times"
        world.verify_all("a", neighbour)
        assert world.unpin(neighbour, "n")
        world.at_rest("a", "xy")

    return [releaser, clock, lambda: world.store("xy", "w")], at_end


def wrong_releases(run: Run):
    """Releases of leases that are stale, foreign or never were, beside a reader and a writer."""
    world = World(run, 1)
    world.store("a", "before")
    stale = world.pin("a", "old")
    assert world.unpin(stale, "old")
    leases: list[int] = []

    def reader():
        grant = world.pin("a", "r")
        leases.append(grant.lease_id)
        world.verify_all("a", grant)
        world.verify_all("a", grant)
        assert world.unpin(grant, "r"), "somebody else released it"
        assert not world.pool.release(grant.lease_id, "r"), "a lease was released twice"

    def thief():
        assert not world.pool.release(stale.lease_id, "old")
        for lease_id in leases or [12345]:
            assert not world.pool.release(lease_id, "thief")
            assert not world.pool.renew(lease_id, "thief", 1.0)

    return [reader, thief, lambda: world.store("x", "w")], lambda: world.at_rest("a", "x")


def duplicates(run: Run):
    """Two save one chain at once: one copy, and both succeed."""
    world = World(run, 3)
    tickets = []

    def saver(owner):
        return lambda: tickets.append(world.store("ab", owner))

    def at_end():
        assert [ticket.num_refused for ticket in tickets] == [0, 0]
        assert sum(len(ticket.slots) for ticket in tickets) == 2, "a block was stored twice"
        assert world.pool.lookup(chain_of("ab")) == 2
        world.at_rest("ab")

    return [saver("w1"), saver("w2"), lambda: world.read("ab", "r")], at_end


def onboard_meets_pin(run: Run):
    """Blocks arrive behind one that is read, in a pool that is full: the pinned slot stays what it is."""
    world = World(run, 3)
    world.store("a", "before")
    world.store("y", "before")

    def onboard():
        ticket = world.claim("abc", "fetch", needs_parent=False)
        world.fill("abc", ticket)
        world.forget(ticket)
        if ticket.write_id:
            world.pool.complete_store(ticket.write_id, "fetch", count=1)
            world.pool.complete_store(ticket.write_id, "fetch")

    def reader():
        world.read("abc", "r")
        world.read("y", "r")

    return [onboard, reader], lambda: world.at_rest("abc", "y")


def readers_of_a_cleared_block(run: Run):
    """Two readers end together on a block that was cleared: its slot comes back once."""
    world = World(run, 2)
    world.store("a", "before")
    grants = {owner: world.pin("a", owner) for owner in ("r1", "r2")}
    world.pool.clear(NAMESPACES[0])

    def reader(owner):
        return lambda: world.unpin(grants[owner], owner)

    return [reader("r1"), reader("r2"), lambda: world.store("xy", "w")], lambda: world.at_rest("x")


def two_writers(run: Run):
    """Two writers take free slots at once."""
    world = World(run, 3)
    return [lambda: world.store("ab", "w1"), lambda: world.store("x", "w2")], lambda: world.at_rest("ab", "x")


def _rank(world: World, tokens: str, part: int, *, start: int = 0, dies: bool = False, gives_up: bool = False):
    """Write one half of each block, as one rank of two; a dead one is noticed after it stopped writing."""
    owner, chain = f"rank{part}", chain_of(tokens, start=start)

    def body():
        parts = {"num_parts": 2, "part": part, "parts_deadline_s": 10.0}
        ticket = world.pool.prepare_store(chain, owner, needs_parent=not start, **parts)
        if gives_up:
            world.pool.abort_store(ticket.write_id, owner)
            return
        for index, slot in zip(ticket.indexes, ticket.slots, strict=True):
            world.stamp_half(slot, part, chain.hash_at(index))
            world.step("part written")
            if dies:
                break
        if dies:
            world.pool.release_owner(owner)
        elif ticket.write_id:
            world.pool.complete_store(ticket.write_id, owner)

    return body


def _in_turn(*bodies: Callable[[], object]):
    return lambda: [body() for body in bodies]


def two_ranks(run: Run):
    """Two ranks write half of each block; a reader never sees one without the other."""
    world = World(run, 1)

    def at_end():
        assert world.pool.lookup(chain_of("a")) == 1
        world.at_rest("a")

    return [_rank(world, "a", 0), _rank(world, "a", 1), lambda: world.read("a", "r")], at_end


def a_rank_dies(run: Run):
    """One of two ranks dies between: the block is lost for all, and can be stored again."""
    world = World(run, 2)

    def reader():
        assert world.read("ab", "r") == 0, "half of a block can be read"

    def at_end():
        assert world.pool.lookup(chain_of("ab")) == 0, "half of a block can be found"
        # The other rank may have come only after the death; nobody joins it any more.
        world.pool.expire(11.0)
        assert len(world.store("ab", "whole").slots) == 2
        world.at_rest("ab")

    return [_rank(world, "ab", 0), _rank(world, "ab", 1, dies=True), reader], at_end


def parts_of_an_earlier_claim(run: Run):
    """A rank gives up a block that the other has written; its slot is used by others, then claimed anew."""
    world = World(run, 2)

    def at_end():
        world.pool.expire(11.0)
        world.at_rest("ab", "x")

    rank0 = _in_turn(_rank(world, "ab", 0, start=1, gives_up=True), _rank(world, "ab", 0))
    return [_rank(world, "ab", 1), rank0, lambda: world.store("x", "other")], at_end


def names_of_an_earlier_claim(run: Run):
    """As before, but the slots are claimed anew for other blocks, by both ranks."""
    world = World(run, 3)

    def at_end():
        world.pool.expire(11.0)
        world.at_rest("abc", "abx")

    gives_up = _rank(world, "abc", 0, start=1, gives_up=True)
    rank0 = _in_turn(gives_up, _rank(world, "axw", 0))
    return [_in_turn(_rank(world, "abc", 1), _rank(world, "axw", 1)), rank0], at_end


def dead_owner(run: Run):
    """An owner is given up while it completes its write and holds a lease."""
    world = World(run, 3)
    world.store("a", "before")
    ended: list[int] = []

    def owner():
        world.pin("a", "dead")
        ticket = world.claim("ab", "dead")
        world.fill("ab", ticket)
        world.readers.clear()
        for slot in ticket.slots:
            world.writers.pop(slot, None)
        if ticket.write_id:
            world.pool.complete_store(ticket.write_id, "dead")

    def reaper():
        run.wait_until(lambda: world.pool.stats().num_writes > 0 or bool(ended), "a write")
        world.pool.release_owner("dead")

    def first(body):
        def run_it():
            body()
            ended.append(1)

        return run_it

    def at_end():
        world.readers.clear()
        world.pool.release_owner("dead")
        world.at_rest("ab")

    return [first(owner), reaper, lambda: world.read("ab", "r")], at_end


def priorities_meet(run: Run):
    """Two store one block under two priorities, while others need room and the time of one ends: the greater counts."""
    world = World(run, 2)
    world.store("n", "before")
    low, high = Retention(Priority.LOW), Retention(Priority.HIGH, 10.0)
    is_over: list[bool] = []

    def writer():
        world.store("x", "w")
        assert is_over or not stored or world.pool.lookup(chain_of("a")), "it went before one that is NORMAL"

    def saver():
        world.store("a", "high", retention=high)
        stored.append(True)

    def clock():
        is_over.append(True)
        world.now_s = 20.0

    stored: list[bool] = []
    return [lambda: world.store("a", "low", retention=low), _in_turn(saver, clock), writer], lambda: world.at_rest("x")


def frozen_while_used(run: Run):
    """A store gives its pool away while a block is written and another is read: the next life knows of both."""
    world = World(run, 3)
    world.store("a", "before")
    images, writing, stored, reading = list[PoolImage](), list[int](), list[str](), list[int]()

    def giver():
        images.append(world.pool.freeze())

    def writer():
        with contextlib.suppress(StoreUnavailable):
            ticket = world.pool.prepare_store(chain_of("ab"), "w")
            writing.extend(ticket.slots)
            world.pool.complete_store(ticket.write_id, "w")
            writing.clear()
            stored.append("ab")

    def reader():
        with contextlib.suppress(StoreUnavailable):
            grant = world.pool.pin_prefix(chain_of("a"), "r", LATER_S)
            reading.extend(grant.slots)

    def at_end():
        after = Pool(3)
        after.adopt(images[0])
        after.check_integrity()
        held = {slot for entry in images[0].writers for slot in entry.slots.tolist()}
        assert held == set(writing), "slots that a writer of the old life has"
        assert after.lookup(chain_of("ab")) == (2 if stored else 1), "what was stored, and nothing else"
        assert after.stats().num_pinned == len(reading), "what a reader of the old life may read"

    return [giver, writer, reader], at_end


def tenant_at_its_quota(run: Run):
    """Two of a tenant store more than it may have, and one gives up, while another tenant's block is read."""
    world = World(run, 4, quotas={"a": TenantLimits(max_slots=2, max_pinned=1)})
    world.store("n", "before")

    def check():
        world.check()
        held = world.pool.tenants()["a"].num_slots
        assert held <= 2, f"{held} slots of a tenant that may have 2"

    run.check = check

    def saver():
        world.store("ab", "w1", tenant="a")

    def fetch():
        ticket = world.claim("xy", "fetch", tenant="a")
        if not ticket.write_id:
            return
        world.forget(ticket)
        num_slots = world.pool.abort_store(ticket.write_id, "fetch", quarantine="read-1")
        world.step("given up")
        assert world.pool.end_quarantine("read-1") == num_slots

    def reader():
        assert world.read("n", "r") == 1, "a tenant at its quota pushed out another's block"

    def at_end():
        assert world.pool.lookup(chain_of("n")) == 1, "a tenant at its quota pushed out another's block"
        world.at_rest("ab", "n")

    return [saver, fetch, reader], at_end


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        claim_pin_evict,
        two_readers_and_eviction,
        two_writers_one_victim,
        write_clear_read,
        clear_in_pieces,
        clear_under_reader,
        cancelled_transfer,
        expire_renew_evict,
        release_meets_expire,
        wrong_releases,
        duplicates,
        onboard_meets_pin,
        readers_of_a_cleared_block,
        two_writers,
        two_ranks,
        a_rank_dies,
        parts_of_an_earlier_claim,
        names_of_an_earlier_claim,
        dead_owner,
        priorities_meet,
        frozen_while_used,
        tenant_at_its_quota,
    )
}

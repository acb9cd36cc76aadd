"""Two or three threads each that meet where a hand-off can go wrong; the explorer runs them in every order."""

from __future__ import annotations

from kvstore.handoff.records import Claim
from poolcheck.handoffs import LATE_S, Handoffs, key_of, writer_of
from poolcheck.run import Run


def withdrawn_while_written(run: Run):
    """A ticket is withdrawn at every moment of its publication; another writer wants the slots."""
    world = Handoffs(run, 2)

    def at_end():
        assert len(world.table) == 0, "what was withdrawn is held on"
        world.at_rest("xy")

    bodies = [lambda: world.publish("p", 2), lambda: world.table.withdraw(key_of("p")), lambda: world.store("xy")]
    return bodies, at_end


def cleared_while_written(run: Run):
    """The namespace is cleared and its ticket asked for while the blocks are copied; another writer wants slots."""
    world = Handoffs(run, 2)
    reasons: list[str] = []

    def clearer():
        world.clear()
        reasons.append(world.fetch("p", "r"))

    def at_end():
        # What was asked for before the publisher came is of the new weights, and not there yet.
        assert reasons[0].startswith(("cleared", "not_ready")) or world.read == ["p"], reasons
        world.at_rest("xy")

    return [lambda: world.publish("p", 2), clearer, lambda: world.store("xy")], at_end


def cleared_and_looked_after(run: Run):
    """The store ends what a clearing made void, while its blocks are copied or read; another writer wants slots."""
    world = Handoffs(run, 2)

    def clearer():
        world.clear()
        world.table.end_cleared(lambda _: world.version)
        run.step("looked after")
        world.table.end_cleared(lambda _: world.version)

    def at_end():
        world.table.end_cleared(lambda _: world.version)
        world.at_rest("xy")

    return [lambda: world.publish("p", 2), clearer, lambda: world.fetch("p", "r"), lambda: world.store("xy")], at_end


def withdrawn_while_read(run: Run):
    """A ticket is withdrawn, and its slots wanted, while a reader claims, reads and ends."""
    world = Handoffs(run, 1)

    def reader():
        world.await_published("p")
        reason = world.fetch("p", "r")
        assert reason == "" or reason.startswith("withdrawn"), reason

    def withdrawer():
        world.table.withdraw(key_of("p"))
        world.store("x")

    return [lambda: world.publish("p"), reader, withdrawer], lambda: world.at_rest("x")


def expired_while_read(run: Run):
    """The time of blocks and of a claim passes while they are read; bytes count only within the claim."""
    world = Handoffs(run, 1)
    assert world.publish("p")

    def reader():
        reason = world.fetch("p", "r", used=False)
        assert reason == "" or reason.startswith(("expired", "lease_expired", "used")), reason

    return [reader, world.let_time_pass, lambda: world.store("x")], lambda: world.at_rest("x")


def two_readers_one_ticket(run: Run):
    """Two readers want one ticket, and a writer its slot: one reader gets it, and the slot is free after."""
    world = Handoffs(run, 1)
    assert world.publish("p")

    def at_end():
        assert world.read == ["p"], "a ticket was good for none, or for two"
        world.at_rest("x")

    readers = [lambda name=name: world.fetch("p", name) for name in ("r1", "r2")]
    return [*readers, lambda: world.store("x")], at_end


def publisher_dies(run: Run):
    """A publisher dies in the middle of its copies, withdrawn or not; the store hears of it later."""
    world = Handoffs(run, 1)
    dead: list[bool] = []

    def publisher():
        slots = world.prepare("p")
        for slot in slots:
            world.arena.stamp_half(slot, 0, key_of("p"))
            world.step("half copied")
        world.leave(slots)
        dead.append(True)

    def store_hears():
        run.wait_until(lambda: bool(dead), "for its death")
        world.table.release_owner("p")

    def other():
        world.table.withdraw(key_of("p"))
        world.store("x")

    return [publisher, store_hears, other], lambda: world.at_rest("x")


def reader_dies(run: Run):
    """A reader dies between claim and end: the ticket is good for the next, whatever the first's end says."""
    world = Handoffs(run, 1)
    assert world.publish("p")
    claims: list[Claim | str] = []

    def first():
        claims.append(world.claim("p", "r1"))
        world.step("reads")

    def store_hears():
        run.wait_until(lambda: bool(claims), "for its claim")
        world.table.release_owner("r1")
        if isinstance(claims[0], Claim):
            assert not world.table.end_claim(claims[0].claim_id, "r1", used=True), "the dead cannot use it up"
        reason = world.fetch("p", "r2")
        assert reason == "" or reason.startswith("withdrawn"), reason

    def other():
        world.table.withdraw(key_of("p"))
        world.store("x")

    return [first, store_hears, other], lambda: world.at_rest("x")


def publisher_fails(run: Run):
    """A publisher fails after some of its copies and says so, while its ticket is asked for and withdrawn."""
    world = Handoffs(run, 1)

    def reader():
        reason = world.fetch("p", "r")
        assert reason.startswith(("not_ready", "withdrawn")), reason

    def other():
        world.table.withdraw(key_of("p"))
        world.store("x")

    return [lambda: world.fail("p"), reader, other], lambda: world.at_rest("x")


def answer_is_lost(run: Run):
    """Slots are granted to one that never hears of them; it says that it does not write, before or after."""
    world = Handoffs(run, 1)

    def store():
        slots = world.prepare("p")
        world.leave(slots)  # Nobody heard.

    def publisher():
        world.table.abort(key_of("p"), writer_of("p"))

    def at_end():
        world.table.abort(key_of("p"), writer_of("p"))
        world.at_rest("x")

    return [store, publisher, lambda: world.store("x")], at_end


def stage_slots_are_reused(run: Run):
    """One slot of a stage, two publishers, a withdrawal: the second never gets what the first still fills."""
    world = Handoffs(run, 1, num_staged=1)

    def second():
        if world.publish("q", slab=1):
            assert world.fetch("q", "r") == ""

    def withdrawer():
        world.table.withdraw(key_of("p"))

    def at_end():
        world.table.withdraw(key_of("q"))
        world.at_rest()

    return [lambda: world.publish("p", slab=1), second, withdrawer], at_end


def mover_dies_while_it_is_packed(run: Run):
    """The mover dies, and its stage with it, while blocks are packed there and asked for."""
    world = Handoffs(run, 1, num_staged=1)
    slots = world.prepare("p", slab=1)

    def publisher():
        world.stamp("p", slots, 1)
        if world.mover_lives:
            world.leave(slots, 1)
        if world.table.complete(key_of("p"), writer_of("p"), "p-keeps", LATE_S + 1):
            world.kept.add("p")

    def reader():
        reason = world.fetch("p", "r")
        assert reason == "" or reason.startswith(("not_ready", "peer_lost")), reason

    return [publisher, reader, world.lose_mover], world.at_rest


def claim_ends_while_it_is_spilled(run: Run):
    """A claim on blocks of a stage ends while the mover copies them to the arena, where another writer wants slots."""
    world = Handoffs(run, 1, num_staged=1)
    assert world.publish("p", slab=1)

    def reader():
        claim = world.claim("p", "r", slab=1)
        if isinstance(claim, str):
            return
        slots = world.spill(claim)
        good = world.holds_bytes("p", slots)
        if world.now_s == 0 and slots:
            assert good, "a reader met the bytes of another"
        world.table.end_claim(claim.claim_id, "r", used=bool(slots))

    return [reader, world.let_time_pass, lambda: world.store("x")], lambda: world.at_rest("x")


def mover_dies_while_it_spills(run: Run):
    """The mover dies while it copies blocks to the arena for a reader; another writer wants those slots."""
    world = Handoffs(run, 1, num_staged=1)
    assert world.publish("p", slab=1)

    def reader():
        claim = world.claim("p", "r", slab=1)
        if isinstance(claim, str):
            return
        slots = world.spill(claim)
        if slots and world.mover_lives:
            good = world.holds_bytes("p", slots)
            assert good or not world.mover_lives, "a reader met the bytes of another"
        world.table.end_claim(claim.claim_id, "r", used=bool(slots))

    return [reader, world.lose_mover, lambda: world.store("x")], lambda: world.at_rest("x")


HANDOFFS = {
    scenario.__name__: scenario
    for scenario in (
        withdrawn_while_written,
        cleared_while_written,
        cleared_and_looked_after,
        withdrawn_while_read,
        expired_while_read,
        two_readers_one_ticket,
        publisher_dies,
        reader_dies,
        publisher_fails,
        answer_is_lost,
        stage_slots_are_reused,
        mover_dies_while_it_is_packed,
        claim_ends_while_it_is_spilled,
        mover_dies_while_it_spills,
    )
}

"""Real hand-offs over real pools with memory behind them: what publishers, readers and movers do, step by step.

As in `poolcheck.world`, what is written carries a stamp, whoever reads compares, and books are kept of who may still
write to which slot: a publisher from when it heard of slots until just before it says that its copies have ended, a
mover until just before it is said to be through or gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

from kvstore.errors import BlockNotFound, InvalidRequest, PoolExhausted
from kvstore.handoff.records import Claim, Place
from kvstore.handoff.table import HandoffTable
from poolcheck.chains import NAMESPACES
from poolcheck.run import Run
from poolcheck.world import World

#: Until when published blocks are kept and claims are good, and a time after both; the real clock never comes there.
KEEP_S, CLAIM_S, LATE_S = 1e12, 2e12, 3e12
_NAMESPACE, _MOVER = NAMESPACES[0], "the mover"


def key_of(name: str) -> bytes:
    """Return the key of a ticket."""
    return sha256(name.encode()).digest()


def writer_of(name: str) -> int:
    """Return the number that the publisher of a ticket names."""
    return int.from_bytes(sha256(b"writer" + name.encode()).digest()[:8], "little")


class Handoffs:
    """One node's hand-offs under one run of the explorer: an arena, and perhaps a stage.

    Args:
        run: whose points the locks and the verbs here are.
        num_slots: of the arena.
        num_staged: slots of the stage; 0 for none.
    """

    def __init__(self, run: Run, num_slots: int, num_staged: int = 0) -> None:
        self.now_s, self.version = 0.0, 0
        self.arena = World(run, num_slots)
        self.worlds = [self.arena]
        # Where two schedules come to one state, their times are the same.
        self.table = HandoffTable(lambda: self.now_s)
        self.table._lock = run.lock()
        self.places = [Place(self.arena.pool, num_slots)]
        if num_staged:
            stage = World(run, num_staged)
            self.worlds.append(stage)
            self.places.append(Place(stage.pool, num_staged, slab=1, generation=1))
        self.mover_lives = True
        #: Tickets whose blocks were kept, read, or void.
        self.kept: set[str] = set()
        self.read: list[str] = []
        self.step: Callable[[str], None] = run.step
        self.wait_until = run.wait_until
        run.check = self.check

    # What a publisher does.

    def prepare(self, name: str, num_blocks: int = 1, slab: int = 0) -> Sequence[int]:
        """Ask for slots and note who writes; none when there is no room or the ticket is void."""
        if slab and not self.mover_lives:
            return ()
        try:
            slots = self.table.prepare(
                key_of(name), writer_of(name), name, _NAMESPACE, self.version, num_blocks, self.places[slab]
            ).tolist()
        except (PoolExhausted, InvalidRequest):
            return ()
        self._enter(slots, name, slab)
        return slots

    def _enter(self, slots: Sequence[int], name: str, slab: int) -> None:
        world = self.worlds[slab]
        for slot in slots:
            assert slot not in world.writers, f"slot {slot} is written by {world.writers[slot]} and {name}"
            assert not world.readers[slot], f"slot {slot} was given to {name} while it is read"
            world.writers[slot] = name

    def stamp(self, name: str, slots: Sequence[int], slab: int = 0) -> None:
        """Copy the blocks."""
        for slot in slots:
            self.worlds[slab].stamp(slot, key_of(name))

    def leave(self, slots: Sequence[int], slab: int = 0) -> None:
        """Note that nothing is written any more; before the table is told, since it gives slots on at once."""
        for slot in slots:
            del self.worlds[slab].writers[slot]

    def publish(self, name: str, num_blocks: int = 1, slab: int = 0) -> bool:
        """Ask, copy, say that it is done; whether the blocks are kept."""
        slots = self.prepare(name, num_blocks, slab)
        if not slots:
            return False
        self.stamp(name, slots, slab)
        self.leave(slots, slab)
        if self.table.complete(key_of(name), writer_of(name), f"{name}-keeps", KEEP_S):
            self.kept.add(name)
        return name in self.kept

    def fail(self, name: str, slab: int = 0) -> None:
        """Ask, copy in part, find that it fails, say so."""
        slots = self.prepare(name, 1, slab)
        if slots:
            self.stamp(name, slots, slab)
            self.leave(slots, slab)
        self.table.abort(key_of(name), writer_of(name))

    # What a reader does.

    def claim(self, name: str, reader: str, slab: int = 0) -> Claim | str:
        """Claim what is published, and note who reads it."""
        claim = self.table.claim(key_of(name), reader, _NAMESPACE, self.version, CLAIM_S, is_early=True)
        if isinstance(claim, Claim):
            assert name in self.kept, "blocks were given to a reader before they were there"
            for slot in claim.slots:
                assert slot not in self.worlds[slab].writers, f"slot {slot} was claimed while it is written"
        return claim

    def holds_bytes(self, name: str, slots: Sequence[int], slab: int = 0) -> bool:
        """Read blocks, letting others run between, and compare."""
        good = True
        for slot in slots:
            try:
                self.worlds[slab].verify(slot, key_of(name))
            except AssertionError:
                good = False
            self.step("block read")
        return good

    def fetch(self, name: str, reader: str, *, used: bool = True) -> str:
        """Claim, read, say so; returns why nothing came. What is read within the claim's time has to be right."""
        claim = self.claim(name, reader)
        if isinstance(claim, str):
            return claim
        good = self.holds_bytes(name, claim.slots, claim.slab)
        if self.now_s >= CLAIM_S:
            return "lease_expired"
        assert good, "a reader met the bytes of another"
        if used:
            self.read.append(name)
        self.table.end_claim(claim.claim_id, reader, used=used)
        return ""

    def await_published(self, name: str) -> None:
        """Return when a ticket's blocks are there, or will not be."""
        handoffs, over = self.table.handoffs, self.table.over

        def is_settled() -> bool:
            handoff = handoffs.get(key_of(name))
            return key_of(name) in over or (handoff is not None and (not handoff.is_written or handoff.over != ""))

        self.wait_until(is_settled, f"for {name}")

    # What else happens.

    def clear(self) -> None:
        """Weights changed: what was published before is of the old ones."""
        self.version += 1

    def let_time_pass(self) -> None:
        """All deadlines pass, and the store notices."""
        self.now_s = LATE_S
        self.table.expire(LATE_S)

    def lose_mover(self) -> None:
        """The mover dies, and the store hears of it."""
        self.mover_lives = False
        for slot in [slot for slot, who in self.arena.writers.items() if who == _MOVER]:
            del self.arena.writers[slot]
        self.worlds[1].writers.clear()  # What publishers have mapped of the stage is nobody's any more.
        self.step("the mover is dead")
        self.table.lose_stages()

    def spill(self, claim: Claim) -> Sequence[int]:
        """Have the mover copy claimed blocks of the stage to the arena; none when it could not."""
        try:
            slots = self.table.move(claim.claim_id, self.places[0]).tolist()
        except (PoolExhausted, BlockNotFound):
            return ()
        if self.mover_lives:
            self._enter(slots, _MOVER, 0)
        stage, arena, half = self.worlds[1].memory, self.arena.memory, 8
        for source, target in zip(claim.slots.tolist(), slots, strict=True):
            for part in range(2):
                if self.mover_lives:
                    at, to = (2 * source + part) * half, (2 * target + part) * half
                    arena[to : to + half] = stage[at : at + half]
                self.step("half spilled")
        if self.mover_lives:
            self.leave(slots)
        self.table.moved(claim.claim_id)
        return slots if self.mover_lives else ()

    def store(self, tokens: str) -> None:
        """Another writer takes what slots it can get, fills, publishes and reads them."""
        self.arena.store(tokens, f"saver of {tokens}")
        self.arena.read(tokens, f"loader of {tokens}")

    # What must hold.

    def check(self) -> None:
        """Assert what holds between any two steps."""
        held = [0 for _ in self.worlds]
        for handoff in self.table.handoffs.values():
            held[handoff.place.slab] += len(handoff.slots)
        for move in self.table.moves.values():
            held[move.place.slab] += len(move.slots)
        counted = [self.table._num_slots[slab] for slab in range(len(self.worlds))]
        assert held == counted, f"hand-offs hold {held} slots and count {counted}"
        for world in self.worlds:
            world.check()

    def at_rest(self, *chains: str) -> None:
        """Assert that nothing is held when every deadline has passed, and that the arena is whole."""
        self.table.expire(LATE_S)
        assert (len(self.table), self.table.num_slots, self.table.claims, self.table.moves) == (0, 0, {}, {})
        self.arena.at_rest(*chains)
        for world in self.worlds[1:]:
            assert world.pool.stats().num_free == world.num_slots, "slots of the stage are lost"

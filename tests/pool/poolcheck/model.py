"""What a pool has to do, in the plainest way: no lists kept in order, no counters, nothing remembered twice.

Written from the rules and not from the code. It says which blocks go and in which order; which of several free
slots a block gets is the pool's own choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.chain import Chain


@dataclass
class Block:
    """What is in a slot. `findable` ends with a clearing; readers may hold it on."""

    block_hash: bytes
    namespace: bytes
    parent: bytes
    ready: bool = False
    findable: bool = True
    refs: int = 0
    touched: int = 0


@dataclass
class Write:
    """Slots that a writer has not published, in chain order, and those that it keeps from eviction."""

    owner: str
    num_claimed: int
    pending: list[int]
    kept: list[int]


@dataclass
class Held:
    """A lease."""

    owner: str
    deadline_s: float
    slots: list[int]


@dataclass
class Model:
    """All that a pool knows."""

    num_slots: int
    max_pinned: int
    blocks: dict[int, Block] = field(default_factory=dict)
    leases: dict[int, Held] = field(default_factory=dict)
    writes: dict[int, Write] = field(default_factory=dict)
    aside: dict[str, list[int]] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    clock: int = 0

    def find(self, block_hash: bytes) -> int:
        """Return the slot in which a block is or is being written, -1 for none."""
        return next((s for s, b in self.blocks.items() if b.findable and b.block_hash == block_hash), -1)

    def free_slots(self) -> set[int]:
        """Return the slots that nothing is in."""
        used = set(self.blocks) | {slot for slots in self.aside.values() for slot in slots}
        return set(range(self.num_slots)) - used

    def pinned(self) -> set[int]:
        """Return the slots that something reads."""
        return {slot for slot, block in self.blocks.items() if block.refs}

    def prefix(self, chain: Chain) -> list[int]:
        """Return the slots of the leading blocks that can be read."""
        found = [self.find(block_hash) for block_hash in chain.hashes()]
        ready = [slot >= 0 and self.blocks[slot].ready for slot in found]
        return found[: ready.index(False) if False in ready else len(found)]

    def pinnable(self, chain: Chain) -> list[int]:
        """Return as much of the prefix as the budget of pins allows."""
        prefix = self.prefix(chain)
        while len(self.pinned() | set(prefix)) > max(self.max_pinned, len(self.pinned())):
            prefix.pop()
        return prefix

    def victims(self, count: int) -> list[int]:
        """Return what is evicted to make room, in order: the least recently used on which nothing hangs."""
        gone: list[int] = []
        while len(gone) < count:
            left = {slot: block for slot, block in self.blocks.items() if slot not in gone}
            parents = {block.parent for block in left.values() if block.findable}
            idle = [s for s, b in left.items() if b.ready and not b.refs and b.block_hash not in parents]
            if not idle:
                break
            gone.append(min(idle, key=lambda slot: left[slot].touched))
        return gone

    def touch(self, slots: list[int]) -> None:
        """Use a chain: its root is the most recent."""
        for slot in reversed(slots):
            self.clock += 1
            self.blocks[slot].touched = self.clock

    def pin(self, slots: list[int]) -> None:
        """Add a reader."""
        for slot in slots:
            self.blocks[slot].refs += 1

    def unpin(self, slots: list[int]) -> None:
        """Take a reader away; what nobody can find goes with its last."""
        for slot in slots:
            self.blocks[slot].refs -= 1
            if not self.blocks[slot].refs and not self.blocks[slot].findable:
                del self.blocks[slot]

    def claim(self, slot: int, block: Block) -> None:
        """Begin a slot's next life."""
        self.blocks[slot] = block
        self.lives[slot] = self.lives.get(slot, 0) + 1

    def publish(self, write_id: int, count: int) -> int:
        """End the writing of the next `count` blocks; returns how many can be found now."""
        write, num_published = self.writes[write_id], 0
        for slot in write.pending[:count]:
            self.blocks[slot].ready = True
            if self.blocks[slot].findable:
                num_published += 1
            else:
                del self.blocks[slot]
        del write.pending[:count]
        if not write.pending:
            self.unpin(self.writes.pop(write_id).kept)
        return num_published

    def abort(self, write_id: int, quarantine: str) -> int:
        """Give up what is not published."""
        write = self.writes.pop(write_id)
        for slot in write.pending:
            del self.blocks[slot]
        if quarantine:
            self.aside.setdefault(quarantine, []).extend(write.pending)
        self.unpin(write.kept)
        return len(write.pending)

    def clear(self, namespace: bytes) -> int:
        """Let nothing of a namespace be found."""
        mine = [slot for slot, block in self.blocks.items() if block.findable and block.namespace == namespace]
        for slot in mine:
            self.blocks[slot].findable = False
            if self.blocks[slot].ready and not self.blocks[slot].refs:
                del self.blocks[slot]
        return len(mine)

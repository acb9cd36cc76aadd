"""What a pool has to do, in the plainest way: no lists kept in order, no counters, nothing remembered twice.

Written from the rules and not from the code. It says which blocks go and in which order; which of several free
slots a block gets, and which of several soft pins is given up first, is the pool's own choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.grants import PinKind
from kvstore.blocks.priority import NORMAL, Priority, Retention

NEVER_S = float("inf")
#: What is closer together is one use: of all, and of a save that finds blocks which their prompt has loaded.
USE_GAP_S, SAVE_GAP_S = 1.0, 60.0


@dataclass(eq=False)
class Block:
    """What is in a slot, for one life of it.

    `findable` ends with a clearing, or when somebody who writes it gives up; readers, and its other writers, may hold
    the slot on. `writers` and `done` are the parts that are being written and those that are in place.
    """

    block_hash: bytes
    namespace: bytes
    parent: bytes
    num_parts: int = 1
    parts_deadline_s: float = NEVER_S
    writers: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    ready: bool = False
    findable: bool = True
    refs: int = 0
    soft: int = 0
    touched: int = 0
    touched_s: float = 0.0
    uses: int = 0
    used_s: float = -NEVER_S
    retention: Retention = NORMAL
    tenant: str = ""


@dataclass(kw_only=True)
class Write:
    """Slots that a writer has not published, in chain order, and those that it keeps from eviction."""

    owner: str
    num_claimed: int
    pending: list[int]
    kept: list[int]
    #: Those kept that count as pins of the writer's tenant: the blocks of others.
    paid: list[int]
    tenant: str = ""
    num_parts: int = 1
    part: int = 0
    deadline_s: float = NEVER_S


@dataclass
class Held:
    """A lease or a pin; a soft one holds blocks, in this life of their slots, and no slots."""

    owner: str
    deadline_s: float
    slots: list[int]
    kind: PinKind = PinKind.LEASE
    tenant: str = ""
    preferred: list[Block] = field(default_factory=list)


@dataclass
class Watch:
    """A caller that waits for a run: so many leading blocks came, until one is neither here nor being written."""

    hashes: list[bytes]
    at: int = 0
    count: int = 0
    ended: bool = False


@dataclass
class Model:
    """All that a pool knows."""

    num_slots: int
    max_pinned: int
    max_hard_pinned: int
    blocks: dict[int, Block] = field(default_factory=dict)
    leases: dict[int, Held] = field(default_factory=dict)
    writes: dict[int, Write] = field(default_factory=dict)
    aside: dict[str, list[int]] = field(default_factory=dict)
    #: Tenants of the slots that are set aside.
    whose_aside: dict[int, str] = field(default_factory=dict)
    #: Of each tenant, how many slots it may have, and how many it may pin; of others all.
    quotas: dict[str, tuple[int, int]] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    num_clears: Counter[bytes] = field(default_factory=Counter)
    clock: int = 0
    now_s: float = 0.0
    #: For learned reuse: of a block with so many uses, touched so long ago. None: only the order of touches counts.
    hazard: Callable[[int, float], float] | None = None
    #: Uses of evicted blocks, and when the last was.
    ghosts: dict[bytes, tuple[int, float]] = field(default_factory=dict)

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

    def prefix(self, chain: BlockHashes) -> list[int]:
        """Return the slots of the leading blocks that can be read."""
        found = [self.find(block_hash) for block_hash in chain.hashes()]
        ready = [slot >= 0 and self.blocks[slot].ready for slot in found]
        return found[: ready.index(False) if False in ready else len(found)]

    def hard_pinned(self) -> set[int]:
        """Return the slots that hard pins hold."""
        return {slot for held in self.leases.values() if held.kind is PinKind.HARD for slot in held.slots}

    def held_by(self, tenant: str) -> int:
        """Return how many slots are a tenant's: those with its blocks, and those set aside of them."""
        aside = [slot for slots in self.aside.values() for slot in slots if self.whose_aside[slot] == tenant]
        return len(aside) + sum(block.tenant == tenant for block in self.blocks.values())

    def pinned_by(self, tenant: str) -> set[int]:
        """Return the slots that leases and hard pins of a tenant hold, and those of others that its saves keep."""
        leased = {slot for held in self.leases.values() if held.tenant == tenant for slot in held.slots}
        return leased | {slot for write in self.writes.values() if write.tenant == tenant for slot in write.paid}

    def payable(self, tenant: str, parent: int, found: list[int]) -> tuple[int, list[int]]:
        """Return (how many leading blocks a tenant may save, slots of others that it pins meanwhile)."""
        ready = [slot >= 0 and self.blocks[slot].ready for slot in found]
        if tenant not in self.quotas or all(ready):
            return len(found), []
        mine, paid = self.pinned_by(tenant), list[int]()
        for at, slot in enumerate([parent, *found], -1):
            if slot >= 0 and self.blocks[slot].ready and self.blocks[slot].tenant != tenant:
                if len(mine | {*paid, slot}) > max(self.quotas[tenant][1], len(mine)):
                    return max(at, 0), paid
                paid.append(slot)
        return len(found), paid

    def num_over(self, tenant: str, wanted: int) -> int:
        """Return how many of so many slots a tenant may not have, unless as many of its own go."""
        return max(0, wanted + self.held_by(tenant) - self.quotas[tenant][0]) if tenant in self.quotas else 0

    def pinnable(self, chain: BlockHashes, kind: PinKind = PinKind.LEASE, tenant: str = "") -> list[int]:
        """Return as much of the prefix as the budgets of pins, and the tenant's quota of them, allow."""
        prefix = self.prefix(chain)
        if kind is PinKind.SOFT:
            return prefix
        while len(self.pinned() | set(prefix)) > max(self.max_pinned, len(self.pinned())):
            prefix.pop()
        while kind is PinKind.HARD and prefix and len(self.hard_pinned() | set(prefix)) > self.max_hard_pinned:
            prefix.pop()
        mine = self.pinned_by(tenant)
        while tenant in self.quotas and prefix and len(mine | set(prefix)) > max(self.quotas[tenant][1], len(mine)):
            prefix.pop()
        return prefix

    def evictable(self, gone: set[int], tenant: str | None = None) -> tuple[list[int], list[int]]:
        """Return what could go next once `gone` has gone: (the first that nobody prefers, all that somebody does).

        Only of one tenant, if it is given.
        """
        left = {slot: block for slot, block in self.blocks.items() if slot not in gone}
        parents = {block.parent for block in left.values() if block.findable}
        idle = [s for s, b in left.items() if b.ready and not b.refs and b.block_hash not in parents]
        idle = [s for s in idle if tenant in (None, left[s].tenant)]
        plain = sorted((s for s in idle if not left[s].soft), key=lambda slot: self.place(left[slot]))
        return plain[:1], [s for s in idle if left[s].soft]

    def priority(self, block: Block) -> Priority:
        """Return the priority of a block now."""
        return block.retention.priority if self.now_s < block.retention.until_s else Priority.NORMAL

    def prefer(self, slots: list[int], retention: Retention) -> None:
        """Raise the priority of blocks to that of a save, or of a use, which is NORMAL; never lower it."""
        for block in map(self.blocks.__getitem__, slots):
            now = self.priority(block)
            if retention.priority > now:
                block.retention = retention
            elif retention.priority == now:
                block.retention = Retention(now, max(retention.until_s, block.retention.until_s))

    def place(self, block: Block) -> tuple[Priority, float, int]:
        """Return what orders blocks: the least goes first. HIGH ones go by their end, NORMAL ones by hazards."""
        priority, order = self.priority(block), 0.0
        if priority is Priority.HIGH:
            order = block.retention.until_s
        elif priority is Priority.NORMAL and self.hazard:
            order = self.hazard(block.uses, self.now_s - block.touched_s)
        return priority, order, block.touched

    def num_evictable(self, wanted: int, tenant: str | None = None) -> int:
        """Return how many blocks could go to make room, `wanted` at most; of one tenant, if it is given."""
        gone: set[int] = set()
        while len(gone) < wanted:
            plain, preferred = self.evictable(gone, tenant)
            if not plain and not preferred:
                break
            gone.add((plain or preferred)[0])
        return len(gone)

    def may_evict(
        self, victims: set[int], num_own: int = 0, tenant: str = "", gone: frozenset[int] = frozenset()
    ) -> bool:
        """Whether these are what has to go: the first in order on which nothing hangs, the preferred ones last.

        The first `num_own` of them are the first of a tenant's own.
        """
        if victims == gone:
            return True
        plain, preferred = self.evictable(set(gone), tenant if len(gone) < num_own else None)
        return any(
            self.may_evict(victims, num_own, tenant, gone | {slot}) for slot in plain or preferred if slot in victims
        )

    def touch(self, slots: list[int], gap_s: float = USE_GAP_S) -> None:
        """Touch a chain: its root is the most recent. That uses what was not used for `gap_s` seconds."""
        for slot in reversed(slots):
            self.clock += 1
            block = self.blocks[slot]
            self.use(block, gap_s)
            block.touched, block.touched_s = self.clock, self.now_s

    def use(self, block: Block, gap_s: float = USE_GAP_S) -> None:
        """Use a block, if it was not used for `gap_s` seconds."""
        if self.now_s - block.used_s >= gap_s:
            block.uses, block.used_s = min(block.uses + 1, 4), self.now_s

    def evict(self, slot: int) -> None:
        """Take a block out, but remember how it was used."""
        block = self.blocks.pop(slot)
        self.ghosts[block.block_hash] = block.uses, block.used_s

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

    def hold(self, lease_id: int, held: Held, slots: list[int], gap_s: float = USE_GAP_S) -> None:
        """Put slots under a lease, perhaps a new one."""
        self.leases[lease_id] = held
        if held.kind is PinKind.SOFT:
            held.preferred += [self.blocks[slot] for slot in slots]
            for slot in slots:
                self.blocks[slot].soft += 1
        else:
            self.pin(slots)
            held.slots += slots
        self.prefer(slots, NORMAL)
        self.touch(slots, gap_s)

    def drop(self, lease_id: int) -> None:
        """End a lease or a pin."""
        held = self.leases.pop(lease_id)
        for block in held.preferred:
            # Of a block that is gone, or was cleared, the preference went with it.
            block.soft = max(0, block.soft - 1)
        self.unpin(held.slots)

    def claim(self, slot: int, block: Block) -> None:
        """Begin a slot's next life."""
        self.blocks[slot] = block
        block.uses, block.used_s = self.ghosts.pop(block.block_hash, (0, -NEVER_S))
        self.use(block)
        self.lives[slot] = self.lives.get(slot, 0) + 1

    def can_join(self, slot: int, num_parts: int, part: int) -> bool:
        """Whether a rank may write its part of what others are writing."""
        block = self.blocks[slot]
        same = not block.ready and num_parts > 1 and block.num_parts == num_parts
        return same and part not in block.writers | block.done

    def publish(self, write_id: int, count: int) -> int:
        """End the writing of the next `count` blocks; returns how many can be found now."""
        write, num_published = self.writes[write_id], 0
        for slot in write.pending[:count]:
            block = self.blocks[slot]
            block.writers.remove(write.part)
            block.done.add(write.part)
            if block.findable and len(block.done) == block.num_parts:
                block.ready = True
                num_published += 1
            self._let_go(slot)
        del write.pending[:count]
        if not write.pending:
            self.unpin(self.writes.pop(write_id).kept)
        return num_published

    def abort(self, write_id: int, quarantine: str) -> int:
        """Give up what is not published, for all who write it."""
        write = self.writes.pop(write_id)
        for slot in write.pending:
            self.whose_aside[slot] = self.blocks[slot].tenant
            self.blocks[slot].findable = False
            self.blocks[slot].writers.remove(write.part)
            self._let_go(slot)
        if quarantine:
            self.aside.setdefault(quarantine, []).extend(write.pending)
        self.unpin(write.kept)
        return len(write.pending)

    def _let_go(self, slot: int) -> None:
        """What will never be found goes with its last writer."""
        block = self.blocks[slot]
        if not block.findable and not block.ready and not block.writers:
            del self.blocks[slot]

    def expire(self, now_s: float) -> int:
        """End what is over; returns how many leases and writes."""
        for slot, block in list(self.blocks.items()):
            num_came = len(block.writers | block.done)
            if not block.ready and block.parts_deadline_s < now_s and num_came < block.num_parts:
                block.findable = False
                self._let_go(slot)
        leases = [i for i, held in self.leases.items() if held.deadline_s < now_s]
        writes = [i for i, write in self.writes.items() if write.deadline_s < now_s]
        self.end(leases, writes)
        return len(leases) + len(writes)

    def end(self, leases: list[int], writes: list[int]) -> None:
        """Drop leases and abort writes."""
        for lease_id in leases:
            self.drop(lease_id)
        for write_id in writes:
            self.abort(write_id, "")

    def clear(self, namespace: bytes) -> int:
        """Let nothing of a namespace be found."""
        self.num_clears[namespace] += 1
        mine = [slot for slot, block in self.blocks.items() if block.findable and block.namespace == namespace]
        for slot in mine:
            block = self.blocks[slot]
            block.findable, block.soft = False, 0
            if block.ready and not block.refs:
                del self.blocks[slot]
            else:
                self._let_go(slot)
        return len(mine)

    def watch(self, chain: BlockHashes) -> Watch:
        """Wait for a run."""
        return self.look(Watch(chain.hashes()))

    def look(self, watch: Watch) -> Watch:
        """Count for a watch what has come since the last look, and end it when nothing more can come."""
        if watch.ended:
            return watch
        ready = [block is not None and block.ready for block in map(self.blocks.get, map(self.find, watch.hashes))]
        while watch.at < len(ready) and ready[watch.at]:
            watch.at += 1
        if watch.at == len(ready) or self.find(watch.hashes[watch.at]) < 0:
            self.end_watch(watch)
        return watch

    def end_watch(self, watch: Watch) -> None:
        """End a watch: the leading blocks count that are here now."""
        ready = [block is not None and block.ready for block in map(self.blocks.get, map(self.find, watch.hashes))]
        watch.count, watch.ended = [*ready, False].index(False), True

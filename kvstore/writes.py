"""What is being written to a pool, by whom, in how many parts. No locking here: the pool holds its lock.

A block of several parts is written by as many ranks: the first that comes claims its slot, the others join it
by hash. It is published with its last part. A rank that gives up, dies or does not come in time dooms the
block for all; the slot comes back when the last rank that may still write to it has said that it does not.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.chain import Chain
from kvstore.clears import ClearCounts
from kvstore.errors import ChainBroken, InvalidRequest, PoolExhausted, StaleTicket
from kvstore.grants import PackedInts, StoreTicket
from kvstore.runs import SlotList
from kvstore.slots import NO_SLOTS, SlotTable


@functools.lru_cache(maxsize=64)
def _positions(count: int) -> PackedInts:
    return PackedInts.of(range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTerms:
    """Who writes and on what terms.

    Args:
        owner: only it can complete or abort the write.
        part: which part of each block it writes.
        num_parts: of how many.
        deadline_s: when the writer has lost its right and its slots come back; it must have stopped before.
        parts_deadline_s: when a block is given up for which not all parts have come.
    """

    owner: str
    part: int = 0
    num_parts: int = 1
    deadline_s: float = float("inf")
    parts_deadline_s: float = float("inf")


@dataclass(slots=True)
class _Write:
    terms: WriteTerms
    hashes: list[bytes]
    slots: list[int]
    generations: bytes
    #: Blocks of the chain that were here: pinned, so that making room cannot evict them.
    kept: SlotList
    stamp: int
    num_done: int = 0
    #: Of blocks that will never be published: `hashes` is empty.
    unnamed: bool = False


@dataclass(slots=True)
class _Parts:
    """A block that is written in several parts; kept until no rank can write to its slot any more."""

    num_parts: int
    deadline_s: float
    writers: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


class WriteTable:
    """The unfinished writes of one pool.

    Args:
        table: the pool's slots.
        epoch: the life of the pool.
        new_id: makes write ids.
        on_settled: called with hashes that are not being written any more, and whether they were published.
        clears: how often namespaces were cleared.
    """

    def __init__(
        self,
        table: SlotTable,
        epoch: bytes,
        new_id: Callable[[], int],
        on_settled: Callable[[list[bytes], bool], None],
        clears: ClearCounts,
    ) -> None:
        self._table, self._epoch, self._new_id, self._on_settled = table, epoch, new_id, on_settled
        self._writes: dict[int, _Write] = {}
        self._parts: dict[int, _Parts] = {}
        self._aside: dict[str, list[int]] = {}
        self._clears = clears

    def __len__(self) -> int:
        return len(self._writes)

    def has_deadlines(self) -> bool:
        """Whether any write ends by itself."""
        ends = (min(write.terms.deadline_s, write.terms.parts_deadline_s) for write in self._writes.values())
        return bool(self._parts) or min(ends, default=float("inf")) < float("inf")

    def prepare(self, chain: Chain, hashes: list[bytes], terms: WriteTerms, *, needs_parent: bool) -> StoreTicket:
        """Claim a slot for each block that is not here, or join those who write it; see `Pool.prepare_store`."""
        table, ready, writing = self._table, self._table.ready, self._table.writing
        if chain.start and needs_parent and chain.parent not in ready and chain.parent not in writing:
            raise ChainBroken(
                f"wanted a run that begins at the root or after a resident block, got one that begins at "
                f"block {chain.start} whose parent is not resident; pass the chain from its root"
            )
        found = list(map(ready.get, hashes))
        # Pinned before anything is evicted to make room.
        here = [slot for slot in found if slot is not None] if found.count(None) < len(found) else []
        if chain.start and chain.parent in ready:
            here.append(ready[chain.parent])
        kept = table.listed(here)
        if here:
            table.pin_all(kept)
        joined: list[int] = []
        if writing and not writing.keys().isdisjoint(hashes):
            under_way = {i: writing[own] for i, own in enumerate(hashes) if own in writing}
            joined = [i for i, slot in under_way.items() if self._can_join(slot, terms)]
            found = [under_way.get(i, slot) for i, slot in enumerate(found)]
        indexes, end = self._claim(chain, hashes, found)
        if joined:
            indexes = sorted([*indexes, *(i for i in joined if i < end)])
        run: list[int] = found[:end]  # type: ignore[assignment]  # Up to there no slot is missing.
        slots = run if len(indexes) == end else [run[i] for i in indexes]
        listed = table.listed(slots)
        if chain.start and (above := ready.get(chain.parent, writing.get(chain.parent))) is not None:
            stamp = table.order.touch(table.listed([above, *run]))
        else:
            stamp = table.order.touch(listed if slots is run else table.listed(run))
        if end < len(hashes):
            # Kept blocks behind a refused one are not touched, and making room may have passed their place.
            stamp = 0
        write_id, generations = 0, b""
        if indexes:
            write_id, generations = self._new_id(), table.lives(listed)
            own = hashes if len(indexes) == len(hashes) else [hashes[i] for i in indexes]
            self._writes[write_id] = _Write(terms, own, slots, generations, kept, stamp)
            self._enter_parts(slots, terms)
        elif here:
            table.unpin_all(kept, stamp)
        return StoreTicket(
            write_id=write_id,
            indexes=PackedInts.of(indexes),
            slots=listed.packed,
            num_resident=end - len(indexes),
            num_refused=len(hashes) - end,
            num_awaited=sum(own in writing for own in hashes[:end]) - len(indexes) if len(indexes) < end else 0,
            num_clears=self._clears.get(chain.namespace),
            generations=generations,
            epoch=self._epoch,
        )

    def refuse(self, namespace: bytes) -> StoreTicket:
        """Return a ticket for nothing, to who has only blocks from before the last clearing."""
        return StoreTicket(
            write_id=0,
            indexes=(),
            slots=(),
            num_resident=0,
            num_refused=0,
            num_clears=self._clears.get(namespace),
            epoch=self._epoch,
        )

    def reserve(self, num_blocks: int, terms: WriteTerms) -> StoreTicket:
        """Claim slots for blocks that will never be published; see `Pool.reserve`."""
        table = self._table
        slots, listed = table.claim_unnamed(num_blocks)
        if len(slots) < num_blocks:
            table.end_unnamed(slots)
            raise PoolExhausted(
                f"wanted {num_blocks} slots, got {len(slots)}: the others are pinned or being written; release leases "
                "or add capacity"
            )
        write_id, generations = self._new_id(), table.lives(listed)
        self._writes[write_id] = _Write(terms, [], slots, generations, NO_SLOTS, 0, unnamed=True)
        return StoreTicket(
            write_id=write_id,
            indexes=_positions(num_blocks),
            slots=listed.packed,
            num_resident=0,
            num_refused=0,
            generations=generations,
            epoch=self._epoch,
        )

    def _claim(self, chain: Chain, hashes: list[bytes], found: list[int | None]) -> tuple[Sequence[int], int]:
        """Claim slots for the blocks that have none in `found`, and fill them in.

        Returns:
            (the blocks that got one, how many leading blocks there are now before the first that got none).
        """
        parents = [chain.parent, *hashes[:-1]]
        if found.count(None) == len(found):
            claimed = self._table.claim(hashes, parents, chain.namespace)
            found[: len(claimed)] = claimed
            return range(len(claimed)), len(claimed)
        missing = [i for i, slot in enumerate(found) if slot is None]
        claimed = self._table.claim([hashes[i] for i in missing], [parents[i] for i in missing], chain.namespace)
        for i, slot in zip(missing, claimed, strict=False):
            found[i] = slot
        end = missing[len(claimed)] if len(claimed) < len(missing) else len(found)
        return missing[: len(claimed)], end

    def _enter_parts(self, slots: list[int], terms: WriteTerms) -> None:
        if terms.num_parts > 1:
            for slot in slots:
                parts = self._parts.setdefault(slot, _Parts(terms.num_parts, terms.parts_deadline_s))
                parts.writers.add(terms.part)

    def _can_join(self, slot: int, terms: WriteTerms) -> bool:
        parts = self._parts.get(slot)
        if parts is None or parts.num_parts != terms.num_parts:
            return False
        return terms.part not in parts.writers and terms.part not in parts.done

    def find(self, write_id: int, owner: str, epoch: bytes | None, generations: bytes | None) -> _Write | None:
        """Return a write if `owner` holds it.

        Raises:
            StaleTicket: it does, but the epoch or the generations are others.
        """
        if epoch is not None and epoch != self._epoch:
            raise StaleTicket(f"wanted epoch {self._epoch.hex()}, got {epoch!r}: the store was restarted")
        write = self._writes.get(write_id) if isinstance(write_id, int) else None
        if write is None or write.terms.owner != owner:
            return None
        if generations is not None and generations != write.generations:
            raise StaleTicket(f"write {write_id}: wanted the generations of its ticket, got others; prepare again")
        return write

    def complete(self, write_id: int, write: _Write, count: int | None) -> int:
        """Publish the leading `count` blocks of a write, or take its part as done; returns how many became readable."""
        if write.terms.num_parts > 1:
            if count is not None:
                raise InvalidRequest(f"count: wanted None for a write of {write.terms.num_parts} parts, got {count}")
            return self._complete_part(write_id, write)
        table, begin = self._table, write.num_done
        end = len(write.slots) if count is None else min(count, len(write.slots))
        if end <= begin:
            return 0
        hashes, slots = write.hashes, write.slots
        if begin or end < len(slots):
            hashes, slots = hashes[begin:end], slots[begin:end]
        write.num_done = end
        if table.doomed and not table.doomed.isdisjoint(slots):
            alive = [i for i, slot in enumerate(slots) if slot not in table.doomed]
            for slot in table.doomed.intersection(slots):
                table.end_writing(slot)
            hashes, slots = [hashes[i] for i in alive], [slots[i] for i in alive]
        if slots:
            table.publish(hashes, slots, write.stamp)
            self._on_settled(hashes, True)
        if end == len(write.slots):
            self._end(write_id)
        return len(slots)

    def _complete_part(self, write_id: int, write: _Write) -> int:
        table, hashes, slots = self._table, [], []
        for own, slot in zip(write.hashes, write.slots, strict=True):
            parts = self._parts[slot]
            parts.writers.remove(write.terms.part)
            parts.done.add(write.terms.part)
            if slot in table.doomed:
                self._leave(slot, parts)
            elif len(parts.done) == parts.num_parts:
                del self._parts[slot]
                hashes.append(own)
                slots.append(slot)
        if slots:
            table.publish(hashes, slots, write.stamp)
            self._on_settled(hashes, True)
        self._end(write_id)
        return len(slots)

    def _leave(self, slot: int, parts: _Parts) -> None:
        """A rank is through with a doomed slot; the last one frees it."""
        if not parts.writers:
            del self._parts[slot]
            self._table.end_writing(slot)

    def abort(self, write_id: int, write: _Write, quarantine: str = "") -> int:
        """Give up what a write has not published; see `Pool.abort_store`."""
        if quarantine and write.terms.num_parts > 1:
            raise InvalidRequest("quarantine: wanted a write of whole blocks, got one of several parts")
        table = self._table
        pending = write.slots[write.num_done :]
        if write.unnamed:
            table.end_unnamed(pending, aside=quarantine != "")
        else:
            self._abort_named(write, pending, quarantine)
        if quarantine and pending:
            self._aside.setdefault(quarantine, []).extend(pending)
        self._end(write_id)
        return len(pending)

    def _abort_named(self, write: _Write, pending: list[int], quarantine: str) -> None:
        table = self._table
        self.doom([slot for slot in pending if slot not in table.doomed])
        for slot in pending:
            if (parts := self._parts.get(slot)) is not None:
                parts.writers.discard(write.terms.part)
                self._leave(slot, parts)
            else:
                table.end_writing(slot, aside=bool(quarantine))

    def doom(self, slots: list[int]) -> None:
        """Make sure that blocks which are being written are never published."""
        lost = [self._table.block_hash[slot] for slot in slots]
        for slot in slots:
            self._table.doom(slot)
        if lost:
            self._on_settled(lost, False)

    def end_quarantine(self, name: str) -> int:
        """Free the slots set aside under `name`; returns how many."""
        slots = self._aside.pop(name, [])
        for slot in slots:
            self._table.end_quarantine(slot)
        return len(slots)

    def release_owner(self, owner: str) -> int:
        """Abort all writes of an owner that is gone; returns how many."""
        return self._abort_all([i for i, write in self._writes.items() if write.terms.owner == owner])

    def holds(self, owner: str) -> bool:
        """Whether an owner has an unfinished write."""
        return any(write.terms.owner == owner for write in self._writes.values())

    def expire(self, now_s: float) -> int:
        """Give up blocks whose parts did not all come, and writes past their own deadline; returns how many writes."""
        for slot in [slot for slot, parts in self._parts.items() if parts.deadline_s < now_s]:
            if slot not in self._table.doomed:
                self.doom([slot])
            self._leave(slot, self._parts[slot])
        return self._abort_all([i for i, write in self._writes.items() if write.terms.deadline_s < now_s])

    def clear(self, namespace: bytes) -> int:
        """Make a namespace a miss; returns how many blocks that concerned."""
        num_cleared, lost = self._table.clear(namespace)
        for slot in lost.values():
            if (parts := self._parts.get(slot)) is not None:
                self._leave(slot, parts)
        if lost:
            self._on_settled(list(lost), False)
        return num_cleared

    def _abort_all(self, write_ids: list[int]) -> int:
        for write_id in write_ids:
            self.abort(write_id, self._writes[write_id])
        return len(write_ids)

    def _end(self, write_id: int) -> None:
        write = self._writes.pop(write_id)
        if len(write.kept):
            self._table.unpin_all(write.kept, write.stamp)

    def check(self, refs: Counter[int]) -> set[int]:
        """Add what writes pin to `refs`, assert that every slot being written has a writer; returns those set aside."""
        table = self._table
        writers: Counter[int] = Counter()
        for write in self._writes.values():
            refs.update(write.kept.tolist())
            writers.update(write.slots[write.num_done :])
            assert table.lives(table.listed(write.slots)) == write.generations or write.num_done, (
                "a claimed slot began a new life"
            )
        for slot, parts in self._parts.items():
            assert writers[slot] == len(parts.writers), f"slot {slot}: {parts} and {writers[slot]} writers"
            assert len(parts.done | parts.writers) <= parts.num_parts, f"slot {slot}: {parts}"
            assert slot not in table.doomed or parts.writers, f"slot {slot}: doomed and nobody writes it"
        assert all(n == 1 for slot, n in writers.items() if slot not in self._parts), "a slot is written by two"
        being_written = {*table.writing.values(), *table.doomed}
        assert being_written == {*writers, *self._parts}, "writers of unknown slots, or none"
        return {slot for slots in self._aside.values() for slot in slots}

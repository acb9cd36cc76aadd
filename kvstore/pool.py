"""The pool of one tier: slots, index, leases, writes, quarantine. One lock, every step atomic.

The rules it keeps (each has tests in tests/kvstore/test_pool.py):
- selecting a slot and claiming it, finding a block and pinning it, dropping a pin and freeing are
  single steps under the lock; nobody peeks;
- a hash can be found only after all its bytes are in place; a failed write was never visible;
- a slot that a reader holds keeps its address and bytes;
- release is by lease id, checks the owner, may be repeated, and says whether the lease was held.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from kvstore.chain import Chain
from kvstore.errors import ChainBroken, InvalidRequest, LeaseReleased
from kvstore.slots import PoolStats, SlotState, SlotTable


@dataclass(slots=True)
class _Lease:
    owner: str
    deadline_s: float
    slots: list[int]


@dataclass(slots=True)
class _Write:
    owner: str
    new: list[int]
    kept: list[int]
    num_done: int = 0
    parts: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Grant:
    """Pinned blocks: a prefix of what was asked for.

    Args:
        lease_id: names the pin to `release`; 0 when nothing was pinned.
        slots: slot of each pinned block, in chain order.
    """

    lease_id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTicket:
    """What `prepare_store` claimed.

    Args:
        write_id: names the write to `complete_store` and `abort_store`; 0 when there is nothing to write.
        indexes: positions in the chain that the caller has to write, ascending.
        slots: slot of each of them.
        num_resident: blocks that were there already, or are just being written by somebody else.
        num_refused: blocks at the end of the chain for which no slot could be had.
    """

    write_id: int
    indexes: tuple[int, ...]
    slots: tuple[int, ...]
    num_resident: int
    num_refused: int


class Pool:
    """Slots of one size, found by block hash.

    Owners are names that the caller vouches for. `yield_point` is called with a step's name before each
    critical section and does nothing in production; tests use it to interleave threads.

    Args:
        num_slots: number of slots, at least 1.
        max_pinned: how many slots leases may hold at once; beyond it prefixes are cut short.
    """

    def __init__(
        self,
        num_slots: int,
        max_pinned: int | None = None,
        yield_point: Callable[[str], None] = lambda step: None,
    ) -> None:
        if num_slots < 1:
            raise InvalidRequest(f"num_slots: wanted at least 1, got {num_slots}")
        self._lock = threading.Lock()
        self._yield = yield_point
        self._table = SlotTable(num_slots)
        self._max_pinned = num_slots if max_pinned is None else max_pinned
        self._index: dict[bytes, int] = {}
        # The readable part of the index, kept beside it so that a lookup is one pass in C.
        self._ready: dict[bytes, int] = {}
        self._leases: dict[int, _Lease] = {}
        self._writes: dict[int, _Write] = {}
        self._quarantine: dict[str, list[int]] = {}
        self._events: list[tuple[bool, bytes]] = []
        self._next_id = secrets.randbits(48) + 1
        self._num_published = 0

    # Reading.

    def lookup(self, chain: Chain) -> int:
        """Return how many leading blocks of the run are readable here. Changes nothing."""
        self._yield("lookup")
        hashes = chain.hashes()
        with self._lock:
            return len(list(takewhile(self._ready.__contains__, hashes)))

    def pin_prefix(self, chain: Chain, owner: str, deadline_s: float, lease_id: int = 0) -> Grant:
        """Find the readable prefix of a run and pin it, in one step.

        Args:
            chain: the blocks wanted.
            owner: who holds the lease; only it can release it.
            deadline_s: on the monotonic clock; the lease is never reclaimed before.
            lease_id: adds the blocks to this lease instead of making one.

        Raises:
            LeaseReleased: `lease_id` is not held by `owner`; nothing changed.
        """
        self._yield("pin_prefix")
        table, hashes = self._table, chain.hashes()
        with self._lock:
            lease = self._held(lease_id, owner) if lease_id else None
            slots = [self._ready[h] for h in takewhile(self._ready.__contains__, hashes)]
            slots = slots[: table.num_pinnable(slots, self._max_pinned)]
            table.pin_all(slots)
            if lease is not None:
                lease.slots.extend(slots)
                lease.deadline_s = max(lease.deadline_s, deadline_s)
                return Grant(lease_id, tuple(slots))
            new_id = self._new_id()
            self._leases[new_id] = _Lease(owner, deadline_s, slots)
            return Grant(new_id, tuple(slots))

    def renew(self, lease_id: int, owner: str, deadline_s: float) -> bool:
        """Move a lease's deadline later, never earlier; False when it is not held by `owner`."""
        self._yield("renew")
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or lease.owner != owner:
                return False
            lease.deadline_s = max(lease.deadline_s, deadline_s)
            return True

    def release(self, lease_id: int, owner: str) -> bool:
        """Drop a lease; False, with nothing changed, when `owner` does not hold it (any more)."""
        self._yield("release")
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or lease.owner != owner:
                return False
            self._drop_lease(lease_id)
            return True

    def generations(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Return the life number of each slot."""
        with self._lock:
            return tuple(self._table.slots[slot].generation for slot in slots)

    # Writing.

    def prepare_store(self, chain: Chain, owner: str, *, num_parts: int = 1, needs_parent: bool = True) -> StoreTicket:
        """Claim a slot for each block of the run that is not here yet.

        Blocks that are here are pinned until the write ends, so that making room cannot evict them.
        When the pool is full the ticket covers the leading blocks that fit.

        Raises:
            ChainBroken: the run names a block twice, or does not begin at the root and its parent is not
                here (and `needs_parent`); nothing changed.
        """
        chain.check_unique()
        self._yield("prepare_store")
        table, hashes = self._table, chain.hashes()
        with self._lock:
            parent = self._index.get(chain.parent, -1) if chain.start else -1
            if chain.start and parent < 0 and needs_parent:
                raise ChainBroken(
                    f"wanted a run that begins at the root or after a resident block, got one that begins at "
                    f"block {chain.start} whose parent is not resident; pass the chain from its root"
                )
            found = [self._index.get(block_hash, -1) for block_hash in hashes]
            kept = [slot for slot in (parent, *found) if slot >= 0 and self._is_ready(slot)]
            for slot in kept:
                table.pin(slot)
            missing = [i for i, slot in enumerate(found) if slot < 0]
            claimed, evicted = table.claim(len(missing))
            for slot in evicted:
                self._unindex(slot)
            refused_at = missing[len(claimed)] if len(claimed) < len(missing) else len(hashes)
            namespace, index, slots = chain.namespace, self._index, table.slots
            for i, slot in zip(missing, claimed, strict=False):
                record = slots[slot]
                record.block_hash, record.namespace, record.position = hashes[i], namespace, chain.start + i
                record.parts_left, record.indexed = num_parts, True
                index[hashes[i]] = found[i] = slot
            before = parent
            for slot in found[:refused_at]:
                # Also for a block that was here: its parent may have been away and be back now.
                if before >= 0 and slots[slot].parent < 0:
                    slots[slot].parent = before
                    slots[before].children.add(slot)
                before = slot
            table.touch_all(found[:refused_at])
            indexes = tuple(missing[: len(claimed)])
            num_resident = refused_at - len(indexes)
            if not indexes:
                for slot in kept:
                    table.unpin(slot)
                return StoreTicket(
                    write_id=0, indexes=(), slots=(), num_resident=num_resident,
                    num_refused=len(hashes) - refused_at,
                )  # fmt: skip
            write_id = self._new_id()
            self._writes[write_id] = _Write(owner, list(claimed), kept)
            return StoreTicket(
                write_id=write_id, indexes=indexes, slots=tuple(claimed), num_resident=num_resident,
                num_refused=len(hashes) - refused_at,
            )  # fmt: skip

    def complete_store(self, write_id: int, owner: str, *, part: int = 0, count: int | None = None) -> int:
        """Say that the bytes of a part are in place, and publish the blocks whose last part that was.

        Args:
            write_id: from `prepare_store`.
            owner: the same as there.
            part: which part this is; a part that comes twice counts once.
            count: only the first `count` claimed blocks (a single part, written front to back); all of them
                when None, which also ends the write for that part.

        Returns:
            How many blocks this call published. 0 when the write is unknown, aborted or ended before.
        """
        self._yield("complete_store")
        table = self._table
        with self._lock:
            write = self._writes.get(write_id)
            if write is None or write.owner != owner or part in write.parts:
                return 0
            end = len(write.new) if count is None else min(count, len(write.new))
            if count is None:
                write.parts.add(part)
            published = finished = 0
            for slot in write.new[write.num_done : end]:
                record = table.slots[slot]
                record.parts_left -= 1
                if record.parts_left > 0:
                    continue
                finished += 1
                if record.doomed:
                    table.free(slot)
                    continue
                published += 1
                table.publish(slot)
                self._ready[record.block_hash] = slot
                self._events.append((True, record.block_hash))
                self._num_published += 1
            if finished or count is not None:
                write.num_done = max(write.num_done, end)
            if write.num_done == len(write.new):
                self._end_write(write_id)
            return published

    def abort_store(self, write_id: int, owner: str, *, quarantine: str = "") -> int:
        """Give up what a write has not published; returns how many slots that were.

        Args:
            write_id: from `prepare_store`.
            owner: the same as there.
            quarantine: when set, a transfer may still write to the slots: they are set aside under this
                name until `end_quarantine`, instead of becoming free.
        """
        self._yield("abort_store")
        with self._lock:
            write = self._writes.get(write_id)
            if write is None or write.owner != owner:
                return 0
            return self._abort(write_id, quarantine)

    def end_quarantine(self, name: str) -> int:
        """Free the slots set aside under `name`; only when nothing can write to them any more."""
        self._yield("end_quarantine")
        with self._lock:
            slots = self._quarantine.pop(name, [])
            for slot in slots:
                self._table.free(slot)
            return len(slots)

    # Owners, namespaces, time.

    def release_owner(self, owner: str) -> int:
        """Drop all leases and unfinished writes of an owner that is gone; returns how many."""
        self._yield("release_owner")
        with self._lock:
            leases = [i for i, lease in self._leases.items() if lease.owner == owner]
            writes = [i for i, write in self._writes.items() if write.owner == owner]
            for lease_id in leases:
                self._drop_lease(lease_id)
            for write_id in writes:
                self._abort(write_id, "")
            return len(leases) + len(writes)

    def holds(self, owner: str) -> bool:
        """Return whether an owner has a lease or an unfinished write."""
        with self._lock:
            return any(lease.owner == owner for lease in self._leases.values()) or any(
                write.owner == owner for write in self._writes.values()
            )

    def expire(self, now_s: float) -> int:
        """Drop every lease whose deadline has passed; returns how many."""
        self._yield("expire")
        with self._lock:
            expired = [i for i, lease in self._leases.items() if lease.deadline_s < now_s]
            for lease_id in expired:
                self._drop_lease(lease_id)
            return len(expired)

    def clear(self, namespace: bytes) -> int:
        """Make every block of a namespace unfindable at once; returns how many there were.

        Pinned readers finish on the old bytes; unfinished writes will publish nothing.
        """
        self._yield("clear")
        table = self._table
        with self._lock:
            mine = [i for i, slot in enumerate(table.slots) if slot.namespace == namespace and slot.indexed]
            for slot in mine:
                self._unindex(slot)
                table.unlink(slot)
            for slot in mine:
                record = table.slots[slot]
                record.indexed = False
                if record.state is SlotState.WRITING:
                    record.doomed = True
                elif record.ref_count == 0:
                    table.free(slot)
            return len(mine)

    # Looking on.

    def drain_events(self) -> list[tuple[bool, bytes]]:
        """Return and forget what became findable (True, hash) or stopped being so (False, hash), in order."""
        with self._lock:
            events, self._events = self._events, []
            return events

    def resident_hashes(self) -> list[bytes]:
        """Return all findable hashes and forget pending events: a consistent snapshot."""
        with self._lock:
            self._events = []
            return list(self._ready)

    def hot_chains(self, max_blocks: int) -> list[Chain]:
        """Return the most recently used chains, each from its root, up to `max_blocks` blocks in all."""
        slots = self._table.slots
        with self._lock:
            leaves = [i for i in self._index.values() if self._is_ready(i) and not slots[i].children]
            leaves.sort(key=lambda i: -slots[i].touched)
            chains: list[Chain] = []
            seen: set[int] = set()
            for leaf in leaves:
                path, at = [], leaf
                while at >= 0 and self._is_ready(at):
                    path.append(at)
                    at = slots[at].parent
                has_root = at < 0 and slots[path[-1]].position == 0
                if not has_root or len(seen | set(path)) > max_blocks:
                    continue
                seen.update(path)
                data = b"".join(slots[i].block_hash for i in reversed(path))
                chains.append(Chain(slots[leaf].namespace, slots[leaf].namespace, 0, data))
            return chains

    def num_leases(self) -> int:
        """Return how many leases are held."""
        with self._lock:
            return len(self._leases)

    def stats(self) -> PoolStats:
        """Return counts that belong together."""
        table = self._table
        with self._lock:
            num_ready = len(table.slots) - table.num_free - table.num_writing - table.num_quarantined
            return PoolStats(
                num_slots=len(table.slots),
                num_free=table.num_free,
                num_writing=table.num_writing,
                num_idle=num_ready - table.num_pinned,
                num_pinned=table.num_pinned,
                num_quarantined=table.num_quarantined,
                num_leases=len(self._leases),
                num_writes=len(self._writes),
                num_evicted=table.num_evicted,
                num_published=self._num_published,
            )

    def check_integrity(self) -> None:
        """Assert everything that must hold between two calls; for tests, and cheap enough for small pools."""
        table = self._table
        with self._lock:
            table.check()
            refs = dict.fromkeys(range(len(table.slots)), 0)
            writing: set[int] = set()
            for lease in self._leases.values():
                for slot in lease.slots:
                    refs[slot] += 1
            for write in self._writes.values():
                for slot in write.kept:
                    refs[slot] += 1
                pending = write.new[write.num_done :]
                assert not writing & set(pending), "a slot is written by two"
                writing.update(pending)
            aside = {slot for slots in self._quarantine.values() for slot in slots}
            for index, record in enumerate(table.slots):
                assert refs[index] == record.ref_count, f"slot {index}: {refs[index]} holders, count {record.ref_count}"
                assert (record.state is SlotState.WRITING) == (index in writing), f"slot {index}: writer unknown"
                assert (record.state is SlotState.QUARANTINED) == (index in aside), f"slot {index}: quarantine"
                assert record.indexed == (self._index.get(record.block_hash) == index), f"slot {index}: index"
            assert all(table.slots[i].block_hash == h for h, i in self._index.items()), "index names another block"

    # Below here the lock is held.

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _held(self, lease_id: int, owner: str) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner:
            raise LeaseReleased(f"wanted a lease held by {owner!r}, got id {lease_id}, which it does not hold")
        return lease

    def _is_ready(self, slot: int) -> bool:
        return self._table.slots[slot].state is SlotState.READY

    def _unindex(self, slot: int) -> None:
        record = self._table.slots[slot]
        if self._index.get(record.block_hash) == slot:
            del self._index[record.block_hash]
            if self._ready.pop(record.block_hash, None) is not None:
                self._events.append((False, record.block_hash))

    def _drop_lease(self, lease_id: int) -> None:
        for slot in self._leases.pop(lease_id).slots:
            self._table.unpin(slot)

    def _end_write(self, write_id: int) -> None:
        for slot in self._writes.pop(write_id).kept:
            self._table.unpin(slot)

    def _abort(self, write_id: int, quarantine: str) -> int:
        write = self._writes[write_id]
        pending = write.new[write.num_done :]
        for slot in pending:
            record = self._table.slots[slot]
            if record.indexed:
                self._index.pop(record.block_hash, None)
            if quarantine:
                self._table.quarantine(slot)
                self._quarantine.setdefault(quarantine, []).append(slot)
            else:
                self._table.free(slot)
        write.num_done = len(write.new)
        self._end_write(write_id)
        return len(pending)

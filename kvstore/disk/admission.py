"""Decide which blocks are written to the disk, which before them, and which are not kept there.

Each block that is written wears the disk, and most blocks are never asked for again. With `disk_min_uses` a block is
written when it was stored or used for the n-th time (the idea of Marconi's admission, and of RocksDB's and CacheLib's
reuse filters). A budget bounds the bytes of a day in any case.

A block is found only behind all those before it in its chain, in memory or on the disk. So what the disk lacks before
a block that was saved is written first, and what is behind a block that is lost is evicted from the disk. The state
here has no lock: callers hold theirs.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore.blocks.grants import HeldBlock
from kvstore.pool.pool import Pool
from kvstore.pool.tenants.limits import SHARED

_KEY_BYTES = 8
_DAY_S = 86400.0
#: Of a day's budget: so much may be written at once after a quiet time.
_BURST = 1 / 24
#: Blocks that one turn of a thread writes at most, and one of so many of the memory: saves must find others to evict.
MOST_BLOCKS, LEAST_SHARE = 256, 32
#: So many blocks are looked at under the lock of the memory's pool at once.
_STEP = 256
#: So many slots of the disk's pool are looked at under its lock at once.
_SLICE = 4096
#: For each saved block, so many that the disk has lost may be written in the places of others.
_REWRITES = 4
#: It is looked for blocks that nobody can find when one of so many of the disk's blocks was evicted.
_SWEPT_SHARE = 16


class OfferKind(enum.Enum):
    """Why blocks are offered to the disk, and so what they need there."""

    #: They became readable: what the disk lacks before them is written first.
    SAVED = enum.auto()
    #: They are before others that were saved. What is left out of them was counted when they were saved themselves.
    BEFORE = enum.auto()
    #: What is before them was offered first; where the disk has not taken it, they are left out.
    BEHIND = enum.auto()
    #: They are about to be evicted from memory, which has what is before them.
    VICTIMS = enum.auto()


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks to write: slots of memory, hashes, and what was known of their namespace before they were pinned."""

    namespace: bytes
    slots: list[int]
    #: A slot may have another block by its turn, which was offered for itself.
    hashes: list[bytes]
    num_clears: int
    version: int
    kind: OfferKind
    #: Of the first block, those of the others follow; 0 if the write takes the next ones.
    generation: int = 0
    #: Whether the first block is written without the one before it: memory cannot tell what that is.
    is_unlinked: bool = False
    #: For BEFORE: who saved what is behind them. They never take the places of other tenants' blocks.
    tenant: str = SHARED
    #: Why blocks of BEFORE were left out, as far as it is known; shared with those BEHIND.
    why: list[str] = field(default_factory=list)

    def needs_parent(self, first: HeldBlock) -> bool:
        """Return whether a run of these blocks is written only behind the block before it; `first` is its first one."""
        is_first = self.is_unlinked and first.block_hash == self.hashes[0]
        return self.kind is not OfferKind.VICTIMS and not is_first

    def split(self, most: int) -> tuple[Offer, Offer]:
        """Return the leading blocks, at most so many, and the others."""
        rest = self.generation and self.generation + most
        return (
            replace(self, slots=self.slots[:most], hashes=self.hashes[:most]),
            replace(self, slots=self.slots[most:], hashes=self.hashes[most:], generation=rest, is_unlinked=False),
        )

    def held(self, blocks: Iterable[HeldBlock]) -> list[HeldBlock]:
        """Return those of the blocks in the offer's slots that were offered."""
        offered = set(self.hashes)
        return [block for block in blocks if block.block_hash in offered]

    def part(self, blocks: Sequence[HeldBlock], kind: OfferKind, why: list[str] | None = None) -> Offer:
        """Return an offer of some of these blocks."""
        slots, hashes = [block.slot for block in blocks], [block.block_hash for block in blocks]
        return replace(self, slots=slots, hashes=hashes, kind=kind, is_unlinked=False, why=[] if why is None else why)


@dataclass(slots=True)
class WriterCounts:
    """Blocks that were written, left out by reason, and the bytes."""

    num_written: int = 0
    num_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class Rewrites:
    """Bounds what is written before saved blocks in the places of others: a disk's worth, and so many for each of them.

    On a disk that is small for the chains in use, each chain would else be written again with each of its saves. Any
    thread may call.

    Args:
        num_slots: of the disk.
    """

    def __init__(self, num_slots: int) -> None:
        self._most = self._left = num_slots
        self._lock = threading.Lock()

    def earn(self, num_saved: int) -> None:
        """Note saved blocks that were written, or that have to wait for what is before them."""
        self.give_back(_REWRITES * num_saved)

    def take(self, num_blocks: int) -> int:
        """Return how many of these blocks may take the places of others."""
        with self._lock:
            num_granted = min(num_blocks, self._left)
            self._left -= num_granted
            return num_granted

    def give_back(self, num_blocks: int) -> None:
        """Note that so many blocks took no places after all."""
        with self._lock:
            self._left = min(self._left + num_blocks, self._most)


def allowed(disk: Pool, rewrites: Rewrites, offer: Offer, run: list[HeldBlock]) -> tuple[list[HeldBlock], int]:
    """Return the leading blocks of a run that may be written, as whose, and how many of them take places of others.

    Only blocks that are before others are bounded. Their owner pays for them if it has room, else the tenant that saved
    those: never in the places of another tenant.
    """
    if offer.kind is not OfferKind.BEFORE:
        return run, 0
    owner = run[0].tenant
    if owner not in (SHARED, offer.tenant) and disk.room_of(owner) < len(run):
        if disk.room_of(offer.tenant) < len(run):
            return [], 0
        run = [block._replace(tenant=offer.tenant) for block in run]
    num_free = max(min(disk.num_free, disk.room_of(run[0].tenant)), 0)
    num_granted = rewrites.take(max(len(run) - num_free, 0))
    return run[: num_free + num_granted], num_granted


def put_off(memory: Pool, disk: Pool, offer: Offer, run: Sequence[HeldBlock], rest: Sequence[HeldBlock]) -> list[Offer]:
    """Return what is written in place of a run of saved blocks, of which the disk lacks what is before it.

    That is what memory has of it, from the root on, and then the run, and then the rest of the offer, which may lack
    the same. What is being written to the disk counts as there.
    """
    namespace, own, slots, names, is_linked = offer.namespace, run[0].parent, list[int](), list[bytes](), True
    # What can have no places together is not tried: it would take those of others for nothing.
    can_fit = run[-1].depth < disk.num_slots
    while can_fit and own != namespace:
        hashes, more, above = memory.climb(namespace, own, _STEP)
        here = disk.held(namespace, [*hashes, above])
        end = next((at for at, name in enumerate([*hashes, above]) if name in here), None)
        slots += more[:end]
        names += hashes[:end]
        if end is not None:
            own = [*hashes, above][end]
            break
        if above != namespace and len(more) < _STEP:
            is_linked = False  # The block there is still being written to memory, and comes to the disk later.
            break
        own = above
    tenant = run[0].tenant
    if (most := disk.most_slots_of(tenant)) < disk.num_slots:
        # What is above on the disk is another's only where that can be seen: it may be written just now.
        there = disk.tenants_of(disk.climb(namespace, own, disk.num_slots)[1])
        num_there = run[0].depth - len(slots) - (len(there) - there.count(tenant)) if is_linked else 0
        num_own = memory.tenants_of(slots).count(tenant) + num_there
        can_fit = can_fit and num_own + len(run) <= most
    behind = offer.part(run, OfferKind.BEHIND, [] if can_fit else ["disk_full"])
    before = replace(
        behind, slots=slots[::-1], hashes=names[::-1], kind=OfferKind.BEFORE, tenant=tenant, is_unlinked=not is_linked
    )
    offers = [before, behind] if slots and can_fit else [replace(behind, is_unlinked=can_fit and not is_linked)]
    return [*offers, offer.part(rest, offer.kind)] if rest else offers


class Sweep:
    """Evicts from the disk what this node cannot find: blocks behind one that neither its memory nor its disk has.

    Blocks are evicted from memory before they could be written, writes fail, and a store may be killed. What the disk
    has behind such a block would otherwise stay until its turn, in the places of blocks that can be found.

    Args:
        memory: its blocks count as before those of the disk.
        disk: blocks are evicted here.
    """

    def __init__(self, memory: Pool, disk: Pool) -> None:
        self._memory, self._disk = memory, disk
        self._every = max(1, disk.num_slots // _SWEPT_SHARE)
        #: How many blocks the disk has evicted when it is looked again. Until it evicts, nothing takes others' places.
        self._next_at = 1

    @property
    def is_due(self) -> bool:
        """Whether the disk has evicted enough blocks since the last time."""
        return self._disk.num_evicted >= self._next_at

    def run(self) -> int:
        """Evict such blocks; return how many. Takes a second for a million blocks, if there are any to be evicted."""
        num_evicted = 0
        for namespace, awaited in self._disk.awaited():
            if lost := self._lost(namespace, awaited):
                behind = _behind(namespace, lost, self._disk)
                for begin in range(0, len(behind), _STEP):
                    some = behind[begin : begin + _STEP]
                    # Again, because a prompt may have been saved anew since.
                    still = self._lost(namespace, {above for _, above in some})
                    pairs = [(own, above) for own, above in some if above in still]
                    num_evicted += self._disk.evict_awaiting(namespace, pairs)
        self._next_at = self._disk.num_evicted + self._every
        return num_evicted

    def _lost(self, namespace: bytes, awaited: Iterable[bytes]) -> set[bytes]:
        lost = set(awaited)
        lost -= self._memory.held(namespace, lost)
        # Last: a block is on the disk before it goes from memory.
        return lost - self._disk.held(namespace, lost)


def _behind(namespace: bytes, lost: Iterable[bytes], disk: Pool) -> list[tuple[bytes, bytes]]:
    """Return the blocks of a disk behind lost ones, each before its parent, and with the lost one."""
    depths, pairs, above = list[int](), list[tuple[bytes, bytes]](), {own: own for own in lost}
    for begin in range(0, disk.num_slots, _SLICE):
        for depth, own, parent in disk.links(namespace, begin, begin + _SLICE):
            depths.append(depth)
            pairs.append((own, parent))
    found = list[tuple[bytes, bytes]]()
    for at in np.argsort(np.array(depths, np.int64), kind="stable").tolist():
        own, parent = pairs[at]
        if (top := above.get(parent)) is not None:
            above[own] = top
            found.append((own, top))
    return found[::-1]


class SeenFilter:
    """Counts the uses of the last blocks that were stored or used, by the first bytes of their hashes.

    Args:
        most: number of blocks to remember; up to twice as many are.
        enough: uses of a block above this number are not counted.
    """

    def __init__(self, most: int, enough: int) -> None:
        self._most, self._enough = most, enough
        # Of each block: how often it was used, and when last. Blocks of one call share their pair.
        self._new: dict[bytes, tuple[int, float]] = {}
        self._old: dict[bytes, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def saw(self, hashes: Iterable[bytes], now_s: float, gap_s: float) -> list[tuple[int, bool]]:
        """Note a use of blocks; return how often each was used by now, and whether this was another use.

        Args:
            hashes: of the blocks.
            now_s: the time now.
            gap_s: a block whose last use is less than this ago is still in that use.
        """
        counts, pairs = list[tuple[int, bool]](), dict[int, tuple[int, float]]()
        for block_hash in hashes:
            key = block_hash[:_KEY_BYTES]
            before = self._find(key)
            count, used_s = before
            is_new = not count or now_s - used_s >= gap_s
            if is_new:
                count = min(count + 1, self._enough + 1)
                before = pairs.setdefault(count, (count, now_s))
            self._new[key] = before
            counts.append((count, is_new))
            # Two tables in turns forget the oldest ones without an order for each.
            if len(self._new) >= self._most:
                self._old, self._new = self._new, {}
        return counts

    def num_uses(self, block_hash: bytes) -> int:
        """Return how often a block was used; 0 if it is not remembered."""
        return self._find(block_hash[:_KEY_BYTES])[0]

    def _find(self, key: bytes) -> tuple[int, float]:
        return self._new.get(key) or self._old.get(key) or (0, 0.0)


class WriteBudget:
    """Bytes that may be written to the disk: so many a day, an hour's worth of them at once.

    Args:
        bytes_per_day: the budget; 0 for no bound.
        now_s: the time now.
    """

    def __init__(self, bytes_per_day: int, now_s: float) -> None:
        self._per_day, self._at_s = bytes_per_day, now_s
        self._left = bytes_per_day * _BURST
        #: More is never granted at once; None for no bound.
        self.most_bytes = int(self._left) if bytes_per_day else None

    def take(self, num_bytes: int, now_s: float) -> bool:
        """Take bytes from the budget; return False, and take none, if it has too few."""
        if not self._per_day:
            return True
        earned = (now_s - self._at_s) * self._per_day / _DAY_S
        self._left, self._at_s = min(self._left + earned, self._per_day * _BURST), now_s
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True

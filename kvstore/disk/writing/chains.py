"""Keep the chains of a disk whole: what is written before blocks that were saved, and what is evicted behind lost ones.

A block is found only behind all those before it in its chain, in memory or on the disk
(docs/adr/0042-what-can-be-found-on-disk.md). So what the disk lacks before a block that was saved is written first, and
what is behind a block that is lost is evicted from the disk.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import numpy as np

from kvstore.blocks.grants import HeldBlock, runs_of_held
from kvstore.disk.writing.offers import Offer, OfferKind
from kvstore.pool.pool import Pool
from kvstore.pool.tenants.limits import SHARED
from kvstore.runtime.threads.own_thread import on_thread

#: So many blocks are looked at under the lock of the memory's pool at once.
_STEP = 256
#: So many slots of the disk's pool are looked at under its lock at once.
_SLICE = 4096
#: For each saved block, so many that the disk has lost may be written in the places of others.
_REWRITES = 4
#: So many runs that were lost are kept in mind.
_MOST_LOST = 256
#: It is looked for blocks that nobody can find when one of so many of the disk's blocks was evicted.
_SWEPT_SHARE = 16


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


def runs_to_write(disk: Pool, offer: Offer, blocks: list[HeldBlock]) -> Iterator[list[HeldBlock]]:
    """Yield the runs of an offer's blocks, each with the tenant that pays for it.

    The owner of what is before others pays as far as it has room when its run is asked for, and the tenant that saved
    those for the rest.
    """
    for run in runs_of_held(blocks):
        end = len(run)
        if offer.kind is OfferKind.BEFORE and (owner := run[0].tenant) not in (SHARED, offer.tenant):
            end = min(max(disk.room_of(owner), 0), end)
        if end:
            yield run[:end]
        if end < len(run):
            yield [block._replace(tenant=offer.tenant) for block in run[end:]]


def allowed(disk: Pool, rewrites: Rewrites, offer: Offer, run: list[HeldBlock]) -> tuple[list[HeldBlock], int]:
    """Return the leading blocks of a run that may be written, and how many of them take places of others.

    Only blocks that are before others are bounded. A tenant at its quota takes its own places only.
    """
    if offer.kind is not OfferKind.BEFORE:
        return run, 0
    num_free = max(min(disk.num_free, disk.room_of(run[0].tenant)), 0)
    num_granted = rewrites.take(max(len(run) - num_free, 0))
    return run[: num_free + num_granted], num_granted


def put_off(memory: Pool, disk: Pool, offer: Offer, run: Sequence[HeldBlock], rest: Sequence[HeldBlock]) -> list[Offer]:
    """Return what is written in place of a run of saved blocks, of which the disk lacks what is before it.

    That is what memory has of it, from the root on, and then the run, and then the rest of the offer, which may lack
    the same. What is being written to the disk counts as there. A run that the quota of its tenant has no room for is
    counted as refused.
    """
    slots, names, own, is_linked, tenant = list[int](), list[bytes](), run[0].parent, True, run[0].tenant
    # What can have no places together is not tried: it would take those of others for nothing.
    if can_fit := run[-1].depth < disk.num_slots:
        slots, names, own, is_linked = _lacking(memory, disk, offer.namespace, own)
    if can_fit and not _has_room(memory, disk, tenant, run, slots, own):
        can_fit = False
        disk.note_refused(tenant, len(run) if offer.is_counted else 0)
    behind = offer.part(run, OfferKind.BEHIND, [] if can_fit else ["disk_full"])
    before = replace(
        behind,
        slots=slots,
        hashes=names,
        generations=(),
        kind=OfferKind.BEFORE,
        tenant=tenant,
        is_unlinked=not is_linked,
        is_counted=False,
    )
    offers = [before, behind] if slots and can_fit else [replace(behind, is_unlinked=can_fit and not is_linked)]
    return [*offers, offer.part(rest, offer.kind)] if rest else offers


def _lacking(
    memory: Pool, disk: Pool, namespace: bytes, own: bytes, offered: Set[bytes] = frozenset()
) -> tuple[list[int], list[bytes], bytes, bool]:
    """Return what memory has of a chain up to a block and the disk lacks: slots and hashes, from the root on.

    What is `offered` to the disk already counts as there. Then comes what is before these, and whether the disk has it
    or it is being written there, as is the namespace before a root. If not, memory lacks it, too, or it is still being
    written there and comes to the disk later.
    """
    slots, names, is_linked = list[int](), list[bytes](), True
    while own != namespace:
        hashes, more, above = memory.climb(namespace, own, _STEP)
        here = disk.held(namespace, [*hashes, above])
        end = next((at for at, name in enumerate([*hashes, above]) if name in here or name in offered), None)
        slots += more[:end]
        names += hashes[:end]
        own = above if end is None else [*hashes, above][end]
        if end is not None or (own != namespace and len(more) < _STEP):
            is_linked = end is not None
            break
    return slots[::-1], names[::-1], own, is_linked


def _has_room(memory: Pool, disk: Pool, tenant: str, run: Sequence[HeldBlock], slots: list[int], own: bytes) -> bool:
    """Return whether a tenant may have a run on the disk together with what it pays for of the blocks before it.

    `slots` of memory are of those that the disk lacks, `own` is the hash of the one above. For who pays see
    `runs_to_write`. What is being written there counts as another's: whose it is cannot be seen yet.
    """
    namespace = run[0].namespace
    if run[-1].depth < (most := disk.most_slots_of(tenant)):
        return True
    num_own = 0
    for owner, num_lacking in Counter(memory.tenants_of(slots) + [block.tenant for block in run]).items():
        if owner == tenant:
            num_own += num_lacking
        elif owner != SHARED:
            num_own += max(num_lacking - max(disk.room_of(owner), 0), 0)
    there = [0] * _STEP
    while num_own <= most and len(there) == _STEP:
        _, there, own = disk.climb(namespace, own, _STEP)
        num_own += disk.tenants_of(there).count(tenant)
    return num_own <= most


def holes(disk: Pool, offer: Offer, failed: Iterable[Sequence[HeldBlock]]) -> list[Offer]:
    """Return what is to be written again of some runs whose write failed.

    That is what others on the disk hang on already: what is saved behind those later finds its parent there, and would
    have nothing written before it. Of blocks BEHIND or BEFORE others it is all: those after them were offered already.
    """
    if offer.kind is OfferKind.VICTIMS:  # They stay in memory, and are the next ones again.
        return []
    awaited = set(dict(disk.awaited()).get(offer.namespace, ()))
    # The same tenant pays for those BEFORE others as the first time. Any other may find that its parent went meanwhile.
    kind = OfferKind.BEFORE if offer.kind is OfferKind.BEFORE else OfferKind.SAVED
    found = list[Offer]()
    for run in failed:
        ends = [at for at, block in enumerate(run, 1) if block.block_hash in awaited]
        if end := max(ends, default=0) if offer.kind is OfferKind.SAVED else len(run):
            is_unlinked = kind is OfferKind.BEFORE and not offer.needs_parent(run[0])
            part = offer.part(run[:end], kind)
            found.append(replace(part, is_unlinked=is_unlinked, is_counted=False, is_again=True))
    return found


class Lost:
    """What is to be written when a write has worked again: its own write failed twice, or that of what is before it.

    Each run of blocks is noted once.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[bytes, bytes, bytes], Offer] = {}

    def note(self, offers: Iterable[Offer]) -> None:
        """Note the runs of offers; beyond so many the oldest are forgotten."""
        for offer in offers:
            key = offer.namespace, offer.hashes[0], offer.hashes[-1]
            self._runs.pop(key, None)
            self._runs[key] = offer
        for key in list(self._runs)[:-_MOST_LOST]:
            del self._runs[key]

    def take(self) -> list[Offer]:
        """Return and forget all."""
        runs, self._runs = list(self._runs.values()), {}
        return runs


def mends(
    memory: Pool,
    disk: Pool,
    lost: Iterable[Offer],
    offer_of: Callable[[bytes, list[int], OfferKind], Offer],
) -> list[Offer]:
    """Return what is to be written so that lost runs can be found on the disk, with all that it lacks before them.

    What memory has no longer, or what is before it, is left out.

    Args:
        memory: of the blocks.
        disk: lacks them.
        lost: the runs, as `Lost.take` returns them.
        offer_of: makes an offer of slots of a namespace.
    """
    offers, offered = list[Offer](), defaultdict[bytes, set[bytes]](set)
    for run in lost:
        namespace, found = run.namespace, list[Offer]()
        # Others may have written some of them meanwhile, and memory may have evicted some.
        lacking = memory.held(namespace, run.hashes) - disk.held(namespace, run.hashes) - offered[namespace]
        for own in reversed(run.hashes):
            if own not in lacking:
                continue
            slots, names, above, is_linked = _lacking(memory, disk, namespace, own, offered[namespace])
            if slots and (is_linked or memory.held(namespace, [above])):
                payer = run.tenant or memory.tenants_of(slots[-1:])[0]
                offer = replace(offer_of(namespace, slots, OfferKind.BEFORE), hashes=names, tenant=payer)
                found.append(replace(offer, is_unlinked=not is_linked, is_counted=False, is_again=True))
                offered[namespace].update(names)
            lacking.difference_update(names)
        offers += reversed(found)
    return offers


class Sweep:
    """Evicts from the disk what this node cannot find: blocks behind one that neither its memory nor its disk has.

    Blocks are evicted from memory before they could be written, writes fail, and a store may be killed. What the disk
    has behind such a block would otherwise stay until its turn, in the places of blocks that can be found.

    Args:
        memory: its blocks count as before those of the disk.
        disk: blocks are evicted here.
        on_evicted: called when some were.
    """

    def __init__(self, memory: Pool, disk: Pool, on_evicted: Callable[[], object] = lambda: None) -> None:
        self._memory, self._disk, self._on_evicted = memory, disk, on_evicted
        self._every = max(1, disk.num_slots // _SWEPT_SHARE)
        self._lock = threading.Lock()
        self._running: Future[int] | None = None
        #: How many blocks the disk has evicted when it is looked again. Until it evicts, nothing takes others' places.
        self._next_at = 1

    @property
    def is_due(self) -> bool:
        """Whether the disk has evicted enough blocks since the last time."""
        return self._disk.num_evicted >= self._next_at

    def run_if_due(self) -> None:
        """Begin `run`, on a thread of its own, if it is due: it may be long."""
        if not self.is_due:
            return
        with self._lock:
            if self._running is not None and not self._running.done():
                return
            with suppress(RuntimeError, MemoryError):  # No thread can be started now: the next call tries again.
                self._running = on_thread("raykv-disk-sweep", self.run)

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
        if num_evicted:
            self._on_evicted()
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

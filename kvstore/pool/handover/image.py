"""Describe what a pool gives to its next life: blocks, and slots that must not be reused yet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import HASH_BYTES
from kvstore.blocks.indexes import IndexArray
from kvstore.blocks.priority import Priority
from kvstore.bounds import DIGEST_BYTES
from kvstore.errors import ProtocolError
from kvstore.pool.eviction.reuse import NUM_CLASSES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockColumns:
    """The readable blocks of a pool, one entry each in every column. Times are of kvstore.runtime.clock, in seconds.

    Args:
        slot: of the block.
        space: index of its namespace in `PoolImage.namespaces`.
        hashes: its hash, `HASH_BYTES` each, back to back.
        parents: likewise the hash before it in its chain; the namespace's digest at a root.
        depth: its number in its chain.
        touch: number of its last touch: the smaller, the sooner it is evicted.
        priority: as `Priority`.
        until_s: when that ends.
        uses: how often it was used, as the eviction policy counts; 0 where it does not.
        used_s: when it was used last.
        touched_s: when it was touched last.
        roots: root key of its chain; 0 where it is not known.
    """

    slot: IndexArray
    space: IndexArray
    hashes: bytes
    parents: bytes
    depth: npt.NDArray[np.int64]
    touch: npt.NDArray[np.int64]
    priority: npt.NDArray[np.uint8]
    until_s: npt.NDArray[np.float64]
    uses: npt.NDArray[np.uint8]
    used_s: npt.NDArray[np.float64]
    touched_s: npt.NDArray[np.float64]
    roots: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True)
class OldWriters:
    """Slots without a readable block to which the named owners may still write, or which readers may still read.

    With owners they may be used again when `until_s` has passed and the processes of all `owners` are gone, whatever
    may read them besides. Without, they are of cleared blocks that only `readers` have leases of, and the rule of
    `OldReaders` holds for them.
    """

    owners: tuple[str, ...]
    until_s: float
    slots: IndexArray
    readers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OldReaders:
    """Slots of readable blocks that `owners` have leases of, the last of them until `until_s`.

    They are not evicted before that, unless the processes of all `owners` are known, and all are gone. That is safe:
    bytes are read by the process that has the lease, or by one that has a lease of its own, and is an owner here, too.
    A process that has ended reads no more. In one life its leases end with it as well.
    """

    owners: tuple[str, ...]
    until_s: float
    slots: IndexArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolImage:
    """All that a pool's next life has to know; it names no lease and no write.

    Args:
        generations: of all slots of the pool.
        tenants: names of the tenants that have slots, from number 1 on.
        owners: of all slots of the pool, the number of the tenant that has it; 0 for a free or a shared one.
        namespaces: digests.
        blocks: the readable ones.
        writers: slots that are neither free nor readable yet; each slot is in one entry only.
        readers: of readable blocks; a slot is in one entry only.
    """

    generations: npt.NDArray[np.uint32]
    tenants: tuple[str, ...]
    owners: npt.NDArray[np.uint8]
    namespaces: tuple[bytes, ...]
    blocks: BlockColumns
    writers: tuple[OldWriters, ...]
    readers: tuple[OldReaders, ...]

    @property
    def num_slots(self) -> int:
        """All slots of the pool."""
        return len(self.generations)

    def check(self) -> None:
        """Check that a pool can adopt this without breaking its invariants.

        Raises:
            ProtocolError: it contradicts itself.
        """
        blocks, count = self.blocks, len(self.blocks)
        columns = (
            blocks.space, blocks.depth, blocks.touch, blocks.priority, blocks.until_s, blocks.uses, blocks.used_s,
            blocks.touched_s, blocks.roots,
        )  # fmt: skip
        _want(all(len(column) == count for column in columns), "columns of equal length")
        _want(len(blocks.hashes) == len(blocks.parents) == count * HASH_BYTES, "a hash and a parent for each block")
        _want(all(len(name) == DIGEST_BYTES for name in self.namespaces), "digests of namespaces")
        _want(len(set(self.namespaces)) == len(self.namespaces), "different namespaces")
        _want(len(self.owners) == self.num_slots, "a tenant for each slot")
        _want(_are_within(self.owners, len(self.tenants) + 1), "known tenants")
        held = [entry.slots for entry in self.writers]
        named = np.concatenate([blocks.slot, *held]) if held else blocks.slot
        _want(_are_within(named, self.num_slots) and len(np.unique(named)) == len(named), "each slot at most once")
        read = [entry.slots for entry in self.readers]
        if read:
            all_read = np.concatenate(read)
            _want(bool(np.isin(all_read, blocks.slot).all()), "readers of readable blocks")
            _want(len(np.unique(all_read)) == len(all_read), "readers of different slots")
        ends = [*(entry.until_s for entry in self.writers), *(entry.until_s for entry in self.readers)]
        _want(all(until_s > -math.inf for until_s in ends), "times")
        _want(not np.isnan(blocks.until_s).any() and not np.isnan(blocks.used_s).any(), "times of blocks")
        _want(not np.isnan(blocks.touched_s).any() and bool((blocks.depth >= 0).all()), "places in chains")
        _want(_are_within(blocks.space, len(self.namespaces)), "known namespaces")
        _want(bool((blocks.priority <= max(Priority)).all() and (blocks.uses <= NUM_CLASSES).all()), "priorities, uses")
        self._check_chains()

    def _check_chains(self) -> None:
        """Check that each block is named once, and further from the root than the one before it."""
        blocks = self.blocks
        hashes, parents, depths = split(blocks.hashes), split(blocks.parents), blocks.depth.tolist()
        spaces = blocks.space.tolist()
        place = {(space, own): at for at, (space, own) in enumerate(zip(spaces, hashes, strict=True))}
        _want(len(place) == len(hashes), "each block once")
        for at, (space, parent) in enumerate(zip(spaces, parents, strict=True)):
            above = place.get((space, parent))
            _want(above is None or depths[above] < depths[at], "parents nearer to the root")


def split(packed: bytes) -> list[bytes]:
    """Return hashes one by one."""
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


def _are_within(values: npt.NDArray[np.integer[Any]], end: int) -> bool:
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < end)


def _want(is_right: bool, what: str) -> None:
    if not is_right:
        raise ProtocolError(f"the index of the old store: wanted {what}, got one that contradicts itself; start cold")

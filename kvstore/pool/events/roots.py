"""Keep the root key of the chain of each slot's block, by which a directory of several shards is divided."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

#: A root key for each block of a list (see `BlockHashes`).
RootKeys = npt.NDArray[np.uint32]


class RootColumn:
    """The root keys of the blocks of a pool, 4 bytes a slot; none at all for a pool whose directory has one shard.

    A column, because a block is announced as gone when the blocks before it may be gone, too: then no parent link leads
    to the root.
    """

    def __init__(self, num_slots: int, *, is_kept: bool) -> None:
        self._keys: RootKeys | None = np.zeros(num_slots, np.uint32) if is_kept else None

    def of(self, slots: Collection[int]) -> RootKeys | None:
        """Return the root keys of slots; None if they are not kept."""
        return None if self._keys is None else self._keys[np.fromiter(slots, np.int64, len(slots))]

    def at(self, slot: int) -> int:
        """Return the root key of one slot; 0 if it is not known."""
        return 0 if self._keys is None else int(self._keys[slot])

    def restore(self, slots: Collection[int], keys: RootKeys) -> None:
        """Note the root keys of slots' blocks as the pool's last life knew them."""
        if self._keys is not None:
            self._keys[np.fromiter(slots, np.int64, len(slots))] = keys

    def claimed(
        self,
        index: slice | npt.NDArray[np.signedinteger],
        root_key: int,
        parent: bytes,
        here: Iterable[Mapping[bytes, int]],
    ) -> None:
        """Note the root key of a claim's blocks.

        Args:
            index: their slots.
            root_key: as their writer knows it. That of their parent counts instead if it is known here: a writer that
                is wrong would announce them where nobody asks for their chain.
            parent: hash of the block that they hang on.
            here: slots of blocks by their hashes; the parent may be among them.
        """
        if self._keys is not None:
            above = [slots[parent] for slots in here if parent in slots]
            self._keys[index] = (self.at(above[0]) if above else 0) or root_key

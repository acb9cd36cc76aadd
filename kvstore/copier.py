"""Copies between an engine's cache and the arena. CPU tensors here; callers see no difference on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.arena import Arena
from kvstore.errors import InvalidRequest, LayoutMismatch
from kvstore.layout import (
    EngineLayout,
    Part,
    canonical_views,
    detect_layout,
    same_layout,
)
from kvstore.shape import KVShape

if TYPE_CHECKING:
    import torch

Ids = npt.NDArray[np.int64]


class Copier:
    """The registered cache of one engine, and the arena's slots as tensors.

    Holds references to the caller's tensors for as long as it lives; never reallocates or mutates them
    besides the blocks that a load names.

    Raises:
        LayoutMismatch: the tensors do not hold KV of this shape, or are not on the CPU.
    """

    def __init__(
        self,
        caches: Any,
        shape: KVShape,
        arena: Arena,
        slot_bytes: int,
        num_slots: int,
        axes: str | None = None,
        part: Part | None = None,
    ) -> None:
        import torch

        from kvstore.kernels import host_copy

        self._kernels = host_copy
        self.layout: EngineLayout = detect_layout(caches, shape, axes, part)
        if not self.layout.device.startswith("cpu"):
            raise LayoutMismatch(
                f"wanted tensors on the CPU, got {self.layout.device}; this version copies CPU caches only"
            )
        self._caches, self._block_dims = caches, shape.block_dims
        self._views = canonical_views(caches, self.layout, shape)
        self._fragments = host_copy.fragments_of(self._views, shape.block_dims)
        buffer = torch.from_numpy(arena.bytes_view())
        self._slots: torch.Tensor = buffer[: slot_bytes * num_slots].view(num_slots, slot_bytes)
        # Compiled now, so that the first copy does not wait for it.
        host_copy.compiled()

    @property
    def num_blocks(self) -> int:
        """How many blocks the engine's cache has."""
        return self.layout.num_blocks

    def check_ids(self, block_ids: object, wanted: int) -> Ids:
        """Return block ids as int64.

        Raises:
            InvalidRequest: not as many as hashes, out of range, or a block named twice.
        """
        try:
            ids = np.asarray(block_ids)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidRequest(f"block_ids: wanted a flat list of integers, got something else ({error})") from error
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise InvalidRequest(f"block_ids: wanted a flat list of integers, got {ids.dtype} of shape {ids.shape}")
        if len(ids) != wanted:
            raise InvalidRequest(f"block_ids: wanted {wanted}, one for each hash, got {len(ids)}")
        ids = ids.astype(np.int64)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.num_blocks):
            raise InvalidRequest(
                f"block_ids: wanted ids in [0, {self.num_blocks}), got {int(ids.min())} to {int(ids.max())}"
            )
        if ids.size and int(np.bincount(ids).max()) > 1:
            raise InvalidRequest("block_ids: wanted each block once, got a block twice")
        return ids

    def check_unchanged(self) -> None:
        """Refuse tensors that were resized or restrided since they were registered.

        Raises:
            LayoutMismatch: they were; register them again.
        """
        same_layout(self._caches, self.layout)

    def into_slots(self, block_ids: Ids, slots: Ids) -> None:
        """Copy engine blocks into slots, block i to slot i, without the interpreter lock."""
        self._kernels.pack(self._fragments, block_ids, self._slots, slots)

    def out_of_slots(self, slots: Ids, block_ids: Ids, first_token: int = 0) -> None:
        """Copy slots into engine blocks; tokens of the first block below `first_token` are not written."""
        if first_token and len(block_ids):
            rest = self._kernels.fragments_of(self._views, self._block_dims, first_token)
            self._kernels.unpack(rest, self._slots, slots[:1], block_ids[:1])
            slots, block_ids = slots[1:], block_ids[1:]
        self._kernels.unpack(self._fragments, self._slots, slots, block_ids)

    def close(self) -> None:
        """Let go of the arena, so that it can be unmapped whoever still knows this object; it copies no more."""
        del self._slots

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
    contiguous_block_view,
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

        from kvstore.kernels import reference

        self._reference, self._torch = reference, torch
        self.layout: EngineLayout = detect_layout(caches, shape, axes, part)
        if not self.layout.device.startswith("cpu"):
            raise LayoutMismatch(
                f"wanted tensors on the CPU, got {self.layout.device}; this version copies CPU caches only"
            )
        self._caches = caches
        self._views = canonical_views(caches, self.layout, shape)
        self._blocks = contiguous_block_view(caches, self.layout, shape)
        buffer = torch.from_numpy(arena.bytes_view())
        self._slots = reference.slot_tensor(buffer, slot_bytes, num_slots, shape.block_dims, shape.dtype)
        self._slot_rows: torch.Tensor = buffer[: slot_bytes * num_slots].view(num_slots, slot_bytes)[
            :, : shape.block_bytes
        ]

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
        if len(np.unique(ids)) != len(ids):
            raise InvalidRequest("block_ids: wanted each block once, got a block twice")
        return ids

    def check_unchanged(self) -> None:
        """Refuse tensors that were resized or restrided since they were registered.

        Raises:
            LayoutMismatch: they were; register them again.
        """
        same_layout(self._caches, self.layout)

    def into_slots(self, block_ids: Ids, slots: Ids) -> None:
        """Copy engine blocks into slots, block i to slot i."""
        if self._blocks is not None:
            self._reference.copy_runs(self._slot_rows, slots, self._blocks, block_ids)
        else:
            self._reference.pack_blocks(self._views, self._ids(block_ids), self._slots, self._ids(slots))

    def out_of_slots(self, slots: Ids, block_ids: Ids, first_token: int = 0) -> None:
        """Copy slots into engine blocks; tokens of the first block below `first_token` are not written."""
        if self._blocks is not None and first_token == 0:
            self._reference.copy_runs(self._blocks, block_ids, self._slot_rows, slots)
        else:
            self._reference.unpack_blocks(self._slots, self._ids(slots), self._views, self._ids(block_ids), first_token)

    def close(self) -> None:
        """Let go of the arena, so that it can be unmapped whoever still knows this object; it copies no more."""
        del self._slots, self._slot_rows

    def _ids(self, ids: Ids) -> torch.Tensor:
        return self._torch.from_numpy(np.ascontiguousarray(ids))

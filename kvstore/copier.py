"""The copier of caches in host memory: compiled copies, on the thread that asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.arena import Arena
from kvstore.engine_copy import I64, EnginePages
from kvstore.layout import EngineLayout, canonical_views, same_layout
from kvstore.shape import KVShape

if TYPE_CHECKING:
    import torch


class HostCopier:
    """An `EngineCopier` of CPU tensors.

    Holds references to the caller's tensors for as long as it lives; never reallocates or mutates them
    besides the blocks that a load names.

    Args:
        caches: as they were registered.
        layout: of the caches, from `detect_layout`.
        shape: of the stored block.
        arena: where the slots are, from its begin on.
        slot_bytes: distance between two slots.
        num_slots: slots of the arena.
    """

    def __init__(
        self, caches: Any, layout: EngineLayout, shape: KVShape, arena: Arena, slot_bytes: int, num_slots: int
    ) -> None:
        import torch

        from kvstore.kernels import host_copy

        self._kernels, self._layout = host_copy, layout
        self._caches, self._block_dims = caches, shape.block_dims
        self._views = canonical_views(caches, layout, shape)
        self._fragments = host_copy.fragments_of(self._views, shape.block_dims)
        buffer = torch.from_numpy(arena.bytes_view())
        self._slots: torch.Tensor = buffer[: slot_bytes * num_slots].view(num_slots, slot_bytes)
        # Compiled now, so that the first copy does not wait for it.
        host_copy.compiled()

    @property
    def layout(self) -> EngineLayout:
        """How the cache is arranged."""
        return self._layout

    def check_unchanged(self) -> None:
        """Refuse tensors that were resized or restrided; see `EngineCopier`."""
        same_layout(self._caches, self._layout)

    def into_slots(self, pages: EnginePages, indexes: I64, slots: I64) -> None:
        """Copy out of the engine into slots, without the interpreter lock; see `EngineCopier`."""
        self._kernels.pack(self._fragments, pages.ids[indexes], self._slots, slots)

    def out_of_slots(self, pages: EnginePages, indexes: I64, slots: I64, skip_tokens: int = 0) -> None:
        """Copy out of slots into the engine, without the interpreter lock; see `EngineCopier`."""
        num_skipped, first_token = divmod(skip_tokens, pages.stored_block_size)
        if skip_tokens and len(indexes) and indexes[0] <= num_skipped:
            whole = int(np.searchsorted(indexes, num_skipped + (first_token > 0)))
            if first_token and whole and indexes[whole - 1] == num_skipped:
                rest = self._kernels.fragments_of(self._views, self._block_dims, first_token)
                at = slice(whole - 1, whole)
                self._kernels.unpack(rest, self._slots, slots[at], pages.ids[indexes[at]])
            indexes, slots = indexes[whole:], slots[whole:]
        self._kernels.unpack(self._fragments, self._slots, slots, pages.ids[indexes])

    def close(self) -> None:
        """Let go of the arena; see `EngineCopier`."""
        del self._slots

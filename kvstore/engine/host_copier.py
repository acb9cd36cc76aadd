"""The copier of caches in host memory: compiled copies on the calling thread."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore.engine.copier import CopyOrder, EngineCopier, EnginePages, job_spans
from kvstore.engine.registered import RegisteredCache
from kvstore.kernels.merging import I64
from kvstore.memory.arena import Arena
from kvstore.runtime.cores import num_copy_threads

if TYPE_CHECKING:
    from kvstore.kernels import host_copy

#: Number of kept tables for blocks that are partly in a skipped prefix; engines repeat few of them.
_NUM_SKIP_TABLES = 8


class HostCopier(EngineCopier):
    """An `EngineCopier` of CPU tensors; arguments as for `make_copier`."""

    def __init__(self, cache: RegisteredCache, arena: Arena, slot_bytes: int, num_slots: int) -> None:
        from kvstore.kernels import host_copy

        self.cache, self._kernels, plan = cache, host_copy, cache.plan
        self.num_slots = num_slots
        self._paging = plan.paging
        sizes = (plan.paging.engine_block_size, plan.paging.stored_block_size)
        self._same_size = sizes[0] == sizes[1]
        # A table for each position of a run in both blocks, and some for skipped prefixes.
        tables = functools.lru_cache(max(sizes) // min(sizes) + _NUM_SKIP_TABLES)
        self._tables = tables(functools.partial(host_copy.fragments_of, plan))
        self._tables(0, 0, min(sizes))
        buffer = torch.from_numpy(arena.bytes_view())
        self._slots: torch.Tensor = buffer[: slot_bytes * num_slots].view(num_slots, slot_bytes)
        self._num_threads = num_copy_threads()
        # Compile now, so that the first copy does not wait for it.
        host_copy.compiled()

    def order(self) -> CopyOrder | None:
        """Return None: a copy is done when its call returns."""
        return None

    def into_slots(self, pages: EnginePages, indexes: I64, slots: I64) -> None:
        """Copy out of the engine into slots, without the interpreter lock; see `EngineCopier`."""
        for tables, blocks, ids in self._runs(pages, indexes, slots, 0):
            self._kernels.pack(tables, blocks, self._slots, ids, self._num_threads)

    def out_of_slots(self, pages: EnginePages, indexes: I64, slots: I64, skip_tokens: int = 0) -> None:
        """Copy out of slots into the engine, without the interpreter lock; see `EngineCopier`."""
        for tables, blocks, ids in self._runs(pages, indexes, slots, skip_tokens):
            self._kernels.unpack(tables, self._slots, ids, blocks, pages.num_threads or self._num_threads)

    def _runs(
        self, pages: EnginePages, indexes: I64, slots: I64, skip_tokens: int
    ) -> Iterator[tuple[tuple[host_copy.Fragments, ...], I64, I64]]:
        """Yield (tables, engine blocks, slots) for runs of tokens at the same place in their blocks."""
        stored = self._paging.stored_block_size
        if self._same_size and len(indexes) and skip_tokens <= stored * int(indexes[0]):
            yield self._tables(0, 0, stored), pages.ids[indexes], slots
            return
        rows = job_spans(self._paging, pages, indexes, slots, len(self._slots), skip_tokens).rows
        places, kinds = np.unique(rows[:, 2:], axis=0, return_inverse=True)
        for kind, place in enumerate(places.tolist()):
            chosen = rows[kinds.ravel() == kind]
            yield self._tables(*place), chosen[:, 0], chosen[:, 1]

    def finish(self, pages: EnginePages) -> None:
        """Do nothing; see `EngineCopier`."""

    def close(self) -> None:
        """Release the arena; see `EngineCopier`."""
        del self._slots

"""The ways that `bench gpu` compares: the limit, ours, and others, each a function that queues one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvstore.blocks.shape import KVShape
from kvstore.kernels.driver import copy_run, copy_runs, on_device
from kvstore.kernels.gpu import GpuCopier
from kvstore.kernels.merging import I64, merge_runs
from kvstore.kernels.reference import torch_dtype
from kvstore.kernels.spans import Spans, block_spans
from kvstore.kernels.staging import StagingRing

Way = Callable[[], torch.cuda.Stream]
"""Queues one copy; returns its stream."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Setup:
    """One engine's cache, `[layer][P, B, T, H, D]`, and slots on the host and on the device."""

    shape: KVShape
    caches: list[torch.Tensor]
    copier: GpuCopier
    block_ids: I64
    slot_ids: I64
    host: torch.Tensor
    device: torch.Tensor
    flat: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that are moved."""
        return len(self.block_ids) * self.shape.block_bytes

    def first(self, count: int) -> Setup:
        """Return the same cache and slots with only the first `count` blocks."""
        return replace(
            self,
            block_ids=self.block_ids[:count],
            slot_ids=self.slot_ids[:count],
            device=self.device[:count],
            flat=self.flat[:count],
        )

    def spans(self) -> Spans:
        """Return the whole blocks, one after the other."""
        count = len(self.block_ids)
        return block_spans(self.copier.plan.paging, self.block_ids, range(count), count)


def device_directions(setup: Setup) -> Iterator[tuple[str, dict[str, Way]]]:
    """Yield each direction in device memory with its ways by name."""
    yield "pack", _device_ways(setup, to_slots=True)
    yield "unpack", _device_ways(setup, to_slots=False)


def link_directions(setup: Setup) -> Iterator[tuple[str, dict[str, Way]]]:
    """Yield each direction over the link with its ways by name."""
    yield "gpu_to_host", _host_ways(setup, to_host=True)
    yield "host_to_gpu", _host_ways(setup, to_host=False)
    yield "both", _both_ways(setup)


def _device_ways(setup: Setup, to_slots: bool) -> dict[str, Way]:
    copier, current, listed = setup.copier, torch.cuda.current_stream(), setup.spans()
    spans = copier.place(listed if to_slots else listed.to_unpack())
    ids = torch.from_numpy(setup.block_ids).cuda()

    def limit() -> torch.cuda.Stream:
        (setup.device if to_slots else setup.flat).copy_(setup.flat if to_slots else setup.device)
        return current

    def ours() -> torch.cuda.Stream:
        if to_slots:
            copier.pack(spans, setup.device)
        else:
            copier.unpack(spans, setup.device)
        return current

    def torch_gather() -> torch.cuda.Stream:
        for layer, cache in enumerate(setup.caches):
            piece = in_slots(setup.device, setup.shape)[:, layer]
            if to_slots:
                piece.copy_(cache.index_select(1, ids).transpose(0, 1))
            else:
                cache.index_copy_(1, ids, piece.transpose(0, 1).contiguous())
        return current

    return {"limit": limit, "ours": ours, "torch_gather": torch_gather}


def _host_ways(setup: Setup, to_host: bool) -> dict[str, Way]:
    ring, stream = StagingRing(setup.copier), _new_stream()
    targets, sources, lengths = _fragments(setup, to_host)
    listed = list(zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True))
    current = torch.cuda.current_stream()
    count = len(setup.block_ids)

    def limit() -> torch.cuda.Stream:
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            near, far = setup.host[:count], setup.flat
            (near if to_host else far).copy_(far if to_host else near, non_blocking=True)
        return stream

    def ours_into(slot_ids: I64) -> Way:
        def way() -> torch.cuda.Stream:
            spans = setup.spans()
            if to_host:
                stream.wait_event(ring.save(spans, setup.host, slot_ids))
            else:
                stream.wait_event(ring.load(setup.host, slot_ids, spans))
            return stream

        return way

    def batch() -> torch.cuda.Stream:
        stream.wait_stream(current)
        with on_device(0):
            copy_runs(targets, sources, lengths, stream.cuda_stream)
        return stream

    def each() -> torch.cuda.Stream:
        stream.wait_stream(current)
        with on_device(0):
            for target, source, length in listed:
                copy_run(target, source, length, stream.cuda_stream)
        return stream

    def torch_gather() -> torch.cuda.Stream:
        ids = torch.from_numpy(setup.block_ids).cuda()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for layer, cache in enumerate(setup.caches):
                piece = _in_layers(setup.host[:count], setup.shape)[layer]
                if to_host:
                    piece.copy_(cache.index_select(1, ids), non_blocking=True)
                else:
                    cache.index_copy_(1, ids, piece.to("cuda", non_blocking=True))
        return stream

    ways = {
        "limit": limit,
        "ours": ours_into(setup.slot_ids),
        "ours_adjacent_slots": ours_into(np.arange(count)),
        "batch_of_fragments": batch,
        "torch_gather": torch_gather,
    }
    if len(lengths) <= 20_000:  # Slow, and no faster for more.
        ways["memcpy_per_fragment"] = each
    return ways


def _both_ways(setup: Setup) -> dict[str, Way]:
    """Return ways that save the blocks while as many others are loaded; bytes of both directions count."""
    count = len(setup.block_ids)
    rings, streams = [StagingRing(setup.copier) for _ in range(2)], [_new_stream() for _ in range(2)]
    others = replace(
        setup,
        block_ids=np.setdiff1d(np.arange(setup.caches[0].shape[1]), setup.block_ids)[:count],
        slot_ids=np.setdiff1d(np.arange(len(setup.host)), setup.slot_ids)[:count],
    )
    pool = ThreadPoolExecutor(1)
    extra, current = torch.empty_like(setup.flat), torch.cuda.current_stream()

    def joined() -> torch.cuda.Stream:
        streams[0].wait_stream(streams[1])
        return streams[0]

    def limit() -> torch.cuda.Stream:
        for stream in streams:
            stream.wait_stream(current)
        with torch.cuda.stream(streams[0]):
            setup.host[:count].copy_(setup.flat, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            extra.copy_(setup.host[count : 2 * count], non_blocking=True)
        return joined()

    def save() -> None:
        with torch.cuda.stream(current):
            streams[0].wait_event(rings[0].save(setup.spans(), setup.host, setup.slot_ids))

    def ours() -> torch.cuda.Stream:
        # Two threads queue copies, as a client's save and load do.
        saving = pool.submit(save)
        streams[1].wait_event(rings[1].load(setup.host, others.slot_ids, others.spans()))
        saving.result(60)
        return joined()

    return {"limit": limit, "ours": ours}


def in_slots(slots: torch.Tensor, shape: KVShape) -> torch.Tensor:
    """View slots as `[S, L, P, T, H, D]`."""
    _, heads, layers, planes, tokens, dim = shape.block_dims
    dims = (len(slots), heads, layers, planes, tokens, dim)
    return slots.view(torch_dtype(shape.dtype)).view(dims).permute(0, 2, 3, 4, 1, 5)


def _in_layers(slots: torch.Tensor, shape: KVShape) -> torch.Tensor:
    """View the same bytes as `[L, P, S, T, H, D]`, the order that a gather by layers writes."""
    dims = (shape.num_layers, shape.num_planes, len(slots), shape.block_size, shape.num_kv_heads, shape.row_dim)
    return slots.reshape(-1).view(torch_dtype(shape.dtype)).view(dims)


def _fragments(setup: Setup, to_host: bool) -> tuple[Any, Any, Any]:
    """Return targets, sources and lengths of a copy of one fragment for each block, layer and plane."""
    shape = setup.shape
    num_planes = shape.num_planes
    length = shape.block_bytes // shape.num_layers // num_planes
    bases = np.array([cache.data_ptr() for cache in setup.caches], np.int64)
    plane = np.arange(num_planes) * (setup.caches[0].stride(0) * setup.caches[0].element_size())
    engine = (bases[:, None] + plane + setup.block_ids[:, None, None] * length).ravel()
    slots = setup.host.data_ptr() + setup.slot_ids * shape.block_bytes
    host = (slots[:, None] + np.arange(shape.num_layers * num_planes) * length).ravel()
    targets, sources = (host, engine) if to_host else (engine, host)
    return merge_runs(targets, sources, np.full(len(host), length, np.int64))


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]

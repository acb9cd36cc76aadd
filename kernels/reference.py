"""The torch oracle of the copy kernels, and the path that CPU-only machines take.

Letters of dims: B engine block, S slot, G layer group, L layer, H head, P plane, T token, D dim.
Every copy moves bits: elements are handled as integers, of the widest kind that rows allow, so
that no NaN payload and no 8-bit float is ever interpreted. A pair with a negative id touches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_BITS_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of an element type's name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in _TORCH_DTYPES:
        raise ValueError(f"torch_dtype: wanted one of {', '.join(_TORCH_DTYPES)}, got {name!r}")
    return _TORCH_DTYPES[name]


def slot_tensor(
    buffer: Tensor | memoryview | bytearray,
    slot_bytes: int,
    num_slots: int,
    block_dims: Sequence[int],
    dtype: torch.dtype | str,
) -> Tensor:
    """View a buffer of slots as one tensor, without copying.

    Args:
        buffer: one-dimensional contiguous uint8 tensor, or a writable buffer. It must outlive the result.
        slot_bytes: distance between two slots; at least the bytes of a block, a multiple of the element size.
        num_slots: slots in the buffer.
        block_dims: sizes [G, H, L, P, T, D] of a block.
        dtype: element type, or its name.

    Returns:
        `[num_slots, *block_dims]` over the buffer.

    Raises:
        ValueError: the sizes do not fit the buffer, or it is read-only or not aligned.
    """
    element = torch_dtype(dtype) if isinstance(dtype, str) else dtype
    dims, strides, block_elements = tuple(block_dims), [0] * len(block_dims), 1
    for axis in reversed(range(len(dims))):
        strides[axis], block_elements = block_elements, block_elements * dims[axis]
    width, block_bytes = element.itemsize, block_elements * element.itemsize
    if slot_bytes < block_bytes or slot_bytes % width or num_slots < 0 or block_bytes < 1:
        raise ValueError(
            f"slot_tensor: wanted slot_bytes >= {block_bytes} in a multiple of {width}, num_slots >= 0 "
            f"and dims >= 1, got slot_bytes={slot_bytes}, num_slots={num_slots}, block_dims={dims}"
        )
    if num_slots == 0:
        return torch.empty((0, *dims), dtype=element)
    span_bytes = (num_slots - 1) * slot_bytes + block_bytes
    flat = buffer if isinstance(buffer, Tensor) else _tensor_of(buffer)
    if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous() or flat.numel() < span_bytes:
        raise ValueError(
            f"slot_tensor: wanted a contiguous uint8 buffer of at least {span_bytes} bytes, "
            f"got {flat.dtype} {list(flat.shape)}"
        )
    if flat.data_ptr() % width or flat.storage_offset() % width:
        raise ValueError(f"slot_tensor: wanted a buffer aligned to {width} bytes, got address {flat.data_ptr():#x}")
    typed = flat[:span_bytes].view(element)
    return typed.as_strided((num_slots, *dims), (slot_bytes // width, *strides), typed.storage_offset())


def pack_blocks(views: Sequence[Tensor], block_ids: Tensor, slots: Tensor, slot_ids: Tensor) -> None:
    """Copy engine blocks into slots: block_ids[i] of every view goes to slot slot_ids[i].

    Args:
        views: per layer one `[B, H, P, T, D]`, or per layer and plane one `[B, H, 1, T, D]` with the
            planes of a layer adjacent; any strides. Only read.
        block_ids: int64 `[n]`.
        slots: `[S, G, H, L, P, T, D]`, written; other slots keep their bytes.
        slot_ids: int64 `[n]`, none of the used ones twice.

    Raises:
        ValueError: shapes, dtypes or ids do not fit; nothing was written.
    """
    pieces = _pieces(views, slots)
    sources, targets = _pairs(block_ids, views[0].shape[0], slot_ids, slots.shape[0])
    if not len(sources):
        return
    source_ids, target_ids = sources.to(views[0].device), targets.to(slots.device)
    for view, piece in pieces:
        piece.index_copy_(0, target_ids, view.index_select(0, source_ids).to(slots.device))


def unpack_blocks(
    slots: Tensor, slot_ids: Tensor, views: Sequence[Tensor], block_ids: Tensor, first_token: int = 0
) -> None:
    """Copy slots into engine blocks: slot slot_ids[i] goes to block_ids[i] of every view.

    Args:
        slots: `[S, G, H, L, P, T, D]`. Only read.
        slot_ids: int64 `[n]`.
        views: as for `pack_blocks`, written; other blocks keep their bytes.
        block_ids: int64 `[n]`, none of the used ones twice.
        first_token: in the block of pair 0, tokens below this one are never written; in [0, T]. Without effect if pair
            0 has a negative id.

    Raises:
        ValueError: shapes, dtypes, ids or first_token do not fit; nothing was written.
    """
    pieces = _pieces(views, slots)
    if not 0 <= first_token <= slots.shape[5]:
        raise ValueError(f"unpack_blocks: wanted first_token in [0, {slots.shape[5]}], got {first_token}")
    sources, targets = _pairs(slot_ids, slots.shape[0], block_ids, views[0].shape[0])
    if not len(sources):
        return
    if first_token and int(slot_ids[0]) >= 0 and int(block_ids[0]) >= 0:
        slot, block = int(slot_ids[0]), int(block_ids[0])
        for view, piece in pieces:
            view[block, :, :, first_token:].copy_(piece[slot, :, :, first_token:])
        sources, targets = sources[1:], targets[1:]
    source_ids, target_ids = sources.to(slots.device), targets.to(views[0].device)
    for view, piece in pieces:
        view.index_copy_(0, target_ids, piece.index_select(0, source_ids).to(view.device))


def _tensor_of(buffer: memoryview | bytearray) -> Tensor:
    if memoryview(buffer).readonly or not memoryview(buffer).nbytes:
        raise ValueError("slot_tensor: wanted a writable buffer that is not empty, got a read-only or empty one")
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _pieces(views: Sequence[Tensor], slots: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pair every view with the piece of the slots for the same KV, both as integers.

    Returns:
        Per view `([B, H, P, T, D], [S, H, P, T, D])`, sharing memory with the arguments.
    """
    if slots.dim() != 7 or not views:
        raise ValueError(
            f"wanted slots as [S, G, H, L, P, T, D] and at least one view, "
            f"got slots {list(slots.shape)} and {len(views)} views"
        )
    _, groups, heads, layers, planes, tokens, dim = slots.shape
    per_layer = len(views) // (groups * layers)
    held = planes // per_layer if per_layer else 0
    if len(views) != groups * layers * per_layer or per_layer not in (1, planes):
        raise ValueError(
            f"wanted {groups * layers} views with {planes} planes each, "
            f"or {groups * layers * planes} with one, got {len(views)}"
        )
    wanted = (views[0].shape[0], heads, held, tokens, dim)
    pairs = []
    for index, view in enumerate(views):
        if tuple(view.shape) != wanted or view.dtype != slots.dtype or view.device != views[0].device:
            raise ValueError(
                f"wanted every view as {list(wanted)} of {slots.dtype} on {views[0].device}, "
                f"got view {index} as {list(view.shape)} of {view.dtype} on {view.device}"
            )
        layer, plane = index // per_layer, index % per_layer * held
        piece = slots[:, layer // layers, :, layer % layers, plane : plane + held]
        pairs.append((view, piece))
    bits = _BITS_OF_WIDTH[_common_width([*views, slots])]
    return [(view.view(bits), piece.view(bits)) for view, piece in pairs]


def _common_width(tensors: Sequence[Tensor]) -> int:
    """Return the most bytes, up to 8, that one integer may span in the rows of all tensors."""
    element_bytes = tensors[0].element_size()
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        return element_bytes
    steps = {tensors[0].shape[-1]}
    for tensor in tensors:
        steps.update((*tensor.stride()[:-1], int(tensor.storage_offset())))
    aligned = math.gcd(8, *(step * element_bytes for step in steps), *(t.data_ptr() for t in tensors))
    return max(aligned, element_bytes)


def _pairs(source_ids: Tensor, num_sources: int, target_ids: Tensor, num_targets: int) -> tuple[Tensor, Tensor]:
    """Check the ids, and return the pairs in which neither is negative, on the CPU and in order."""
    if source_ids.dtype != torch.int64 or target_ids.dtype != torch.int64:
        raise ValueError(f"wanted int64 ids, got {source_ids.dtype} and {target_ids.dtype}")
    if source_ids.dim() != 1 or source_ids.shape != target_ids.shape:
        raise ValueError(
            f"wanted two id lists of one length, got {list(source_ids.shape)} and {list(target_ids.shape)}"
        )
    sources, targets = source_ids.cpu(), target_ids.cpu()
    kept = (sources >= 0) & (targets >= 0)
    sources, targets = sources[kept], targets[kept]
    if not len(sources):
        return sources, targets
    if int(sources.max()) >= num_sources or int(targets.max()) >= num_targets:
        raise ValueError(
            f"wanted source ids below {num_sources} and target ids below {num_targets}, "
            f"got up to {int(sources.max())} and {int(targets.max())}"
        )
    ordered = targets.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError("wanted every target id at most once, got one twice; which copy wins is undefined")
    return sources, targets

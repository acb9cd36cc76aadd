"""The data about one engine's cache that a copy kernel needs; made and checked once, at registration.

Letters of dims: B engine block, H head, P plane, T token, D dim. Views of any strides, on any device: the same
plan drives the kernels on a GPU and, in tests, on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvstore.kernels.merging import I64
from kvstore.kernels.reference import torch_dtype
from kvstore.kernels.spans import Paging
from kvstore.kernels.stored import Side, StoredBlock


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """One tensor of a block: the places of its rows on both sides.

    Args:
        engine_bases: int64 `[n]`, address of block 0, token 0, head 0 of every layer and plane; if the engine's row
            elements are not contiguous, of every element as well.
        slot_offsets: int64 `[n]`, distance of the same row from the beginning of its slot.
        num_heads: heads held; 1 if one row is for all heads.
        row_bytes: bytes that are contiguous on both sides for one token and head.
        engine_block_stride: bytes between two engine blocks; the other strides are in bytes as well. If one row is for
            all tokens of a block, both token strides are 0: the row is copied with each token.
        align_bytes: a power of two, at most 16, that divides all of the above.
    """

    engine_bases: I64
    slot_offsets: I64
    num_heads: int
    row_bytes: int
    engine_block_stride: int
    engine_head_stride: int
    engine_token_stride: int
    slot_head_stride: int
    slot_token_stride: int
    align_bytes: int

    def rows(self, engine_token: int, slot_token: int, num_tokens: int) -> tuple[I64, I64]:
        """List the rows of some tokens of a block: addresses in engine block 0, and offsets in the slot."""
        # A row that all tokens of a block share is copied once.
        token = np.arange(num_tokens if self.slot_token_stride else min(num_tokens, 1), dtype=np.int64)
        head = np.arange(self.num_heads, dtype=np.int64)[:, None]
        engine = head * self.engine_head_stride + (engine_token + token) * self.engine_token_stride
        slot = head * self.slot_head_stride + (slot_token + token) * self.slot_token_stride
        return (self.engine_bases[:, None, None] + engine).ravel(), (self.slot_offsets[:, None, None] + slot).ravel()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CopyPlan:
    """The plan of copies between one engine's cache and the slots of `stored`.

    Args:
        stored: the block as it lies in a slot.
        paging: block sizes of both sides.
        sections: the planes, then the side tensors.
        device: where the engine's tensors are.
        views: the engine's tensors, kept alive as long as the plan.
    """

    stored: StoredBlock
    paging: Paging
    sections: tuple[Section, ...]
    device: torch.device
    views: tuple[Tensor, ...]

    @property
    def whole_blocks(self) -> bool:
        """Return whether blocks may only be copied whole, because a side tensor's row is for all their tokens."""
        return not all(side.per_token for side in self.stored.sides)


def plan_copy(
    views: Sequence[Tensor],
    stored: StoredBlock,
    *,
    layers: range | None = None,
    heads: range | None = None,
    sides: Sequence[Sequence[Tensor]] = (),
) -> CopyPlan:
    """Check an engine's tensors against the stored block, and compute both sides' addresses.

    Args:
        views: one `[B, H, P, T, D]` per held layer, or one `[B, H, 1, T, D]` per layer and plane with the planes of a
            layer adjacent; all of one shape, dtype, device and strides. T is the engine's block size. Only read here; a
            copy out of slots writes them.
        stored: the block of all layers and heads.
        layers: layers of the block that the engine holds; default all.
        heads: heads of the block that the engine holds; default all.
        sides: for every side tensor of the block, views as above; H is 1 if it has no heads, and T is 1 if it has no
            tokens.

    Raises:
        ValueError: number, shape, dtype, device or strides do not fit, memory is shared between views or within one,
            neither block size divides the other, or layers or heads are not in the block; or a side tensor is for
            all heads and not all are held, or for all tokens of a block and the block sizes differ.
    """
    layers = range(stored.num_layers) if layers is None else layers
    heads = range(stored.num_heads) if heads is None else heads
    for name, held, count in (("layers", layers, stored.num_layers), ("heads", heads, stored.num_heads)):
        if held.step != 1 or not 0 <= held.start < held.stop <= count:
            raise ValueError(f"plan_copy: wanted {name} as a range within the {count} of a block, got {held}")
    if len(sides) != len(stored.sides):
        raise ValueError(f"plan_copy: wanted {len(stored.sides)} side tensors as stored, got {len(sides)}")
    if not views or views[0].dim() != 5:
        raise ValueError(
            f"plan_copy: wanted views as [B, H, P, T, D], got {[list(view.shape) for view in views[:1]]}; permute the "
            "engine's tensors into this order, which copies nothing"
        )
    first = views[0]
    paging = Paging(engine_block_size=first.shape[3], stored_block_size=stored.block_dims[4], num_blocks=first.shape[0])
    _check_sides(stored, heads, paging)
    groups = [list(views), *(list(side) for side in sides)]
    sections = []
    for index, (tensor, group) in enumerate(zip(stored.tensors, groups, strict=True)):
        per_layer = _views_per_layer(tensor, group, len(layers))
        num_heads, num_rows = len(heads) if tensor.per_head else 1, first.shape[3] if tensor.per_token else 1
        _check_views(group, (paging.num_blocks, num_heads, tensor.num_planes // per_layer, num_rows), tensor)
        if group[0].device != first.device:
            raise ValueError(f"plan_copy: wanted side tensors on {first.device}, got {group[0].device}")
        sections.append(_section(stored, index, group, per_layer, layers, heads))
    every = tuple(view for group in groups for view in group)
    return CopyPlan(stored=stored, paging=paging, sections=tuple(sections), device=first.device, views=every)


def _check_sides(stored: StoredBlock, heads: range, paging: Paging) -> None:
    if len(heads) < stored.num_heads and not all(side.per_head for side in stored.sides):
        raise ValueError(
            f"plan_copy: wanted all {stored.num_heads} heads, because a side tensor has one row for all of them, got "
            f"{len(heads)}"
        )
    engine, size = paging.engine_block_size, paging.stored_block_size
    if engine != size and not all(side.per_token for side in stored.sides):
        raise ValueError(
            f"plan_copy: wanted engine blocks of the stored size, because a side tensor has one row for all tokens of "
            f"a block, got {engine} and {size} tokens"
        )


def _views_per_layer(tensor: Side, views: Sequence[Tensor], num_layers: int) -> int:
    for per_layer in (1, tensor.num_planes):
        if len(views) == num_layers * per_layer:
            return per_layer
    raise ValueError(
        f"plan_copy: wanted {num_layers} views for {num_layers} layers with {tensor.num_planes} planes each, or "
        f"{num_layers * tensor.num_planes} with one, got {len(views)}"
    )


def _check_views(views: Sequence[Tensor], sizes: tuple[int, ...], tensor: Side) -> None:
    first = views[0]
    wanted = ((*sizes, tensor.dim), torch_dtype(tensor.dtype), first.device, first.stride())
    for index, view in enumerate(views):
        got = (tuple(view.shape), view.dtype, view.device, view.stride())
        if got != wanted:
            raise ValueError(
                f"plan_copy: wanted every view as {list(wanted[0])} of {wanted[1]} on {wanted[2]} with strides "
                f"{wanted[3]}, got view {index} as {list(got[0])} of {got[1]} on {got[2]} with strides {got[3]}"
            )
    if len({view.data_ptr() for view in views}) != len(views):
        raise ValueError(f"plan_copy: wanted {len(views)} views in memory of their own, got some at one address")
    if overlaps_itself(first):
        raise ValueError(
            f"plan_copy: wanted strides that do not overlap, got {first.stride()} for {list(first.shape)}; a copy "
            "into an expanded view would write one place from many"
        )


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may share memory, as in an expanded view."""
    extent = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def overlaps_at(tensor: Tensor, distance_bytes: int) -> bool:
    """Return whether a tensor of the same shape and strides shares memory with this one, which is so far before it.

    Views of one tensor that lie between each other, such as those of its layers, share none. This tensor must not
    overlap itself.
    """
    width = tensor.element_size()
    dims = [(stride * width, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    left = {distance_bytes}  # What the smaller strides have to make up.
    for stride, size in sorted([*dims, (1, width)], reverse=True):
        steps = [(rest, rest // stride + more) for rest in left for more in (0, 1)]
        left = {rest - stride * number for rest, number in steps if abs(number) < size}
    return 0 in left


def _section(
    stored: StoredBlock, index: int, views: Sequence[Tensor], per_layer: int, layers: range, heads: range
) -> Section:
    tensor, first = stored.tensors[index], views[0]
    per_group, width = stored.block_dims[2], torch_dtype(tensor.dtype).itemsize
    num_heads, head_bytes = (len(heads), stored.head_bytes) if tensor.per_head else (1, 0)
    held = tensor.num_planes // per_layer
    block, head, plane, token, dim = (stride * width for stride in first.stride())
    # Separated elements of a row become separate rows.
    num_pieces, row_bytes = (1, tensor.row_bytes) if tensor.dim == 1 or dim == width else (tensor.dim, width)

    starts = np.array([view.data_ptr() for view in views], np.int64)[:, None, None]
    inside = np.arange(held, dtype=np.int64)[:, None] * plane + np.arange(num_pieces, dtype=np.int64) * dim
    bases = (starts + inside).ravel()

    layer = np.arange(layers.start, layers.stop, dtype=np.int64)[:, None, None]
    planes = np.arange(tensor.num_planes, dtype=np.int64)[:, None]
    begin = layer // per_group * stored.group_bytes + heads.start * head_bytes + stored.section_offset(index)
    rows = ((layer % per_group) * tensor.num_planes + planes) * stored.rows_of(tensor) * tensor.row_bytes
    offsets = (begin + rows + np.arange(num_pieces, dtype=np.int64) * row_bytes).ravel()

    # The stride of a dim of size 1 is never used, and torch may hold any value there.
    token = token if first.shape[3] > 1 else row_bytes
    strides = (
        block if first.shape[0] > 1 else 0,
        head if num_heads > 1 else 0,
        token if tensor.per_token else 0,
        head_bytes if num_heads > 1 else 0,
        tensor.row_bytes if tensor.per_token else 0,
    )
    align_bytes = math.gcd(16, row_bytes, *strides, int(np.gcd.reduce(bases)), int(np.gcd.reduce(offsets)))
    return Section(bases, offsets, num_heads, row_bytes, *strides, align_bytes)

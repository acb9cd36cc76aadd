"""The layout of KV in an engine's tensors: describe, check, view in the stored order.

Legend of dims, used in the whole project:

    L layer    B block    P plane (K or V)    T token in a block    H KV head    D element of a row

A string such as "BPTHD" names the dims of a tensor, outermost logical dim first; strides may
permute them in memory. A stored block is [G, H, L, P, T, D], see kvstore.blocks.shape, where G is a group
of layers and L a layer within its group. A slot tensor adds S, the slot, in front.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import TypeAlias

import torch
from torch import Tensor

from kvstore.blocks.part import WHOLE, Part
from kvstore.blocks.shape import KVShape
from kvstore.errors import LayoutMismatch
from kvstore.kernels.reference import torch_dtype

LayerCaches: TypeAlias = Tensor | tuple[Tensor, Tensor]
Caches: TypeAlias = Tensor | Sequence[LayerCaches] | Mapping[str, LayerCaches]
"""What an engine registers: per layer a tensor or a (k, v) pair, or one cross-layer tensor."""


class CacheForm(Enum):
    """How the tensors divide the KV of an engine."""

    PER_LAYER = "per_layer"
    """One tensor per layer."""

    KV_PAIR = "kv_pair"
    """One tensor for K and one for V per layer."""

    CROSS_LAYER = "cross_layer"
    """One tensor for all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """The layout in which one engine holds the KV of a `KVShape`; made by `detect_layout`.

    Args:
        form: how tensors divide the KV.
        axes: dims of each tensor, in letters of the legend.
        num_layers: layers held.
        num_blocks: engine blocks.
        block_size: tokens per engine block; a multiple or a divisor of the stored one.
        tensor_shape: sizes of each tensor.
        stride_bytes: strides of each tensor, in bytes.
        dtype: name of the element type.
        device: where the tensors are, as torch writes it.
        part: the rank's part of every block.
        sides: layouts of the side tensors, in the order of the shape's.
    """

    form: CacheForm
    axes: str
    num_layers: int
    num_blocks: int
    block_size: int
    tensor_shape: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    dtype: str
    device: str
    part: Part = WHOLE
    sides: tuple[EngineLayout, ...] = ()

    @property
    def cross_layer(self) -> bool:
        """Return whether one tensor holds all layers."""
        return self.form is CacheForm.CROSS_LAYER

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits that name the arrangement; independent of addresses and number of blocks."""
        # A stride outside B grows with the number of blocks; the gap left after the next inner
        # dim does not, so the gaps are hashed, in the order of memory.
        held = [at for at, size in enumerate(self.tensor_shape) if size > 1 or self.axes[at] == "B"]
        gaps, extent = [], 0
        for at in sorted(held, key=lambda at: (self.stride_bytes[at], -at)):
            gaps.append([self.axes[at], self.stride_bytes[at] - extent])
            extent = self.stride_bytes[at] * self.tensor_shape[at]
        part = self.part
        fields: dict[str, object] = {
            "axes": self.axes,
            "dtype": self.dtype,
            "form": self.form.value,
            "gaps": gaps,
            "num_layers": self.num_layers,
            "part": [part.tp_rank, part.tp_size, part.pp_rank, part.pp_size],
            "sizes": [size for axis, size in zip(self.axes, self.tensor_shape, strict=True) if axis != "B"],
        }
        if self.sides:
            fields["sides"] = [side.fingerprint for side in self.sides]
        encoded = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")
        return sha256(b"raykv/layout/1" + encoded).hexdigest()[:16]


def same_layout(caches: Caches, layout: EngineLayout) -> None:
    """Check that tensors are still arranged as when they were registered.

    Raises:
        LayoutMismatch: form, number, shape, dtype, device or strides changed.
    """
    form, tensors = flatten(caches)
    wanted = (layout.form, layout.tensor_shape, layout.stride_bytes, torch_dtype(layout.dtype), layout.device)
    for index, tensor in enumerate(tensors):
        strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
        got = (form, tuple(tensor.shape), strides, tensor.dtype, str(tensor.device))
        if got != wanted:
            raise LayoutMismatch(
                f"same_layout: wanted tensors as registered, {described(wanted)}, "
                f"got tensor {index} as {described(got)}; register the caches again after they change"
            )
    count = num_tensors(form, layout.num_layers)
    if len(tensors) != count:
        raise LayoutMismatch(
            f"same_layout: wanted {count} tensors as registered, got {len(tensors)}; register the caches again"
        )


def canonical_views(caches: Caches, layout: EngineLayout, shape: KVShape) -> list[Tensor]:
    """View the caches in the stored order of dims, without copying.

    Args:
        caches: as registered.
        layout: as detected.
        shape: the stored block of all layers and heads.

    Returns:
        One `[num_blocks, H, P, T, D]` per layer held, T and H those of the engine; for (k, v) pairs, which
        no single view can span, one `[num_blocks, H, 1, T, D]` per layer and plane: k0, v0, k1, v1, ...
        They share the caches' memory.

    Raises:
        LayoutMismatch: the caches are not as registered, or the layout is of another shape.
    """
    same_layout(caches, layout)
    form, tensors = flatten(caches)
    axes = layout.axes
    if form is CacheForm.CROSS_LAYER and "L" in axes:
        tensors = list(tensors[0].unbind(axes.index("L")))
        axes = axes.replace("L", "")
    missing = "".join(axis for axis in "BHPTD" if axis not in axes)
    order = [(missing + axes).index(axis) for axis in "BHPTD"]
    views = [tensor[(None,) * len(missing)].permute(order) for tensor in tensors]
    held = layout.part.held(shape)
    planes = 1 if form is CacheForm.KV_PAIR else held.num_planes
    wanted = (layout.num_blocks, held.num_kv_heads, planes, layout.block_size, held.row_dim)
    if tuple(views[0].shape) != wanted or layout.num_layers != held.num_layers or layout.dtype != held.dtype:
        raise LayoutMismatch(
            f"canonical_views: wanted {held.num_layers} layers of {list(wanted)} {held.dtype}, "
            f"got {layout.num_layers} of {list(views[0].shape)} {layout.dtype}; "
            "use the shape that the layout was detected with"
        )
    return views


def flatten(caches: Caches) -> tuple[CacheForm, list[Tensor]]:
    """Return the form and all tensors: by layer, and K before V."""
    if isinstance(caches, Tensor):
        return CacheForm.CROSS_LAYER, [caches]
    values = caches.values() if isinstance(caches, Mapping) else caches
    items = list(values) if isinstance(values, Iterable) else []
    if items and all(isinstance(item, Tensor) for item in items):
        return CacheForm.PER_LAYER, [item for item in items if isinstance(item, Tensor)]
    pairs = [tuple(item) for item in items if isinstance(item, (tuple, list))]
    tensors = [tensor for pair in pairs for tensor in pair if isinstance(tensor, Tensor)]
    if items and len(pairs) == len(items) and len(tensors) == 2 * len(items) and {len(p) for p in pairs} == {2}:
        return CacheForm.KV_PAIR, tensors
    raise LayoutMismatch(
        f"caches: wanted one tensor, or per layer a tensor or a (k, v) pair, got {type(caches).__name__} of "
        f"{sorted({type(item).__name__ for item in items})}; pass torch tensors, all layers in one form"
    )


def num_tensors(form: CacheForm, num_layers: int) -> int:
    """Return how many tensors a form has."""
    return {CacheForm.CROSS_LAYER: 1, CacheForm.PER_LAYER: num_layers, CacheForm.KV_PAIR: 2 * num_layers}[form]


def described(layout: tuple[CacheForm, tuple[int, ...], tuple[int, ...], torch.dtype, str]) -> str:
    """Say in words how a tensor is arranged."""
    form, dims, strides, dtype, device = layout
    return f"{form.value} {list(dims)} {dtype} on {device} with strides {list(strides)}"

"""How one engine holds KV in its own tensors: find it, check it, view it in the stored order.

Legend of dims, the only one of the project:

    L layer    B block    P plane (K or V)    T token in a block    H KV head    D element of a row

A string such as "BPTHD" names the dims of a tensor, outermost logical dim first; strides may
permute them in memory. A stored block is [G, H, L, P, T, D], see shape.py, where G is a group
of layers and L a layer within its group. A slot tensor adds S, the slot, in front.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from itertools import combinations, permutations
from typing import TypeAlias

import torch
from torch import Tensor

from kvstore.errors import ConfigError, LayoutMismatch
from kvstore.kernels.reference import torch_dtype
from kvstore.shape import KVShape, Planes

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


_EXAMPLES = {
    CacheForm.PER_LAYER: "BPTHD, PBTHD, BPHTD, BHTD (packed), BTD (MLA)",
    CacheForm.KV_PAIR: "BTHD, BHTD",
    CacheForm.CROSS_LAYER: "BHLPTD (the stored order), BLPTHD, LBPTHD, LPBTHD, BHPLTD, LBTD (MLA)",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of every block, in the order (tp_rank, tp_size, pp_rank, pp_size).

    Raises:
        ConfigError: a rank is not below its size.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int

    def __post_init__(self) -> None:
        for name, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
                raise ConfigError(
                    f"Part: wanted 0 <= {name}_rank < {name}_size as ints, got {rank!r} of {size!r}; count ranks from 0"
                )


_WHOLE = Part(0, 1, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """How one engine holds the KV of a `KVShape`; made by `detect_layout`.

    Args:
        form: how tensors divide the KV.
        axes: dims of each tensor, in letters of the legend.
        num_layers: layers held.
        num_blocks: engine blocks.
        block_size: tokens per engine block.
        tensor_shape: sizes of each tensor.
        stride_bytes: strides of each tensor, in bytes.
        dtype: name of the element type.
        device: where the tensors are, as torch writes it.
        part: the rank's part of every block; None is the whole block.
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
    part: Part | None = None

    @property
    def cross_layer(self) -> bool:
        """Whether one tensor holds all layers."""
        return self.form is CacheForm.CROSS_LAYER

    @property
    def fingerprint(self) -> str:
        """16 hex digits of how bytes are arranged; the same for any addresses and number of blocks."""
        # A stride outside B grows with the number of blocks; the gap left after the next inner
        # dim does not, so the gaps are hashed, in the order of memory.
        held = [at for at, size in enumerate(self.tensor_shape) if size > 1 or self.axes[at] == "B"]
        gaps, extent = [], 0
        for at in sorted(held, key=lambda at: (self.stride_bytes[at], -at)):
            gaps.append([self.axes[at], self.stride_bytes[at] - extent])
            extent = self.stride_bytes[at] * self.tensor_shape[at]
        part = self.part or _WHOLE
        fields = {
            "axes": self.axes,
            "dtype": self.dtype,
            "form": self.form.value,
            "gaps": gaps,
            "num_layers": self.num_layers,
            "part": [part.tp_rank, part.tp_size, part.pp_rank, part.pp_size],
            "sizes": [size for axis, size in zip(self.axes, self.tensor_shape, strict=True) if axis != "B"],
        }
        encoded = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")
        return sha256(b"raykv/layout/1" + encoded).hexdigest()[:16]


def detect_layout(caches: Caches, shape: KVShape, axes: str | None = None, part: Part | None = None) -> EngineLayout:
    """Find the one way in which the tensors can hold the KV of `shape`.

    Args:
        caches: a list or dict of per-layer tensors, a list or dict of (k, v) pairs, or one
            cross-layer tensor; any strides that do not overlap. Dicts are read in insertion order.
        shape: the stored block.
        axes: dims of each tensor, for example "BPTHD"; needed only when sizes leave a choice.
        part: the rank's part; only the whole block is supported.

    Raises:
        LayoutMismatch: no way or several ways fit, the tensors differ from each other or share memory,
            or the block size or part would need a conversion.
    """
    if part is not None and part != _WHOLE:
        raise LayoutMismatch(
            f"detect_layout: wanted the whole block, part (0, 1, 0, 1), got {part}; "
            "partial blocks of TP or PP ranks are not supported by this version, "
            "register all heads and layers"
        )
    form, tensors = _flatten(caches)
    first = tensors[0]
    _check_tensors(form, tensors, shape)
    dims = tuple(first.shape)
    if axes is None:
        found = _candidates(form, shape, dims)
    else:
        found = [axes] if _fits(axes, form, shape, dims) else []
    if not found:
        raise _no_match(axes, form, shape, dims)
    if len(found) > 1:
        raise LayoutMismatch(
            f"detect_layout: wanted one reading of {form.value} tensors {list(dims)}, got {len(found)}: "
            f"{', '.join(found)}; sizes alone cannot tell them apart, pass axes= with the right one"
        )
    width = first.element_size()
    return EngineLayout(
        form=form,
        axes=found[0],
        num_layers=shape.num_layers,
        num_blocks=dims[found[0].index("B")],
        block_size=shape.block_size,
        tensor_shape=dims,
        stride_bytes=tuple(stride * width for stride in first.stride()),
        dtype=shape.dtype,
        device=str(first.device),
        part=part,
    )


def same_layout(caches: Caches, layout: EngineLayout) -> None:
    """Check that tensors given later are arranged as those that were registered.

    Raises:
        LayoutMismatch: form, number, shape, dtype, device or strides changed.
    """
    form, tensors = _flatten(caches)
    wanted = (layout.form, layout.tensor_shape, layout.stride_bytes, torch_dtype(layout.dtype), layout.device)
    for index, tensor in enumerate(tensors):
        strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
        got = (form, tuple(tensor.shape), strides, tensor.dtype, str(tensor.device))
        if got != wanted:
            raise LayoutMismatch(
                f"same_layout: wanted tensors as registered, {_described(wanted)}, "
                f"got tensor {index} as {_described(got)}; register the caches again after they change"
            )
    count = _num_tensors(form, layout.num_layers)
    if len(tensors) != count:
        raise LayoutMismatch(
            f"same_layout: wanted {count} tensors as registered, got {len(tensors)}; register the caches again"
        )


def canonical_views(caches: Caches, layout: EngineLayout, shape: KVShape) -> list[Tensor]:
    """View the caches in the stored order of dims, without copying.

    Returns:
        One `[num_blocks, H, P, T, D]` per layer; for (k, v) pairs, which no single view can span,
        one `[num_blocks, H, 1, T, D]` per layer and plane: k0, v0, k1, v1, ... They share the
        caches' memory.

    Raises:
        LayoutMismatch: the caches are not as registered, or the layout is of another shape.
    """
    same_layout(caches, layout)
    form, tensors = _flatten(caches)
    axes = layout.axes
    if form is CacheForm.CROSS_LAYER and "L" in axes:
        tensors = list(tensors[0].unbind(axes.index("L")))
        axes = axes.replace("L", "")
    missing = "".join(axis for axis in "BHPTD" if axis not in axes)
    order = [(missing + axes).index(axis) for axis in "BHPTD"]
    views = [tensor[(None,) * len(missing)].permute(order) for tensor in tensors]
    planes = 1 if form is CacheForm.KV_PAIR else shape.num_planes
    wanted = (layout.num_blocks, shape.num_kv_heads, planes, shape.block_size, shape.row_dim)
    if tuple(views[0].shape) != wanted or layout.num_layers != shape.num_layers or layout.dtype != shape.dtype:
        raise LayoutMismatch(
            f"canonical_views: wanted {shape.num_layers} layers of {list(wanted)} {shape.dtype}, "
            f"got {layout.num_layers} of {list(views[0].shape)} {layout.dtype}; "
            "use the shape that the layout was detected with"
        )
    return views


def _flatten(caches: Caches) -> tuple[CacheForm, list[Tensor]]:
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


def _num_tensors(form: CacheForm, num_layers: int) -> int:
    return {CacheForm.CROSS_LAYER: 1, CacheForm.PER_LAYER: num_layers, CacheForm.KV_PAIR: 2 * num_layers}[form]


def _check_tensors(form: CacheForm, tensors: list[Tensor], shape: KVShape) -> None:
    """Refuse tensors that are unlike each other, of the wrong dtype or number, or that share memory."""
    count = _num_tensors(form, shape.num_layers)
    if len(tensors) != count:
        raise LayoutMismatch(
            f"detect_layout: wanted {count} {form.value} tensors for {shape.num_layers} layers, "
            f"got {len(tensors)}; pass every layer once, "
            "and a cross-layer tensor by itself instead of in a list"
        )
    if form is CacheForm.KV_PAIR and shape.planes is not Planes.KV_SPLIT:
        raise LayoutMismatch(
            f"detect_layout: wanted one tensor per layer for planes={Planes(shape.planes).value!r}, "
            "got (k, v) pairs; use KVShape(planes='kv')"
        )
    first = tensors[0]
    if first.dtype != torch_dtype(shape.dtype):
        raise LayoutMismatch(
            f"detect_layout: wanted {shape.dtype} as in KVShape, got {first.dtype}; "
            "name the caches' dtype in KVShape, or pass tensor.view(dtype) if they hold it under another name"
        )
    wanted = (form, tuple(first.shape), first.stride(), first.dtype, str(first.device))
    for index, tensor in enumerate(tensors):
        got = (form, tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
        if got != wanted:
            raise LayoutMismatch(
                f"detect_layout: wanted all tensors as the first, {_described(wanted)}, "
                f"got tensor {index} as {_described(got)}; "
                "layers of unlike shape need a namespace of their own"
            )
    if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        raise LayoutMismatch(
            f"detect_layout: wanted {len(tensors)} tensors in memory of their own, got some at one address; "
            "pass every layer once, without layers that share another layer's KV"
        )
    extent = 1
    for stride, size in sorted((s, n) for n, s in zip(first.shape, first.stride(), strict=True) if n > 1):
        if stride < extent:
            raise LayoutMismatch(
                f"detect_layout: wanted strides that do not overlap, "
                f"got {first.stride()} for {list(first.shape)}; "
                "pass the cache itself, not an expanded or unfolded view"
            )
        extent += stride * (size - 1)


def _sizes(form: CacheForm, shape: KVShape) -> tuple[dict[str, int], str]:
    """Return the size of every axis of a form except B, and the axes that may be left out."""
    sizes = {"T": shape.block_size, "H": shape.num_kv_heads, "D": shape.row_dim}
    optional = "H" if shape.planes is Planes.SINGLE and shape.num_kv_heads == 1 else ""
    if form is not CacheForm.KV_PAIR:
        sizes["P"] = shape.num_planes
        optional += "P" if shape.num_planes == 1 else ""
    if form is CacheForm.CROSS_LAYER:
        sizes["L"] = shape.num_layers
        optional += "L" if shape.num_layers == 1 else ""
    return sizes, optional


def _fits(axes: str, form: CacheForm, shape: KVShape, dims: tuple[int, ...]) -> bool:
    """Tell whether axes name dims of these sizes, each required axis once and D last."""
    sizes, optional = _sizes(form, shape)
    required = ({"B"} | sizes.keys()) - set(optional)
    return (
        len(set(axes)) == len(axes) == len(dims)
        and axes.endswith("D")
        and required <= set(axes) <= required | set(optional)
        and all(size >= 1 if axis == "B" else size == sizes[axis] for axis, size in zip(axes, dims, strict=True))
    )


def _orders(form: CacheForm, shape: KVShape) -> Iterator[str]:
    """Yield the plausible orders of axes; stranger ones have to be named by the caller."""
    sizes, optional = _sizes(form, shape)
    required = sorted(({"B"} | sizes.keys()) - set(optional) - {"D"})
    for count in range(len(optional) + 1):
        for chosen in combinations(optional, count):
            for order in permutations([*required, *chosen]):
                if _plausible("".join(order)):
                    yield "".join(order) + "D"


def _plausible(axes: str) -> bool:
    """Keep orders that engines use: blocks before tokens and heads, layers and planes before tokens."""
    at = {axis: index for index, axis in enumerate(axes)}
    early = all(at[axis] < at["T"] for axis in "BLP" if axis in at) and at["B"] < at.get("H", at["T"])
    if at.get("P", -1) > at.get("H", len(axes)):
        # Heads come before planes only where they come before layers too, as in the stored order.
        return early and at["H"] < at.get("L", -1)
    return early


def _candidates(form: CacheForm, shape: KVShape, dims: tuple[int, ...]) -> list[str]:
    """Return every plausible reading; readings that differ only in dims of size 1 are one."""
    found: dict[tuple[tuple[str, int], ...], str] = {}
    for axes in _orders(form, shape):
        if _fits(axes, form, shape, dims):
            key = tuple((axis, at) for at, axis in enumerate(axes) if dims[at] > 1)
            found.setdefault(key, axes)
    return sorted(found.values())


def _no_match(axes: str | None, form: CacheForm, shape: KVShape, dims: tuple[int, ...]) -> LayoutMismatch:
    """Say why nothing fits, naming the block size if that is all that differs."""
    for tokens in dims[:-1]:
        if tokens == shape.block_size or (tokens % shape.block_size and shape.block_size % max(tokens, 1)):
            continue
        other = KVShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            block_size=tokens,
            planes=shape.planes,
        )
        if _fits(axes, form, other, dims) if axes is not None else _candidates(form, other, dims):
            return LayoutMismatch(
                f"detect_layout: wanted blocks of {shape.block_size} tokens, "
                f"got blocks of {tokens} in {list(dims)}; "
                "re-layout between block sizes is not supported by this version, "
                f"use KVShape(block_size={tokens})"
            )
    sizes, optional = _sizes(form, shape)
    wanted = ", ".join(f"{axis}={size}" for axis, size in sorted(sizes.items()))
    hint = "; the last dim is 2 * head_dim, use KVShape(planes='packed')" if dims[-1:] == (2 * shape.row_dim,) else ""
    return LayoutMismatch(
        f"detect_layout: wanted {form.value} tensors with B free, {wanted}, D last"
        f"{' and ' + '/'.join(optional) + ' optional' if optional else ''}, got {list(dims)}"
        f"{'' if axes is None else f' with axes={axes!r}'}; axes are for example {_EXAMPLES[form]}{hint}"
    )


def _described(layout: tuple[CacheForm, tuple[int, ...], tuple[int, ...], torch.dtype, str]) -> str:
    form, dims, strides, dtype, device = layout
    return f"{form.value} {list(dims)} {dtype} on {device} with strides {list(strides)}"

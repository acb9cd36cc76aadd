"""Find how an engine's tensors hold KV, from their shapes and strides. Letters of dims: the legend in layout.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, permutations
from typing import TypeAlias

import torch
from torch import Tensor

from kvstore.blocks.part import WHOLE, Part
from kvstore.blocks.shape import KVShape, Planes, SideTensor
from kvstore.bounds import clip
from kvstore.engine.layout import CacheForm, Caches, EngineLayout, described, flatten, num_tensors
from kvstore.errors import LayoutMismatch
from kvstore.kernels.plan import overlaps_at, overlaps_itself
from kvstore.kernels.reference import torch_dtype

_Sizes: TypeAlias = tuple[dict[str, int], str]
"""Sizes of axes, and the axes that may be left out. B and T may be of any size where they have none."""

_EXAMPLES = {
    CacheForm.PER_LAYER: "BPTHD, PBTHD, BPHTD, BHTD (packed), BTD (MLA)",
    CacheForm.KV_PAIR: "BTHD, BHTD",
    CacheForm.CROSS_LAYER: "BHLPTD (the stored order), BLPTHD, LBPTHD, LPBTHD, BHPLTD, LBTD (MLA)",
}


def detect_layout(caches: Caches, shape: KVShape, axes: str | None = None, part: Part = WHOLE) -> EngineLayout:
    """Find the only layout in which the tensors can hold their part of the KV of `shape`.

    The engine's block size comes from the tensors: the stored one if it fits, else any multiple or divisor of it.

    Args:
        caches: a list or dict of per-layer tensors, a list or dict of (k, v) pairs, or one
            cross-layer tensor; any strides that do not overlap. Dicts are read in insertion order.
        shape: the stored block of all layers and heads.
        axes: dims of each tensor, for example "BPTHD"; needed only when sizes are ambiguous.
        part: the part that the tensors hold.

    Raises:
        LayoutMismatch: no layout or several fit, the tensors differ from each other or share memory, neither block size
            divides the other, or blocks of this shape have no such part.
    """
    held = part.held(shape)
    form, tensors = flatten(caches)
    _check_tensors(form, tensors, held)
    dims, sizes = tuple(tensors[0].shape), _sizes(form, held)
    readings = _readings(axes, sizes, dims)
    stored = shape.block_size
    fitting = [found for found in readings if not (size := _tokens(found, dims)) % stored or not stored % size]
    # Another block size is considered only where no reading has the stored one.
    found = [reading for reading in fitting if _tokens(reading, dims) == stored] or fitting
    if not found:
        raise _no_match(axes, form, held, dims, readings)
    return _layout(form, tensors[0], found, held, part)


def detect_side(
    caches: Caches, side: SideTensor, shape: KVShape, layout: EngineLayout, axes: str | None = None
) -> EngineLayout:
    """Find the only layout in which tensors can be a side tensor of caches with a known layout.

    Args:
        caches: a list or dict of per-layer tensors, or one cross-layer tensor; rows of one element need no dim D.
        side: which side tensor of the shape they are.
        shape: the stored block of all layers and heads.
        layout: layout of their caches, which have the same numbers of blocks and tokens.
        axes: dims of each tensor, for example "BTH"; needed only when sizes are ambiguous.

    Raises:
        LayoutMismatch: as for `detect_layout`, or they have other blocks, or are on another device.
    """
    held = layout.part.held(shape).of_side(side)
    form, tensors = flatten(caches)
    if form is CacheForm.KV_PAIR:
        raise LayoutMismatch(
            "wanted one tensor per layer, got pairs; give what belongs to K and to V names of their own"
        )
    if str(tensors[0].device) != layout.device:
        raise LayoutMismatch(
            f"wanted tensors on {layout.device} as the caches, got {tensors[0].device}; move them there"
        )
    _check_tensors(form, tensors, held)
    dims, (sizes, optional) = tuple(tensors[0].shape), _sizes(form, held)
    sizes = {axis: size for axis, size in sizes.items() if axis != "P"}
    sizes |= {"B": layout.num_blocks, "T": layout.block_size if side.per_token else 1}
    optional = optional.replace("P", "") + ("D" if side.dim == 1 else "") + ("" if side.per_token else "T")
    found = _readings(axes, (sizes, optional), dims)
    if not found:
        wanted = ", ".join(f"{axis}={size}" for axis, size in sorted(sizes.items()))
        raise LayoutMismatch(
            f"wanted {form.value} tensors with {wanted}{', ' + '/'.join(optional) + ' optional' if optional else ''}, "
            f"got {list(dims)}{'' if axes is None else f' with axes={axes!r}'}; slice or view the engine's tensor so "
            "that it holds this alone, which copies nothing"
        )
    return _layout(form, tensors[0], found, held, layout.part)


def _layout(form: CacheForm, first: Tensor, found: list[str], held: KVShape, part: Part) -> EngineLayout:
    """Return the layout of the only reading."""
    dims, width = tuple(first.shape), first.element_size()
    if len(found) > 1:
        raise LayoutMismatch(
            f"detect_layout: wanted one reading of {form.value} tensors {list(dims)}, got {len(found)}: "
            f"{', '.join(found)}; sizes alone cannot tell them apart, pass axes= with the right one, or side_axes="
        )
    return EngineLayout(
        form=form,
        axes=found[0],
        num_layers=held.num_layers,
        num_blocks=dims[found[0].index("B")],
        block_size=_tokens(found[0], dims),
        tensor_shape=dims,
        stride_bytes=tuple(stride * width for stride in first.stride()),
        dtype=held.dtype,
        device=str(first.device),
        part=part,
    )


def _check_tensors(form: CacheForm, tensors: list[Tensor], shape: KVShape) -> None:
    """Refuse tensors that differ from each other, share memory, or have the wrong dtype or number."""
    count = num_tensors(form, shape.num_layers)
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
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:  # It may have no strides to compare.
            raise _not_dense(index, tensor)
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
                f"detect_layout: wanted all tensors as the first, {described(wanted)}, "
                f"got tensor {index} as {described(got)}; "
                "layers of unlike shape need a namespace of their own"
            )
    if first.is_meta or not first.numel():
        raise _not_dense(0, first)
    if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        raise LayoutMismatch(
            f"detect_layout: wanted {len(tensors)} tensors in memory of their own, got some at one address; "
            "pass every layer once, without layers that share another layer's KV"
        )
    if overlaps_itself(first):
        raise LayoutMismatch(
            f"detect_layout: wanted strides that do not overlap, "
            f"got {first.stride()} for {list(first.shape)}; "
            "pass the cache itself, not an expanded or unfolded view"
        )
    _check_apart(tensors)


def _check_apart(tensors: list[Tensor]) -> None:
    """Refuse tensors of one shape and strides that share some of their memory."""
    first, begins = tensors[0], sorted(tensor.data_ptr() for tensor in tensors)
    last = sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
    apart = set[int]()  # Slices of one tensor have few distances, and many pairs.
    for at, begin in enumerate(begins):
        for other in begins[at + 1 :]:
            if other - begin >= (last + 1) * first.element_size():
                break
            if other - begin not in apart and overlaps_at(first, other - begin):
                raise LayoutMismatch(
                    f"detect_layout: wanted {len(tensors)} tensors in memory of their own, got two that begin "
                    f"{other - begin} bytes apart and share some; pass each layer's own part of a larger tensor"
                )
            apart.add(other - begin)


def _not_dense(index: int, tensor: Tensor) -> LayoutMismatch:
    return LayoutMismatch(
        f"detect_layout: wanted dense tensors with memory, got tensor {index} of {list(tensor.shape)}, "
        f"{tensor.layout} on {tensor.device}; pass the engine's caches as they are allocated"
    )


def _sizes(form: CacheForm, shape: KVShape) -> _Sizes:
    """Return the sizes of a form's axes except B and T, and the axes that may be left out."""
    sizes = {"H": shape.num_kv_heads, "D": shape.row_dim}
    optional = "H" if shape.planes is Planes.SINGLE and shape.num_kv_heads == 1 else ""
    if form is not CacheForm.KV_PAIR:
        sizes["P"] = shape.num_planes
        optional += "P" if shape.num_planes == 1 else ""
    if form is CacheForm.CROSS_LAYER:
        sizes["L"] = shape.num_layers
        optional += "L" if shape.num_layers == 1 else ""
    return sizes, optional


def _fits(axes: str, sizes: _Sizes, dims: tuple[int, ...]) -> bool:
    """Return whether axes name dims of these sizes, each required axis once and D last. Others may have any size."""
    known, optional = sizes
    required = ({"B", "T"} | known.keys()) - set(optional)
    return (
        len(set(axes)) == len(axes) == len(dims)
        and axes.find("D") in (-1, len(axes) - 1)
        and required <= set(axes) <= required | set(optional)
        and all(size >= 1 and size == known.get(axis, size) for axis, size in zip(axes, dims, strict=True))
    )


def _orders(sizes: _Sizes) -> Iterator[str]:
    """Yield the plausible orders of axes; the caller must name any other."""
    known, optional = sizes
    required = sorted(({"B", "T"} | known.keys()) - set(optional))
    for count in range(len(optional) + 1):
        for chosen in combinations(optional, count):
            held = {*required, *chosen}
            for order in permutations(sorted(held - {"D"})):
                if _plausible("".join(order)):
                    yield "".join(order) + ("D" if "D" in held else "")


def _plausible(axes: str) -> bool:
    """Keep orders that engines use: blocks before tokens and heads, layers and planes before tokens."""
    at = {axis: index for index, axis in enumerate(axes)}
    tokens = at.get("T", len(axes))
    early = all(at[axis] < tokens for axis in "BLP" if axis in at) and at["B"] < at.get("H", tokens)
    if at.get("P", -1) > at.get("H", len(axes)):
        # Heads come before planes only where they come before layers too, as in the stored order.
        return early and at["H"] < at.get("L", -1)
    return early


def _readings(axes: str | None, sizes: _Sizes, dims: tuple[int, ...]) -> list[str]:
    """Return `axes` if they fit; without `axes`, all plausible readings. Ignores order of dims of size 1."""
    if axes is not None:
        if not isinstance(axes, str):
            raise LayoutMismatch(f"axes: wanted the letters of the dims as text, such as 'BPTHD', got {clip(axes)}")
        return [axes] if _fits(axes, sizes, dims) else []
    found: dict[tuple[tuple[str, int], ...], str] = {}
    for axes in _orders(sizes):
        if _fits(axes, sizes, dims):
            key = tuple((axis, at) for at, axis in enumerate(axes) if dims[at] > 1)
            found.setdefault(key, axes)
    return sorted(found.values())


def _tokens(axes: str, dims: tuple[int, ...]) -> int:
    return dims[axes.index("T")] if "T" in axes else 1


def _no_match(
    axes: str | None, form: CacheForm, shape: KVShape, dims: tuple[int, ...], readings: list[str]
) -> LayoutMismatch:
    """Return the error for no reading, naming the block size if only that does not fit."""
    if readings:
        tokens, stored = _tokens(readings[0], dims), shape.block_size
        return LayoutMismatch(
            f"detect_layout: wanted engine blocks of a multiple or a divisor of the stored {stored} tokens, "
            f"got blocks of {tokens} in {list(dims)} as {' or '.join(readings)}; "
            f"store blocks of KVShape(block_size={math.gcd(tokens, stored)}) to share them between both"
        )
    sizes, optional = _sizes(form, shape)
    wanted = ", ".join(f"{axis}={size}" for axis, size in sorted(sizes.items()))
    hint = "; the last dim is 2 * head_dim, use KVShape(planes='packed')" if dims[-1:] == (2 * shape.row_dim,) else ""
    return LayoutMismatch(
        f"detect_layout: wanted {form.value} tensors with B free, T={shape.block_size} (a multiple or a divisor of "
        f"it does), {wanted}, D last{' and ' + '/'.join(optional) + ' optional' if optional else ''}, "
        f"got {list(dims)}{'' if axes is None else f' with axes={axes!r}'}; "
        f"axes are for example {_EXAMPLES[form]}{hint}"
    )

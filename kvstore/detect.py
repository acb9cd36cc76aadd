"""Find how an engine's tensors hold KV, from their shapes and strides. Letters of dims: the legend in layout.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, permutations

from torch import Tensor

from kvstore.errors import LayoutMismatch
from kvstore.kernels.reference import torch_dtype
from kvstore.layout import CacheForm, Caches, EngineLayout, described, flatten, num_tensors
from kvstore.part import WHOLE, Part
from kvstore.shape import KVShape, Planes

_EXAMPLES = {
    CacheForm.PER_LAYER: "BPTHD, PBTHD, BPHTD, BHTD (packed), BTD (MLA)",
    CacheForm.KV_PAIR: "BTHD, BHTD",
    CacheForm.CROSS_LAYER: "BHLPTD (the stored order), BLPTHD, LBPTHD, LPBTHD, BHPLTD, LBTD (MLA)",
}


def detect_layout(caches: Caches, shape: KVShape, axes: str | None = None, part: Part = WHOLE) -> EngineLayout:
    """Find the one way in which the tensors can hold their part of the KV of `shape`.

    The engine's block size is what the tensors say: the stored one where they can be read so, else any multiple
    or divisor of it.

    Args:
        caches: a list or dict of per-layer tensors, a list or dict of (k, v) pairs, or one
            cross-layer tensor; any strides that do not overlap. Dicts are read in insertion order.
        shape: the stored block of all layers and heads.
        axes: dims of each tensor, for example "BPTHD"; needed only when sizes leave a choice.
        part: the part that the tensors hold.

    Raises:
        LayoutMismatch: no way or several ways fit, the tensors differ from each other or share memory,
            neither block size divides the other, or blocks of this shape have no such part.
    """
    held = part.held(shape)
    form, tensors = flatten(caches)
    first = tensors[0]
    _check_tensors(form, tensors, held)
    dims = tuple(first.shape)
    readings = _candidates(form, held, dims) if axes is None else [axes] if _fits(axes, form, held, dims) else []
    stored = shape.block_size
    fitting = [found for found in readings if not (size := _tokens(found, dims)) % stored or not stored % size]
    # Another block size is considered only where no reading has the stored one.
    found = [reading for reading in fitting if _tokens(reading, dims) == stored] or fitting
    if not found:
        raise _no_match(axes, form, held, dims, readings)
    if len(found) > 1:
        raise LayoutMismatch(
            f"detect_layout: wanted one reading of {form.value} tensors {list(dims)}, got {len(found)}: "
            f"{', '.join(found)}; sizes alone cannot tell them apart, pass axes= with the right one"
        )
    width = first.element_size()
    return EngineLayout(
        form=form,
        axes=found[0],
        num_layers=held.num_layers,
        num_blocks=dims[found[0].index("B")],
        block_size=_tokens(found[0], dims),
        tensor_shape=dims,
        stride_bytes=tuple(stride * width for stride in first.stride()),
        dtype=shape.dtype,
        device=str(first.device),
        part=part,
    )


def _check_tensors(form: CacheForm, tensors: list[Tensor], shape: KVShape) -> None:
    """Refuse tensors that are unlike each other, of the wrong dtype or number, or that share memory."""
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
    """Return the size of every axis of a form except B and T, and the axes that may be left out."""
    sizes = {"H": shape.num_kv_heads, "D": shape.row_dim}
    optional = "H" if shape.planes is Planes.SINGLE and shape.num_kv_heads == 1 else ""
    if form is not CacheForm.KV_PAIR:
        sizes["P"] = shape.num_planes
        optional += "P" if shape.num_planes == 1 else ""
    if form is CacheForm.CROSS_LAYER:
        sizes["L"] = shape.num_layers
        optional += "L" if shape.num_layers == 1 else ""
    return sizes, optional


def _fits(axes: str, form: CacheForm, shape: KVShape, dims: tuple[int, ...]) -> bool:
    """Tell whether axes name dims of these sizes, each required axis once and D last; any block size does."""
    sizes, optional = _sizes(form, shape)
    required = ({"B", "T"} | sizes.keys()) - set(optional)
    return (
        len(set(axes)) == len(axes) == len(dims)
        and axes.endswith("D")
        and required <= set(axes) <= required | set(optional)
        and all(size >= 1 if axis in "BT" else size == sizes[axis] for axis, size in zip(axes, dims, strict=True))
    )


def _orders(form: CacheForm, shape: KVShape) -> Iterator[str]:
    """Yield the plausible orders of axes; stranger ones have to be named by the caller."""
    sizes, optional = _sizes(form, shape)
    required = sorted(({"B", "T"} | sizes.keys()) - set(optional) - {"D"})
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


def _tokens(axes: str, dims: tuple[int, ...]) -> int:
    return dims[axes.index("T")]


def _no_match(
    axes: str | None, form: CacheForm, shape: KVShape, dims: tuple[int, ...], readings: list[str]
) -> LayoutMismatch:
    """Say why nothing fits, naming the block size if that is all that does not."""
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

"""The side tensors of an engine's cache, such as scales: detect and check them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kvstore.blocks.shape import KVShape
from kvstore.engine.detect import detect_side
from kvstore.engine.layout import Caches, EngineLayout, canonical_views, flatten
from kvstore.errors import InvalidRequest, LayoutMismatch


def detect_sides(
    caches: Caches,
    side_caches: Mapping[str, Caches] | None,
    shape: KVShape,
    layout: EngineLayout,
    axes: Mapping[str, str] | None = None,
) -> tuple[EngineLayout, list[Caches]]:
    """Find how an engine holds the side tensors of a shape.

    Args:
        caches: the engine's.
        side_caches: by name, every side tensor of the shape and no others: one tensor per layer in the order of the
            caches, or one for all layers.
        shape: the stored block of all layers and heads.
        layout: of the caches.
        axes: by name, dims of a side tensor whose sizes are ambiguous.

    Returns:
        The layout, with the side tensors' layouts in it; and the tensors, in the order of the shape's sides.

    Raises:
        LayoutMismatch: one is missing, unknown, or not as the shape and the caches say.
    """
    for name, value in (("side_caches", side_caches), ("side_axes", axes)):
        if value is not None and not isinstance(value, Mapping):
            raise LayoutMismatch(f"{name}: wanted a dict by name, got {type(value).__name__}; name each side tensor")
    given, named = dict(side_caches or {}), dict(axes or {})
    wanted = [side.name for side in shape.sides]
    if sorted(given, key=str) != wanted:
        raise LayoutMismatch(
            f"side_caches: wanted {wanted} as in KVShape.sides, got {list(given)}; pass every side tensor by its name"
        )
    if not named.keys() <= given.keys():
        raise LayoutMismatch(f"side_axes: wanted names of {wanted}, got {list(named)}; name side tensors only")
    whole = [side.name for side in shape.sides if not side.per_token]
    if whole and layout.block_size != shape.block_size:
        raise LayoutMismatch(
            f"side_caches: wanted engine blocks of the stored {shape.block_size} tokens, because {whole} have one row "
            f"for all tokens of a block, got blocks of {layout.block_size}; use KVShape(block_size={layout.block_size})"
        )
    found = []
    for side in shape.sides:
        try:
            tensors = given[side.name]
            if isinstance(caches, Mapping) and isinstance(tensors, Mapping):
                names, others = list(caches), list(tensors)
                if names != others and sorted(names) == sorted(others):  # Scales would go to the wrong layers.
                    raise LayoutMismatch(
                        f"wanted layers in the order of the caches, {names}, got {others}; sort both dicts alike"
                    )
            found.append(detect_side(tensors, side, shape, layout, named.get(side.name)))
        except LayoutMismatch as error:
            raise LayoutMismatch(f"side_caches[{side.name!r}]: {error}") from error
    ordered = [given[name] for name in wanted]
    begins = [tensor.data_ptr() for held in (caches, *ordered) for tensor in flatten(held)[1]]
    if len(set(begins)) != len(begins):
        raise LayoutMismatch(
            f"side_caches: wanted tensors in memory of their own for {wanted}, got some at one address; pass every "
            "tensor once"
        )
    return replace(layout, sides=tuple(found)), ordered


def side_views(sides: Sequence[Caches], layout: EngineLayout, shape: KVShape) -> list[list[Tensor]]:
    """View every side tensor in the stored order of dims, as `canonical_views` does the caches.

    Raises:
        LayoutMismatch: as for `canonical_views`.
    """
    return [
        canonical_views(given, found, shape.of_side(side))
        for given, found, side in zip(sides, layout.sides, shape.sides, strict=True)
    ]


def check_skip(shape: KVShape, skip_tokens: int, num_blocks: int) -> None:
    """Refuse to skip part of a block whose tokens share a side tensor's row.

    Raises:
        InvalidRequest: not a number of tokens, or more than the blocks have; or the skipped tokens end inside a block,
            and a side tensor has one row for a whole block.
    """
    if not isinstance(skip_tokens, int) or isinstance(skip_tokens, bool) or skip_tokens < 0:
        raise InvalidRequest(f"skip_prefix_tokens: wanted an integer of at least 0, got {skip_tokens!r}")
    if skip_tokens > num_blocks * shape.block_size:
        most = num_blocks * shape.block_size
        raise InvalidRequest(f"skip_prefix_tokens: wanted at most the {most} tokens of the blocks, got {skip_tokens}")
    whole = [side.name for side in shape.sides if not side.per_token]
    if whole and skip_tokens % shape.block_size:
        raise InvalidRequest(
            f"skip_prefix_tokens: wanted whole blocks of {shape.block_size} tokens, because {whole} have one row for "
            f"all tokens of a block, got {skip_tokens}; skip {skip_tokens // shape.block_size * shape.block_size}, or "
            "load behind that block"
        )

"""The side tensors of an engine's cache, such as its scales: which they are, and that they go with the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kvstore.detect import detect_side
from kvstore.errors import InvalidRequest, LayoutMismatch
from kvstore.layout import Caches, EngineLayout, canonical_views, flatten, same_layout
from kvstore.shape import KVShape


def detect_sides(
    caches: Caches,
    side_caches: Mapping[str, Caches] | None,
    shape: KVShape,
    layout: EngineLayout,
    axes: Mapping[str, str] | None = None,
) -> tuple[EngineLayout, list[Caches]]:
    """Find how an engine holds the side tensors of a shape.

    Args:
        caches: of the engine.
        side_caches: by name, every side tensor of the shape and no others: per layer a tensor, in the order of the
            caches, or one for all layers.
        shape: the stored block of all layers and heads.
        layout: of the caches.
        axes: by name, dims of a side tensor whose sizes leave a choice.

    Returns:
        The layout with those of the side tensors in it, and the tensors in the order of the shape's sides.

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
            _check_layers(caches, given[side.name])
            found.append(detect_side(given[side.name], side, shape, layout, named.get(side.name)))
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


def _check_layers(caches: Caches, side: Caches) -> None:
    """Refuse dicts that name the same layers in another order: scales would go to the wrong layers."""
    if isinstance(caches, Mapping) and isinstance(side, Mapping):
        names, others = list(caches), list(side)
        if names != others and sorted(names) == sorted(others):
            raise LayoutMismatch(
                f"wanted layers in the order of the caches, {names}, got {others}; sort both dicts alike"
            )


class Registered:
    """The tensors that an engine registered, and whether they are still arranged as they were.

    Args:
        caches: of the engine.
        sides: the side tensors beside the caches, in the order of the shape's.
        layout: of both.
    """

    def __init__(self, caches: Caches, sides: Sequence[Caches], layout: EngineLayout) -> None:
        self.caches, self.sides, self.layout = caches, sides, layout
        #: Most engines have a list of tensors: it need not be taken apart again.
        self._is_list = isinstance(caches, list) and all(isinstance(each, Tensor) for each in caches) and not sides
        self._as_they_were = [tensor.detach() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        if self._is_list and isinstance(self.caches, list):
            return self.caches
        return [tensor for given in (self.caches, *self.sides) for tensor in flatten(given)[1]]

    def check(self) -> None:
        """Check it; in every call of an engine, so the details are only looked at where something changed.

        Raises:
            LayoutMismatch: it is not so.
        """
        now, then = self._tensors(), self._as_they_were
        try:
            is_same = len(now) == len(then) and all(map(Tensor.is_set_to, now, then))
        except TypeError:  # Something else is in the list by now.
            is_same = False
        if not is_same:
            same_layouts(self.caches, self.sides, self.layout)


def same_layouts(caches: Caches, sides: Sequence[Caches], layout: EngineLayout) -> None:
    """Check that caches and side tensors are arranged as those that were registered.

    Raises:
        LayoutMismatch: something changed.
    """
    for given, found in zip((caches, *sides), (layout, *layout.sides), strict=True):
        same_layout(given, found)


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
    """Refuse to skip part of a block whose tokens share a row: it would be wrong for the tokens on one side of it.

    Raises:
        InvalidRequest: no number of tokens; or the skipped ones end inside a block of the job, and a side tensor is
            for whole blocks.
    """
    if not isinstance(skip_tokens, int) or skip_tokens < 0:
        raise InvalidRequest(f"skip_prefix_tokens: wanted an integer of at least 0, got {skip_tokens!r}")
    whole = [side.name for side in shape.sides if not side.per_token]
    if whole and skip_tokens % shape.block_size and skip_tokens < num_blocks * shape.block_size:
        raise InvalidRequest(
            f"skip_prefix_tokens: wanted whole blocks of {shape.block_size} tokens, because {whole} have one row for "
            f"all tokens of a block, got {skip_tokens}; skip {skip_tokens // shape.block_size * shape.block_size}, or "
            "load behind that block"
        )

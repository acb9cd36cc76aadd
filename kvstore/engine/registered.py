"""The cache that an engine registered, and whether its tensors still are those: arranged alike, in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvstore.blocks.shape import KVShape
from kvstore.engine.layout import Caches, EngineLayout, canonical_views, flatten, same_layout
from kvstore.engine.side_tensors import side_views
from kvstore.errors import LayoutMismatch
from kvstore.kernels.plan import CopyPlan, plan_copy


class Registered:
    """What was registered; copies go to and from the memory that these tensors had then, and to no other.

    That memory stays referenced for as long as this lives. It must not be changed in size or moved meanwhile, as
    `untyped_storage().resize_` and `share_memory_` do: torch then frees what copies may be using.

    Args:
        caches: of the engine.
        sides: the side tensors beside the caches, in the order of the shape's.
        layout: of both; None where only the memory matters.
    """

    def __init__(self, caches: Caches, sides: Sequence[Caches] = (), layout: EngineLayout | None = None) -> None:
        self.caches, self.sides, self._layout = caches, sides, layout
        #: Most engines have a list of tensors: it need not be taken apart again.
        self._is_list = isinstance(caches, list) and all(isinstance(each, Tensor) for each in caches) and not sides
        # Objects of their own: what is assigned to `data` of the engine's tensors does not reach them.
        self._as_they_were = [tensor.detach() for tensor in self._tensors()]
        self._addresses = [tensor.data_ptr() for tensor in self._as_they_were]

    def _tensors(self) -> list[Tensor]:
        if self._is_list and isinstance(self.caches, list):
            return self.caches
        return [tensor for given in (self.caches, *self.sides) for tensor in flatten(given)[1]]

    def check(self) -> None:
        """Refuse tensors that are others by now; on any thread.

        In every call of an engine and after every copy, so the details are only looked at where something changed.

        Raises:
            LayoutMismatch: a tensor was replaced, resized, restrided, or moved, by itself or by its `data`.
        """
        now, then = self._tensors(), self._as_they_were
        try:
            # A storage is the same object when its memory is another: so its address counts too.
            is_same = (
                len(now) == len(then)
                and all(map(Tensor.is_set_to, now, then))
                and list(map(Tensor.data_ptr, now)) == self._addresses
            )
        except (TypeError, RuntimeError):  # Something else is in the list by now, or a tensor without memory.
            is_same = False
        if is_same:
            return
        if self._layout is not None:
            for given, found in zip((self.caches, *self.sides), (self._layout, *self._layout.sides), strict=True):
                same_layout(given, found)
        raise LayoutMismatch(
            "wanted the tensors that were registered, got some in other memory, to and from which nothing is copied; "
            "call register_kv_caches(...) again whenever a tensor, or its data, is replaced"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredCache:
    """What an engine registered; made by `register_cache`, and the same for every copier of the cache.

    Args:
        caches: the tensors. Copies into the engine write the blocks that are named, and nothing else changes them.
        sides: the side tensors beside the caches, in the order of the shape's.
        layout: of both, from `detect_layout` and `detect_sides`.
        shape: of the stored block.
        plan: where rows of the engine's part and of slots lie.
        registered: whether the tensors are what they were.
    """

    caches: Caches
    sides: Sequence[Caches]
    layout: EngineLayout
    shape: KVShape
    plan: CopyPlan
    registered: Registered


def register_cache(
    caches: Caches, layout: EngineLayout, shape: KVShape, sides: Sequence[Caches] = ()
) -> RegisteredCache:
    """Note the tensors of an engine and plan their copies; arguments as for `RegisteredCache`.

    Raises:
        LayoutMismatch: the tensors are not as the layout says, or it is of another shape.
    """
    views = canonical_views(caches, layout, shape)
    layers, heads = layout.part.ranges(shape)
    plan = plan_copy(views, shape.stored_block, layers=layers, heads=heads, sides=side_views(sides, layout, shape))
    return RegisteredCache(caches, sides, layout, shape, plan, Registered(caches, sides, layout))

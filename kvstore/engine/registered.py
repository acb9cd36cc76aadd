"""The cache that an engine registered, and the check that its tensors did not change."""

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
    """The registered tensors; copies use only the memory that these had when they were registered.

    That memory stays referenced as long as this lives. It must not be resized or moved meanwhile, as by
    `untyped_storage().resize_` and `share_memory_`: torch then frees memory that copies may be using.

    Args:
        caches: the engine's.
        sides: the side tensors, in the order of the shape's.
        layout: of both; None where only the memory matters.
    """

    def __init__(self, caches: Caches, sides: Sequence[Caches] = (), layout: EngineLayout | None = None) -> None:
        self.caches, self.sides, self._layout = caches, sides, layout
        #: Fast path: most engines pass a list of tensors, which need not be flattened again.
        self._is_list = isinstance(caches, list) and all(isinstance(each, Tensor) for each in caches) and not sides
        # Separate objects: assigning to `data` of the engine's tensors does not change them.
        self._as_they_were = [tensor.detach() for tensor in self._tensors()]
        self._addresses = [tensor.data_ptr() for tensor in self._as_they_were]

    def _tensors(self) -> list[Tensor]:
        if self._is_list and isinstance(self.caches, list):
            return self.caches
        return [tensor for given in (self.caches, *self.sides) for tensor in flatten(given)[1]]

    def check(self) -> None:
        """Refuse to continue if the tensors changed; on any thread.

        Runs in every call of an engine and after every copy, so it looks at details only if something changed.

        Raises:
            LayoutMismatch: a tensor was replaced, resized, restrided, or moved, by itself or by its `data`.
        """
        now, then = self._tensors(), self._as_they_were
        try:
            # A storage object stays the same when its memory changes, so compare the address too.
            is_same = (
                len(now) == len(then)
                and all(map(Tensor.is_set_to, now, then))
                and list(map(Tensor.data_ptr, now)) == self._addresses
            )
        except (TypeError, RuntimeError):  # The list now holds something else, or a tensor without memory.
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
    """A registered cache; made by `register_cache`, and shared by all copiers of the cache.

    Args:
        caches: the tensors. Copies into the engine write the named blocks; nothing else here changes them.
        sides: the side tensors, in the order of the shape's.
        layout: of both, from `detect_layout` and `detect_sides`.
        shape: of the stored block.
        plan: where rows of the engine's part and of slots lie.
        registered: checks that the tensors are unchanged.
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

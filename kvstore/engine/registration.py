"""Make the copier for an engine's cache, chosen by the device of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvstore.blocks.shape import KVShape
from kvstore.engine.copier import EngineCopier
from kvstore.engine.cuda_copier import CopyPath, CudaCopier
from kvstore.engine.host_copier import HostCopier
from kvstore.engine.layout import EngineLayout
from kvstore.engine.registered import register_cache
from kvstore.errors import InvalidRequest, LayoutMismatch
from kvstore.memory.mapping import ArenaMapping


def make_copier(
    caches: Any,
    layout: EngineLayout,
    shape: KVShape,
    mapping: ArenaMapping,
    slot_bytes: int,
    num_slots: int,
    copy_path: CopyPath | str,
    sides: Sequence[Any] = (),
) -> EngineCopier:
    """Return a copier between caches and an arena's slots. For caches on a GPU, pin the arena.

    Args:
        caches: an engine's tensors.
        layout: of the caches and side tensors, from `detect_layout` and `detect_sides`.
        shape: of the stored block.
        mapping: of the arena; its slots start at the arena's beginning.
        slot_bytes: distance between two slots.
        num_slots: slots of the arena.
        copy_path: a `CopyPath`, or its value; only caches on a GPU have a choice.
        sides: the side tensors, in the order of the shape's.

    Raises:
        InvalidRequest: `copy_path` is not a `CopyPath`.
        LayoutMismatch: the caches are on a device of another kind, or not as the layout says.
        ConfigError: they are on a GPU, and CuPy or the driver is missing.
        KernelError: they are on a GPU that cannot run the copies, or has no memory for the buffers.
    """
    try:
        path = CopyPath(copy_path)
    except ValueError as error:
        wanted = ", ".join(repr(path.value) for path in CopyPath)
        raise InvalidRequest(f"copy_path: wanted one of {wanted}, got {copy_path!r}") from error
    device = torch.device(layout.device)
    if device.type == "cpu":
        return HostCopier(register_cache(caches, layout, shape, sides), mapping.arena, slot_bytes, num_slots)
    if device.type != "cuda":
        raise LayoutMismatch(
            f"wanted tensors on the CPU or on a CUDA device, got {layout.device}; this version copies no others"
        )
    assert device.index is not None, "a tensor's device has an index"
    pinning = mapping.pinned(slot_bytes, num_slots, device.index)
    cache = register_cache(caches, layout, shape, sides)
    return CudaCopier(cache, mapping.arena, slot_bytes, num_slots, pinning, path)

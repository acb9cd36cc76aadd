"""Launcher of host_copy.ll: one call copies many fragments of many blocks in host memory, without the interpreter.

A KV block of an engine is scattered over layers, planes and heads; its slot is one run. `fragments_of` lists,
once per layout, the runs that both sides share; a copy is then one call into compiled code for all blocks.
The idea of one table of fragments for all blocks is the one of the CUDA kernels; tests compare with the oracle.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from torch import Tensor

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """The runs of one block that are contiguous on both sides.

    Args:
        engine_addresses: int64 `[n]`, address of each run in engine block 0.
        slot_offsets: int64 `[n]`, ascending, distance of each run from the begin of its slot.
        lengths: int64 `[n]`, bytes of each run, at least 1.
        engine_order: int64 `[n]`, the runs by ascending engine address: a copy goes along its source, because
            reading with gaps costs more than streaming with gaps.
        block_stride_bytes: distance between two engine blocks.
        num_blocks: blocks of the engine's cache.
    """

    engine_addresses: I64
    slot_offsets: I64
    lengths: I64
    engine_order: I64
    block_stride_bytes: int
    num_blocks: int


def fragments_of(views: Sequence[Tensor], block_dims: Sequence[int], first_token: int = 0) -> Fragments:
    """List the runs of a block.

    Args:
        views: CPU tensors, per layer one `[B, H, P, T, D]`, or per layer and plane one `[B, H, 1, T, D]` with
            the planes of a layer adjacent; all with the same strides. The caller keeps them alive.
        block_dims: sizes [G, H, L, P, T, D] of a slot, contiguous in this order.
        first_token: tokens below it are left out; in [0, T].

    Raises:
        ValueError: shapes, strides, devices or first_token do not fit.
    """
    groups, heads, layers, planes, tokens, dim = block_dims
    first, per_layer = views[0], len(views) // (groups * layers)
    held = planes // per_layer if per_layer else 0
    wanted = (first.shape[0], heads, held, tokens, dim)
    if len(views) != groups * layers * per_layer or per_layer not in (1, planes) or not 0 <= first_token <= tokens:
        raise ValueError(
            f"fragments_of: wanted {groups * layers} views, or as many times {planes}, and first_token in "
            f"[0, {tokens}], got {len(views)} views and first_token={first_token}"
        )
    for view in views:
        if tuple(view.shape) != wanted or view.stride() != first.stride() or view.device.type != "cpu":
            raise ValueError(
                f"fragments_of: wanted CPU views {list(wanted)} with strides {first.stride()}, "
                f"got {list(view.shape)} with {view.stride()} on {view.device}"
            )
    # Addresses of all rows on both sides in the order of the slot: a row is one token's dim, or one element of
    # it where the engine keeps the elements apart.
    width = first.element_size()
    num_rows, row_bytes = (1, dim * width) if dim == 1 or first.stride(4) == 1 else (dim, width)
    starts = np.array([view.data_ptr() for view in views], dtype=np.int64)
    starts = starts.reshape(groups, 1, layers, per_layer, 1, 1, 1)
    head, plane, token, row = (
        np.arange(size, dtype=np.int64) * stride * width
        for size, stride in zip((heads, held, tokens, num_rows), first.stride()[1:], strict=True)
    )
    inside = head[:, None, None, None] + plane[:, None, None] + token[:, None] + row
    rows = (starts + inside[None, :, None, None]).reshape(-1, tokens, num_rows)
    places = np.arange(0, rows.size * row_bytes, row_bytes, dtype=np.int64).reshape(rows.shape)
    engine, slot = rows[:, first_token:].ravel(), places[:, first_token:].ravel()
    if not len(engine):
        return Fragments(engine, slot, engine, engine, first.stride(0) * width, first.shape[0])
    breaks = np.flatnonzero((np.diff(engine) != row_bytes) | (np.diff(slot) != row_bytes)) + 1
    begins = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((begins, [len(engine)]))) * row_bytes
    engine, slot = engine[begins], slot[begins]
    return Fragments(engine, slot, lengths, np.argsort(engine), first.stride(0) * width, first.shape[0])


def pack(fragments: Fragments, block_ids: I64, slots: Tensor, slot_ids: I64) -> None:
    """Copy engine blocks into slots: block_ids[i] goes to slot slot_ids[i].

    Args:
        fragments: of the engine's layout; its tensors are only read.
        block_ids: int64 `[n]`; a pair with a negative id touches nothing.
        slots: uint8 `[S, slot_bytes]` on the CPU, contiguous, written.
        slot_ids: int64 `[n]`, none of the used ones twice.

    Raises:
        ValueError: ids or the slots' form do not fit; nothing was written.
    """
    order = fragments.engine_order
    blocks, ids = _pairs(block_ids, fragments.num_blocks, slot_ids, _check_slots(fragments, slots))
    _launch(
        slots.data_ptr() + ids * slots.stride(0), blocks * fragments.block_stride_bytes,
        fragments.slot_offsets[order], fragments.engine_addresses[order], fragments.lengths[order],
    )  # fmt: skip


def unpack(fragments: Fragments, slots: Tensor, slot_ids: I64, block_ids: I64) -> None:
    """Copy slots into engine blocks: slot slot_ids[i] goes to block_ids[i].

    Args:
        fragments: of the engine's layout; its tensors are written, in named blocks only.
        slots: uint8 `[S, slot_bytes]` on the CPU, contiguous. Only read.
        slot_ids: int64 `[n]`; a pair with a negative id touches nothing.
        block_ids: int64 `[n]`, none of the used ones twice.

    Raises:
        ValueError: ids or the slots' form do not fit; nothing was written.
    """
    ids, blocks = _pairs(slot_ids, _check_slots(fragments, slots), block_ids, fragments.num_blocks)
    _launch(
        blocks * fragments.block_stride_bytes, slots.data_ptr() + ids * slots.stride(0),
        fragments.engine_addresses, fragments.slot_offsets, fragments.lengths,
    )  # fmt: skip


def _check_slots(fragments: Fragments, slots: Tensor) -> int:
    """Return how many slots there are."""
    wanted = int(fragments.slot_offsets[-1] + fragments.lengths[-1]) if len(fragments.lengths) else 0
    if slots.dim() != 2 or not slots.is_contiguous() or slots.element_size() != 1 or slots.device.type != "cpu":
        raise ValueError(
            f"wanted slots as contiguous uint8 [slots, bytes] on the CPU, got {slots.dtype} {list(slots.shape)} "
            f"with strides {slots.stride()} on {slots.device}"
        )
    if slots.shape[1] < wanted:
        raise ValueError(f"wanted slots of at least {wanted} bytes, got {slots.shape[1]}")
    return int(slots.shape[0])


def _pairs(source_ids: I64, num_sources: int, target_ids: I64, num_targets: int) -> tuple[I64, I64]:
    """Check the ids, and return the pairs in which neither is negative."""
    for name, ids in (("source", source_ids), ("target", target_ids)):
        if ids.dtype != np.int64 or ids.ndim != 1 or len(ids) != len(source_ids):
            raise ValueError(
                f"wanted two flat int64 id lists of one length, got {name} ids {ids.dtype} {ids.shape} beside "
                f"{len(source_ids)} sources"
            )
    if not len(source_ids):
        return source_ids, target_ids
    if int(source_ids.min()) < 0 or int(target_ids.min()) < 0:
        used = (source_ids >= 0) & (target_ids >= 0)
        source_ids, target_ids = source_ids[used], target_ids[used]
        if not len(source_ids):
            return source_ids, target_ids
    if int(source_ids.max()) >= num_sources or int(target_ids.max()) >= num_targets:
        raise ValueError(
            f"wanted source ids below {num_sources} and target ids below {num_targets}, "
            f"got up to {int(source_ids.max())} and {int(target_ids.max())}"
        )
    seen = np.bincount(target_ids, minlength=1)
    if int(seen.max()) > 1:
        raise ValueError(f"wanted every target id at most once, got {int(seen.argmax())} {int(seen.max())} times")
    return source_ids, target_ids


def _launch(targets: I64, sources: I64, target_offsets: I64, source_offsets: I64, lengths: I64) -> None:
    compiled()(
        targets.ctypes.data, sources.ctypes.data, len(targets),
        target_offsets.ctypes.data, source_offsets.ctypes.data, lengths.ctypes.data, len(lengths),
    )  # fmt: skip


@functools.cache
def compiled() -> Callable[..., None]:
    """Compile host_copy.ll for this machine's processor; takes a few tenths of a second, once in a process."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(Path(__file__).with_suffix(".ll").read_text())
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        opt=3, cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten()
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    signature = ctypes.CFUNCTYPE(
        None, *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), *(ctypes.c_void_p,) * 3, ctypes.c_int64
    )
    function = signature(engine.get_function_address("copy_fragments"))
    # The engine owns the code: it has to live as long as whoever may call it.
    function.engine = engine  # type: ignore[attr-defined]
    return function

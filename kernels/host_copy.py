"""Launcher of host_copy.ll: one call copies many fragments of many blocks in host memory, without the interpreter.

An engine's KV block is scattered over layers, planes and heads; its slot is one run. For a run of tokens within a
block, `fragments_of` lists once the bytes that are contiguous on both sides. A copy is then one call into compiled code
for all blocks. The CUDA kernels use one table for all blocks in the same way; tests compare with the oracle.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
from torch import Tensor

from kvstore.kernels.merging import I64, merge_runs
from kvstore.kernels.plan import CopyPlan, Section

#: A thread takes about as long to start as to copy a tenth of this.
_LEAST_BYTES_PER_THREAD = 2 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """The runs of one tensor of a block that are contiguous on both sides.

    Args:
        engine_addresses: int64 `[n]`, address of each run in engine block 0.
        slot_offsets: int64 `[n]`, ascending, distance of each run from the beginning of its slot.
        lengths: int64 `[n]`, bytes of each run, at least 1.
        engine_order: int64 `[n]`, the runs by ascending engine address: a copy follows its source, because reading with
            gaps costs more than writing with gaps.
        block_stride_bytes: distance between two engine blocks.
        num_blocks: blocks of the engine's cache.
    """

    engine_addresses: I64
    slot_offsets: I64
    lengths: I64
    engine_order: I64
    block_stride_bytes: int
    num_blocks: int


def fragments_of(
    plan: CopyPlan, engine_token: int = 0, slot_token: int = 0, num_tokens: int | None = None
) -> tuple[Fragments, ...]:
    """List the runs of some adjacent tokens of a block, in tables for `pack` and `unpack`.

    Args:
        plan: of the engine's cache; on the CPU. The caller keeps it alive.
        engine_token: where the tokens begin in an engine block.
        slot_token: where they begin in a stored block.
        num_tokens: number of tokens; default: the smaller block size.

    Returns:
        One table for the planes, and one for every side tensor.

    Raises:
        ValueError: the tensors are not on the CPU, the tokens are not within both blocks, or they are part of a block
            that may only be copied whole.
    """
    engine_size, stored_size = plan.paging.engine_block_size, plan.paging.stored_block_size
    count = min(engine_size, stored_size) if num_tokens is None else num_tokens
    if (
        min(engine_token, slot_token, count) < 0
        or engine_token + count > engine_size
        or slot_token + count > stored_size
    ):
        raise ValueError(
            f"fragments_of: wanted tokens within engine blocks of {engine_size} and stored ones of {stored_size}, got "
            f"{count} from {engine_token} and {slot_token} on"
        )
    if plan.whole_blocks and count != stored_size:
        raise ValueError(
            f"fragments_of: wanted whole blocks of {stored_size} tokens, because a side tensor has one row for all of "
            f"them, got {count} tokens"
        )
    if plan.device.type != "cpu":
        raise ValueError(f"fragments_of: wanted an engine's tensors on the CPU, got {plan.device}")
    return tuple(_fragments(plan, section, engine_token, slot_token, count) for section in plan.sections)


def _fragments(plan: CopyPlan, section: Section, engine_token: int, slot_token: int, count: int) -> Fragments:
    engine, slot = section.rows(engine_token, slot_token, count)
    order = np.argsort(slot, kind="stable")
    engine, slot, lengths = merge_runs(engine[order], slot[order], section.row_bytes)
    return Fragments(engine, slot, lengths, np.argsort(engine), section.engine_block_stride, plan.paging.num_blocks)


def pack(tables: Sequence[Fragments], block_ids: I64, slots: Tensor, slot_ids: I64, num_threads: int = 1) -> None:
    """Copy engine blocks into slots: block_ids[i] goes to slot slot_ids[i].

    Args:
        tables: from `fragments_of`; the engine's tensors are only read.
        block_ids: int64 `[n]`; a pair with a negative id touches nothing.
        slots: uint8 `[S, slot_bytes]` on the CPU, contiguous, written.
        slot_ids: int64 `[n]`, none of the used ones twice.
        num_threads: most threads that share the blocks, if there is enough to copy.

    Raises:
        ValueError: ids or the slots' form do not fit; nothing was written.
    """
    blocks, ids = _pairs(block_ids, tables[0].num_blocks, slot_ids, _check_slots(tables, slots))
    targets = slots.data_ptr() + ids * slots.stride(0)
    for table in tables:
        order = table.engine_order
        _launch(
            targets, blocks * table.block_stride_bytes,
            table.slot_offsets[order], table.engine_addresses[order], table.lengths[order], num_threads,
        )  # fmt: skip


def unpack(tables: Sequence[Fragments], slots: Tensor, slot_ids: I64, block_ids: I64, num_threads: int = 1) -> None:
    """Copy slots into engine blocks: slot slot_ids[i] goes to block_ids[i]; arguments and errors as for `pack`.

    The engine's tensors are written, in named blocks only, and the slots only read; none of the used block ids may
    come twice.
    """
    ids, blocks = _pairs(slot_ids, _check_slots(tables, slots), block_ids, tables[0].num_blocks)
    sources = slots.data_ptr() + ids * slots.stride(0)
    for table in tables:
        _launch(
            blocks * table.block_stride_bytes, sources,
            table.engine_addresses, table.slot_offsets, table.lengths, num_threads,
        )  # fmt: skip


def _check_slots(tables: Sequence[Fragments], slots: Tensor) -> int:
    """Return how many slots there are."""
    wanted = max(int(table.slot_offsets[-1] + table.lengths[-1]) if len(table.lengths) else 0 for table in tables)
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


def _launch(
    targets: I64, sources: I64, target_offsets: I64, source_offsets: I64, lengths: I64, num_threads: int
) -> None:
    copy, tables = compiled(), (target_offsets.ctypes.data, source_offsets.ctypes.data, lengths.ctypes.data)
    num_threads = min(num_threads, len(targets) * int(lengths.sum()) // _LEAST_BYTES_PER_THREAD)
    if num_threads <= 1:
        copy(targets.ctypes.data, sources.ctypes.data, len(targets), *tables, len(lengths))
        return
    bounds = [len(targets) * i // num_threads for i in range(num_threads + 1)]

    def part(begin: int, end: int) -> None:
        copy(targets[begin:end].ctypes.data, sources[begin:end].ctypes.data, end - begin, *tables, len(lengths))

    in_parts(part, list(itertools.pairwise(bounds)))


def in_parts(part: Callable[[int, int], None], left: list[tuple[int, int]]) -> None:
    """Do all parts on this thread and on helpers; when this ends, however, no helper works any more.

    An interrupt may come at any moment, also between a helper's start and the next line here. So a helper counts as
    soon as it takes a part, an interrupt removes the parts that are left, and this waits until the last helper is done.
    """
    changed, num_at_work = threading.Condition(), 0
    failures: list[BaseException] = []  # Errors of helpers, whose parts are then not copied.

    def help_out() -> None:
        nonlocal num_at_work
        while True:
            with changed:
                if not left:
                    return
                own = left.pop()
                num_at_work += 1
            try:
                part(*own)
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread.
                failures.append(error)
                left.clear()
            finally:
                with changed:
                    num_at_work -= 1
                    changed.notify_all()

    # New threads each time: a forked process would have no waiting threads.
    interrupt: BaseException | None = None
    try:
        with contextlib.suppress(RuntimeError):  # No thread can be started: this thread does the rest.
            for _ in left[1:]:
                threading.Thread(target=help_out, daemon=True).start()
        while True:
            with changed:
                if not left:
                    break
                own = left.pop(0)
            part(*own)
    except BaseException as error:  # noqa: BLE001 - raised below, when no thread copies any more.
        interrupt = error
    while True:
        try:
            with changed:
                left.clear()
                changed.wait_for(lambda: num_at_work == 0)
            break
        except BaseException as error:  # noqa: BLE001 - raised below as well.
            interrupt = interrupt or error
    if interrupt is not None or failures:
        raise interrupt or failures[0]


@functools.cache
def compiled() -> Callable[..., None]:
    """Compile host_copy.ll for this processor, once per process; takes a few tenths of a second."""
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
    # The compiler engine owns the code, so the function keeps it alive.
    function.engine = engine  # type: ignore[attr-defined]
    return function

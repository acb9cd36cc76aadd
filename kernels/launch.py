"""The geometry and arguments of every launch of pack.cu, worked out and checked before any of them is made."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvstore.kernels.module import WORDS
from kvstore.kernels.plan import CopyPlan, Section
from kvstore.kernels.spans import Spans

#: Threads of a thread block, and planes that a thread copies, as pack.cu has them.
MAX_THREADS = 256
NUM_PLANES = 4
WARP = 32
_MAX_INDEX = 2**31 - 1


class Divisor(ctypes.Structure):
    """`struct Divisor` of pack.cu: a product and a shift in place of a division."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("value", "multiplier", "shift")]


@functools.lru_cache(maxsize=1024)
def divisor_of(value: int) -> Divisor:
    """Return the divisor of a value of at least 1; nobody may write it.

    Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
    """
    shift = (value - 1).bit_length()
    return Divisor(value, ((1 << 32) * ((1 << shift) - value)) // value + 1, shift)


class Copy(ctypes.Structure):
    """`struct Copy` of pack.cu."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("engine_bases", "slot_offsets", "spans", "slots")),
        *((name, ctypes.c_int64) for name in ("engine_block", "engine_head", "engine_token")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "slot_head", "slot_token")),
        *((name, ctypes.c_uint32) for name in ("num_planes", "num_heads", "num_units")),
        *((name, Divisor) for name in ("lanes", "tiles", "groups", "num_spans", "head_words", "row_words")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel launch: `args` are ctypes objects of the kernel's parameter types."""

    name: str
    num_ctas: int
    num_threads: int
    args: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Tables:
    """Addresses of a section's `engine_bases` and `slot_offsets` where the kernel can read them."""

    engine_bases: int
    slot_offsets: int


def check_slots(plan: CopyPlan, slots: Tensor) -> None:
    """Refuse slots that the plan's kernels cannot reach or that are too small.

    Raises:
        ValueError: not contiguous uint8 `[S, slot_bytes]`, smaller than a block, on another device, or host memory
            that is not pinned.
    """
    if slots.dim() != 2 or slots.dtype != torch.uint8 or not slots.is_contiguous():
        raise ValueError(
            f"wanted slots as contiguous uint8 [slots, bytes], got {slots.dtype} {list(slots.shape)} with strides "
            f"{slots.stride()}"
        )
    if slots.shape[1] < plan.stored.block_bytes:
        raise ValueError(f"wanted slots of at least {plan.stored.block_bytes} bytes, got {slots.shape[1]}")
    if slots.device == plan.device:
        return
    if slots.device.type != "cpu":
        raise ValueError(f"wanted slots on {plan.device} or in pinned host memory, got {slots.device}")
    if not slots.is_pinned():
        raise ValueError(
            "wanted slots in pinned host memory, got pageable memory; allocate it pinned, or register it with "
            "cudaHostRegister first"
        )


def check_window(
    plan: CopyPlan, spans: Spans, num_slots: int, begin: int, end: int | None, first_slot: int, max_ctas: int | None
) -> None:
    """Refuse a part of a list that does not fit the plan or the slots at hand.

    Raises:
        ValueError: the list is of other block sizes or names slots outside the window, the bounds are no part of it,
            or max_ctas is below 1.
    """
    if spans.paging != plan.paging:
        raise ValueError(
            f"wanted spans of {plan.paging}, got spans of {spans.paging}; make them with the plan's paging"
        )
    if max_ctas is not None and max_ctas < 1:
        raise ValueError(f"wanted max_ctas >= 1, got {max_ctas}")
    end = len(spans) if end is None else end
    if not 0 <= begin <= end <= len(spans):
        raise ValueError(f"wanted 0 <= begin <= end <= {len(spans)} spans, got {begin} and {end}")
    if begin == end:
        return
    low, high = int(spans.rows[begin:end, 1].min()), int(spans.rows[begin:end, 1].max())
    if low < first_slot or high >= first_slot + num_slots:
        raise ValueError(
            f"wanted slots in [{first_slot}, {first_slot + num_slots}), got spans in slots {low} to {high}"
        )


def launches(
    plan: CopyPlan,
    tables: list[Tables],
    spans: Spans,
    spans_address: int,
    slots: Tensor,
    *,
    to_slots: bool,
    begin: int = 0,
    end: int | None = None,
    first_slot: int = 0,
    max_ctas: int | None = None,
) -> Iterator[Launch]:
    """Yield one launch for every section of the plan, none when there is nothing to copy.

    Its arguments are those that `check_window` and `check_slots` have passed.

    Args:
        plan: of the engine's cache.
        tables: of every section.
        spans: the whole list, on the host.
        spans_address: the same list where the kernel can read it.
        slots: uint8 `[S, slot_bytes]`.
        to_slots: whether the engine is the source.
        begin: the first span that is copied.
        end: the span after the last; default all.
        first_slot: the number that slots[0] has in the list; a staging buffer holds a window of a longer list.
        max_ctas: cap on thread blocks, so that a copy leaves multiprocessors to the model.

    Raises:
        ValueError: a copy is too large.
    """
    end = len(spans) if end is None else end
    if end <= begin:
        return
    max_tokens = int(spans.rows[begin:end, 4].max())
    stride = slots.stride(0)
    origin = slots.data_ptr() - first_slot * stride
    begin_address = spans_address + begin * spans.rows.strides[0]
    for section, table in zip(plan.sections, tables, strict=True):
        word = math.gcd(section.align_bytes, slots.data_ptr(), stride if slots.shape[0] > 1 else 16)
        row_words = section.row_bytes // word
        grid = _grid(section, end - begin, max_tokens * row_words, max_ctas)
        copy = Copy(
            table.engine_bases, table.slot_offsets, begin_address, origin,
            section.engine_block_stride, section.engine_head_stride, section.engine_token_stride,
            stride, section.slot_head_stride, section.slot_token_stride,
            len(section.engine_bases), section.num_heads, grid.num_units,
            *grid.divisors, divisor_of(end - begin), divisor_of(max_tokens * row_words), divisor_of(row_words),
        )  # fmt: skip
        yield Launch(
            f"{'pack' if to_slots else 'unpack'}_spans<{WORDS[word]}>", grid.num_ctas, grid.num_threads, (copy,)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    num_ctas: int
    num_threads: int
    num_units: int
    divisors: tuple[Divisor, ...]


def _grid(section: Section, num_spans: int, head_words: int, max_ctas: int | None) -> _Grid:
    """Cut what a launch copies: `head_words` words of each head, plane and span."""
    words = head_words * section.num_heads
    num_tiles, lanes = _tiles(words)
    num_groups = -(-len(section.engine_bases) // NUM_PLANES)
    num_units = num_spans * num_groups * num_tiles
    if max(num_units, words + MAX_THREADS) > _MAX_INDEX:
        raise ValueError(
            f"wanted at most {_MAX_INDEX} pieces of work and words of a span and plane, got {num_units} and {words}; "
            "copy in smaller pieces"
        )
    at_once = MAX_THREADS // lanes
    num_ctas = -(-num_units // at_once)
    num_threads = -(-lanes * at_once // WARP) * WARP
    divisors = (divisor_of(lanes), divisor_of(num_tiles), divisor_of(num_groups))
    return _Grid(num_ctas if max_ctas is None else min(num_ctas, max_ctas), num_threads, num_units, divisors)


@functools.lru_cache(maxsize=1024)
def _tiles(words: int) -> tuple[int, int]:
    """Return into how many tiles words are cut, and the threads of each: as few without a word as there can be.

    More than a warp of them are whole warps, so that none begins in the middle of a line.
    """
    fewest = -(-words // MAX_THREADS)
    if words <= WARP:
        return 1, words
    lanes = {count: -(-words // (count * WARP)) * WARP for count in range(fewest, fewest + 8)}
    count = min(lanes, key=lambda count: count * lanes[count])
    return count, lanes[count]

"""The geometry and arguments of every launch of pack.cu, computed and checked before the first launch."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstore.kernels.module import ACROSS, INSIDE, Threads
from kvstore.kernels.plan import CopyPlan
from kvstore.kernels.spans import Spans

WARP = 32
_MAX_INDEX = 2**31 - 1


class Style(NamedTuple):
    """How a copy is divided among threads; `python -m benchmarks.studies.gpu_strips` compares styles."""

    threads: Threads
    strip: int | None
    """Number of planes, or of groups of planes that a thread takes at once, in a strip.

    All spans of a strip come before the next strip, one span after another. None: all planes are one strip.
    """

    apart: bool = False
    """Whether the planes of a strip lie as far apart as possible; else next to each other."""


#: Words in a plane of a span from which it counts as long, very long, and longest.
_LONG, _VERY_LONG, _LONGEST = 256, 2048, 4096
#: Planes of very long spans in a strip. A single plane is slow to read where slot sizes are a power of two.
_PLANES = 4
#: Engine blocks lie together if at least one of this many is copied, from the first to the last.
_TOGETHER = 4


def style_of(to_slots: bool, words: int, together: bool) -> Style:
    """Return the style for spans with `words` words in a plane; `together`: the written blocks lie together.

    Slots lie together from plane to plane; the engine's blocks, if at all, from span to span of a plane.
    """
    if words < _LONG:
        return Style(ACROSS, None if to_slots else 1)
    if not together:
        return Style(INSIDE, None)
    if words < _VERY_LONG:
        return Style(INSIDE, 1)
    # A strip reads either scattered pieces of a slot at a time, or a piece long enough to be read at once.
    return Style(INSIDE, _PLANES, apart=words < _LONGEST)


def lie_together(spans: Spans, begin: int, end: int, max_tokens: int) -> bool:
    """Return whether engine blocks of spans [begin, end), of at most `max_tokens` tokens, ascend and lie together."""
    blocks = spans.rows[begin:end, 0]
    num_tokens = (int(blocks[-1]) - int(blocks[0]) + 1) * spans.paging.engine_block_size
    return 0 < num_tokens <= _TOGETHER * max_tokens * (end - begin) and bool((blocks[1:] >= blocks[:-1]).all())


class Divisor(NamedTuple):
    """`struct Divisor` of pack.cu: a product and a shift instead of a division."""

    value: int
    multiplier: int
    shift: int


@functools.lru_cache(maxsize=1024)
def divisor_of(value: int) -> Divisor:
    """Return the divisor for a value of at least 1.

    Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
    """
    shift = (value - 1).bit_length()
    return Divisor(value, (((1 << 32) * ((1 << shift) - value)) // value + 1) & 0xFFFFFFFF, shift)


#: `struct Copy` of pack.cu: ten addresses and strides, five counts, six divisors.
_COPY = struct.Struct("<10q23I4x")
#: The addresses of the list and of the slots in it.
_ADDRESSES, _ADDRESSES_OFFSET = struct.Struct("<2q"), 16
_CopyBytes = ctypes.c_char * _COPY.size


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel launch: `args` are ctypes objects of the kernel's parameter types."""

    name: str
    num_ctas: int
    num_threads: int
    args: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Tables:
    """Addresses of a section's `engine_bases` and `slot_offsets` for the kernel."""

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
    """Refuse a part of a list that does not fit the plan or the slots.

    Raises:
        ValueError: the list is for other block sizes or names slots outside the window, the bounds are outside the
            list, max_ctas is below 1, or a span is part of a block that may only be copied whole.
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
    size = plan.paging.stored_block_size
    if plan.whole_blocks and int(spans.rows[begin:end, 4].min()) < size:
        raise ValueError(
            f"wanted whole blocks of {size} tokens, because a side tensor has one row for all of them, got a span of "
            f"{int(spans.rows[begin:end, 4].min())}; skip and copy whole blocks"
        )
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
    """Yield one launch for every section of the plan; none when there is nothing to copy.

    The caller has checked the arguments with `check_window` and `check_slots`.

    Args:
        plan: of the engine's cache.
        tables: of every section.
        spans: the whole list, on the host.
        spans_address: address of the same list for the kernel.
        slots: uint8 `[S, slot_bytes]`.
        to_slots: whether the engine is the source.
        begin: the first span that is copied.
        end: the span after the last; default all.
        first_slot: number of slots[0] in the list; a staging buffer holds a window of a longer list.
        max_ctas: cap on thread blocks, so that a copy leaves multiprocessors to the model.

    Raises:
        ValueError: a copy is too large.
    """
    end = len(spans) if end is None else end
    if end <= begin:
        return
    max_tokens = int(spans.rows[begin:end, 4].max())
    stride, address, num_slots = slots.stride(0), slots.data_ptr(), slots.shape[0]
    begin_address = spans_address + begin * spans.rows.strides[0]
    for section, table in zip(plan.sections, tables, strict=True):
        word = math.gcd(section.align_bytes, address, stride if num_slots > 1 else 16)
        row_words = section.row_bytes // word
        words = max_tokens * row_words * section.num_heads
        # Checked last: it takes a few microseconds in which nothing is queued.
        together = not to_slots and words >= _LONG and lie_together(spans, begin, end, max_tokens)
        style = style_of(to_slots, words, together)
        grid = _grid(style, len(section.engine_bases), section.num_heads, end - begin, max_tokens, row_words, max_ctas)
        copy = _COPY.pack(
            table.engine_bases, table.slot_offsets, begin_address, address - first_slot * stride,
            section.engine_block_stride, section.engine_head_stride, section.engine_token_stride,
            stride, section.slot_head_stride, section.slot_token_stride, *grid.counts,
        )  # fmt: skip
        args = (_CopyBytes.from_buffer_copy(copy),)
        yield Launch(_kernel(style.threads, to_slots, word), grid.num_ctas, grid.num_threads, args)


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    num_ctas: int
    num_threads: int
    counts: tuple[int, ...]  # num_planes and what follows it in `struct Copy`


def moved(work: Launch, spans_by: int, slots_by: int) -> Launch:
    """Return a copy of a launch with its list and slots moved by these bytes; `slots_by` is whole slots."""
    copy = _CopyBytes.from_buffer_copy(work.args[0])
    spans, slots = _ADDRESSES.unpack_from(copy, _ADDRESSES_OFFSET)
    _ADDRESSES.pack_into(copy, _ADDRESSES_OFFSET, spans + spans_by, slots + slots_by)
    return Launch(work.name, work.num_ctas, work.num_threads, (copy,))


_kernel = functools.cache(Threads.kernel)


@functools.lru_cache(maxsize=1024)
def _grid(
    style: Style,
    num_planes: int,
    num_heads: int,
    num_spans: int,
    max_tokens: int,
    row_words: int,
    max_ctas: int | None,
) -> _Grid:
    """Divide a launch's work: `max_tokens * row_words` words of each head, plane and span."""
    is_inside, num_words, most_threads, _ = style.threads
    head_words = max_tokens * row_words
    num_tiles, lanes = _tiles(head_words * num_heads, num_words if is_inside else 1, most_threads)
    num_groups = num_planes if is_inside else -(-num_planes // num_words)
    strip = min(style.strip or num_groups, num_groups)
    strip_pairs = num_spans * strip
    num_strips = -(-num_groups // strip)
    steps = (1, num_strips) if style.apart else (strip, 1)
    num_units = num_strips * strip_pairs * num_tiles
    most_words = num_tiles * lanes * num_words
    if max(num_units, most_words) > _MAX_INDEX:
        raise ValueError(
            f"wanted at most {_MAX_INDEX} pieces of work and words of a span and plane, got {num_units} and "
            f"{head_words * num_heads}; copy in smaller pieces"
        )
    at_once = most_threads // lanes
    num_ctas = -(-num_units // at_once)
    num_threads = -(-lanes * at_once // WARP) * WARP
    divisors = map(divisor_of, (lanes, num_tiles, strip, strip_pairs, head_words, row_words))
    counts = (num_planes, num_heads, num_units, *steps, *itertools.chain.from_iterable(divisors))
    return _Grid(num_ctas if max_ctas is None else min(num_ctas, max_ctas), num_threads, counts)


def _tiles(words: int, per_thread: int, most_threads: int) -> tuple[int, int]:
    """Return the number of tiles and the threads of each, with as few idle threads as possible.

    Tiles of more than a warp are whole warps, so that none begins in the middle of a line.
    """
    if words <= WARP:
        return 1, -(-words // per_thread)
    fewest = -(-words // (most_threads * per_thread))
    lanes = {count: -(-words // (count * per_thread * WARP)) * WARP for count in range(fewest, fewest + 8)}
    count = min(lanes, key=lambda count: count * lanes[count])
    return count, lanes[count]

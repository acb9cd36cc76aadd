"""The geometry and arguments of every launch of pack.cu, worked out and checked before any of them is made."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvstore.kernels.module import WORDS
from kvstore.kernels.plan import CopyPlan, Section
from kvstore.kernels.spans import Spans

NUM_THREADS = 256
WARP = 32
#: Loads that one thread has in flight, kUnroll of pack.cu.
UNROLL = 4
_MAX_ITEMS = 2**31 - 1


class Copy(ctypes.Structure):
    """`struct Copy` of pack.cu."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("engine_bases", "slot_offsets", "spans", "slots")),
        *((name, ctypes.c_int64) for name in ("engine_block", "engine_head", "engine_token")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "slot_head", "slot_token")),
        *((name, ctypes.c_uint32) for name in ("num_planes", "num_spans", "num_heads", "row_words", "lanes")),
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
    num_spans = (len(spans) if end is None else end) - begin
    if num_spans < 1:
        return
    max_tokens = min(plan.paging.engine_block_size, plan.paging.stored_block_size)
    stride = slots.stride(0)
    origin = slots.data_ptr() - first_slot * stride
    begin_address = spans_address + begin * spans.rows.strides[0]
    for section, table in zip(plan.sections, tables, strict=True):
        word = math.gcd(section.align_bytes, slots.data_ptr(), stride if slots.shape[0] > 1 else 16)
        row_words = section.row_bytes // word
        num_ctas, lanes = _grid(section, num_spans, row_words * max_tokens * section.num_heads, max_ctas)
        copy = Copy(
            table.engine_bases, table.slot_offsets, begin_address, origin,
            section.engine_block_stride, section.engine_head_stride, section.engine_token_stride,
            stride, section.slot_head_stride, section.slot_token_stride,
            len(section.engine_bases), num_spans, section.num_heads, row_words, lanes,
        )  # fmt: skip
        yield Launch(f"{'pack' if to_slots else 'unpack'}_spans<{WORDS[word]}>", num_ctas, NUM_THREADS, (copy,))


def _grid(section: Section, num_spans: int, words: int, max_ctas: int | None) -> tuple[int, int]:
    """Return the number of thread blocks, and how many threads share one pair of span and plane."""
    items = num_spans * len(section.engine_bases)
    if items > _MAX_ITEMS or words > _MAX_ITEMS:
        raise ValueError(
            f"wanted at most {_MAX_ITEMS} pairs of span and plane and words in each, got {items} and {words}; copy in "
            "smaller pieces"
        )
    lanes = WARP
    while lanes < NUM_THREADS and lanes * UNROLL < words:
        lanes *= 2
    num_ctas = -(-items // (NUM_THREADS // lanes))
    return (num_ctas if max_ctas is None else min(num_ctas, max_ctas)), lanes

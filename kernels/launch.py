"""The geometry and arguments of every launch of pack.cu, worked out and checked before any of them is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
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


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel launch: `args` are NumPy scalars of the kernel's parameter types."""

    name: str
    num_ctas: int
    num_threads: int
    args: tuple[np.generic, ...]


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

    Args:
        plan: of the engine's cache.
        tables: of every section.
        spans: the whole list, on the host.
        spans_address: the same list where the kernel can read it.
        slots: uint8 `[S, slot_bytes]`, already checked.
        to_slots: whether the engine is the source.
        begin: the first span that is copied.
        end: the span after the last; default all.
        first_slot: the number that slots[0] has in the list; a staging buffer holds a window of a longer list.
        max_ctas: cap on thread blocks, so that a copy leaves multiprocessors to the model.

    Raises:
        ValueError: the list is of other block sizes or names slots outside the window, the bounds are no part of it,
            or a copy is too large.
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
    rows = spans.rows[begin:end]
    if not len(rows):
        return
    low, high = int(rows[:, 1].min()), int(rows[:, 1].max())
    if low < first_slot or high >= first_slot + slots.shape[0]:
        raise ValueError(
            f"wanted slots in [{first_slot}, {first_slot + slots.shape[0]}), got spans in slots {low} to {high}"
        )
    max_tokens = int(rows[:, 4].max())
    origin = slots.data_ptr() - first_slot * slots.stride(0)
    begin_address = spans_address + begin * spans.rows.strides[0]
    for section, table in zip(plan.sections, tables, strict=True):
        word = math.gcd(section.align_bytes, slots.data_ptr(), slots.stride(0) if slots.shape[0] > 1 else 16)
        row_words = section.row_bytes // word
        num_ctas, lanes = _grid(section, len(rows), row_words * max_tokens * section.num_heads, max_ctas)
        yield Launch(
            f"{'pack' if to_slots else 'unpack'}_spans<{WORDS[word]}>",
            num_ctas,
            NUM_THREADS,
            (
                np.int64(table.engine_bases),
                np.int64(table.slot_offsets),
                np.uint32(len(section.engine_bases)),
                np.int64(begin_address),
                np.uint32(len(rows)),
                np.int64(origin),
                np.int64(section.engine_block_stride),
                np.int64(section.engine_head_stride),
                np.int64(section.engine_token_stride),
                np.int64(slots.stride(0)),
                np.int64(section.slot_head_stride),
                np.int64(section.slot_token_stride),
                np.uint32(section.num_heads),
                np.uint32(row_words),
                np.uint32(lanes),
            ),
        )


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

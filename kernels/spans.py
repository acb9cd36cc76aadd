"""The list of spans for a copy kernel: the tokens to move, and their places on both sides.

A span is a run of tokens inside one engine block and one stored block. Tokens that must not be touched are in no span:
a skipped prefix, tokens past the end, negative ids. So the mask is exact per token, costs no thread, and a kernel
cannot forget it. Everything is checked here, on the host, before any launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from kvstore.kernels.merging import I64, merge_runs

Ids: TypeAlias = I64 | Tensor | Sequence[int]

COLUMNS = ("block", "slot", "engine_token", "slot_token", "num_tokens")
"""Columns of a span list, as `struct Span` of pack.cu has them."""

#: Engine blocks are near each other if at least one of this many is copied, from the first to the last.
_NEAR = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """The division of tokens into blocks on both sides.

    Args:
        engine_block_size: tokens of an engine block, or page.
        stored_block_size: tokens of a stored block; one of the two divides the other.
        num_blocks: blocks of the engine's cache.

    Raises:
        ValueError: sizes below 1, or neither block size divides the other.
    """

    engine_block_size: int
    stored_block_size: int
    num_blocks: int

    def __post_init__(self) -> None:
        engine, stored = self.engine_block_size, self.stored_block_size
        if min(engine, stored, self.num_blocks) < 1:
            raise ValueError(f"wanted block sizes and num_blocks >= 1, got {engine}, {stored} and {self.num_blocks}")
        if engine % stored and stored % engine:
            raise ValueError(
                f"wanted the engine's block size to be a multiple or a divisor of the stored one, got {engine} and "
                f"{stored} tokens; store blocks of a size that divides {engine}, or that {engine} divides"
            )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Spans:
    """A checked list of spans; made only by the functions of this file.

    Args:
        rows: int64 `[n, 5]`, see `COLUMNS`; each span has at least one token.
        paging: block sizes that it was made for.
        num_slots: upper bound of its slots.
    """

    rows: I64
    paging: Paging
    num_slots: int

    def __len__(self) -> int:
        return len(self.rows)

    def to_unpack(self) -> Spans:
        """Return the same spans in the order in which a kernel unpacks them fastest.

        By ascending engine block, so that writes are near each other. If the blocks are too far apart for that, the
        order stays: then the slots are read from beginning to end.
        """
        blocks = self.rows[:, 0]
        if not len(blocks) or _NEAR * self.num_tokens < np.ptp(blocks) * self.paging.engine_block_size:
            return self
        rows = np.ascontiguousarray(self.rows[blocks.argsort(kind="stable")])
        return Spans(rows=rows, paging=self.paging, num_slots=self.num_slots)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that are copied."""
        return int(self.rows[:, 4].sum())


def block_spans(
    paging: Paging,
    block_ids: Ids,
    slot_ids: Ids,
    num_slots: int,
    *,
    num_tokens: int | None = None,
    skip_prefix_tokens: int = 0,
) -> Spans:
    """List the spans of a run of tokens that begins in the first engine block and the first slot.

    Args:
        paging: block sizes of both sides.
        block_ids: engine blocks of the run, on the host; tokens of a negative one touch nothing.
        slot_ids: slots of the run, on the host; tokens of a negative one touch nothing.
        num_slots: upper bound of the ids.
        num_tokens: length of the run; the last block may be partial. Default: the tokens of the lists, which must then
            be equally many on both sides.
        skip_prefix_tokens: this many tokens from the beginning of the run are not touched, on either side.

    Raises:
        ValueError: ids of another dtype, out of range, twice in a list or of the wrong number, or a bad skip.
    """
    blocks = host_ids("block_ids", block_ids, paging.num_blocks)
    slots = host_ids("slot_ids", slot_ids, num_slots)
    engine, stored = paging.engine_block_size, paging.stored_block_size
    if num_tokens is None:
        num_tokens = len(blocks) * engine
        if num_tokens != len(slots) * stored:
            raise ValueError(
                f"wanted as many tokens in engine blocks as in slots, got {len(blocks)} blocks of {engine} tokens and "
                f"{len(slots)} slots of {stored}; pass num_tokens when the last one is partial"
            )
    _check_range(num_tokens, skip_prefix_tokens)
    _check_count("block_ids", len(blocks), num_tokens, engine)
    _check_count("slot_ids", len(slots), num_tokens, stored)
    step = min(engine, stored)
    first, last = skip_prefix_tokens // step, -(-num_tokens // step)
    rows = np.zeros((last - first if skip_prefix_tokens < num_tokens else 0, len(COLUMNS)), np.int64)
    if len(rows):
        rows[:, 0], rows[:, 2] = _places(blocks, first, last, engine // step, step)
        rows[:, 1], rows[:, 3] = _places(slots, first, last, stored // step, step)
        rows[:, 4] = step
        rows[0, 2:4] += skip_prefix_tokens - first * step
        rows[0, 4] -= skip_prefix_tokens - first * step
        rows[-1, 4] -= last * step - num_tokens
        rows = _on_both_sides(rows)
    return Spans(rows=rows, paging=paging, num_slots=num_slots)


def position_spans(paging: Paging, block_ids: I64) -> Spans:
    """List the spans of whole engine blocks of the stored size; block i belongs to slot i.

    An engine waits meanwhile, so this does not check that no block comes twice: the caller must know that.

    Raises:
        ValueError: the two block sizes differ, or ids are out of range.
    """
    if paging.engine_block_size != paging.stored_block_size:
        raise ValueError(
            f"wanted engine blocks of {paging.stored_block_size} tokens, got {paging.engine_block_size}; make such "
            "spans with block_spans"
        )
    rows = np.zeros((len(block_ids), len(COLUMNS)), np.int64)
    if len(rows):
        # As unsigned numbers, negative ids are the largest.
        if int(np.maximum.reduce(block_ids.view(np.uint64))) >= paging.num_blocks:
            raise ValueError(
                f"block_ids: wanted ids in [0, {paging.num_blocks}), got {block_ids.min()} to {block_ids.max()}"
            )
        rows[:, 0], rows[:, 1], rows[:, 4] = block_ids, np.arange(len(rows)), paging.stored_block_size
    return Spans(rows=rows, paging=paging, num_slots=len(rows))


def token_spans(
    paging: Paging,
    slot_mapping: Ids,
    slot_ids: Ids,
    num_slots: int,
    *,
    num_tokens: int | None = None,
    skip_prefix_tokens: int = 0,
) -> Spans:
    """List the spans of a run of tokens whose places in the engine are given one by one.

    Args:
        paging: block sizes of both sides; the engine's may be 1.
        slot_mapping: flat token slot of every token of the run, block * engine_block_size + offset, on the host; a
            token with a negative slot touches nothing, on either side.
        slot_ids: slots of the run, on the host.
        num_slots: as for `block_spans`.
        num_tokens: length of the run; slot_mapping may be longer. Default: all of slot_mapping.
        skip_prefix_tokens: as for `block_spans`; the mapping and the run are passed in full.

    Raises:
        ValueError: as for `block_spans`, or slot_mapping is shorter than the run.
    """
    engine, stored = paging.engine_block_size, paging.stored_block_size
    mapping = host_ids("slot_mapping", slot_mapping, paging.num_blocks * engine, num_tokens)
    slots = host_ids("slot_ids", slot_ids, num_slots)
    num_tokens = len(mapping) if num_tokens is None else num_tokens
    _check_range(num_tokens, skip_prefix_tokens)
    if len(mapping) < num_tokens:
        raise ValueError(f"slot_mapping: wanted a slot for each of {num_tokens} tokens, got {len(mapping)}")
    _check_count("slot_ids", len(slots), num_tokens, stored)
    places = mapping[skip_prefix_tokens:num_tokens]
    tokens = np.arange(skip_prefix_tokens, num_tokens, dtype=np.int64)
    if not len(tokens):
        return Spans(rows=np.empty((0, len(COLUMNS)), np.int64), paging=paging, num_slots=num_slots)
    places, tokens, lengths = merge_runs(places, tokens, 1, places // engine, tokens // stored)
    # Negative places stay negative under floor division, so `_on_both_sides` drops their spans.
    columns = (places // engine, slots[tokens // stored], places % engine, tokens % stored, lengths)
    rows = _on_both_sides(np.stack(columns, axis=1))
    return Spans(rows=rows, paging=paging, num_slots=num_slots)


def host_ids(name: str, ids: Ids, bound: int, num_used: int | None = None) -> I64:
    """Return checked ids as int64; only the first `num_used` if that is given.

    Raises:
        ValueError: not flat integers in host memory, not below `bound`, or a non-negative one comes twice.
    """
    if isinstance(ids, range) and ids.step == 1 and ids.start >= 0 and len(ids) and ids.stop <= bound:
        return np.arange(ids.start, ids.stop, dtype=np.int64)[:num_used]
    if isinstance(ids, Tensor):
        if ids.device.type != "cpu":
            raise ValueError(
                f"{name}: wanted ids in host memory, got a tensor on {ids.device}; ids are checked before anything is "
                "launched, and fetching them would make the host wait for the stream: pass the engine's host copy"
            )
        ids = ids.numpy()
    array = np.asarray(ids)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name}: wanted a flat list of integers, got {array.dtype} of shape {list(array.shape)}")
    array = array[:num_used]
    if not array.size:
        return np.empty(0, np.int64)
    top = int(array.max())
    if top >= bound:
        raise ValueError(f"{name}: wanted ids below {bound}, got {top} at position {int(array.argmax())}")
    used: I64 = array.astype(np.int64, copy=False)
    ordered = np.sort(used)
    same = ordered[1:] == ordered[:-1]
    if same.any() and (twice := ordered[1:][same & (ordered[1:] >= 0)]).size:
        raise ValueError(f"{name}: wanted every id once, got {int(twice[0])} more than once")
    return used


def slots_of_positions(spans: Spans, slot_ids: Ids, num_slots: int) -> I64:
    """Return the slot of each position of a list whose slots are positions.

    Raises:
        ValueError: not one slot for each position, or a slot is negative, out of range or named twice.
    """
    ids = host_ids("slot_ids", slot_ids, num_slots)
    if spans.num_slots != len(ids) or (len(ids) and int(ids.min()) < 0):
        raise ValueError(
            f"wanted slot_ids >= 0 for each of the {spans.num_slots} positions of the spans, got {len(ids)}; name "
            "a position that is not to be touched by -1 when the spans are made"
        )
    return ids


def _check_range(num_tokens: int, skip_prefix_tokens: int) -> None:
    if num_tokens < 0 or not 0 <= skip_prefix_tokens <= num_tokens:
        raise ValueError(
            f"wanted num_tokens >= 0 and skip_prefix_tokens in [0, num_tokens], got {num_tokens} and "
            f"{skip_prefix_tokens}"
        )


def _check_count(name: str, count: int, num_tokens: int, block_size: int) -> None:
    wanted = -(-num_tokens // block_size)
    if count != wanted:
        raise ValueError(
            f"{name}: wanted {wanted} for {num_tokens} tokens in blocks of {block_size}, got {count}; pass one for "
            "every block of the run, -1 for those that are not to be touched"
        )


def _places(ids: I64, first: int, last: int, per_block: int, step: int) -> tuple[I64, I64 | int]:
    """Return the block of every step in [first, last), and the first token of the step within it."""
    if per_block == 1:
        return ids[first:last], 0
    steps = np.arange(first, last, dtype=np.int64)
    return ids[steps // per_block], steps % per_block * step


def _on_both_sides(rows: I64) -> I64:
    """Leave out the spans that have a negative place on one side."""
    if int(rows[:, :2].min()) >= 0:
        return rows
    return np.ascontiguousarray(rows[(rows[:, 0] >= 0) & (rows[:, 1] >= 0)])

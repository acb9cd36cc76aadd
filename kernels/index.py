"""Launcher of index.cu: token slots and pages of a ragged batch, on the GPU, for page sizes above 1.

Lengths are given on the host: they decide how much is written, so they are checked before anything is launched.
Every function returns a new tensor; no argument is changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore.kernels.launch import Launch
from kvstore.kernels.merging import I64
from kvstore.kernels.module import INDEX_TYPES

_NUM_THREADS = 128
_MAX_CTAS = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A ragged batch: the tokens of every sequence, and its begin in flat lists of tokens and of pages.

    Args:
        lengths: int64 `[n]`, tokens of each sequence; 0 is allowed.
        page_size: tokens of a page.
        device: where the kernels run.
        starts: int64 `[2, n + 1]` on the device: begins in the list of tokens, and in the list of pages.
    """

    lengths: I64
    page_size: int
    device: torch.device
    starts: Tensor

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sequences."""
        return int(self.lengths.sum())

    @property
    def num_pages(self) -> int:
        """Return the number of pages of all sequences."""
        return int((-(-self.lengths // self.page_size)).sum())


def make_batch(lengths: Sequence[int] | I64, page_size: int, device: torch.device | str) -> Batch:
    """Return the description of a batch for the kernels.

    Raises:
        ValueError: a length is negative, not an integer, or page_size is below 1.
    """
    array = np.asarray(lengths)
    if array.size == 0:
        array = np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.size and int(array.min()) < 0) or page_size < 1:
        raise ValueError(
            f"make_batch: wanted a flat list of lengths >= 0 and page_size >= 1, got {array.dtype} "
            f"{list(array.shape)} and page_size={page_size}"
        )
    flat = array.astype(np.int64)
    starts = np.zeros((2, len(flat) + 1), np.int64)
    np.cumsum(flat, out=starts[0, 1:])
    np.cumsum(-(-flat // page_size), out=starts[1, 1:])
    placed = torch.from_numpy(starts).to(device)
    return Batch(lengths=flat, page_size=page_size, device=placed.device, starts=placed)


def split_evenly(num_sequences: int, group: int) -> int:
    """Return how many groups of `group` sequences a batch has.

    Raises:
        ValueError: the batch is not a multiple of a group.
    """
    if group < 1 or num_sequences % group:
        raise ValueError(f"wanted a batch that is a multiple of {group} sequences, got {num_sequences}")
    return num_sequences // group


def slots_to_pages(batch: Batch, slots: Tensor, run: Callable[[Launch], object]) -> Tensor:
    """Return the page of every `page_size` tokens of every sequence.

    Args:
        batch: lengths in tokens.
        slots: int32 or int64 `[num_tokens]` on the batch's device: token slots, one sequence after another.
        run: runs a launch on the caller's stream, for example `gpu.runner("index.cu")`.

    Returns:
        `[num_pages]` of the same dtype; -1 where the tokens of a page are not all in it, each at its own offset.

    Raises:
        ValueError: wrong dtype, device or number of slots.
    """
    _check("slots", slots, batch, batch.num_tokens)
    pages = torch.empty(batch.num_pages, dtype=slots.dtype, device=batch.device)
    _run(run, "slots_to_pages", batch, slots, (slots, *_starts(batch), _count(batch), _page(batch), pages))
    return pages


def pages_to_slots(batch: Batch, pages: Tensor, run: Callable[[Launch], object]) -> Tensor:
    """List the token slots of every sequence; the inverse of `slots_to_pages`.

    Args:
        batch: lengths in tokens.
        pages: int32 or int64 `[num_pages]`; a negative one means no page.
        run: as for `slots_to_pages`.

    Returns:
        `[num_tokens]` of the same dtype; -1 for the tokens of a missing page.

    Raises:
        ValueError: wrong dtype, device or number of pages.
    """
    _check("pages", pages, batch, batch.num_pages)
    slots = torch.empty(batch.num_tokens, dtype=pages.dtype, device=batch.device)
    tokens, starts = _starts(batch)
    _run(run, "pages_to_slots", batch, pages, (pages, starts, tokens, _count(batch), _page(batch), slots))
    return slots


def repack_pages(
    batch: Batch, table: Tensor, row_ids: Sequence[int], run: Callable[[Launch], object], capacity: int | None = None
) -> Tensor:
    """Copy the used part of some rows of a padded page table into one ragged list.

    Args:
        batch: lengths in tokens.
        table: int32 or int64 `[rows, max_pages]` on the batch's device; its rows may have gaps between them.
        row_ids: the row of every sequence, on the host.
        run: as for `slots_to_pages`.
        capacity: entries that the receiver of the list has room for.

    Raises:
        ValueError: wrong dtype or device, a row that is not in the table, a sequence longer than a row, or more
            pages than `capacity`.
    """
    if table.dim() != 2 or table.stride(1) != 1:
        raise ValueError(f"table: wanted [rows, max_pages] with dense rows, got {list(table.shape)} {table.stride()}")
    _check("table", table, batch, table.numel(), dense=False)
    rows = np.asarray(row_ids, np.int64)
    if rows.shape != batch.lengths.shape or (rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < len(table)):
        raise ValueError(
            f"row_ids: wanted one in [0, {len(table)}) for each of {len(batch.lengths)} sequences, got {rows.tolist()}"
        )
    longest = -(-int(batch.lengths.max(initial=0)) // batch.page_size)
    if longest > table.shape[1]:
        raise ValueError(f"wanted sequences of at most {table.shape[1]} pages as the table's rows, got {longest}")
    if capacity is not None and batch.num_pages > capacity:
        raise ValueError(f"wanted at most {capacity} pages, got {batch.num_pages}")
    pages = torch.empty(batch.num_pages, dtype=table.dtype, device=batch.device)
    ids = torch.from_numpy(rows).to(batch.device)
    stride = ctypes.c_int64(table.stride(0))
    _run(run, "repack_pages", batch, table, (table, stride, ids, _starts(batch)[1], _count(batch), pages))
    return pages


def last_pages(batch: Batch, slots: Tensor, run: Callable[[Launch], object]) -> tuple[Tensor, Tensor]:
    """Return the tokens in each sequence's last page, and the slot of its last token.

    Args:
        batch: lengths in tokens.
        slots: as for `slots_to_pages`.
        run: as for `slots_to_pages`.

    Returns:
        Two tensors `[n]` of the slots' dtype: lengths in 1 .. page_size, 0 for an empty sequence; slots, -1 for an
        empty sequence.

    Raises:
        ValueError: wrong dtype, device or number of slots.
    """
    _check("slots", slots, batch, batch.num_tokens)
    counts = torch.empty(len(batch.lengths), dtype=slots.dtype, device=batch.device)
    last = torch.empty_like(counts)
    args = (slots, _starts(batch)[0], _count(batch), _page(batch), counts, last)
    _run(run, "last_pages", batch, slots, args)
    return counts, last


def _check(name: str, tensor: Tensor, batch: Batch, num_wanted: int, dense: bool = True) -> None:
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.device != batch.device:
        raise ValueError(
            f"{name}: wanted int32 or int64 on {batch.device}, got {tensor.dtype} on {tensor.device}; "
            "page tables of other types are not read"
        )
    if dense and (tensor.dim() != 1 or tensor.numel() != num_wanted or not tensor.is_contiguous()):
        raise ValueError(f"{name}: wanted {num_wanted} in one dense list, got {list(tensor.shape)}")


def _starts(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.starts[0], batch.starts[1]


def _count(batch: Batch) -> ctypes.c_uint32:
    return ctypes.c_uint32(len(batch.lengths))


def _page(batch: Batch) -> ctypes.c_uint32:
    return ctypes.c_uint32(batch.page_size)


def _run(run: Callable[[Launch], object], name: str, batch: Batch, like: Tensor, args: Sequence[Any]) -> None:
    if not len(batch.lengths):
        return  # An empty grid is an error.
    packed = tuple(ctypes.c_int64(arg.data_ptr()) if isinstance(arg, Tensor) else arg for arg in args)
    num_ctas = min(len(batch.lengths), _MAX_CTAS)
    run(Launch(f"{name}<{INDEX_TYPES[like.element_size()]}>", num_ctas, _NUM_THREADS, packed))

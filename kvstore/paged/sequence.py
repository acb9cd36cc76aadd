"""The pages of one sequence in one group, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest, PoolExhausted
from kvstore.paged.allocator import PageAllocator
from kvstore.paged.units import (
    NO_PAGES,
    Pages,
    Slots,
    check_count,
    last_page_tokens,
    pages_for,
    present_slots,
    slots_of,
)

_MIN_ROOM = 8


class SequencePages:
    """Hold the pages of one sequence: shared ones first, then its own, the last of which may be partial.

    Token `i` lies in page `i // page_size` of the sequence, at offset `i % page_size` of that page. The pages of a
    sequence never change while it has them. A page that it no longer needs is -1.

    Args:
        allocator: owns the pages.
        shared: int32, pages that somebody else owns and keeps for this sequence; all their tokens are there.
    """

    def __init__(self, allocator: PageAllocator, shared: Pages = NO_PAGES) -> None:
        self.allocator = allocator
        self.num_tokens = len(shared) * allocator.page_size
        """Tokens with a slot, without those of a step that is not complete."""
        self.num_step_tokens = 0
        """Tokens of a step that is not complete."""
        self.is_released = False
        """Whether its pages were given back; such a sequence takes no more."""
        self._num_pages = len(shared)
        self._pages = np.empty(max(_MIN_ROOM, len(shared)), np.int32)
        self._pages[: len(shared)] = shared
        self._is_own = np.zeros(len(self._pages), np.bool_)

    @property
    def num_pages(self) -> int:
        """Return how many pages the tokens need, also those of an incomplete step."""
        return self._num_pages

    @property
    def pages(self) -> Pages:
        """Return the pages as a view that must not be written; it is valid until the next change."""
        view = self._pages[: self._num_pages]
        view.flags.writeable = False
        return view

    @property
    def last_tokens(self) -> int:
        """Return the tokens in the last page; 0 only without tokens."""
        return last_page_tokens(self.num_tokens, self.allocator.page_size)

    @property
    def last_slot(self) -> int:
        """Return the slot of the last token; -1 without tokens."""
        if not self.num_tokens:
            return -1
        return int(slots_of(self._pages, self.allocator.page_size, self.num_tokens - 1, self.num_tokens)[0])

    def slots(self, start: int, stop: int) -> Slots:
        """Return the slots of tokens `[start, stop)`, int64; -1 for those of a page that was dropped.

        Raises:
            InvalidRequest: the sequence has no such tokens.
        """
        end = self.num_tokens + self.num_step_tokens
        last = check_count("slots", "stop", stop, end)
        return slots_of(self._pages, self.allocator.page_size, check_count("slots", "start", start, last), last)

    def num_pages_for(self, num_tokens: int, first_page: int = 0) -> int:
        """Return how many more pages `num_tokens` more tokens would take, without those before `first_page`."""
        end = pages_for(self.num_tokens + num_tokens, self.allocator.page_size)
        return max(0, end - max(first_page, self._num_pages))

    def extend(self, num_tokens: int) -> Slots:
        """Add tokens: fill the last page, then take whole pages, then one for the rest. 0 is allowed.

        Returns:
            int64 `[num_tokens]`, the slots of the new tokens.

        Raises:
            InvalidRequest: num_tokens is negative or no integer, a step is not complete, or the sequence was
                released; nothing was changed.
            PoolExhausted: too few pages are free; nothing was changed.
        """
        count = self._check("extend", num_tokens)
        self._take(self.num_pages_for(count))
        start = self.num_tokens
        self.num_tokens += count
        return present_slots(self._pages, self.allocator.page_size, start, self.num_tokens)

    def prepare_step(self, num_tokens: int, first_page: int = 0) -> Slots:
        """Reserve slots for tokens that may be rejected, as the drafts of speculative decoding.

        Args:
            num_tokens: of the step.
            first_page: new pages before this one are not needed: they are -1, and nothing is taken for them.

        Raises:
            InvalidRequest, PoolExhausted: as for `extend`; nothing was changed.
        """
        count = self._check("prepare_step", num_tokens)
        pages = self.allocator.alloc(self.num_pages_for(count, first_page))
        end = pages_for(self.num_tokens + count, self.allocator.page_size)
        if missing := end - self._num_pages - len(pages):
            self._append(np.full(missing, -1, np.int32))
            self._is_own[self._num_pages - missing : self._num_pages] = False
        if len(pages):
            self._append(pages)
        self.num_step_tokens = count
        return slots_of(self._pages, self.allocator.page_size, self.num_tokens, self.num_tokens + count)

    def complete_step(self, num_accepted: int) -> None:
        """Keep the first tokens of the step, and give back the pages that only the others needed.

        Raises:
            InvalidRequest: more are accepted than were reserved; nothing was changed.
        """
        self.num_tokens += check_count("complete_step", "num_accepted", num_accepted, self.num_step_tokens)
        self.num_step_tokens = 0
        kept = pages_for(self.num_tokens, self.allocator.page_size)
        self.allocator.give_back(self.owned(kept, self._num_pages))
        self._num_pages = kept

    def add_partial(self, page: Pages, num_tokens: int) -> None:
        """Add one page of its own after whole pages, with its first tokens in place."""
        assert self.num_tokens == self._num_pages * self.allocator.page_size
        self._append(page)
        self.num_tokens += num_tokens

    def owned(self, start: int, stop: int) -> Pages:
        """Return those of pages `[start, stop)` that the sequence owns, in a new array."""
        return self._pages[start:stop][self._is_own[start:stop]]

    def hand_over(
        self, start: int, stop: int, which: npt.NDArray[np.bool_] | None = None, *, never_drops: bool = False
    ) -> Pages:
        """Stop owning pages `[start, stop)`, or those of them in `which`; the caller owns them now.

        Args:
            start: first page.
            stop: end of the pages.
            which: bool `[stop - start]`; None for all.
            never_drops: `drop` is never called, and the caller does not write into the result.

        Returns:
            All pages `[start, stop)`, -1 where one was dropped.
        """
        self._is_own[start:stop] &= False if which is None else ~which
        part = self._pages[start:stop]
        # A list that is never written again is not copied, unless it would keep a much longer one in memory.
        return part if never_drops and 2 * len(part) >= len(self._pages) else part.copy()

    def is_own(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return for pages `[start, stop)` whether the sequence owns them."""
        return self._is_own[start:stop]

    def drop(self, start: int, stop: int) -> int:
        """Forget pages `[start, stop)`, and give back its own. Returns how many became free."""
        freed = self.allocator.give_back(self.owned(start, stop))
        self._pages[start:stop] = -1
        self._is_own[start:stop] = False
        return freed

    def release(self) -> int:
        """Give back all pages that it owns; a second call does nothing. Returns how many became free."""
        freed = self.allocator.give_back(self.owned(0, self._num_pages))
        self.num_tokens = self.num_step_tokens = self._num_pages = 0
        self.is_released = True
        return freed

    def _check(self, verb: str, num_tokens: int) -> int:
        if self.is_released:
            raise InvalidRequest(f"{verb}: wanted a sequence with pages, got a released one; begin another")
        if self.num_step_tokens:
            raise InvalidRequest(
                f"{verb}: wanted no incomplete step, got one of {self.num_step_tokens} tokens; complete it first"
            )
        return check_count(verb, "num_tokens", num_tokens)

    def _take(self, num_pages: int) -> None:
        if num_pages:
            self._append(self.allocator.alloc(num_pages))

    def _append(self, pages: Pages) -> None:
        end = self._num_pages + len(pages)
        if self._num_pages == 0 and end > len(self._pages):
            self._pages, self._is_own = pages, np.zeros(end, np.bool_)
        elif end > len(self._pages):
            room = max(end, 2 * len(self._pages))
            self._pages = np.concatenate((self._pages[: self._num_pages], np.empty(room - self._num_pages, np.int32)))
            self._is_own = np.concatenate((self._is_own[: self._num_pages], np.zeros(room - self._num_pages, np.bool_)))
        if self._pages is not pages:
            self._pages[self._num_pages : end] = pages
        self._is_own[self._num_pages : end] = True
        self._num_pages = end


def extend_all(sequences: Sequence[SequencePages], num_tokens: Sequence[int]) -> list[Slots]:
    """Extend every sequence of a batch, or none. A sequence that gets 0 tokens is not touched.

    Raises:
        InvalidRequest: the lists have different lengths, a sequence comes twice or has another allocator than the
            first, or as for `SequencePages.extend`; nothing was changed.
        PoolExhausted: too few pages are free for all; nothing was changed.
    """
    if len(sequences) != len(num_tokens):
        raise InvalidRequest(
            f"extend_all: wanted one number of tokens for each of {len(sequences)} sequences, got {len(num_tokens)}"
        )
    if len({id(sequence) for sequence in sequences}) != len(sequences):
        raise InvalidRequest("extend_all: wanted different sequences, got one twice; nothing was changed")
    wanted = 0
    for sequence, count in zip(sequences, num_tokens, strict=True):
        if sequence.allocator is not sequences[0].allocator:
            raise InvalidRequest("extend_all: wanted sequences of one allocator, got two; nothing was changed")
        wanted += sequence.num_pages_for(sequence._check("extend_all", count))
    if sequences and wanted > sequences[0].allocator.num_free:
        raise PoolExhausted(
            f"extend_all: wanted {wanted} pages, {sequences[0].allocator.num_free} are free; nothing was changed"
        )
    return [sequence.extend(count) for sequence, count in zip(sequences, num_tokens, strict=True)]


def fill_page_table(sequences: Sequence[SequencePages], table: npt.NDArray[np.int32]) -> None:
    """Write the pages of each sequence into its row of a padded table, and -1 behind them.

    Args:
        sequences: only read.
        table: int32 `[rows, pages]`; rows after the last sequence are not written.

    Raises:
        InvalidRequest: the table has another dtype, too few rows or too short rows; nothing was written.
    """
    if table.ndim != 2 or table.dtype != np.int32 or len(table) < len(sequences):
        raise InvalidRequest(
            f"fill_page_table: wanted int32 of at least {len(sequences)} rows, got {table.dtype} {list(table.shape)}"
        )
    longest = max((sequence.num_pages for sequence in sequences), default=0)
    if longest > table.shape[1]:
        raise InvalidRequest(f"fill_page_table: wanted rows of at least {longest} pages, got {table.shape[1]}")
    for row, sequence in zip(table, sequences, strict=False):
        row[: sequence.num_pages] = sequence.pages
        row[sequence.num_pages :] = -1

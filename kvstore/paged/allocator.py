"""The pages of one group: which are free, and how many references the others have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest, PoolExhausted
from kvstore.paged.units import NO_PAGES, Pages, as_ids, check_count, check_num_pages, check_page_size


class PageAllocator:
    """Give out pages, and take a page back when its last reference goes.

    A page is the unit of ownership: `page_size` neighbouring token slots, the first of which is a multiple of
    `page_size`. Tokens are counted by `SequencePages`. Calls must come from one thread at a time.

    Args:
        num_pages: pages of the engine's cache; their ids are 0 .. num_pages - 1.
        page_size: tokens of a page, 1 .. 256.

    Raises:
        ConfigError: one of them is out of range.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = check_num_pages(num_pages)
        self.page_size = check_page_size(page_size)
        # A stack whose top is its first free place. The last pages that came back are the first to go out again.
        self._stack: Pages = np.arange(self.num_pages, dtype=np.int32)
        self._top = 0
        self._is_used = np.zeros(self.num_pages, np.bool_)
        self._more_refs: dict[int, int] = {}  # References beside the first one, of the few pages that have some.

    @property
    def num_free(self) -> int:
        """Return how many pages are free."""
        return self.num_pages - self._top

    def num_refs(self, page: int) -> int:
        """Return the references to one page; 0 if it is free.

        Raises:
            InvalidRequest: there is no such page.
        """
        (known,) = as_ids("num_refs", "pages", [page], self.num_pages).tolist()
        return int(self._is_used[known]) + self._more_refs.get(known, 0)

    def alloc(self, num_pages: int) -> Pages:
        """Take free pages, each with one reference.

        Returns:
            int32 `[num_pages]`, a new array. The caller owns the pages until it frees them.

        Raises:
            InvalidRequest: num_pages is negative or no integer.
            PoolExhausted: fewer pages are free; none was taken.
        """
        wanted = check_count("alloc", "num_pages", num_pages)
        if wanted == 0:
            return NO_PAGES
        if wanted > self.num_free:
            raise PoolExhausted(
                f"alloc: wanted {wanted} pages, {self.num_free} of {self.num_pages} are free; evict or release some"
            )
        pages = self._stack[self._top : self._top + wanted].copy()
        self._top += wanted
        self._is_used[pages.astype(np.intp)] = True  # NumPy's own conversion of an index takes longer.
        return pages

    def share(self, pages: Sequence[int] | npt.ArrayLike) -> None:
        """Add a reference to each page, for one more owner.

        Raises:
            InvalidRequest: a page is free, unknown, or named twice; nothing was changed.
        """
        for page in self._held("share", pages).tolist():
            self._more_refs[page] = self._more_refs.get(page, 0) + 1

    def free(self, pages: Sequence[int] | npt.ArrayLike) -> int:
        """Give up one reference to each page; those without references are free.

        Returns:
            How many pages became free.

        Raises:
            InvalidRequest: a page is free already, unknown, or named twice; nothing was changed.
        """
        return self.give_back(self._held("free", pages))

    def free_slots(self, slots: Sequence[int] | npt.ArrayLike) -> int:
        """Give up one reference to each page, named by all of its token slots in any order.

        Returns:
            How many pages became free.

        Raises:
            InvalidRequest: some slots of a page are missing, or as for `free`; nothing was changed.
        """
        ids = np.sort(as_ids("free_slots", "slots", slots, self.num_pages * self.page_size))
        pages, counts = np.unique(ids // self.page_size, return_counts=True)
        partial = pages[counts != self.page_size]
        if partial.size:
            raise InvalidRequest(
                f"free_slots: wanted all {self.page_size} slots of each page, got a part of page {int(partial[0])}; "
                "name whole pages, nothing was changed"
            )
        return self.free(pages)

    def give_back(self, pages: npt.NDArray[np.integer]) -> int:
        """Give up references without checks: only for different pages that the caller surely owns."""
        if self._more_refs:
            pages = np.array([page for page in pages.tolist() if not self._drop_ref(page)], np.int32)
        self._is_used[pages.astype(np.intp)] = False
        begin = self._top - len(pages)
        self._stack[begin : self._top] = pages
        self._top = begin
        return len(pages)

    def check_integrity(self) -> None:
        """Check that each page is either free once or has references.

        Raises:
            AssertionError: it is not so, which is an error of this class.
        """
        free = self._stack[self._top :]
        assert 0 <= self._top <= self.num_pages, self._top
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert not self._is_used[free].any(), "a free page has references"
        assert int(self._is_used.sum()) == self._top, "a page is lost"
        assert all(self._is_used[page] and count > 0 for page, count in self._more_refs.items()), "wrong references"

    def _drop_ref(self, page: int) -> bool:
        """Give up one of several references; False if there is only one."""
        count = self._more_refs.get(page, 0)
        if count > 1:
            self._more_refs[page] = count - 1
        elif count:
            del self._more_refs[page]
        return count > 0

    def _held(self, verb: str, pages: Sequence[int] | npt.ArrayLike) -> npt.NDArray[np.int64]:
        ids = as_ids(verb, "pages", pages, self.num_pages)
        free = ids[~self._is_used[ids]]
        if free.size:
            raise InvalidRequest(
                f"{verb}: wanted pages that are in use, got page {int(free[0])}, which is free; nothing was changed"
            )
        return ids

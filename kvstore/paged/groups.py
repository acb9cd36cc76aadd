"""Groups of layers that share page ids, and how much of a prefix each needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.paged.units import check_num_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGroup:
    """Layers with one cache and one set of page ids.

    Args:
        window_tokens: tokens that a token sees, itself included, in layers with a sliding window; None for layers
            that see all tokens.
        num_pages: pages of this group; None for as many as the cache says.

    Raises:
        ConfigError: a number is out of range.
    """

    window_tokens: int | None = None
    num_pages: int | None = None

    def __post_init__(self) -> None:
        window = self.window_tokens
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 2):
            raise ConfigError(f"PageGroup: wanted window_tokens as an integer >= 2, or None, got {window!r}")
        if self.num_pages is not None:
            check_num_pages(self.num_pages)

    def first_page(self, num_tokens: int, page_size: int) -> int:
        """Return the first page that the token after `num_tokens` tokens needs."""
        if self.window_tokens is None:
            return 0
        return max(0, num_tokens - self.window_tokens + 1) // page_size


def longest_usable(is_present: npt.NDArray[np.bool_], group: PageGroup, page_size: int) -> npt.NDArray[np.bool_]:
    """Return for each number of leading pages, 0 .. n, whether all pages are there that the next token needs.

    Args:
        is_present: bool `[n]`, which pages of a prefix a window group has.
        group: a group with a window.
        page_size: tokens of a page.

    Returns:
        bool `[n + 1]`; the first is True.
    """
    ends = np.arange(len(is_present) + 1, dtype=np.int64)
    missing = np.full(len(ends), -1, np.int64)  # The last missing page before each end.
    missing[1:] = np.where(is_present, -1, ends[:-1])
    np.maximum.accumulate(missing, out=missing)
    assert group.window_tokens is not None
    first = np.maximum(0, ends * page_size - group.window_tokens + 1) // page_size
    return first > missing

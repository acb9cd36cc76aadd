"""Groups of layers that share page ids, and how much of a prefix each needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
        align_tokens: windows begin and end at multiples of this: with the block size of a store, a request always
            keeps the whole blocks that a load or a hand-off up to its last whole block would need.

    Raises:
        ConfigError: a number is out of range.
    """

    window_tokens: int | None = None
    num_pages: int | None = None
    align_tokens: int = 1

    def __post_init__(self) -> None:
        window = self.window_tokens
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 2):
            raise ConfigError(f"PageGroup: wanted window_tokens as an integer >= 2, or None, got {window!r}")
        align = self.align_tokens
        if not isinstance(align, int) or isinstance(align, bool) or align < 1:
            raise ConfigError(f"PageGroup: wanted align_tokens as an integer >= 1, got {align!r}")
        if self.num_pages is not None:
            check_num_pages(self.num_pages)

    def first_page(self, num_tokens: int, page_size: int) -> int:
        """Return the first page that a request with `num_tokens` tokens keeps.

        It has what the last token sees, not only what the next one does: if KV came whole from elsewhere, the last
        token is computed again for its logits.
        """
        if self.window_tokens is None:
            return 0
        return int(_first_pages(np.int64(num_tokens), self, page_size, self.window_tokens))


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
    first = _first_pages(ends * page_size, group, page_size, group.window_tokens - 1)
    usable: npt.NDArray[np.bool_] = first > missing
    return usable


def _first_pages(num_tokens: Any, group: PageGroup, page_size: int, num_seen: int) -> Any:
    """Return the page where the last `num_seen` tokens begin, of each number of tokens."""
    # A match ends at a page, a load or a hand-off at a stored block: windows begin as the last such end needs it.
    unit, align = math.lcm(page_size, group.align_tokens), group.align_tokens
    first = np.maximum(0, num_tokens // unit * unit - num_seen)
    return first // align * align // page_size

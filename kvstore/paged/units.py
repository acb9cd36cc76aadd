"""Tokens, pages and slots: the only place where one unit becomes another, and where arguments are checked.

    page of a token = position // page_size        slot of a token = page * page_size + position % page_size

A page that is not there is -1, and so are the slots in it. Page 0 is a page like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, InvalidRequest

Pages = npt.NDArray[np.int32]
"""Page ids of one group."""
Slots = npt.NDArray[np.int64]
"""Token slots of one group."""

MAX_PAGE_SIZE = 256
"""Tokens of the largest page."""
NO_PAGES: Pages = np.empty(0, np.int32)
NO_PAGES.flags.writeable = False


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return the number of pages that hold this many tokens; the last one may be partial."""
    return -(-num_tokens // page_size)


def last_page_tokens(num_tokens: int, page_size: int) -> int:
    """Return the tokens in the last page of a sequence: 1 .. page_size, and 0 only for an empty sequence."""
    return (num_tokens - 1) % page_size + 1 if num_tokens else 0


def slots_of(pages: Pages, page_size: int, start: int, stop: int) -> Slots:
    """Return the slots of the tokens `[start, stop)` of a sequence; -1 for tokens of a missing page.

    Args:
        pages: int32, the pages of the sequence from its first token on; at least those of token `stop`.
        page_size: tokens of a page.
        start: first token.
        stop: end of the tokens.

    Returns:
        int64 `[stop - start]`, a new array.
    """
    slots = present_slots(pages, page_size, start, stop)
    return slots if not len(slots) or int(slots.min()) >= 0 else np.where(slots < 0, np.int64(-1), slots)


def present_slots(pages: Pages, page_size: int, start: int, stop: int) -> Slots:
    """Return what `slots_of` does, of pages none of which is missing."""
    first = start // page_size
    slots = pages[first : pages_for(stop, page_size)].astype(np.int64)
    if page_size > 1:
        slots = (slots[:, None] * page_size + np.arange(page_size)).ravel()
    return slots[start - first * page_size : stop - first * page_size]


def check_count(verb: str, name: str, value: Any, most: int | None = None) -> int:
    """Return a count as an int.

    Raises:
        InvalidRequest: not an integer, negative, or above `most`.
    """
    bound = "" if most is None else f" and <= {most}"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidRequest(f"{verb}: wanted {name} as an integer >= 0{bound}, got {value!r}")
    if value < 0 or (most is not None and value > most):
        raise InvalidRequest(f"{verb}: wanted {name} >= 0{bound}, got {value}; nothing was changed")
    return int(value)


def check_page_size(page_size: Any) -> int:
    """Return the tokens of a page as an int.

    Raises:
        ConfigError: not an integer in [1, 256].
    """
    whole = isinstance(page_size, int | np.integer) and not isinstance(page_size, bool)
    if not whole or not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ConfigError(f"wanted page_size as an integer in [1, {MAX_PAGE_SIZE}] tokens, got {page_size!r}")
    return int(page_size)


def check_num_pages(num_pages: Any) -> int:
    """Return the number of pages of a group as an int.

    Raises:
        ConfigError: not an integer in [1, 2**31).
    """
    whole = isinstance(num_pages, int | np.integer) and not isinstance(num_pages, bool)
    if not whole or not 1 <= num_pages < 1 << 31:
        raise ConfigError(f"wanted num_pages as an integer in [1, 2**31), got {num_pages!r}")
    return int(num_pages)


def as_ids(verb: str, name: str, ids: Sequence[int] | npt.ArrayLike, end: int) -> npt.NDArray[np.int64]:
    """Return different ids in `[0, end)` as an int64 array; an empty list is allowed.

    Raises:
        InvalidRequest: not a flat list of integers, one is outside, or one comes twice.
    """
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as cause:
        raise InvalidRequest(f"{verb}: wanted {name} as a flat list of integers, got {type(ids).__name__}") from cause
    if array.ndim == 1 and array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(
            f"{verb}: wanted {name} as a flat list of integers, got {array.ndim} dims of {array.dtype}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= end:
        raise InvalidRequest(f"{verb}: wanted {name} in [0, {end}), got {low}..{high}; nothing was changed")
    flat = array.astype(np.int64)
    ordered = np.sort(flat)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise InvalidRequest(f"{verb}: wanted different {name}, got {int(twice[0])} twice; nothing was changed")
    return flat

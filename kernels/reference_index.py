"""The oracle of index.cu: plain loops over plain lists."""

from __future__ import annotations

from collections.abc import Sequence


def num_pages(length: int, page_size: int) -> int:
    """Return how many pages a sequence of this length takes; 0 when it is empty."""
    return -(-length // page_size)


def slots_to_pages(slots: Sequence[int], lengths: Sequence[int], page_size: int) -> list[int]:
    """Return the pages of all sequences; -1 where a page's tokens do not lie in it, each at its own offset."""
    pages, at = [], 0
    for length in lengths:
        mine, at = list(slots[at : at + length]), at + length
        for begin in range(0, length, page_size):
            held = mine[begin : begin + page_size]
            right = held[0] >= 0 and held[0] % page_size == 0 and held == list(range(held[0], held[0] + len(held)))
            pages.append(held[0] // page_size if right else -1)
    return pages


def pages_to_slots(pages: Sequence[int], lengths: Sequence[int], page_size: int) -> list[int]:
    """Return the token slots of all sequences; -1 for the tokens of a missing page."""
    slots, at = [], 0
    for length in lengths:
        for token in range(length):
            page = pages[at + token // page_size]
            slots.append(page * page_size + token % page_size if page >= 0 else -1)
        at += num_pages(length, page_size)
    return slots


def repack_pages(table: Sequence[Sequence[int]], row_ids: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the first `counts[i]` pages of row `row_ids[i]`, one sequence after another."""
    return [page for row, count in zip(row_ids, counts, strict=True) for page in table[row][:count]]


def last_pages(slots: Sequence[int], lengths: Sequence[int], page_size: int) -> tuple[list[int], list[int]]:
    """Return the tokens in each sequence's last page and the slot of its last token; 0 and -1 when it is empty."""
    counts, last, at = [], [], 0
    for length in lengths:
        at += length
        counts.append((length - 1) % page_size + 1 if length else 0)
        last.append(slots[at - 1] if length else -1)
    return counts, last

"""Find out how much of a long prompt each holder has, with a few probes.

A store evicts a block before the blocks that it builds on. So which blocks of a prompt a node has is one cut: all
before it, none behind it, and about ten probes find it in a thousand blocks. Nodes with the same cut share them.
"""

from __future__ import annotations

from collections.abc import Callable

#: More probes than this take as long as a walk along all blocks; so many different cuts are rare.
MOST_PROBES = 64


def cuts_of(count: int, holders: Callable[[int], int], most_probes: int = MOST_PROBES) -> list[tuple[int, int]] | None:
    """Return where the holders of a prompt's first block end, as (number of leading blocks, their bits).

    A holder has the last block of its prefix, and not the one behind it. If it lacks others before (a hole), and a
    probe meets that, the answer is None; if none does, its prefix is longer than that of a walk. It is never shorter:
    a walk ends at the first block that is lacking.

    Args:
        count: number of blocks, at least 1.
        holders: returns the lives that have a block, by its number, as an integer with a bit for each.
        most_probes: calls of `holders` at most.

    Returns:
        Each holder once. None if a hole was met, or the probes were used up: then walk.
    """
    first = holders(0)
    last = holders(count - 1) & first if first else 0
    cuts = [(count, last)] if last else []
    #: The bits at both ends of ranges of blocks; those of the first that are not at the second have their cut between.
    ranges, num_probes = [(0, first, count - 1, last)], 2
    while ranges:
        low, at_low, high, at_high = ranges.pop()
        leaving = at_low & ~at_high
        if not leaving:
            continue
        if high - low == 1:
            cuts.append((high, leaving))
            continue
        if num_probes == most_probes:
            return None
        middle = (low + high) // 2
        at_middle, num_probes = holders(middle) & first, num_probes + 1
        if at_middle & ~at_low or at_high & ~at_middle:
            return None
        ranges += ((low, at_low, middle, at_middle), (middle, at_middle, high, at_high))
    return cuts

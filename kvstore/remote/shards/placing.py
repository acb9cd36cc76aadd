"""Choose the shard of a chain, and put the answers of several shards together."""

from __future__ import annotations

from collections.abc import Iterable


def shard_of(root_key: int, num_shards: int) -> int | None:
    """Return the shard that knows the blocks of a chain; None where its root is not known, so that all may."""
    if num_shards == 1:
        return 0
    return root_key % num_shards if root_key else None


def merged(answers: Iterable[list[tuple[str, int]]]) -> list[tuple[str, int]]:
    """Return (node, length of its prefix), longest first, from answers of several shards to one question."""
    longest = dict[str, int]()
    for answer in answers:
        for node, count in answer:
            longest[node] = max(count, longest.get(node, 0))
    return sorted(longest.items(), key=lambda item: (-item[1], item[0]))

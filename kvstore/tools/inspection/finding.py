"""Find one namespace, or one chain, among the answers of several nodes."""

from __future__ import annotations

from typing import Any

from kvstore.blocks.chain import BlockHashes
from kvstore.bounds import clip
from kvstore.errors import BlockNotFound, InvalidRequest

Answers = dict[str, Any]
_MOST_NAMED = 5
_SHORT = 16


def is_error(answer: Any) -> bool:
    """Return whether a node's answer is that it has none."""
    return isinstance(answer, dict) and "error" in answer


def of_how_many(nodes: Answers) -> str:
    """Return how many nodes answered, for errors: what is not found may be on the others."""
    num_silent = sum(map(is_error, nodes.values()))
    others = f"; {num_silent} more did not answer" if num_silent else ""
    return f"{len(nodes) - num_silent} node(s) answered{others}"


def the_namespace(nodes: Answers, prefix: str) -> bytes:
    """Return the digest of the only namespace that begins with a prefix.

    Raises:
        InvalidRequest: none does, or several do.
    """
    found = sorted({row["namespace"] for each in nodes.values() if not is_error(each) for row in each["namespaces"]})
    if not found:
        raise InvalidRequest(
            f"namespace: wanted the beginning of a namespace's digest, got {clip(prefix)}, which no node knows "
            f"({of_how_many(nodes)}); `kvstore inspect namespace` lists them"
        )
    if len(found) > 1:
        named = ", ".join(each[: max(_SHORT, len(prefix) + 2)] for each in found[:_MOST_NAMED])
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise InvalidRequest(
            f"namespace: wanted the beginning of one namespace's digest, got {clip(prefix)}, which is that of "
            f"{named}{more}; give more digits"
        )
    return bytes.fromhex(found[0])


def the_chain(nodes: Answers, hashes: list[bytes]) -> BlockHashes:
    """Return the longest chain that a node found for some hashes, with those that come after it.

    Raises:
        BlockNotFound: no node has any of these blocks.
        InvalidRequest: they are not of one chain, or not in its order.
    """
    runs = [each for each in nodes.values() if isinstance(each, BlockHashes) and len(each)]
    if not runs:
        raise BlockNotFound(
            f"--hash: wanted the hash of a block that is in memory or on disk, got {hashes[-1].hex()[:_SHORT]}..., "
            f"which no node has ({of_how_many(nodes)}); it was evicted or never stored, or the hash is an "
            "engine's own: use what Namespace.block_hashes gives"
        )
    best = min(runs, key=lambda run: (-run.start - len(run), run.start))
    if len(set(hashes)) < len(hashes):
        twice = next(each for each in hashes if hashes.count(each) > 1)
        raise _no_chain(twice, twice)
    places = {best.hash_at(place): place for place in range(len(best))}
    last = best.hash_at(len(best) - 1)
    end = hashes.index(last) + 1 if last in hashes else len(hashes)
    _check_order(hashes, end, best, places)
    for run in runs:
        other = run.hash_at(len(run) - 1)
        if run.start + len(run) > best.start and other not in places:
            raise _no_chain(other, last)
    return BlockHashes(best.namespace, best.parent, best.start, best.data + b"".join(hashes[end:]), best.root_key)


def _check_order(hashes: list[bytes], end: int, best: BlockHashes, places: dict[bytes, int]) -> None:
    """Refuse hashes that are not those of blocks of a chain, in its order; those from `end` on come after it."""
    before, last = -1, best.hash_at(len(best) - 1)
    for number, each in enumerate(hashes):
        place = places.get(each)
        # Without its root a chain cannot tell which blocks came before.
        if place is None and number < end and best.start == 0 and last in hashes:
            raise _no_chain(each, last)
        if place is not None and place <= before:
            raise _no_chain(each, best.hash_at(before))
        before = before if place is None else place


def _no_chain(one: bytes, other: bytes) -> InvalidRequest:
    return InvalidRequest(
        f"--hash: wanted blocks of one chain, each once and in its order, got {one.hex()[:_SHORT]}... and "
        f"{other.hex()[:_SHORT]}..., which are not; give the last block's hash alone, which finds those before it"
    )


def absent(nodes: Answers, chain: BlockHashes) -> list[tuple[int, int]]:
    """Return [start, end) of the runs of a chain that no node has, as far as the nodes answered."""
    has = bytearray(len(chain))
    for each in nodes.values():
        for run in [] if is_error(each) else each["runs"]:
            first = run["start"] - chain.start
            has[first : first + run["num_blocks"]] = b"\1" * run["num_blocks"]
    found, at = [], 0
    while (first := has.find(0, at)) >= 0:
        at = has.find(1, first)
        at = len(has) if at < 0 else at
        found.append((chain.start + first, chain.start + at))
    return found

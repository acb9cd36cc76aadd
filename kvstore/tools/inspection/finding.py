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
    """
    runs = [each for each in nodes.values() if isinstance(each, BlockHashes) and len(each)]
    if not runs:
        raise BlockNotFound(
            f"--hash: wanted the hash of a block that is in memory or on disk, got {hashes[-1].hex()[:_SHORT]}..., "
            f"which no node has ({of_how_many(nodes)}); it was evicted or never stored, or the hash is an "
            "engine's own: use what Namespace.block_hashes gives"
        )
    best = min(runs, key=lambda run: (-run.start - len(run), run.start))
    last = best.hash_at(len(best) - 1)
    rest = hashes[hashes.index(last) + 1 :] if last in hashes else []
    return BlockHashes(best.namespace, best.parent, best.start, best.data + b"".join(rest), best.root_key)


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

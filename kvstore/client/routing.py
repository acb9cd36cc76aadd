"""Which node should serve a prompt: the one where its first token comes soonest.

Routers that only count equal prefixes send everything to the node that has it, until that node is the slowest. Routers
that only balance compute everything anew. Here both are seconds, and are added. The idea is that of a cost for overlap
and load, as Dynamo's KV router has it; the terms are measured speeds instead of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks.shape import KVShape
from kvstore.bounds import check_count, check_text, clip
from kvstore.errors import InvalidRequest

_MOST_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """What a router knows about the engines of one node.

    Args:
        node_id: of Ray.
        num_waiting_tokens: tokens of prompts that wait there or are being computed.
        num_running: requests that decode there.

    Raises:
        InvalidRequest: a value is no such count, or node_id is no text.
    """

    node_id: str
    num_waiting_tokens: int = 0
    num_running: int = 0

    def __post_init__(self) -> None:
        check_text("node_id", self.node_id)
        check_count("num_waiting_tokens", self.num_waiting_tokens, 0, _MOST_TOKENS)
        check_count("num_running", self.num_running, 0, _MOST_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRank:
    """What serving a prompt on a node would take.

    Args:
        node_id: of Ray.
        num_blocks: leading blocks of the prompt that this node has.
        num_fetched: further leading blocks that it would fetch from another node.
        wait_s: until its engines have computed what waits there.
        fetch_s: of the blocks from the other node.
        compute_s: of the tokens that no node has.
    """

    node_id: str
    num_blocks: int
    num_fetched: int
    wait_s: float
    fetch_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """Return the expected time to the first token."""
        return self.wait_s + self.fetch_s + self.compute_s


def rank_nodes(
    prefixes: Iterable[tuple[str, int]],
    loads: Sequence[NodeLoad],
    *,
    shape: KVShape,
    num_tokens: int,
    prefill_tokens_per_s: float,
    fetch_bytes_per_s: float,
    decode_tokens: float = 0.0,
) -> list[NodeRank]:
    """Rank nodes for a prompt, the one with the soonest first token first.

    Prefixes are hints: what is gone meanwhile is computed, so a stale one costs time and nothing else.

    Args:
        prefixes: (node, leading blocks of the prompt that it has), as `Store.locate(hashes)` returns them; nodes that
            are not in it have none.
        loads: of the nodes to choose from; others cannot serve, but are fetched from.
        shape: of the blocks.
        num_tokens: of the prompt. The last token is always computed.
        prefill_tokens_per_s: how fast an engine computes prompts; above 0.
        fetch_bytes_per_s: how fast a node gets blocks of another one; 0 where nothing is fetched.
        decode_tokens: tokens of prompts that a running request costs as much time as; 0 if decoding does not slow
            prompts.

    Returns:
        A rank for each load, in a new list; equal ones in the order of `loads`.

    Raises:
        InvalidRequest: a node comes twice, or a number is out of range.
    """
    count = check_count("num_tokens", num_tokens, 1, _MOST_TOKENS)
    speeds = (prefill_tokens_per_s, fetch_bytes_per_s, decode_tokens)
    if not all(isinstance(each, int | float) and 0 <= each <= _MOST_TOKENS for each in speeds) or not speeds[0]:
        raise InvalidRequest(
            "rank_nodes: wanted prefill_tokens_per_s above 0, fetch_bytes_per_s and decode_tokens of at least 0, got "
            f"{prefill_tokens_per_s!r}, {fetch_bytes_per_s!r} and {decode_tokens!r}"
        )
    block_size = shape.block_size
    held = {
        check_text("prefixes", node): min(check_count("prefixes", blocks, 0, _MOST_TOKENS), count // block_size)
        for node, blocks in prefixes
    }
    longest = max(held.values(), default=0)
    ranks = list[NodeRank]()
    for load in loads:
        if not isinstance(load, NodeLoad):
            raise InvalidRequest(f"rank_nodes: wanted a NodeLoad for each node, got {clip(load)}")
        own = held.get(load.node_id, 0)
        compute_s = _compute_s(count, own * block_size, prefill_tokens_per_s)
        fetched, fetch_s = longest - own, 0.0
        if fetched and fetch_bytes_per_s:
            fetch_s = fetched * shape.block_bytes / fetch_bytes_per_s
            less_s = _compute_s(count, longest * block_size, prefill_tokens_per_s)
        if not fetch_s or fetch_s + less_s >= compute_s:
            fetched, fetch_s = 0, 0.0
        else:
            compute_s = less_s
        waiting = load.num_waiting_tokens + load.num_running * decode_tokens
        ranks.append(
            NodeRank(
                node_id=load.node_id,
                num_blocks=own,
                num_fetched=fetched,
                wait_s=waiting / prefill_tokens_per_s,
                fetch_s=fetch_s,
                compute_s=compute_s,
            )
        )
    if len({rank.node_id for rank in ranks}) != len(ranks):
        raise InvalidRequest("rank_nodes: wanted every node once in loads, got one twice")
    return sorted(ranks, key=lambda rank: rank.seconds)


def _compute_s(num_tokens: int, num_known: int, tokens_per_s: float) -> float:
    """Return the time to compute a prompt behind known tokens; the last one is always computed."""
    return max(1, num_tokens - num_known) / tokens_per_s

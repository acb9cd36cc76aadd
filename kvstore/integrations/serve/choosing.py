"""Rank the replicas for a prompt: from what the store's nodes have, what replicas were sent, and what waits there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.blocks.shape import KVShape
from kvstore.client.routing import NodeLoad, NodeRank, rank_nodes
from kvstore.integrations.serve.options import RouterOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """What a router knows about one replica.

    Args:
        replica: its name, unlike those of all nodes.
        node_id: of Ray, where it runs; "" if that is not known.
        num_waiting_tokens: tokens of prompts that wait there or are being computed.
        num_running: requests there.
        pressure: from 0 to 1, of how much use what is that a new block would push out there.
    """

    replica: str
    node_id: str
    num_waiting_tokens: int
    num_running: int
    pressure: float = 0.0


def rank_replicas(
    states: Sequence[ReplicaState],
    on_nodes: Iterable[tuple[str, int]],
    routed: Mapping[str, int],
    *,
    shape: KVShape,
    num_tokens: int,
    options: RouterOptions,
) -> list[NodeRank]:
    """Rank replicas for a prompt, the one with the soonest first token first, `work_weight` and `evict_weight` apart.

    What a replica computes also delays the requests behind this one. Without a weight for that, every short queue is a
    reason to compute a prefix once more. And a new block pushes out another one, which may have to be computed again.
    So it goes where the place of a block is worth least.

    A replica has what its node's store has, or what it was sent before, whichever is longer. What only other nodes
    have would be fetched from them; what other replicas have in their engines alone would not.

    Args:
        states: of the replicas to choose from; of equal ones the first comes first.
        on_nodes: (node, leading blocks of the prompt that its store may have).
        routed: leading blocks that each replica was sent before.
        shape: of the blocks.
        num_tokens: of the prompt.
        options: speeds.

    Returns:
        A rank for each state; `node_id` is the replica's name.

    Raises:
        InvalidRequest: a number is out of range, or a replica comes twice.
    """
    stored = dict(on_nodes)
    longest = max(stored.values(), default=0)
    # What is in no store is no source for others, so each replica is ranked beside the stores alone.
    ranks = list[NodeRank]()
    for state in states:
        own = max(stored.get(state.node_id, 0), routed.get(state.replica, 0))
        load = NodeLoad(
            node_id=state.replica, num_waiting_tokens=state.num_waiting_tokens, num_running=state.num_running
        )
        ranks += rank_nodes(
            [(state.replica, own), ("the store of another node", longest)],
            [load],
            shape=shape,
            num_tokens=num_tokens,
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            fetch_bytes_per_s=options.fetch_bytes_per_s,
            decode_tokens=options.decode_tokens,
        )
    num_blocks, pressures = num_tokens // shape.block_size, {state.replica: state.pressure for state in states}

    def cost_s(rank: NodeRank) -> float:
        num_new = max(0, num_blocks - rank.num_blocks) * shape.block_size
        evict_s = pressures[rank.node_id] * num_new / options.prefill_tokens_per_s
        return rank.seconds + options.work_weight * rank.compute_s + options.evict_weight * evict_s

    return sorted(ranks, key=cost_s)

"""Replay a trace against pools of the store: their index and their rights, and no bytes.

Of each request the blocks that are there are leased, the others are stored in the same moment, and the lease is
released: what an engine does with a prompt, with all time between these steps left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.blocks.chain import BlockHashes
from kvstore.config import EVICTION_POLICIES
from kvstore.pool.eviction.make import make_policy
from kvstore.pool.pool import Pool
from kvstore.replay.tiers import TierNode, hits_of, outcome_of
from kvstore.replay.traces import Found, Outcome, Trace

#: Policies of the real pool, in the order of the table.
POOL_POLICIES = ("default", "lru")
ROUTINGS = ("round-robin", "prefix")
_OWNER = "replay"
#: A lease ends with its request, so no deadline is ever looked at.
_NEVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class Nodes:
    """How many nodes there are, and how a request finds its own: see `kvstore.replay.report.Plan`."""

    count: int = 1
    routing: str = "round-robin"
    tie_blocks: int = 0


ONE_NODE = Nodes()


class TraceClock:
    """The time of the request that is replayed now."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return seconds since the beginning of the trace."""
        return self.now_s


def make_pool(
    policy_name: str,
    num_blocks: int,
    now_s: Callable[[], float],
    on_published: Callable[[bytes, list[int], str], None] | None = None,
) -> Pool:
    """Return an empty pool.

    Args:
        policy_name: one of `POOL_POLICIES`.
        num_blocks: its capacity.
        now_s: the clock of the trace.
        on_published: see `Pool`.
    """
    assert policy_name in POOL_POLICIES, policy_name
    name = EVICTION_POLICIES[0] if policy_name == "default" else policy_name
    policy = make_policy(name, num_blocks, now_s)
    return Pool(num_blocks, eviction=policy, on_published=on_published, now_s=now_s)


def use_blocks(pool: Pool, chain: BlockHashes) -> int:
    """Lease what is there of a prompt, store the rest, release; return how many leading blocks were there."""
    grant = pool.pin_prefix(chain, _OWNER, _NEVER_S)
    if grant.num_blocks < len(chain):
        ticket = pool.prepare_store(chain, _OWNER)
        if ticket.write_id:
            pool.complete_store(ticket.write_id, _OWNER)
    pool.release(grant.lease_id, _OWNER)
    return grant.num_blocks


def replay_pools(
    trace: Trace, policy: str, num_blocks: int, tick: Callable[[], None], nodes: Nodes = ONE_NODE
) -> Outcome:
    """Replay a trace against one pool for each node.

    Args:
        trace: the requests.
        policy: one of `POOL_POLICIES`.
        num_blocks: capacity of each pool.
        tick: called after each request.
        nodes: how many pools, and which of them gets a request.
    """
    clock = TraceClock()
    pools = [make_pool(policy, num_blocks, clock) for _ in range(nodes.count)]
    given, hits = [0] * nodes.count, array("q")
    for index, request in enumerate(trace.requests):
        clock.now_s = request.time_s
        chain = trace.chain_of(request)
        node = choose_node(nodes, index, given, [pool.lookup for pool in pools], chain)
        hits.append(use_blocks(pools[node], chain))
        given[node] += len(chain)
        tick()
    num_evictions = sum(pool.stats().num_evicted for pool in pools)
    return Outcome(hits=hits, num_evictions=num_evictions, node_references=tuple(given))


def replay_tiers(
    trace: Trace,
    policy: str,
    num_blocks: int,
    disk_blocks: int,
    tick: Callable[[], None],
    nodes: Nodes = ONE_NODE,
    restart_at: int = 0,
) -> Outcome:
    """Replay a trace against nodes that have a memory and a disk, and take from each other what they miss.

    Args:
        trace: the requests.
        policy: of memory and disk, one of `POOL_POLICIES`.
        num_blocks: capacity of each memory.
        disk_blocks: capacity of each disk; 0 for none.
        tick: called after each request.
        nodes: how many, and which of them gets a request.
        restart_at: number of requests before all nodes lose their memory; 0 for never.
    """
    clock = TraceClock()
    stores = [
        TierNode(lambda count, told: make_pool(policy, count, clock, told), num_blocks, disk_blocks)
        for _ in range(nodes.count)
    ]
    given, found = [0] * nodes.count, list[Found]()
    for index, request in enumerate(trace.requests):
        if restart_at and index == restart_at:
            for store in stores:
                store.restart()
        clock.now_s = request.time_s
        chain = trace.chain_of(request)
        node = choose_node(nodes, index, given, [store.num_here for store in stores], chain)
        found.append(stores[node].load(chain, stores[:node] + stores[node + 1 :]))
        if found[-1].num_blocks < len(chain):
            stores[node].save(chain)
        for store in stores:
            store.write_behind()
        given[node] += len(chain)
        tick()
    for store in stores:
        store.count_evictions()
    return Outcome(
        hits=hits_of(found),
        num_evictions=sum(store.num_evicted for store in stores),
        node_references=tuple(given),
        tiers=outcome_of(stores, found),
    )


def choose_node(
    nodes: Nodes,
    index: int,
    given: Sequence[int],
    prefix_of: Sequence[Callable[[BlockHashes], int]],
    chain: BlockHashes,
) -> int:
    """Return the node that gets a request.

    Args:
        nodes: how many there are, and the routing.
        index: number of requests before this one.
        given: how many blocks were in the requests that each node was given.
        prefix_of: returns how many leading blocks of a chain a node has.
        chain: of the request.
    """
    if nodes.count == 1:
        return 0
    if nodes.routing == "prefix":
        return best_node([look(chain) for look in prefix_of], given, nodes.tie_blocks)
    return index % nodes.count


def best_node(prefixes: Sequence[int], given: Sequence[int], tie_blocks: int) -> int:
    """Return the node that gets a request.

    Args:
        prefixes: how many leading blocks of it each node has.
        given: how many blocks were in the requests that each node was given.
        tie_blocks: prefixes that are shorter than the longest by at most so many blocks count as equal.
    """
    enough = max(prefixes) - tie_blocks
    return min((node for node, count in enumerate(prefixes) if count >= enough), key=lambda node: (given[node], node))

"""Hand-offs between engines on two nodes of a real cluster, over real NIXL: right bytes once, or a reason."""

from __future__ import annotations

import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kvstore
from kvstore.blocks.chunking import plan_chunks
from kvstore.client.results import MissReason
from kvstore.config import StoreConfig
from kvstore.errors import StoreUnavailable

pytestmark = [pytest.mark.ray]

_seeds = itertools.count(1)
#: A block of 64 KiB: 256 of them are 16 MiB.
_LARGE = {"num_layers": 4, "num_kv_heads": 4, "head_dim": 64}
_LEASE_TTL_S = 5.0


class Handoffs:
    """A store on two nodes, and an engine on each: the first one's publishes, the second one's fetches."""

    def __init__(self, store: Any, space: Any, nodes: list[str]) -> None:
        self.store, self.space, self.nodes = store, space, nodes
        self.source: Any = None
        self.target: Any = None

    def ask(self, node: int, verb: str, *args: Any) -> Any:
        """Call a node's store; one that is gone is an error of ours."""
        from kvstore.actors.calls import call

        handle = kvstore.node_store(self.nodes[node], name=self.store.config.name)
        return call("store", getattr(handle, verb), *args, timeout_s=20)

    def stats(self, node: int) -> dict[str, Any]:
        return self.ask(node, "stats")

    def pids(self, node: int) -> dict[str, int]:
        return self.ask(node, "pids")

    def is_empty(self, node: int) -> bool:
        stats = self.stats(node)
        self.ask(node, "check_integrity")
        pool = {key: stats["pool"][f"num_{key}"] for key in ("writing", "writes", "pinned", "leases", "quarantined")}
        counts = [stats[f"num_handoff{what}"] for what in ("s", "_slots", "_fetches")]
        return not any([*counts, *pool.values()])


@pytest.fixture(scope="module", params=["default", "tcp"])
def cluster(request, ray_cluster, node_ids, make_space):
    lane = request.param
    store = kvstore.start(
        "48MiB", name=f"handoff-{lane}", lane=lane, chunk_bytes=1 << 20, lease_ttl_s=_LEASE_TTL_S,
        transfer_timeout_s=4.0,
    )  # fmt: skip
    try:
        yield Handoffs(store, make_space(**_LARGE), node_ids)
    finally:
        store.stop()


@pytest.fixture
def handoffs(cluster, open_engine, eventually):
    """The cluster with two fresh engines; afterwards nothing may be held on either node."""
    opened = [open_engine(cluster.store, cluster.space, node) for node in cluster.nodes]
    cluster.source, cluster.target = opened
    yield cluster
    for engine in opened:
        engine.client.close()
    for node in (0, 1):
        eventually(lambda node=node: cluster.is_empty(node), 15)


@pytest.fixture
def chain(handoffs, chain_of):
    """256 blocks that nothing holds."""
    return chain_of(handoffs.space, 256, next(_seeds))


def reason(result: Any) -> MissReason:
    assert result.num_blocks == 0
    assert len({failure.reason for failure in result.failed}) == 1
    return result.failed[0].reason


@pytest.mark.parametrize("num_blocks", [1, 7, 256])
def test_blocks_cross_between_nodes_once_and_leave_nothing(handoffs, chain, eventually, num_blocks):
    hashes, here = chain[:num_blocks], list(range(num_blocks))
    there = here[::-1]
    before = handoffs.stats(1)["nixl"]["num_bytes"]
    ticket = handoffs.source.publish(hashes, here)
    handoffs.source.poison(here)  # The engine's blocks are its own again.
    result = handoffs.target.fetch(ticket, hashes, there)
    assert (result.num_blocks, result.num_peer, result.num_local) == (num_blocks, num_blocks, 0)
    assert (result.peers, result.route) == ((handoffs.nodes[0],), "host")
    assert result.num_bytes == ticket.num_bytes == handoffs.stats(1)["nixl"]["num_bytes"] - before
    # Neighbours are merged within a chunk, since the slots of both sides follow each other: 1 MiB a descriptor, and
    # a begin and an end of each chunk that fill none.
    num_chunks = len(plan_chunks(num_blocks, StoreConfig().chunk_bytes * num_blocks // ticket.num_bytes))
    assert result.num_descriptors <= -(-ticket.num_bytes // (1 << 20)) + 2 * num_chunks
    for node in (0, 1):
        eventually(lambda node=node: handoffs.is_empty(node), 5)
        assert handoffs.stats(node)["pool"]["num_idle"] == 0
    assert reason(handoffs.target.fetch(ticket, hashes, there)) is MissReason.USED
    assert handoffs.target.client.lookup(chain).num_blocks == 0
    assert handoffs.store.locate(hashes) == []


def test_on_one_node_no_byte_crosses(handoffs, chain, open_engine):
    other = open_engine(handoffs.store, handoffs.space, handoffs.nodes[0])
    ticket = handoffs.source.publish(chain[:40], list(range(40)))
    result = other.fetch(ticket, chain[:40], list(range(100, 140)))
    assert result == kvstore.FetchResult(num_blocks=40, num_local=40)


def test_a_ticket_that_is_lost_costs_its_time_only(handoffs, chain, eventually):
    ticket = handoffs.source.publish(chain[:40], list(range(40)), ttl_s=2.0)
    assert handoffs.stats(0)["num_handoff_slots"] == 40
    eventually(lambda: handoffs.is_empty(0), 20)
    assert reason(handoffs.target.fetch(ticket, chain[:40], list(range(40)))) is MissReason.EXPIRED


def test_a_publisher_that_is_killed_takes_its_blocks_along(handoffs, chain, start_worker, get, eventually):
    worker = start_worker(handoffs.nodes[0])
    get(worker.open.remote("engine", handoffs.store, handoffs.space))
    ticket = get(worker.do.remote("engine", "publish", chain[:40], list(range(40)), ttl_s=600))
    time.sleep(0.6)
    assert handoffs.stats(0)["num_handoff_slots"] == 40, "it lives"
    os.kill(get(worker.pid.remote()), signal.SIGKILL)
    eventually(lambda: handoffs.is_empty(0), 20)
    assert reason(handoffs.target.fetch(ticket, chain[:40], list(range(40)))) is MissReason.OWNER_GONE


def test_a_ticket_survives_the_source_mover(handoffs, chain, eventually):
    """Its bytes are in the arena: the next mover serves them."""
    ticket = handoffs.source.publish(chain, list(range(256)), ttl_s=60)
    pid = handoffs.pids(0)["mover"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: handoffs.pids(0)["mover"] not in (0, pid), 20)
    result = eventually(lambda: (r := handoffs.target.fetch(ticket, chain, list(range(256)))).num_blocks and r, 20)
    assert result.num_blocks == 256


@pytest.fixture
def tcp(handoffs):
    """Over shared memory a source that stopped is read all the same; over TCP the READ stays open."""
    if handoffs.store.config.lane != "tcp":
        pytest.skip("needs a READ that stays open")
    return handoffs


@pytest.fixture
def under_way(tcp, chain, stopped, eventually):
    """A fetch whose READ is open, because the source's mover has stopped: (ticket, future of its result)."""
    # Connected, so that it is the READ that is met and not a handshake.
    warm = tcp.source.publish(chain[:1], [0])
    assert eventually(lambda: tcp.target.fetch(warm, chain[:1], [0]).num_blocks == 1, 10)
    ticket = tcp.source.publish(chain, list(range(256)), ttl_s=60)
    stopped(tcp.pids(0)["mover"])
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(tcp.target.fetch, ticket, chain, list(range(256)))
        eventually(lambda: tcp.stats(1)["num_handoff_fetches"] == 1, 5)
        time.sleep(0.3)
        assert not future.done()
        yield ticket, future
        stopped.resume()


def test_the_source_mover_is_killed_while_it_is_read(tcp, chain, under_way, eventually):
    ticket, future = under_way
    os.kill(tcp.pids(0)["mover"], signal.SIGKILL)
    assert future.result(20).failed[0].reason is MissReason.PEER_LOST
    again = eventually(lambda: (r := tcp.target.fetch(ticket, chain, list(range(256)))).num_blocks and r, 20)
    assert again.num_blocks == 256


def test_the_readers_mover_is_killed_while_it_reads(tcp, chain, under_way, stopped, eventually):
    ticket, future = under_way
    os.kill(tcp.pids(1)["mover"], signal.SIGKILL)
    assert future.result(20).failed[0].reason is MissReason.PEER_LOST
    # The source's mover may abort when it resumes and finds its peer gone; then there is another.
    stopped.resume()
    again = eventually(lambda: (r := tcp.target.fetch(ticket, chain, list(range(256)))).num_blocks and r, 30)
    assert again.num_blocks == 256


def test_a_fetch_that_times_out_leaves_its_slots_to_the_read_and_the_ticket_to_the_next(
    tcp, chain, under_way, stopped, eventually
):
    ticket, future = under_way
    assert future.result(20).failed[0].reason is MissReason.TIMEOUT
    assert eventually(lambda: tcp.stats(1)["pool"]["num_quarantined"], 5)
    assert tcp.stats(0)["num_handoff_slots"] == 256
    stopped.resume()
    eventually(lambda: tcp.is_empty(1), 10)
    tcp.source.client.withdraw(ticket)


def test_a_store_that_dies_takes_its_tickets_along(cluster, chain_of, open_engine, eventually):
    source, target = (open_engine(cluster.store, cluster.space, node) for node in cluster.nodes)
    chain = chain_of(cluster.space, 40, next(_seeds))
    ticket = source.publish(chain, list(range(40)))
    pid = cluster.pids(0)["store"]
    os.kill(pid, signal.SIGKILL)
    first = target.fetch(ticket, chain, list(range(40)))
    assert reason(first) in (MissReason.PEER_LOST, MissReason.STALE)
    eventually(lambda: cluster.pids(0)["store"] != pid, 20)
    eventually(lambda: reason(target.fetch(ticket, chain, list(range(40)))) is MissReason.STALE, 20)
    with pytest.raises((StoreUnavailable, kvstore.errors.PeerLost)):
        source.publish(chain, list(range(40)))
    eventually(lambda: cluster.ask(0, "ready", 5.0), 30)
    again = open_engine(cluster.store, cluster.space, cluster.nodes[0])
    ticket = again.publish(chain, list(range(40)))
    assert eventually(lambda: target.fetch(ticket, chain, list(range(40))).num_blocks == 40, 20)

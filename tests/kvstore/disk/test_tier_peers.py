"""The disks of other nodes: their blocks are known to the directory, and fetched through their memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

from disk_store import HALF, SOON_S, flip, slot_span, wait_until

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.disk.records import PAGE_BYTES
from kvstore.remote.messages import PeerLease
from kvstore.remote.peers import Peer
from kvstore.rpc.connection import Role
from tests.kvstore.conftest import SHAPE


def located(store, hashes):
    """Return how many leading blocks the directory says that each other node has."""
    return dict(store.core.state.hints.locate(hashes))


def peers_of(store):
    """Return the connections of other nodes."""
    return [each for each in [*store.core.control.server.connections] if each.role is Role.PEER]


def test_blocks_on_the_disk_of_another_node(start, cluster):
    store, other = start("a"), start("b")
    hashes = cluster.hashes(12)
    store.save(hashes)
    store.empty_memory()
    wait_until(lambda: located(other, hashes) == {"a": 12})
    result = other.load(hashes)
    assert (result.num_blocks, result.num_peer, result.num_disk, result.peers) == (12, 12, 0, ("a",))
    store.settle()
    assert store.num("num_read") == 12
    assert store.core.pool.lookup(hashes) == 12


def test_blocks_of_another_nodes_disk_leave_low_ones_before_them_low_for_a_low_job(start, cluster):
    store, other = start("a"), start("b")
    hashes = cluster.hashes(6)
    store.save(hashes)
    store.empty_memory()
    store.worker.client.save(hashes[:2], range(2), priority="low").result(10)
    other.saved = store.saved
    wait_until(lambda: located(other, hashes) == {"a": 6})
    assert other.load(hashes, priority="low").num_peer == 6
    assert store.core.pool.stats().num_low == 1, "blocks of the disk are NORMAL, and so is the one that they hang on"
    store.settle()


def test_the_directory_knows_blocks_as_long_as_one_tier_has_them(start, cluster):
    store, other = start("a", disk_capacity_bytes=1 << 16), start("b")
    hashes = cluster.hashes(5)
    store.save(hashes)
    assert located(other, hashes) == {"a": 5}
    store.empty_memory()
    store.disk.pool.check_integrity()
    wait_until(lambda: located(other, hashes) == {"a": 5})
    # Evicted from the disk, not in memory.
    for seed in range(1, 4):
        store.save(cluster.hashes(6, seed=seed), first=10)
        store.empty_memory()
    store.core.state.hints.publish_soon()
    wait_until(lambda: located(other, hashes) == {})
    assert other.load(hashes).num_blocks == 0
    # In memory only.
    store.worker.save(hashes, range(5))
    wait_until(lambda: located(other, hashes) == {"a": 5})


def test_blocks_of_an_earlier_life_are_announced(start, cluster):
    store, other = start("a"), start("b")
    hashes = cluster.hashes(12)
    store.save(hashes)
    store.restart()
    wait_until(lambda: located(other, hashes) == {"a": 12})
    assert other.load(hashes).num_peer == 12


def test_cleared_blocks_are_forgotten_by_the_directory(start, cluster):
    store, other = start("a"), start("b")
    hashes = cluster.hashes(6)
    store.save(hashes)
    store.empty_memory()
    wait_until(lambda: located(other, hashes) == {"a": 6})
    store.core.state.pool_service.clear(hashes.namespace)
    wait_until(lambda: located(other, hashes) == {})
    assert other.load(hashes).num_blocks == 0


def test_a_damaged_block_of_a_peer_is_a_miss_here(start, cluster):
    store, other = start("a"), start("b")
    hashes = cluster.hashes(12)
    store.save(hashes)
    store.empty_memory()
    wait_until(lambda: located(other, hashes) == {"a": 12})
    flip(store.slots, slot_span(store.folder, hashes[7])[0] + PAGE_BYTES + 3)
    assert other.load(hashes).num_blocks == 7
    store.settle()
    wait_until(lambda: located(other, hashes) == {"a": 7, "b": 7})


def test_a_peer_whose_disk_hangs_costs_a_part_of_the_time(start, cluster, reads):
    store, other = start("a", disk_timeout_s=0.2, call_timeout_s=1.0), start("b", transfer_timeout_s=SOON_S)
    hashes = cluster.hashes(12)
    store.save(hashes)
    store.empty_memory()
    wait_until(lambda: located(other, hashes) == {"a": 12})
    with reads.held():
        assert other.load(hashes).num_blocks == 0
        # The peer's control thread serves on.
        more = cluster.hashes(4, seed=3)
        store.save(more, first=20, is_written=False)
        assert other.load(more).num_peer == 4
    store.settle()
    wait_until(lambda: not store.disk.is_off)
    assert other.load(hashes).num_blocks == 12


def test_a_peer_without_room_in_memory(start, cluster):
    store, other = start("a", capacity_bytes=1 << 17), start("b")
    hashes = cluster.hashes(12)
    store.save(hashes)
    store.empty_memory()
    ticket = store.core.pool.reserve(26, "test")
    wait_until(lambda: located(other, hashes) == {"a": 12})
    assert other.load(hashes).num_blocks == 6
    store.core.pool.abort_store(ticket.write_id, "test")
    store.settle()
    assert other.load(hashes).num_blocks == 12


def test_two_nodes_ask_each_other_at_once(start, cluster):
    """Each has on its disk what the other wants. A16: no wait of one needs the other's."""
    store, other = start("a"), start("b")
    mine, theirs = cluster.hashes(10, seed=1), cluster.hashes(10, seed=2)
    store.save(mine)
    other.save(theirs)
    for _ in range(3):
        store.empty_memory()
        other.empty_memory()
        wait_until(lambda: located(store, theirs).get("b") == 10 and located(other, mine).get("a") == 10)
        with ThreadPoolExecutor(2) as threads:
            loads = [threads.submit(store.load, theirs), threads.submit(other.load, mine)]
            assert [load.result(2 * SOON_S).num_blocks for load in loads] == [10, 10]
        store.settle()
        other.settle()


def test_more_loads_than_threads_ask_each_other_at_once(start, cluster):
    """A16 again, now each node has so many loads under way that no thread of theirs is left to answer the other."""
    # So many at once take long on a busy machine, and time is not what is asked here.
    settings = {"call_timeout_s": SOON_S, "transfer_timeout_s": 6 * SOON_S, "capacity_bytes": 1 << 20}
    store, other, num_loads = start("a", **settings), start("b", **settings), 48
    mine, theirs = ([cluster.hashes(1, seed=base + i) for i in range(num_loads)] for base in (100, 200))
    for i in range(num_loads):
        store.save(mine[i], first=i)
        other.save(theirs[i], first=i)
    store.empty_memory()
    other.empty_memory()
    wait_until(lambda: all(located(store, one).get("b") for one in theirs))
    wait_until(lambda: all(located(other, one).get("a") for one in mine))
    jobs = []
    for i in range(num_loads):
        jobs.append(store.worker.client.load(theirs[i], [HALF + i]))
        jobs.append(other.worker.client.load(mine[i], [HALF + i]))
    assert [job.result(6 * SOON_S).num_blocks for job in jobs] == [1] * 2 * num_loads


def test_two_nodes_ask_each_other_for_what_both_have_on_disk(start, cluster, monkeypatch):
    """Other nodes were faster lately, so each asks the other first. A16: neither waits for the other's load."""
    settings = {"call_timeout_s": 6 * SOON_S, "transfer_timeout_s": 6 * SOON_S}
    stores, hashes = [start("a", **settings), start("b", **settings)], cluster.hashes(6)
    for first, store in enumerate(stores):
        store.save(hashes, first=10 * first)
        store.empty_memory()
    both, original = threading.Barrier(2), Peer.lease

    def lease(peer, *asked, **more):
        both.wait(SOON_S)
        return original(peer, *asked, **more)

    monkeypatch.setattr(Peer, "lease", lease)
    for store, other in zip(stores, reversed(stores), strict=True):
        store.disk.rate.bytes_per_s, store.core.state.fetcher.peers_rate.bytes_per_s = 1.0, 1e9
        store.core.state.hints.remember(hashes[0], [(other.node_id, 6)])
    jobs = [store.worker.client.load(hashes, list(range(HALF, HALF + 6))) for store in stores]
    assert [job.result(SOON_S).num_blocks for job in jobs] == [6, 6]


def test_many_peers_loads_of_one_chain(start, cluster, reads):
    store, other = start("a"), start("b")
    hashes = cluster.hashes(12)
    store.save(hashes)
    store.empty_memory()
    wait_until(lambda: located(other, hashes) == {"a": 12})
    with reads.held():
        jobs = [other.worker.client.load(hashes, list(range(HALF, HALF + 12))) for _ in range(8)]
        own = [store.worker.client.load(hashes, list(range(HALF, HALF + 12))) for _ in range(8)]
        wait_until(lambda: reads.num_waiting)
    assert [job.result(SOON_S).num_blocks for job in [*jobs, *own]] == [12] * 16
    assert store.num("num_read") == 12
    store.settle()
    other.settle()


def test_a_drained_node_gives_from_its_disk_until_it_is_closed(start, cluster):
    store, other = start("a"), start("b")
    hashes = cluster.hashes(6)
    store.save(hashes)
    store.empty_memory()
    wait_until(lambda: located(other, hashes) == {"a": 6})
    store.core.drain(0.1)
    wait_until(lambda: located(other, hashes) == {})
    assert other.load(hashes).num_blocks == 0
    store.core.undrain()
    wait_until(lambda: located(other, hashes) == {"a": 6})
    assert other.load(hashes).num_blocks == 6


def test_a_peer_that_left_while_blocks_came_from_the_disk_gets_no_lease(start, cluster, reads):
    store, other = start("a", call_timeout_s=SOON_S), start("b")
    hashes = cluster.hashes(6)
    store.save(hashes)
    store.empty_memory()
    wait_until(lambda: located(other, hashes) == {"a": 6})
    with reads.held():
        job = other.worker.client.load(hashes, list(range(HALF, HALF + 6)))
        wait_until(lambda: reads.num_waiting)
        theirs = peers_of(store)
        other.core.state.peers.failed("a")  # It closes the connection.
        wait_until(lambda: all(connection.closed for connection in theirs))
        assert job.result(SOON_S).num_blocks == 0
    store.settle()
    assert store.core.pool.lookup(hashes) == 6, "what came is kept"


def test_a_node_that_is_closed_while_blocks_come_from_the_disk_grants_nothing(start, cluster, reads):
    store, other = start("a", call_timeout_s=SOON_S), start("b", call_timeout_s=SOON_S)
    hashes = cluster.hashes(6)
    store.save(hashes)
    store.empty_memory()
    wait_until(lambda: located(other, hashes) == {"a": 6})
    with reads.held():
        job = other.worker.client.load(hashes, list(range(HALF, HALF + 6)))
        wait_until(lambda: reads.num_waiting)
        assert not store.core.drain(0.0)["is_drained"]
    assert job.result(SOON_S).num_blocks == 0
    store.settle()
    assert store.core.drain(SOON_S)["is_drained"]


def test_blocks_of_another_size_than_the_peer_knows_are_misses(start, cluster):
    """This life knows the namespace from the disk only, and the peer has blocks of another size under its name."""
    store, other = start("a", block_bytes=4096), start("b", block_bytes=4096)
    hashes = cluster.hashes(4)
    store.save(hashes)
    store.stop()
    store.core = cluster.add("a", **store.settings)
    store.disk = store.core.state.disk
    cluster.worker("a", 1, space=Namespace(model="another", shape=SHAPE))
    wait_until(lambda: located(other, hashes) == {"a": 4})
    for block_bytes, wanted in ((2048, 0), (1024, 4)):
        began = PeerLease(
            chain=hashes,
            block_bytes=block_bytes,
            slot_format=BLOCK_ORDER_VERSION,
            namespace_version=0,
            ttl_s=5.0,
            within_s=2.0,
        )
        peer = other.core.state.peers.get("a")
        grant = peer.lease(peer.client, began)
        assert len(grant.slots) == wanted
    store.core.state.pool_service.current.expire(float("inf"))


def test_a_node_that_was_drained_before_its_first_client_announces_nothing(start, cluster):
    store, other = start("a"), start("b")
    hashes = cluster.hashes(6)
    store.save(hashes)
    store.stop()
    store.core = cluster.add("a", **store.settings)
    store.disk = store.core.state.disk
    assert store.core.drain(0.0)["is_drained"]
    cluster.client("a")
    wait_until(lambda: not store.disk.is_off)
    told = threading.Event()
    store.core.state.hints.publish_soon(told.set)
    assert told.wait(SOON_S)
    assert located(other, hashes) == {}
    store.core.undrain()
    wait_until(lambda: located(other, hashes) == {"a": 6})


def test_a_node_whose_disk_hangs_while_it_writes_can_be_drained(start, cluster, writes):
    store = start("a", disk_timeout_s=0.1)
    with writes.held():
        store.save(cluster.hashes(6), is_written=False)
        wait_until(lambda: writes.num_waiting and store.disk.is_off)
        assert store.core.drain(SOON_S)["is_drained"]


def stored_on(store, other, hashes):
    """Save a chain on the disk of a store, not in its memory, and wait until another one has heard of it."""
    store.save(hashes)
    store.empty_memory()
    wait_until(lambda: located(other, hashes) == {store.node_id: len(hashes)})


def test_a_slow_disk_of_a_healthy_peer_is_no_failure_of_the_peer(start, cluster, reads):
    """The load has less time than the peer may take: the peer answers in time, and is asked again at once."""
    store, other = start("a", call_timeout_s=SOON_S), start("b", call_timeout_s=SOON_S)
    hashes = cluster.hashes(6)
    stored_on(store, other, hashes)
    with reads.held():
        result = other.load(hashes, timeout_s=0.5)
        assert (result.num_blocks, result.num_lease_calls) == (0, 1)
        peers = other.core.state.peers
        assert (peers.failures, peers.is_usable("a")) == ({}, True)
        assert not peers.known("a").client.closed
    store.settle()
    assert other.load(hashes).num_peer == 6


def test_what_has_come_from_the_disk_of_a_peer_in_time_is_granted(start, cluster, reads, monkeypatch):
    monkeypatch.setattr("kvstore.disk.reader._MOST_BYTES", 1)
    store, other = start("a", call_timeout_s=SOON_S), start("b", call_timeout_s=SOON_S)
    hashes = cluster.hashes(6)
    stored_on(store, other, hashes)
    go = threading.Event()
    reads.before = lambda file, first: None if reads.num_calls <= 2 else go.wait(SOON_S)
    result = other.load(hashes, timeout_s=2.0)
    go.set()
    assert 0 < result.num_blocks < 6
    assert other.core.state.peers.failures == {}
    store.settle()


def test_a_load_does_not_wait_for_what_another_one_has_the_peer_read(start, cluster, reads):
    settings = {"call_timeout_s": SOON_S, "transfer_timeout_s": 2 * SOON_S}
    store, other = start("a", **settings), start("b", **settings)
    slow, quick = cluster.hashes(6), cluster.hashes(4, seed=1)
    stored_on(store, other, slow)
    store.save(quick, first=20)
    with reads.held():
        job = other.worker.client.load(slow, list(range(HALF, HALF + 6)))
        wait_until(lambda: reads.num_waiting)
        assert other.worker.client.load(quick, list(range(4)), timeout_s=1.0).result(SOON_S).num_peer == 4
        assert not job.done()
    assert job.result(SOON_S).num_peer == 6


def test_peers_are_answered_in_time_though_all_threads_that_read_for_them_are_busy(start, cluster, reads, monkeypatch):
    monkeypatch.setattr("kvstore.remote.fetch._NUM_THREADS_FOR_PEERS", 1)
    settings = {"call_timeout_s": 4.0, "transfer_timeout_s": SOON_S}
    store, other = start("a", **settings), start("b", **settings)
    chains = [cluster.hashes(2, seed=seed) for seed in range(4)]
    for at, chain in enumerate(chains):
        store.save(chain, first=2 * at)
    store.empty_memory()
    wait_until(lambda: all(located(other, chain) for chain in chains))
    with reads.held():
        jobs = [other.worker.client.load(chain, [HALF + 2 * at, HALF + 2 * at + 1]) for at, chain in enumerate(chains)]
        assert [job.result(2 * SOON_S).num_blocks for job in jobs] == [0] * 4
        assert other.core.state.peers.failures == {}
    store.settle()


def test_blocks_that_hang_on_the_own_disk_come_from_another_node(start, cluster, reads):
    """Also for the load that asked its own disk first, as long as it has time left."""
    store, other = start("a", disk_timeout_s=0.2, transfer_timeout_s=SOON_S), start("b")
    hashes = cluster.hashes(6)
    store.save(hashes)
    wait_until(lambda: located(other, hashes) == {"a": 6})
    assert other.load(hashes).num_peer == 6
    wait_until(lambda: located(store, hashes).get("b") == 6)
    store.empty_memory()
    with reads.held():
        result = store.load(hashes)
        assert (result.num_blocks, result.num_peer, result.num_disk, result.peers) == (6, 6, 0, ("b",))
        assert store.load(hashes).num_local == 6
        assert store.core.pool.stats().num_writing == 6, "the slots that the disk may still write to"
    store.settle()
    assert store.core.pool.stats().num_writing == 0
    assert store.load(hashes).num_local == 6


def test_later_loads_of_blocks_that_hang_on_the_own_disk_ask_another_node(start, cluster, reads):
    """Nobody waits for the read any more when the disk is found to hang."""
    store, other = start("a", disk_timeout_s=0.5), start("b")
    hashes = cluster.hashes(6)
    store.save(hashes)
    assert other.load(hashes).num_peer == 6
    wait_until(lambda: located(store, hashes).get("b") == 6)
    store.empty_memory()
    with reads.held():
        assert store.load(hashes, timeout_s=0.1).num_blocks == 0
        wait_until(lambda: store.disk.is_off and store.stats()["num_trips"])
        wait_until(lambda: store.load(hashes).num_peer == 6)
    store.settle()

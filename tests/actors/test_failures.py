"""What dies, and what goes on: workers, movers, the directory, stores, nodes. Wrong bytes come from none of it.

Every load here goes through `Engine.load`, which compares each block that is called usable with its stamp.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from two_nodes import NODE

import kvstore
from kvstore.client.results import MissReason
from kvstore.errors import StoreUnavailable, TransferError

pytestmark = [pytest.mark.ray, pytest.mark.ruins_cluster]

_seeds = itertools.count(1)
#: 256 blocks are 16 MiB: long enough to be met half-way.
_LARGE = {"num_layers": 4, "num_kv_heads": 4, "head_dim": 64}
#: Pins of a reader that vanished altogether come back after this long.
_LEASE_TTL_S = 5.0


@pytest.fixture(scope="module")
def stores(ray_cluster):
    """A store on each lane."""
    started = {}
    try:
        for lane in ("default", "tcp"):
            started[lane] = kvstore.start("64MiB", name=lane, lane=lane, lease_ttl_s=_LEASE_TTL_S)
        yield started
    finally:
        for store in started.values():
            store.stop()


@pytest.fixture(scope="module")
def space(make_space):
    return make_space(**_LARGE)


@pytest.fixture
def chain(space, chain_of):
    """256 blocks that nothing holds yet."""
    return chain_of(space, 256, next(_seeds))


@pytest.fixture
def engines(stores, space, node_ids, open_engine):
    """Engines on both nodes, on the default lane: the first node's saves, the second one's loads."""
    return [open_engine(stores["default"], space, node_id) for node_id in node_ids]


@pytest.fixture
def tcp_engines(stores, space, node_ids, open_engine):
    """The same, over TCP."""
    return [open_engine(stores["tcp"], space, node_id) for node_id in node_ids]


@pytest.fixture
def pool_of(get):
    def ask(node_id, name="default"):
        return get(kvstore.node_store(node_id, name=name).stats.remote())["pool"]

    return ask


@pytest.fixture
def pids_of(get):
    def ask(node_id, name="default"):
        return get(kvstore.node_store(node_id, name=name).pids.remote())

    return ask


@pytest.fixture
def check_pools(get, node_ids, eventually, pool_of):
    """Asserts that the pools of a store are whole and that nothing is held in them any more."""

    def check(name="default"):
        for node_id in node_ids:
            get(kvstore.node_store(node_id, name=name).check_integrity.remote())
            for key in ("num_pinned", "num_leases", "num_writing", "num_writes", "num_quarantined"):
                eventually(lambda node_id=node_id, key=key: pool_of(node_id, name)[key] == 0, 10)

    return check


@pytest.fixture
def background():
    with ThreadPoolExecutor(1) as threads:
        yield lambda function, *args, **options: threads.submit(function, *args, **options)


def test_what_a_worker_holds_stays_while_it_lives_and_comes_back_when_it_is_killed(
    stores, engines, space, chain, chain_of, node_ids, start_worker, get, eventually, pool_of, check_pools,
    stopped,
):  # fmt: skip
    engines[1].save(chain[:100])
    other = chain_of(space, 60, next(_seeds))
    worker = start_worker(node_ids[1])
    get(worker.open.remote("engine", stores["default"], space))
    free = pool_of(node_ids[1])["num_free"]
    assert get(worker.do.remote("engine", "hold", chain[:100], other)) == (100, 60)
    pid = get(worker.pid.remote())
    stopped(pid)
    time.sleep(1.0)
    pool = pool_of(node_ids[1])
    assert (pool["num_pinned"], pool["num_writing"], pool["num_leases"]) == (100, 60, 1)
    assert pool["num_free"] == free - 60

    os.kill(pid, signal.SIGKILL)

    def all_back():
        pool = pool_of(node_ids[1])
        return not (pool["num_pinned"] or pool["num_writing"] or pool["num_leases"] or pool["num_writes"])

    eventually(all_back, 2.0)
    assert pool_of(node_ids[1])["num_free"] == free
    check_pools()
    assert engines[1].client.lookup(other).num_blocks == 0
    assert engines[1].load(chain[:100]).num_local == 100
    assert engines[1].save(other).num_written == 60


def test_the_readers_mover_dies_idle(engines, chain, node_ids, pids_of, eventually, check_pools):
    engines[0].save(chain)
    before = pids_of(node_ids[1])
    os.kill(before["mover"], signal.SIGKILL)
    after = eventually(lambda: new_mover(pids_of(node_ids[1]), before["mover"]), 10)
    assert after["store"] == before["store"]
    assert engines[1].load(chain).num_peer == 256
    check_pools()


def new_mover(pids, old):
    return pids if pids["mover"] not in (0, old) else None


def test_the_readers_mover_dies_in_the_middle_of_a_load(
    tcp_engines, chain, node_ids, pids_of, pool_of, eventually, check_pools, stopped, background
):
    source, reader = tcp_engines
    source.save(chain)
    reader.load(chain[:1])  # connected
    before = pids_of(node_ids[1], "tcp")
    stopped(pids_of(node_ids[0], "tcp")["mover"])  # nobody sends, so the READ stays half done
    loading = background(reader.load, chain, timeout_s=60)
    eventually(lambda: pool_of(node_ids[1], "tcp")["num_writing"] > 0, 5, 0.005)

    os.kill(before["mover"], signal.SIGKILL)

    result = loading.result(20)  # It does not wait until its own time ends.
    assert result.num_blocks < 256
    assert result.failed[-1].reason is MissReason.PEER_LOST
    stopped.resume()
    eventually(lambda: new_mover(pids_of(node_ids[1], "tcp"), before["mover"]), 10)
    eventually(lambda: reader.load(chain).num_blocks == 256, 20)
    check_pools("tcp")


def test_killing_the_readers_mover_at_any_moment_gives_no_wrong_byte(
    engines, space, chain_of, node_ids, pids_of, eventually, check_pools, background
):
    source, reader = engines
    for delay_s in (0.001, 0.004, 0.010):
        chain = chain_of(space, 256, next(_seeds))
        source.save(chain)
        eventually(lambda: reader.load(chain[:1]).num_blocks == 1, 15)  # noqa: B023
        old = eventually(lambda: pids_of(node_ids[1])["mover"], 10)
        loading = background(reader.load, chain, timeout_s=5)
        time.sleep(delay_s)
        os.kill(old, signal.SIGKILL)
        result = loading.result(20)
        assert result.num_blocks == 256 or result.failed
        eventually(lambda: new_mover(pids_of(node_ids[1]), old), 10)  # noqa: B023
        eventually(lambda: reader.load(chain).num_blocks == 256, 15)  # noqa: B023
    check_pools()


def test_the_sources_mover_dies(engines, chain, node_ids, pids_of, eventually, check_pools):
    source, reader = engines
    source.save(chain)
    reader.load(chain[:1])
    before = pids_of(node_ids[0])
    os.kill(before["mover"], signal.SIGKILL)
    began_s = time.monotonic()
    first = reader.load(chain, timeout_s=5)
    assert time.monotonic() - began_s < 10
    assert first.num_blocks == 256 or first.failed[0].reason is not MissReason.OTHER
    eventually(lambda: new_mover(pids_of(node_ids[0]), before["mover"]), 10)
    eventually(lambda: reader.load(chain).num_blocks == 256, 20)
    assert source.load(chain).num_local == 256
    check_pools()


def test_the_sources_mover_dies_in_the_middle_of_a_load(
    tcp_engines, chain, node_ids, pids_of, pool_of, eventually, check_pools, stopped, background
):
    source, reader = tcp_engines
    source.save(chain)
    reader.load(chain[:1])
    before = pids_of(node_ids[0], "tcp")
    stopped(before["mover"])
    loading = background(reader.load, chain, timeout_s=8)
    eventually(lambda: pool_of(node_ids[1], "tcp")["num_writing"] > 0, 5, 0.005)
    os.kill(before["mover"], signal.SIGKILL)
    result = loading.result(20)
    assert result.num_blocks < 256
    assert result.failed[-1].reason in (MissReason.PEER_LOST, MissReason.TIMEOUT)
    eventually(lambda: new_mover(pids_of(node_ids[0], "tcp"), before["mover"]), 10)
    eventually(lambda: reader.load(chain).num_blocks == 256, 20)
    check_pools("tcp")


def test_a_read_that_stalls_is_given_up_and_its_slots_are_set_aside(
    tcp_engines, chain, node_ids, pids_of, pool_of, eventually, check_pools, stopped
):
    source, reader = tcp_engines
    source.save(chain)
    reader.load(chain[:1])
    stopped(pids_of(node_ids[0], "tcp")["mover"])
    began_s = time.monotonic()
    result = reader.load(chain, timeout_s=1.5)
    assert time.monotonic() - began_s < 4
    assert result.num_blocks < 256
    assert result.failed[-1].reason is MissReason.TIMEOUT
    assert pool_of(node_ids[1], "tcp")["num_quarantined"] > 0
    stopped.resume()
    eventually(lambda: pool_of(node_ids[1], "tcp")["num_quarantined"] == 0, 20)
    eventually(lambda: reader.load(chain).num_blocks == 256, 20)
    check_pools("tcp")


def test_the_directory_dies(stores, engines, chain, chain_of, space, node_ids, get, eventually, check_pools):
    source, reader = engines
    local = chain_of(space, 32, next(_seeds))
    source.save(chain)
    reader.save(local)
    directory = ray.get_actor("raykv/default/directory", namespace="raykv")
    old = get(directory.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(old, signal.SIGKILL)

    began_s = time.monotonic()
    while True:
        assert reader.load(local).num_local == 32  # nobody needs a directory for these
        if reader.load(chain, timeout_s=5).num_blocks == 256:
            break
        assert time.monotonic() - began_s < 15
        time.sleep(0.1)

    found = eventually(lambda: dict(stores["default"].locate(chain)), 15)
    assert found[node_ids[0]] == 256
    new = ray.get_actor("raykv/default/directory", namespace="raykv")
    assert get(new.__ray_call__.remote(lambda self: os.getpid())) != old
    check_pools()


def test_a_node_store_dies(stores, space, chain, node_ids, get, pids_of, eventually, open_engine, process_lives):
    """Scenario 21: the rest goes on, old handles fail closed, and nothing of the old life is left."""
    source, reader = (open_engine(stores["default"], space, node_id) for node_id in node_ids)
    source.save(chain)
    reader.load(chain[:100])
    old = pids_of(node_ids[0])
    epoch = source.client.epoch
    os.kill(old["store"], signal.SIGKILL)

    # Its clients fail closed, each in its way, and soon.
    began_s = time.monotonic()
    lost = source.load(chain, timeout_s=3)
    assert (lost.num_blocks, lost.failed[0].reason) == (0, MissReason.STORE_LOST)
    with pytest.raises((StoreUnavailable, TransferError)):
        source.client.lookup(chain)
    with pytest.raises((StoreUnavailable, TransferError)):
        source.save(chain)
    assert time.monotonic() - began_s < 5
    # Peers lose what was only there, and keep the rest.
    assert reader.load(chain, timeout_s=5).num_blocks == 100

    def new_store():
        pids = pids_of(node_ids[0])
        return pids if pids["store"] != old["store"] and pids["mover"] else None

    eventually(new_store, 20)
    assert not process_lives(old["mover"])
    # The old client still sees another life's memory, and says so.
    assert source.load(chain).failed[0].reason is MissReason.STORE_LOST
    again = open_engine(stores["default"], space, node_ids[0])
    assert again.client.epoch != epoch
    assert again.load(chain[:100]).num_peer == 100
    assert again.save(chain).num_written == 156
    eventually(lambda: reader.load(chain).num_blocks == 256, 20)


def test_a_store_that_hangs_delays_no_other(stores, space, chain, node_ids, pids_of, eventually, open_engine, stopped):
    before = {node_id: pids_of(node_id) for node_id in node_ids}
    engine = open_engine(stores["default"], space, node_ids[0])
    engine.save(chain)
    stopped(before[node_ids[0]]["store"])
    os.kill(before[node_ids[1]]["store"], signal.SIGKILL)

    def made_again():
        try:
            pids = pids_of(node_ids[1])
        except ray.exceptions.RayError:
            return None
        return pids if pids["store"] != before[node_ids[1]]["store"] and pids["mover"] else None

    eventually(made_again, 15)
    problems = eventually(lambda: stores["default"].stats()["problems"], 15)
    assert set(problems) == {node_ids[0]}, "what hangs is said, and not replaced: it still has its name and memory"
    stopped.resume()
    eventually(lambda: not stores["default"].stats()["problems"], 15)
    assert pids_of(node_ids[0]) == before[node_ids[0]]
    assert engine.load(chain).num_local == 256


@pytest.fixture(scope="module")
def third_node(ray_cluster, stores):
    """A node that joins a running store; the last test removes it."""
    before = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    node = ray_cluster.add_node(num_cpus=1, object_store_memory=80 << 20, **NODE)
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        new = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - before
        if new:
            return node, new.pop()
        time.sleep(0.1)
    raise AssertionError("the node did not come up")


def test_a_node_that_joins_gets_a_store(stores, engines, third_node, space, chain, get, eventually, open_engine):
    _, node_id = third_node
    handle = eventually(lambda: kvstore.node_store(node_id), 20)
    assert get(handle.ready.remote(20), 40)
    newcomer = open_engine(stores["default"], space, node_id)
    engines[0].save(chain)
    assert newcomer.load(chain).num_peer == 256


def test_a_draining_peer_does_not_hide_another_one(
    stores, engines, third_node, node_ids, space, chain, get, open_engine
):
    newcomer = open_engine(stores["default"], space, third_node[1])
    holders = {engine.client.node_id: engine for engine in (engines[0], newcomer)}
    for engine in holders.values():
        engine.save(chain)
    first = stores["default"].locate(chain)[0][0]
    handle = kvstore.node_store(first)
    get(handle.drain.remote(1.0))
    try:
        result = engines[1].load(chain)
        assert (result.num_blocks, result.peers) == (256, tuple(set(holders) - {first}))
    finally:
        get(handle.undrain.remote())
    assert engines[1].load(chain).num_local == 256


def test_a_node_that_is_lost_takes_only_its_blocks_along(
    ray_cluster, stores, engines, third_node, space, chain, chain_of, eventually, open_engine, check_pools,
    pids_of, process_lives, node_ids,
):  # fmt: skip
    source, reader = engines
    node, node_id = third_node
    only_there, pids = chain_of(space, 64, next(_seeds)), pids_of(node_id)
    gone = open_engine(stores["default"], space, node_id)
    gone.save(only_there)
    source.save(chain)
    # What happened before may have made the reader leave its other peer alone for a while.
    warm = chain_of(space, 16, next(_seeds))
    source.save(warm)
    eventually(lambda: reader.load(warm).num_blocks == 16, 20, 0.1)
    assert reader.client.lookup(only_there).num_blocks == 64

    ray_cluster.remove_node(node, allow_graceful=False)
    # Its processes follow their raylet; Ray still calls the node alive.
    eventually(lambda: not any(process_lives(pid) for pid in pids.values()), 10, 0.01)
    assert node_id in stores["default"].node_ids()

    began_s = time.monotonic()
    result = reader.load(only_there, timeout_s=5)
    assert (result.num_blocks, result.num_peer) == (0, 0)
    assert {failure.reason for failure in result.failed} <= {
        MissReason.PEER_LOST, MissReason.TIMEOUT, MissReason.NOT_FOUND,
    }  # fmt: skip
    assert time.monotonic() - began_s < 11
    assert reader.load(chain).num_peer == 256  # meanwhile the others serve each other
    assert reader.load(chain).num_local == 256
    eventually(lambda: node_id not in dict(stores["default"].locate(only_there)), 20)
    assert reader.load(only_there).failed[0].reason is MissReason.NOT_FOUND
    eventually(lambda: node_id not in stores["default"].node_ids(), 20)
    assert sorted(stores["default"].stats()["nodes"]) == sorted(node_ids)
    check_pools()

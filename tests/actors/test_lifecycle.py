"""Starting, joining, finding and stopping: what runs afterwards, and what does not."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import kvstore
from kvstore.actors import ending, starting
from kvstore.actors.session import probing
from kvstore.actors.session.probing import check_answers
from kvstore.errors import (
    ConfigError,
    IncompatibleStore,
    InvalidRequest,
    StoreNotRunning,
    StoreUnavailable,
    TransferTimeout,
)

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def store(ray_cluster):
    store = kvstore.start("16MiB")
    yield store
    store.stop()


def named_actors(name):
    """The actors of a store that Ray knows."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in found if actor["name"].startswith(f"raykv/{name}/"))


def epochs(store):
    return {node: counts["epoch"] for node, counts in store.stats()["nodes"].items()}


def in_another_process(script, timeout_s=60):
    """Run a script in a process of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_start_runs_one_store_on_every_node(store, node_ids):
    wanted = ["directory", *(f"node/{node_id}" for node_id in sorted(node_ids)), "supervisor"]
    assert named_actors("default") == [f"raykv/default/{kind}" for kind in wanted]
    assert store.node_ids() == sorted(node_ids)


def test_a_second_start_with_equal_settings_joins(store):
    before, began_s = epochs(store), time.monotonic()
    again = kvstore.start("16MiB")
    assert epochs(again) == before
    assert time.monotonic() - began_s < 5


def test_a_second_start_with_other_settings_is_refused_with_both_values(store):
    before = epochs(store)
    with pytest.raises(IncompatibleStore, match=rf"capacity_bytes: wanted {32 << 20}, runs with {16 << 20}"):
        kvstore.start("32MiB")
    with pytest.raises(IncompatibleStore, match=r"lane: wanted 'tcp', runs with 'default'"):
        kvstore.start("16MiB", lane="tcp")
    assert epochs(store) == before


def test_connect_finds_the_running_store(store):
    found = kvstore.connect()
    assert found.config == store.config
    assert epochs(found) == epochs(store)


def test_connect_to_a_store_that_does_not_run(ray_cluster):
    with pytest.raises(StoreNotRunning, match=r"raykv/nobody/supervisor.*kvstore\.start"):
        kvstore.connect("nobody")
    with pytest.raises(StoreNotRunning, match="nobody"):
        kvstore.node_store(name="nobody")


def test_a_store_survives_pickling_and_serves_an_actor(store, make_space, chain_of, start_worker, node_ids, get):
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.config, repr(copy)) == (store.config, repr(store))
    space = make_space()
    worker, chain = start_worker(node_ids[1]), chain_of(space, 4)
    assert get(worker.open.remote("engine", store, space)) == node_ids[1]
    assert get(worker.do.remote("engine", "save", chain)).num_written == 4
    assert copy.locate(chain) == [(node_ids[1], 4)]


def test_more_than_a_node_offers_is_refused_and_leaves_nothing(ray_cluster, node_ids):
    with pytest.raises(ConfigError, match=r"lower capacity= or start Ray with more --memory") as caught:
        kvstore.start("2TiB", name="huge")
    assert all(node_id in str(caught.value) for node_id in node_ids)
    assert named_actors("huge") == []


def test_more_than_the_machine_has_is_refused_and_leaves_nothing(ray_cluster, eventually):
    # Ray was told of a terabyte, so only the node store itself can see that it is not there.
    with pytest.raises(ConfigError, match=r"lower capacity= or free memory"):
        kvstore.start("900GiB", name="unreal", timeout_s=40)
    assert eventually(lambda: named_actors("unreal") == [], 5)
    assert eventually(lambda: held_memory() == 2 * NODE_STORE_BYTES, 5)


NODE_STORE_BYTES = 16 << 20


def held_memory():
    """Bytes of Ray memory that actors hold now, in the whole cluster."""
    return ray.cluster_resources()["memory"] - ray.available_resources()["memory"]


def test_a_start_whose_time_is_over_before_anything_is_up_leaves_nothing(ray_cluster):
    """Its supervisor, which only comes up then, would make a store that nobody has a handle of."""
    with pytest.raises(StoreUnavailable, match=r"did not answer in time.*timeout_s="):
        kvstore.start("16MiB", name="short", timeout_s=0.01)
    assert named_actors("short") == []


def test_what_a_start_waits_for_is_said_when_its_time_is_over(ray_cluster, node_ids):
    """Ray has the memory, but others hold it: the store's actor waits for it, and says nothing."""
    holders = hold_memory(node_ids)
    with pytest.raises(StoreUnavailable, match=rf"{node_ids[0]}.*wants 16777216 bytes of Ray memory, free there are"):
        kvstore.start("16MiB", name="waits", timeout_s=8)
    assert named_actors("waits") == []
    for holder in holders:
        ray.kill(holder)


def test_a_start_that_gives_up_leaves_the_store_to_those_that_wait_for_it(store, node_ids, eventually):
    """Eight of them, which is more than the supervisor has threads for rounds."""
    holders, more = hold_memory(node_ids), ThreadPoolExecutor(8)
    first = more.submit(kvstore.start, "16MiB", name="waits", timeout_s=7)
    assert eventually(lambda: "raykv/waits/supervisor" in named_actors("waits"), 10)
    others = [more.submit(kvstore.start, "16MiB", name="waits", timeout_s=60) for _ in range(7)]
    with pytest.raises(StoreUnavailable, match="not every node had a store in time"):
        first.result(30)
    for holder in holders:
        ray.kill(holder)
    stores = [other.result(60) for other in others]
    assert {tuple(epochs(one).values()) for one in stores} == {tuple(epochs(stores[0]).values())}
    for one in stores:  # One of them is the starter now.
        one.stop()
    assert eventually(lambda: named_actors("waits") == [], 10)
    more.shutdown()


def test_a_start_joins_a_store_that_is_suspended_for_a_moment(store, node_ids, get, stopped):
    before = epochs(store)
    pid = get(kvstore.node_store(node_ids[0]).pids.remote())["store"]
    stopped(pid)
    timer = threading.Timer(7, stopped.resume)
    timer.start()
    assert epochs(kvstore.start("16MiB", timeout_s=40)) == before
    timer.join()


def hold_memory(node_ids):
    """Hold all Ray memory that the store of this module leaves, so that another one waits for its own."""
    total = int(next(node["Resources"]["memory"] for node in ray.nodes() if node["NodeID"] == node_ids[0]))
    holders = [
        ray.remote(Holder)
        .options(
            memory=total - NODE_STORE_BYTES, num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote()
        for node_id in node_ids
    ]  # fmt: skip
    ray.get([holder.ping.remote() for holder in holders], timeout=30)
    return holders


class Holder:
    def ping(self):
        return True


def test_a_stop_that_was_interrupted_is_completed_by_another(ray_cluster, store, node_ids, monkeypatch):
    short = kvstore.start("8MiB", name="short")

    def interrupt(name):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ending, "actors_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ending.end_actors("short")
    assert "raykv/short/supervisor" in named_actors("short")
    with pytest.raises(StoreUnavailable, match=r"being ended by another process.*kvstore stop"):
        kvstore.start("8MiB", name="short", timeout_s=3.0)
    assert len(named_actors("short")) == 2 + len(node_ids)
    kvstore.connect("short").destroy()
    assert named_actors("short") == []
    with pytest.raises(StoreNotRunning, match=r"this handle ended the store|not every|no actor|wanted the actor"):
        short.stats()


@pytest.mark.parametrize("kind", ["node", "supervisor"])
def test_an_end_without_all_actors_leaves_what_another_call_ends(ray_cluster, store, node_ids, monkeypatch, kind):
    kvstore.start("8MiB", name="short")
    everything = set(named_actors("short"))
    hidden = next(path for path in everything if kind in path)
    find = ending.find_actor

    def find_others(path, *args):
        if path == hidden:
            raise TransferTimeout("late")
        return find(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ending, "find_actor", find_others)
        with pytest.raises(TransferTimeout, match="late"):
            ending.end_actors("short", 2.0)
    left = everything if kind == "supervisor" else {hidden, "raykv/short/supervisor"}  # It would make them anew.
    assert set(named_actors("short")) == left
    kvstore.connect("short").destroy()
    assert named_actors("short") == []


def test_a_store_that_others_left_with_other_settings_is_not_taken_for_this_one(ray_cluster, store, node_ids):
    kvstore.start("8MiB", name="short")
    ray.kill(ray.get_actor("raykv/short/supervisor", namespace="raykv"))
    with pytest.raises((ConfigError, StoreUnavailable), match="capacity_bytes: wanted 16777216, runs with 8388608"):
        kvstore.start("16MiB", name="short", timeout_s=20)
    assert named_actors("short") == []


@pytest.mark.parametrize("timeout_s", [-1.0, float("inf"), float("nan"), 1e6, "5"])
def test_times_that_are_none_are_refused_and_nothing_changes(store, node_ids, timeout_s):
    for door in (
        lambda: kvstore.start("16MiB", name="never", timeout_s=timeout_s),
        lambda: kvstore.connect(timeout_s=timeout_s),
        lambda: store.drain(node_ids[0], timeout_s),
    ):
        with pytest.raises(InvalidRequest, match="timeout_s: wanted a number of seconds"):
            door()
    assert named_actors("never") == []
    assert not any(counts["draining"] for counts in store.stats()["nodes"].values())


def test_a_setting_that_there_is_not_is_named_with_the_one_that_may_be_meant():
    with pytest.raises(ConfigError, match=r"'lease_ttl' is no setting.*did you mean 'lease_ttl_s'"):
        kvstore.start("16MiB", name="never", lease_ttl=3)


def test_the_capacity_has_one_name():
    with pytest.raises(ConfigError, match=r"capacity_bytes: pass it as capacity="):
        kvstore.start(capacity_bytes="64MiB")


@pytest.mark.parametrize("changes", [{"name": 5}, {"name": None}, {"address": 5}, {"timeout_s": "3"}])
def test_arguments_of_another_type_are_refused_before_anything_is_asked(changes):
    (wrong,) = changes
    kind = ConfigError if wrong == "name" else InvalidRequest
    for ask in (kvstore.connect, kvstore.start):
        with pytest.raises(kind, match=f"{wrong}: wanted"):
            ask(**changes)


@pytest.mark.parametrize("wrong", ["x", [b"1"], None])
def test_what_is_no_hashes_and_no_namespace_is_refused(store, wrong):
    with pytest.raises(InvalidRequest, match=r"hashes: wanted BlockHashes"):
        store.locate(wrong)
    with pytest.raises(InvalidRequest, match=r"space: wanted a kvstore\.Namespace"):
        store.client(wrong)


@pytest.mark.parametrize("address", ["10.0.0..1:6379", "127.0.0.1:1"])
def test_an_address_that_cannot_be_is_a_typed_error(address):
    with pytest.raises(StoreNotRunning, match="no Ray cluster answers"):
        check_answers(address)


@pytest.mark.parametrize(
    "address", ["nonsense", "6379", "host:", ":6379", "a/b:c", "h:65536", "h:²", f"h:{'1' * 5000}"]
)
def test_what_is_no_address_is_said_to_be_none(address):
    with pytest.raises(ConfigError, match="wanted the host:port of a Ray cluster"):
        check_answers(address)


@pytest.mark.parametrize(("says", "match"), [(b"", "timed out"), (b"HTTP/1.1 400 Bad Request\r\n", "no GCS of Ray")])
def test_what_listens_and_is_no_gcs_is_found_out_in_time(monkeypatch, says, match):
    """ray.init would wait for it for ever."""
    monkeypatch.setattr(probing, "_CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError), server.accept()[0] as sock:
                sock.sendall(says)
                sock.recv(1000)
                sock.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(StoreNotRunning, match=f"no Ray cluster answers.*{match}"):
            check_answers(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_gcs_that_works_answers(ray_cluster):
    check_answers(ray_cluster.address)


def test_a_start_that_is_interrupted_leaves_nothing(ray_cluster, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(starting, "_wait_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kvstore.start("16MiB", name="interrupted")
    assert named_actors("interrupted") == []


def test_joining_that_is_interrupted_leaves_the_store_alone(store, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    before = epochs(store)
    monkeypatch.setattr(starting, "_wait_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kvstore.start("16MiB")
    assert epochs(store) == before


def test_stop_leaves_nothing(
    ray_cluster, store, node_ids, get, make_space, chain_of, open_engine, eventually, process_lives,
    arena_inode, arena_holders,
):  # fmt: skip
    before = epochs(store)
    short = kvstore.start("8MiB", name="short")
    handles = [kvstore.node_store(node_id, name="short") for node_id in node_ids]
    paths = get([handle.control_path.remote() for handle in handles])
    pids = [pid for found in get([handle.pids.remote() for handle in handles]) for pid in found.values()]
    directory = ray.get_actor("raykv/short/directory", namespace="raykv")
    pids.append(get(directory.__ray_call__.remote(lambda self: os.getpid())))
    inodes = [arena_inode(pid) for pid in pids[0:4:2]]
    engine = open_engine(short, make_space(), node_ids[1])
    engine.save(chain_of(engine.space, 4))
    assert all(len(arena_holders(inode)) >= 2 for inode in inodes)
    assert all(Path(path).is_socket() for path in paths)
    assert len({*pids, os.getpid()}) == 6

    short.stop()

    assert eventually(lambda: not any(process_lives(pid) for pid in pids), 10)
    assert named_actors("short") == []
    assert not any(Path(path).exists() for path in paths)
    engine.client.close()
    assert eventually(lambda: not any(arena_holders(inode) for inode in inodes), 5)
    with pytest.raises(StoreNotRunning):
        kvstore.connect("short")
    short.stop()  # may be called again
    assert epochs(store) == before  # the other store did not notice


def test_another_process_joins_by_address(ray_cluster, store):
    script = f"""
        import kvstore
        store = kvstore.start("16MiB", address={ray_cluster.address!r})
        print(sorted(node["epoch"] for node in store.stats()["nodes"].values()))
    """
    assert in_another_process(script).strip() == str(sorted(epochs(store).values()))


def test_an_address_that_does_not_answer_is_a_typed_error_in_bounded_time():
    script = """
        import time, kvstore
        for call in (kvstore.connect, kvstore.start):
            began_s = time.monotonic()
            try:
                call(address="127.0.0.1:1")
            except kvstore.KVStoreError as error:
                print(type(error).__name__, "127.0.0.1:1" in str(error), time.monotonic() - began_s)
    """
    for line in in_another_process(script).splitlines():
        kind, named, seconds = line.split()
        assert (kind, named) == ("StoreNotRunning", "True")
        assert float(seconds) < 15


def test_drivers_that_are_seeded_alike_do_not_disturb_each_other(ray_cluster, store):
    """Engines are; of one id, each would end the poll that the other has open at the cluster, and poll again."""
    script = f"""
        import random, sys, threading, time
        from pathlib import Path
        import kvstore

        random.seed(0)
        kvstore.connect(address={ray_cluster.address!r})
        print(random.random() == random.Random(0).random(), flush=True)
        sys.stdin.readline()
        listens, = (thread for thread in threading.enumerate() if thread.name == "ray_listen_error_messages")
        status = Path(f"/proc/self/task/{{listens.native_id}}/status")

        def num_waits():
            return next(int(line.split()[1]) for line in status.open() if line.startswith("voluntary"))

        before = num_waits()
        time.sleep(1)
        print(num_waits() - before)
    """
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        assert [driver.stdout.readline() for driver in drivers] == ["True\n"] * 2
        for driver in drivers:  # both are there
            driver.stdin.write("\n")
            driver.stdin.flush()
        said = [driver.communicate(timeout=60)[0] for driver in drivers]
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait(10)
    # Otherwise hundreds of each.
    assert max(map(int, said)) < 50

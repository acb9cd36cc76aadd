"""Actors that answer Ray and serve nobody: what is told of them, and that others take their place."""

from __future__ import annotations

import os
import time

import pytest
import ray
from ray import exceptions as ray_errors

import kvstore
from kvstore.actors import serving
from kvstore.actors.calls import call
from kvstore.actors.serving import MADE_WITHIN_S, SILENT_S, STUCK_S, ServedNodes, ServingWatch
from kvstore.errors import PeerLost, TransferTimeout

pytestmark = pytest.mark.ray

#: A period, two rounds of pings that nobody answers, and what it takes to make another one, on a busy machine.
_REPLACED_WITHIN_S = 60.0


def hang(self, path):
    """Keep the one thread that serves an actor's sockets in a call that does not come back."""
    import os
    import time
    from functools import reduce

    server = reduce(getattr, path.split("."), self)
    read, write = os.pipe()
    server.watch(read, lambda: time.sleep(600))
    os.write(write, b"x")


@pytest.fixture(scope="module")
def store(ray_cluster):
    store = kvstore.start("16MiB", name="serving")
    yield store
    store.stop()


@pytest.fixture
def directory(store):
    return ray.get_actor("raykv/serving/directory", namespace="raykv")


def test_callers_that_have_a_store_wait_keep_no_other_from_its_answers(store, node_ids, get, eventually, make_space):
    handle, space = kvstore.node_store(node_ids[0], name="serving"), make_space()
    with store.client(space, node_id=node_ids[0]) as client:
        hashes = client.space.block_hashes(range(4 * space.shape.block_size))
        write = get(handle.prepare_store.remote(hashes, "a writer", ttl_s=300.0))
        drains = [handle.drain.remote(300.0) for _ in range(40)]
        eventually(lambda: get(handle.stats.remote(), 10.0)["draining"])
        assert get(handle.ready.remote(5.0), 10.0)
        assert get(handle.peer_address.remote(), 10.0).port
        get(handle.abort_store.remote(write.write_id, "a writer"), 10.0)
        get(drains, 30.0)
        get(handle.undrain.remote(), 10.0)
        assert client.lookup(hashes).num_local == 0


def test_a_store_and_a_directory_that_serve_nobody_are_replaced(
    store, directory, node_ids, get, eventually, make_space, chain_of, open_engine
):
    space = make_space()
    chains = [chain_of(space, 4, seed) for seed in range(2)]
    kept = open_engine(store, space, node_ids[1])
    kept.save(chains[1])
    before = {node_id: counts["epoch"] for node_id, counts in store.stats()["nodes"].items()}
    directory_pid = get(directory.__ray_call__.remote(lambda self: os.getpid()))
    stuck = kvstore.node_store(node_ids[0], name="serving")
    for handle, find in ((stuck, "_core.control.server"), (directory, "_server.server")):
        get(handle.__ray_call__.remote(hang, find), 10)
    assert get(stuck.ping.remote(0.2)) is False, "it answers Ray, and says so"
    assert get(directory.ping.remote(0.2)) is False

    def replaced():
        epochs = {node_id: counts.get("epoch") for node_id, counts in store.stats()["nodes"].items()}
        assert epochs.get(node_ids[1]) == before[node_ids[1]], "one that serves stays"
        return epochs.get(node_ids[0]) not in (None, before[node_ids[0]])

    eventually(replaced, _REPLACED_WITHIN_S, 0.5)
    again = ray.get_actor("raykv/serving/directory", namespace="raykv")
    eventually(
        lambda: call("directory", again.__ray_call__, lambda self: os.getpid(), timeout_s=10) != directory_pid,
        _REPLACED_WITHIN_S,
        0.5,
    )
    engine = eventually(lambda: open_engine(store, space, node_ids[0]), 20)
    engine.save(chains[0])
    for node_id, chain in zip(node_ids, chains, strict=True):
        eventually(lambda node_id=node_id, chain=chain: dict(store.locate(chain)).get(node_id) == 4, 20)
    eventually(lambda: not store.stats()["problems"], 20)


class Actor:
    """A handle whose answers are given."""

    def __init__(self, *answers):
        self.answers, self.ping, self.num_killed = list(answers), self, 0

    def options(self, concurrency_group):
        assert concurrency_group == "health", "verbs that wait must not keep a ping from its answer"
        return self

    def remote(self, within_s):
        return self.answers.pop(0)


@pytest.fixture
def watched(monkeypatch):
    clock, killed = [100.0], []

    def answer(ref, timeout):
        clock[0] += 1.0
        if isinstance(ref, Exception):
            raise ref
        return ref

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", answer)
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: killed.append(no_restart))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock, killed


SILENCE = ray.exceptions.GetTimeoutError("no answer")
DEATH = ray.exceptions.ActorDiedError()


@pytest.mark.parametrize(("answer", "patience_s"), [(False, STUCK_S), (SILENCE, SILENT_S)], ids=["stuck", "silent"])
@pytest.mark.parametrize("may_restart", [False, True])
def test_one_that_does_not_serve_is_ended_after_its_time_and_not_before(watched, answer, patience_s, may_restart):
    (clock, killed), watch = watched, ServingWatch()
    handle = Actor(True, answer, answer, answer)
    assert watch.serves("n", "it", handle, may_restart=may_restart)
    with pytest.raises(TransferTimeout, match=f"does not serve.*replaced after {patience_s:.0f} s"):
        watch.serves("n", "it", handle, may_restart=may_restart)
    clock[0] += patience_s - 2.5
    with pytest.raises(TransferTimeout):
        watch.serves("n", "it", handle, may_restart=may_restart)
    assert killed == []
    assert watch.serves("n", "it", handle, may_restart=may_restart) is may_restart
    assert killed == [not may_restart]


def test_one_that_is_still_being_made_is_not_taken_for_one_that_hangs(watched, monkeypatch):
    (clock, killed), watch, handle = watched, ServingWatch(), Actor(SILENCE, SILENCE, SILENCE)
    monkeypatch.setattr(serving, "constructor_pid", lambda handle: 7)
    for pause_s in (SILENT_S + 5.0, MADE_WITHIN_S - SILENT_S - 10.0):
        with pytest.raises(TransferTimeout, match="it is still being made"):
            watch.serves("n", "it", handle, may_restart=False)
        clock[0] += pause_s
    assert killed == []
    clock[0] += 10.0
    assert watch.serves("n", "it", handle, may_restart=False) is False
    assert killed == [True]


def test_one_that_serves_again_begins_anew(watched):
    (clock, killed), watch, handle = watched, ServingWatch(), Actor(False, True, False, False)
    with pytest.raises(TransferTimeout):
        watch.serves("n", "it", handle, may_restart=False)
    clock[0] += STUCK_S
    assert watch.serves("n", "it", handle, may_restart=False)
    with pytest.raises(TransferTimeout):
        watch.serves("n", "it", handle, may_restart=False)
    assert killed == []
    watch.keep(set())
    clock[0] += STUCK_S
    with pytest.raises(TransferTimeout):
        watch.serves("n", "it", handle, may_restart=False)
    assert killed == []


def test_one_that_is_gone_is_made_again_at_once(watched):
    assert ServingWatch().serves("n", "it", Actor(DEATH), may_restart=False) is False
    assert watched[1] == []


def test_actors_may_be_asked_for_the_first_time_while_others_are_forgotten():
    watch = ServingWatch()
    watch.since_s = {"gone": 1.0, "kept": 1.0}

    class Names(set):
        def __contains__(self, name):
            watch.since_s.setdefault("new", 2.0)  # As another thread would do now.
            return super().__contains__(name)

    watch.keep(Names({"kept", "new"}))
    assert watch.since_s == {"kept": 1.0, "new": 2.0}


def test_the_log_has_the_whole_error_of_a_node_without_a_store(caplog, monkeypatch):
    """Its reason is only what the traceback ends with."""
    monkeypatch.setattr(ray_errors.ActorDiedError, "__str__", lambda self: "a traceback\nOSError: gone")
    error = PeerLost("OSError: gone")
    error.__cause__ = ray_errors.ActorDiedError()
    nodes = ServedNodes("default")
    for _ in range(2):
        nodes.failed("n1", error)
    nodes.failed("n2", PeerLost("a reason without more"))
    assert [text for text in caplog.messages if "whole error" in text] == [
        "node n1 has no store; the whole error: a traceback\nOSError: gone"
    ]

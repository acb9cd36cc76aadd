"""What blocks a store runs on few threads, and nothing else waits for them."""

import threading
import time
from contextlib import ExitStack

import pytest

from kvstore.client.results import MissReason
from kvstore.errors import StoreBusy, TransferTimeout
from kvstore.runtime.threads.store_threads import _MAX_QUEUED, _NUM_THREADS, Blocking, StoreThreads


@pytest.fixture
def threads():
    made = StoreThreads()
    yield made
    made.stop()


def test_no_kind_waits_behind_another(threads, wait_until):
    go, done = threading.Event(), threading.Event()
    try:
        for _ in range(2 * _NUM_THREADS[Blocking.LOOKUP]):
            assert threads.submit(Blocking.LOOKUP, lambda: go.wait(20))
        assert threads.submit(Blocking.STATS, done.set)
        assert done.wait(5)
    finally:
        go.set()


def test_the_queue_is_bounded_and_empties_again(threads, wait_until):
    go, ran = threading.Event(), []
    most = _NUM_THREADS[Blocking.STATS] + _MAX_QUEUED
    taken = sum(threads.submit(Blocking.STATS, lambda: (go.wait(20), ran.append(1))) for _ in range(most + 50))
    assert taken == most
    assert threads.submit(Blocking.STATS, lambda: ran.append(1), is_admitted=True), "it goes on with what was taken"
    go.set()
    wait_until(lambda: len(ran) == most + 1)
    wait_until(lambda: not threads.num_pending[Blocking.STATS])
    assert threads.submit(Blocking.STATS, lambda: ran.append(1))


def test_what_fails_is_logged_and_the_next_one_runs(threads, caplog, wait_until):
    done = threading.Event()
    for _ in range(8):
        threads.submit(Blocking.SPILL, lambda: 1 // 0)
    threads.submit(Blocking.SPILL, done.set)
    assert done.wait(5)
    assert "unexpected error" in caplog.text


def test_after_the_end_nothing_is_taken(threads):
    threads.stop()
    assert not threads.submit(Blocking.STATS, lambda: None)


@pytest.fixture
def no_threads(monkeypatch):
    """No thread can be started, until it is called."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return monkeypatch.undo


def test_what_was_not_taken_for_want_of_a_thread_is_never_run(threads, no_threads, wait_until):
    ran, done = [], threading.Event()
    assert not threads.submit(Blocking.SPILL, lambda: ran.append(1))
    no_threads()
    assert threads.submit(Blocking.SPILL, done.set)
    assert done.wait(5)
    wait_until(lambda: not threads.num_pending[Blocking.SPILL])
    assert ran == []


def test_a_load_for_which_no_thread_can_be_started_is_answered(cluster, monkeypatch, wait_until):
    cluster.add("a")
    core = cluster.add("b")
    saver, loader, hashes = cluster.worker("a", 8), cluster.worker("b", 8), cluster.hashes(3)
    saver.save(hashes, range(3))
    with monkeypatch.context() as patch:
        patch.setattr(core.state.fetcher._threads, "_start", lambda: False)
        found = loader.load(hashes, range(3))
    assert found.num_blocks == 0
    assert "busy" in str(found.failed), found
    wait_until(lambda: core.pool.num_leases() == 0)
    assert loader.load(hashes, range(3)).num_blocks == 3


@pytest.mark.parametrize("bound", [{"_MOST_LOADS": 0}, {"_MOST_BYTES": 95}])
def test_loads_beyond_a_bound_are_answered_at_once_and_those_that_ended_count_no_more(cluster, monkeypatch, bound):
    cluster.add("a")
    core = cluster.add("b")
    saver, loader, hashes = cluster.worker("a", 8), cluster.worker("b", 8), cluster.hashes(4)
    saver.save(hashes, range(4))
    with monkeypatch.context() as patch:
        for name, value in bound.items():
            patch.setattr(f"kvstore.remote.fetch.{name}", value)
        found = loader.load(hashes[:3], range(3))
    assert found.num_blocks == 0
    assert found.failed[0].reason is MissReason.BUSY
    assert loader.load(hashes, range(4)).num_blocks == 4
    assert (core.state.fetcher._num_loads, core.state.fetcher._num_bytes) == (0, 0)


def test_a_fetch_for_which_no_thread_can_be_started_goes_on_when_one_can(cluster, monkeypatch):
    for node in "ab":
        cluster.add(node)
    publisher, reader = cluster.worker("a", 8), cluster.worker("b", 8)
    ticket = publisher.client.publish([0, 1])
    threads = cluster.nodes["b"].state.threads.threads[Blocking.FETCH]
    start, num_left = threads._start, [2]

    def refuse():
        num_left[0] -= 1
        return num_left[0] < 0 and start()

    monkeypatch.setattr(threads, "_start", refuse)
    assert reader.client.fetch(ticket, [0, 1]).result(10).num_blocks == 2
    assert num_left[0] < 0


class Directory:
    """Makes a node's questions to the directory wait until `go`."""

    def __init__(self, core, monkeypatch):
        self.go, self.num_asked, ask = threading.Event(), 0, core.state.hints.ask

        def late(chain):
            self.num_asked += 1
            self.go.wait(20)
            return ask(chain)

        monkeypatch.setattr(core.state.hints, "ask", late)
        monkeypatch.setattr(core.state.hints, "is_alone", lambda: False)


@pytest.fixture
def hanging(cluster, monkeypatch, wait_until):
    """A node of which the directory hangs, in the middle of a worker's lookup."""
    core = cluster.add("a", mover=False, call_timeout_s=10.0)
    worker, hashes = cluster.worker("a", seed=1), cluster.hashes(3)
    worker.save(hashes[:2], range(2))
    directory = Directory(core, monkeypatch)
    first = threading.Thread(target=lambda: worker.client.lookup(hashes), daemon=True)
    first.start()
    wait_until(lambda: directory.num_asked == 1)
    yield core, worker, hashes, directory
    directory.go.set()
    first.join(10)


def test_a_local_lookup_waits_for_no_other(hanging):
    _, worker, hashes, _ = hanging
    for _ in range(20):
        assert worker.client.lookup(hashes, remote=False, timeout_s=1.0).num_local == 2


def test_a_lookup_that_waits_for_others_is_answered_with_what_is_here_in_its_own_time(hanging):
    _, worker, hashes, directory = hanging
    began_s = time.monotonic()
    assert worker.client.lookup(hashes, timeout_s=1.0).num_local == 2
    assert time.monotonic() - began_s < 1.0
    assert directory.num_asked == 1


def test_lookups_that_wait_start_no_thread_each_and_too_many_are_answered_at_once(cluster, hanging):
    core, worker, hashes, directory = hanging
    before, answered = threading.active_count(), []

    def look_up():
        answered.append(worker.client.lookup(hashes, timeout_s=8.0).num_local)

    most = _NUM_THREADS[Blocking.LOOKUP] + _MAX_QUEUED
    with ExitStack() as held:
        core.state.threads.num_pending[Blocking.LOOKUP] += most
        held.callback(core.state.threads.num_pending.__setitem__, Blocking.LOOKUP, 1)
        look_up()
    assert answered == [2], "at once, with what is here"
    askers = [threading.Thread(target=look_up, daemon=True) for _ in range(40)]
    for asker in askers:
        asker.start()
    time.sleep(0.3)
    assert threading.active_count() - before - len(askers) <= _NUM_THREADS[Blocking.LOOKUP]
    with pytest.raises(TransferTimeout):
        worker.client.lookup(hashes, timeout_s=0.05)
    assert worker.client.lookup(hashes, remote=False).num_local == 2
    directory.go.set()
    for asker in askers:
        asker.join(10)
    assert answered == [2] * 41


def test_counts_that_cannot_be_had_are_refused_while_others_wait_for_them(cluster, monkeypatch):
    core, go = cluster.add("a", mover=False), threading.Event()
    client, stats = cluster.client("a"), core.stats
    monkeypatch.setattr(core, "stats", lambda: (go.wait(20), stats())[1])
    core.state.threads.num_pending[Blocking.STATS] = _NUM_THREADS[Blocking.STATS] + _MAX_QUEUED
    with pytest.raises(StoreBusy, match="try again"):
        client.stats()
    core.state.threads.num_pending[Blocking.STATS] = 0
    go.set()
    assert client.stats()["node_id"] == "a"

"""The control thread lives whatever is raised on it, and says whether it serves."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from kvstore.errors import KVStoreError
from kvstore.rpc.server import ControlServer
from kvstore.runtime.guard import Guard, LogLimit


@pytest.fixture
def server():
    made = ControlServer(lambda c, m: None, lambda c: None, lambda: made.tick(), lambda: True, tick_s=0.01)
    made.tick = lambda: None
    made.start()
    yield made
    made.stop()


def test_a_store_whose_tick_fails_serves_on(cluster, monkeypatch, wait_until, caplog):
    core = cluster.add("a", mover=False)
    worker, hashes = cluster.worker("a", 8), cluster.hashes(3)
    worker.save(hashes, range(3))
    failed = []

    def tick(now_s):
        failed.append(now_s)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(core.control.handoffs, "tick", tick)
    lease = worker.client.lease(hashes, ttl_s=0.5)
    assert lease is not None
    wait_until(lambda: len(failed) > 1)
    assert worker.client.lookup(hashes).num_local == 3
    # The parts of a tick that come after the one that fails are done: leases end, and so do the ticks' other users.
    wait_until(lambda: core.pool.num_leases() == 0)
    assert core.control.server.is_serving(5.0)
    assert core.control.server.loop.num_failures == len(failed)
    monkeypatch.undo()
    worker.save(cluster.hashes(6), range(6))


def test_a_server_whose_ticks_all_fail_does_not_count_as_serving(server, wait_until, monkeypatch):
    monkeypatch.setattr("kvstore.runtime.guard._PAUSES_S", (0.0,))
    server.tick = lambda: 1 / 0
    wait_until(lambda: not server.is_serving(5.0))
    server.tick = lambda: None
    wait_until(lambda: server.is_serving(5.0))


def test_a_callback_that_fails_is_called_no_more(server, wait_until):
    read_fd, write_fd = os.pipe()
    called = []

    def fail():
        called.append(1)
        raise ValueError("a bug")

    try:
        server.watch(read_fd, fail)
        os.write(write_fd, b"x")
        wait_until(lambda: server.loop.num_failures == 1)
        assert server.is_serving(5.0)
        assert server.is_serving(5.0)
        assert len(called) == 1
    finally:
        os.close(read_fd)
        os.close(write_fd)


def test_a_server_that_cannot_poll_any_more_ends_its_connections_and_says_so(cluster, monkeypatch, wait_until):
    monkeypatch.setattr("kvstore.runtime.guard._PAUSES_S", (0.0,))
    core = cluster.add("a", mover=False)
    worker = cluster.worker("a", 8)

    def fail(wait_s):
        raise OSError("no more")

    monkeypatch.setattr(core.control.server.loop, "_poll", fail)
    core.control.server.wake()
    wait_until(lambda: not core.control.server.is_serving(0.2))
    with pytest.raises(KVStoreError):
        worker.client.lookup(cluster.hashes(1))


def test_a_server_that_hangs_does_not_count_as_serving(server):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang():
        hangs.set()
        assert goes_on.wait(10.0)

    assert server.is_serving(5.0)
    server.tick = hang
    try:
        assert hangs.wait(5.0)
        assert not server.is_serving(0.05)
    finally:
        server.tick = lambda: None
        goes_on.set()
    assert server.is_serving(5.0)
    server.stop()
    assert not server.is_serving(0.0)


def test_few_of_many_failures_are_logged(caplog):
    guard = Guard(logging.getLogger("kvstore.test"), "a step")
    with caplog.at_level(logging.INFO, "kvstore.test"):
        for _ in range(1000):
            pause_s = guard.failed(ValueError("again"))
    assert (len(caplog.records), guard.num_failures, guard.num_in_row, pause_s) == (1, 1000, 1000, 2.0)
    guard.passed()
    assert (guard.num_failures, guard.num_in_row) == (1000, 0)


def test_what_the_log_did_not_take_is_counted():
    limit = LogLimit(every_s=0.0)
    assert limit.passes()
    assert limit.passes()
    limit.every_s = 1000.0
    assert limit.passes()
    assert not limit.passes()
    assert not limit.passes()
    assert (limit.take_held_back(), limit.take_held_back()) == (2, 0)

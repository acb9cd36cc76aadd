"""What a client holds is its own over all its connections: a call that times out loses nothing, and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import threading

import pytest
from inner_parts import parts_of

from kvstore.client import attachment
from kvstore.client.results import Pinned
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import CopyStuck, InvalidRequest, PeerLost, ProtocolError, StoreUnavailable, TransferTimeout
from kvstore.rpc.connect import connect_local

PATIENCE_S = 0.3
NOTHING = Pinned(pin_id=0, num_blocks=0)


@pytest.fixture
def core(cluster):
    return cluster.add("a", mover=False, call_timeout_s=PATIENCE_S, transfer_timeout_s=1.0)


@pytest.fixture
def worker(cluster, core):
    worker = cluster.worker("a", 16, seed=1)
    worker.save(cluster.hashes(10), range(10))
    return worker


@contextlib.contextmanager
def late(core, verb):
    """Have the store's one thread serve a verb only after its client gave up waiting, at the end of this context."""
    service, go_on = core.state.pool_service, threading.Event()
    serve = getattr(service, verb)
    served = threading.Event()

    def serve_late(*args, **more):
        go_on.wait(10)
        try:
            return serve(*args, **more)
        finally:
            served.set()

    setattr(service, verb, serve_late)
    try:
        yield
    finally:
        setattr(service, verb, serve)
        go_on.set()
        assert served.wait(10)


def ask_in_vain(verb, *args):
    with pytest.raises(TransferTimeout):
        verb(*args)


def lose_the_connection_of_calls(core, client):
    with late(core, "release"), pytest.raises(TransferTimeout):
        client.unpin(NOTHING)


def test_a_pin_is_given_back_over_another_connection_than_it_was_taken(core, worker, cluster):
    pinned = worker.client.pin(cluster.hashes(10))
    lose_the_connection_of_calls(core, worker.client)
    assert core.pool.stats().num_hard_pinned == 10
    assert worker.client.unpin(pinned)
    assert not worker.client.unpin(pinned)
    assert core.pool.stats().num_hard_pinned == 0


def test_a_closed_client_has_no_pins_left_whatever_timed_out_before(core, worker, cluster, wait_until):
    worker.client.pin(cluster.hashes(10))
    worker.client.pin(cluster.hashes(3), soft=True)
    lose_the_connection_of_calls(core, worker.client)
    worker.client.close()
    wait_until(lambda: core.pool.stats().num_pinned == core.pool.stats().num_soft_pinned == 0)
    assert core.pool.num_leases() == 0
    wait_until(lambda: not any(c.role == "client" for c in core.control.server.connections))


def test_a_lease_is_renewed_and_released_over_another_connection(core, worker, cluster):
    lease = worker.client.lease(cluster.hashes(4))
    lose_the_connection_of_calls(core, worker.client)
    assert lease.renew(60.0)
    assert lease.release()
    assert core.pool.num_leases() == 0


@pytest.mark.parametrize("verb", ["pin", "lease"])
def test_what_comes_after_its_caller_gave_up_is_given_back(core, worker, cluster, verb):
    kept = worker.client.pin(cluster.hashes(2))
    with late(core, verb), pytest.raises(TransferTimeout):
        getattr(worker.client, verb)(cluster.hashes(10))
    worker.client.unpin(NOTHING)  # Over the next connection.
    assert (core.pool.num_leases(), core.pool.stats().num_pinned) == (1, 2)
    assert worker.client.unpin(kept)


def test_a_question_that_the_store_has_not_read_yet_is_never_served(core, worker, cluster, wait_until):
    client, entered = worker.client, threading.Event()
    with late(core, "lookup"):
        with pytest.raises(TransferTimeout):
            client.lookup(cluster.hashes(1))
        with pytest.raises(TransferTimeout):
            client.pin(cluster.hashes(10))
        closing = threading.Thread(target=lambda: (entered.set(), client.close()))
        closing.start()
        assert entered.wait(5)
    closing.join(10)
    wait_until(lambda: not any(c.role == "client" for c in core.control.server.connections))
    assert core.pool.num_leases() == 0


def test_slots_that_a_save_never_heard_of_come_back_while_the_client_lives(core, worker, cluster, wait_until):
    with late(core, "prepare_store"):
        job = worker.client.save(cluster.hashes(3, seed=2), range(3))
        with pytest.raises(TransferTimeout):
            job.result(5)
    wait_until(lambda: core.pool.stats().num_writing == 0)
    assert worker.save(cluster.hashes(3, seed=2), range(3)).num_written == 3


def test_slots_that_a_publisher_never_heard_of_come_back(core, worker, wait_until):
    table = core.control.handoffs.table
    prepare, go_on = table.prepare, threading.Event()
    table.prepare = lambda *args: (go_on.wait(10), prepare(*args))[1]
    with pytest.raises(TransferTimeout):
        worker.client.begin_publish([0, 1])
    table.prepare = prepare
    go_on.set()
    worker.client.unpin(NOTHING)
    wait_until(lambda: table.num_slots == 0)


def test_slots_of_a_publication_come_back_whose_failure_the_store_did_not_hear(core, worker, wait_until):
    """COMPLETE and ABORT have no answer, and no later call of the client tells the store."""
    table = core.control.handoffs.table
    complete, go_on = table.complete, threading.Event()
    table.complete = lambda *args: (go_on.wait(10), complete(*args))[1]
    publication = worker.client.begin_publish([0, 1])
    with pytest.raises((TransferTimeout, StoreUnavailable)):
        publication.job.result(10)
    table.complete = complete
    go_on.set()
    wait_until(lambda: table.num_slots == 0)


def test_questions_for_counts_hold_up_no_call(core, worker, cluster, monkeypatch):
    """The store waits for its mover to answer them, and that hangs."""
    asked, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(core, "stats", lambda: (asked.set(), go_on.wait(10), {})[2])
    asking = threading.Thread(target=ask_in_vain, args=(worker.client.stats,))
    asking.start()
    assert asked.wait(5)
    assert worker.client.unpin(worker.client.pin(cluster.hashes(10)))
    asking.join(10)
    go_on.set()


def test_a_call_whose_connection_another_one_broke_is_asked_over_the_next(core, worker, cluster, wait_until):
    store, results = parts_of(worker.client).store, []
    with late(core, "release"):
        first = threading.Thread(target=ask_in_vain, args=(worker.client.unpin, NOTHING))
        first.start()
        wait_until(lambda: store.calls.turns.now is not None)
        store.call_timeout_s = 10.0
        second = threading.Thread(target=lambda: results.append(worker.client.pin(cluster.hashes(10)).num_blocks))
        second.start()
        first.join(10)
    second.join(10)
    assert results == [10]


def test_a_publication_outlasts_a_later_job_that_loses_its_connection(core, worker, cluster):
    client = worker.client
    ticket = client.publish([0, 1])
    for seed in range(2, 6):  # One each for the threads of the client, and so for that of the publication.
        with late(core, "prepare_store"), pytest.raises(TransferTimeout):
            client.save(cluster.hashes(1, seed=seed), [2]).result(5)
        worker.save(cluster.hashes(1, seed=seed), [2])
    assert client.fetch(ticket, [3, 4]).result(5).num_blocks == 2


def test_many_calls_that_time_out_leave_no_descriptors_in_the_store(core, worker, cluster, wait_until):
    worker.client.pin(cluster.hashes(3))
    server = core.control.server

    def theirs():
        return [c for c in server.connections if c.role == "client"]

    num_before = len(theirs())
    for _ in range(4):
        lose_the_connection_of_calls(core, worker.client)
        worker.client.unpin(NOTHING)
    wait_until(lambda: len(theirs()) <= num_before)
    assert core.pool.stats().num_hard_pinned == 3


def test_a_client_that_is_collected_gives_everything_back(core, worker, cluster, wait_until):
    client = cluster.client("a")
    client.pin(cluster.hashes(5))
    lose_the_connection_of_calls(core, client)
    cluster.clients.remove(client)
    num_connections = len(core.control.server.connections)
    del client
    gc.collect()
    wait_until(lambda: core.pool.stats().num_hard_pinned == 0)
    wait_until(lambda: len(core.control.server.connections) < num_connections)


def test_threads_that_close_a_client_at_once_give_everything_back(core, cluster, wait_until):
    worker, together = cluster.worker("a"), threading.Barrier(4)
    hashes = cluster.hashes(3)
    worker.save(hashes, range(3))
    client = worker.client
    assert client.pin(hashes).num_blocks == 3

    def end():
        together.wait(5)
        client.close()

    threads = [threading.Thread(target=end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    wait_until(lambda: not any(c.role == "client" for c in core.control.server.connections))
    assert core.pool.stats().num_pinned == 0


def test_an_owner_is_one_process(core, worker):
    key = parts_of(worker.client).store.key
    hello = {"role": "client", "protocol": PROTOCOL_VERSION, "owner": key}
    child = os.fork()
    if child == 0:
        try:
            connect_local(core.control_path, hello, timeout_s=5.0)
        except InvalidRequest as error:
            os._exit(0 if "new client in each process" in str(error) else 2)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert key not in repr([c.owner for c in core.control.server.connections]), "it is a secret"


@pytest.mark.parametrize("key", ["", "0" * 31, 7, {}, ["0" * 32]])
def test_what_is_no_key_is_refused(core, key):
    with pytest.raises(ProtocolError, match="32 digits"):
        connect_local(core.control_path, {"role": "client", "protocol": PROTOCOL_VERSION, "owner": key}, timeout_s=5.0)


def test_an_exception_in_the_middle_of_a_call_does_not_shift_the_answers(core, worker, cluster):
    """As a signal's handler may raise one at any moment."""
    client = worker.client
    read = parts_of(client).store.calls.channel.read

    def interrupt(timeout_s):
        parts_of(client).store.calls.channel.read = read
        raise KeyboardInterrupt

    parts_of(client).store.calls.channel.read = interrupt
    with pytest.raises(KeyboardInterrupt):
        client.lease(cluster.hashes(10))
    assert len(client.lease(cluster.hashes(2))) == 2
    assert core.pool.num_leases() == 1, "the one of which nobody heard is given back"


def test_a_call_that_meets_a_close_is_granted_nothing_that_nobody_gives_back(core, worker, cluster, wait_until):
    """It has passed the first check, then the client is closed by another thread, and its connection with it."""
    store = parts_of(worker.client).store
    store.calls.close()
    renewed = store.renewed

    def close_first(timeout_s):
        store.renewed = renewed
        worker.client.close()
        return renewed(timeout_s)

    store.renewed = close_first
    with pytest.raises((StoreUnavailable, PeerLost)):
        worker.client.pin(cluster.hashes(4))
    wait_until(lambda: not any(c.role == "client" for c in core.control.server.connections))
    assert core.pool.num_leases() == 0
    assert all(connection.closed for connection in store.open)


def test_a_client_whose_copies_are_stuck_is_not_collected_and_keeps_its_slots(core, cluster, wait_until, monkeypatch):
    worker = cluster.worker("a", 8)

    def stick(*args):
        raise CopyStuck("the device does not come to an end")

    monkeypatch.setattr(attachment, "_with_stuck_copies", set())
    monkeypatch.setattr(parts_of(worker.client).copier, "into_slots", stick)
    with pytest.raises(CopyStuck):
        worker.save(cluster.hashes(3, seed=3), range(3))
    assert attachment._with_stuck_copies == {parts_of(worker.client)}
    num_connections = len(core.control.server.connections)
    cluster.clients.remove(worker.client)
    del worker
    gc.collect()
    cluster.client("a").stats()  # What a collected one had said before is heard by then.
    assert core.pool.stats().num_writing == 3
    assert len(core.control.server.connections) >= num_connections

"""The connections of one client, to a real store on a thread."""

import contextlib
import threading
from types import SimpleNamespace

import pytest

from kvstore.client.connections import StoreConnections
from kvstore.errors import StoreNotRunning, StoreUnavailable, TransferTimeout
from kvstore.rpc.framing import Op
from tests.kvstore.standing_still import standing_still


@pytest.fixture
def core(cluster):
    return cluster.add("a")


@pytest.fixture
def lost():
    return []


@pytest.fixture
def store(core, lost):
    store = StoreConnections(core.control_path, lambda: lost.append(threading.current_thread()))
    yield store
    store.end()
    store.close(jobs_are_over=True)
    store.arena.close()


def test_it_knows_the_store_and_has_its_memory(store, core):
    assert (store.node_id, store.epoch) == ("a", core.state.epoch.hex())
    assert store.config == core.state.config
    assert store.call_timeout_s == core.state.config.call_timeout_s
    assert store.arena.num_bytes == core.state.arena.num_bytes


def test_nobody_at_the_path_is_said(tmp_path, lost):
    with pytest.raises(StoreNotRunning):
        StoreConnections(str(tmp_path / "nobody"), lambda: lost.append(1))
    assert lost == [], "a store that never was is not lost"


def test_jobs_at_once_have_one_each_and_the_next_ones_have_them_again(store):
    with store.for_jobs.taken() as one, store.for_jobs.taken() as other:
        assert one is not other
    with store.for_jobs.taken() as again:
        assert again in (one, other)


def test_a_broken_one_of_a_job_is_replaced_by_name(store):
    with store.for_jobs.taken() as broken:
        broken.close()
    with store.for_jobs.taken() as found:
        assert found is not broken
        assert not found.closed
        assert found.hello["connection"] != broken.hello["connection"]


def test_a_lookup_that_times_out_does_not_take_what_holds_leases(store):
    with store.for_lookups.taken() as first:
        first.close()
    with store.for_lookups.taken() as found:
        assert found is not first
    assert store.call(Op.STATS, b"")


def test_calls_go_on_over_a_new_connection_when_theirs_broke(store, lost):
    store.calls.close()
    assert store.call(Op.STATS, b"")
    assert lost == []


def test_a_handler_that_asks_while_its_thread_reconnects_is_answered(store, monkeypatch):
    connect, answers = store.connect, []

    def interrupted(*args):
        monkeypatch.setattr(store, "connect", connect)
        answers.append(store.call(Op.STATS, b""))
        return connect(*args)

    store.calls.close()
    monkeypatch.setattr(store, "connect", interrupted)
    asking = threading.Thread(target=lambda: answers.append(store.call(Op.STATS, b"")), daemon=True)
    asking.start()
    asking.join(5)
    assert not asking.is_alive(), "it waits for its own lock"
    assert len(answers) == 2
    assert store.call(Op.STATS, b"")


def test_a_question_of_its_own_leaves_no_connection(store):
    before = [connection for connection in store.open if not connection.closed]
    assert store.ask(Op.STATS, b"", 5.0)
    assert [connection for connection in store.open if not connection.closed] == before


def test_after_its_end_nothing_new_is_taken(store):
    held = contextlib.ExitStack()
    running = held.enter_context(store.for_jobs.taken())
    store.end()
    for refused in (
        store.check_open,
        lambda: store.call(Op.STATS, b""),
        lambda: store.say(Op.GOODBYE, b""),
        lambda: store.ask(Op.STATS, b"", 1.0),
    ):
        with pytest.raises(StoreUnavailable, match="make a new one"):
            refused()
    assert running.call(Op.STATS, b"", timeout_s=5.0), "a job that runs goes on"
    held.close()
    assert running.closed, "nobody else will close it"


def test_a_store_that_is_gone_is_said_to_be_lost(store, cluster, lost):
    cluster.stop_node("a")
    with pytest.raises(StoreUnavailable):
        store.connect()
    assert lost == [threading.current_thread()]


def test_a_store_that_does_not_answer_a_new_connection_in_time_is_late_and_not_lost(store, core, lost):
    with standing_still(core), pytest.raises(TransferTimeout, match="does not answer"):
        store.connect(timeout_s=0.05)
    assert lost == []
    assert store.call(Op.STATS, b"")


def test_what_a_new_connection_took_of_a_calls_time_is_not_there_for_its_answer(store, monkeypatch):
    now_s, limits = [100.0], []
    monkeypatch.setattr("kvstore.client.connections.clock", SimpleNamespace(now_s=lambda: now_s[0]))
    connect = store.connect

    def connect_slowly(*args):
        connection = connect(*args)
        call = connection.call
        connection.call = lambda *args, timeout_s, **more: (
            limits.append(timeout_s),
            call(*args, timeout_s=timeout_s, **more),
        )[1]
        now_s[0] += 0.75 * store.call_timeout_s
        return connection

    monkeypatch.setattr(store, "connect", connect_slowly)
    store.calls.close()
    assert store.call(Op.STATS, b"")
    assert limits == [pytest.approx(0.25 * store.call_timeout_s)]


def test_the_thread_that_says_goodbye_again_ends_with_the_store(store, cluster, monkeypatch, wait_until):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "raykv-goodbye"]

    tried, connect = [], store.connect_anew
    monkeypatch.setattr(store, "connect_anew", lambda *args: (tried.append(1), connect(*args))[1])
    before = threads()
    cluster.stop_node("a")
    store.end()
    store.close(jobs_are_over=True)
    wait_until(lambda: set(threads()) <= set(before))
    assert tried == [1], "nobody is there: once is enough"


def test_another_life_of_the_store_is_not_this_one(store, cluster, lost):
    cluster.stop_node("a")
    store.path = cluster.add("a").control_path
    with pytest.raises(StoreUnavailable, match="restarted"):
        store.connect()
    assert len(lost) == 1
    assert all(connection.closed for connection in store.open[1:])


@pytest.mark.parametrize("jobs_are_over", [True, False])
def test_close_closes_all_and_says_so_only_when_nothing_is_copied_any_more(store, jobs_are_over):
    said = []
    with store.for_jobs.taken() as job, store.for_lookups.taken() as lookup:
        used = [job, lookup, store.calls]
    for connection in used:
        send = connection.send_if_free
        connection.send_if_free = lambda op, send=send: (said.append(op), send(op))[1]
    store.close(jobs_are_over=jobs_are_over)
    assert said == [Op.GOODBYE if jobs_are_over else Op.UNPIN_ALL]
    assert store.open == []
    assert store.calls.closed

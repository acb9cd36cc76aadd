"""What a client held comes back when it is closed, or collected, whatever its calls and its store are doing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import threading
import time
from types import SimpleNamespace

import pytest
from inner_parts import parts_of

import kvstore.kernels
from kvstore.blocks.codec import encode
from kvstore.client import attachment
from kvstore.client.handoff.stage_link import AttachedStage, StageLink
from kvstore.client.job_threads import JobThreads
from kvstore.client.work import Awaited, Work
from kvstore.errors import InvalidRequest, JobAbandoned, KVStoreError, StoreBusy, StoreUnavailable, TransferTimeout
from kvstore.rpc.client import ControlClient
from kvstore.rpc.framing import Flag, Op, encode_short
from kvstore.rpc.messages import Ask
from tests.kvstore.standing_still import standing_still


@pytest.fixture
def core(cluster):
    return cluster.add("a", mover=False, call_timeout_s=0.5)


@pytest.fixture
def worker(cluster, core):
    """A client that pins four blocks."""
    worker = cluster.worker("a")
    hashes = cluster.hashes(4)
    worker.save(hashes, range(4))
    assert worker.client.pin(hashes).num_blocks == 4
    assert core.pool.stats().num_pinned == 4
    return worker


@pytest.fixture
def is_given_back(core, wait_until):
    return lambda: wait_until(lambda: core.pool.stats().num_pinned == core.pool.num_leases() == 0)


def in_time(call, timeout_s=10.0):
    """Call on a thread of its own, which has to return."""
    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    calling.join(timeout_s)
    assert not calling.is_alive(), "it has not returned"


def test_beside_a_call_of_another_thread_that_times_out(core, worker, cluster, is_given_back):
    failed = []

    def lease():
        try:
            worker.client.lease(cluster.hashes(4), 5.0)
        except KVStoreError as error:
            failed.append(type(error))

    with standing_still(core):
        leasing = threading.Thread(target=lease, daemon=True)
        leasing.start()
        while parts_of(worker.client).store.calls.turns.now is None:
            assert leasing.is_alive()
        worker.client.close(0.1)
        leasing.join(5)
    assert failed
    is_given_back()


def test_in_the_handler_of_a_signal_that_comes_within_a_call(worker, is_given_back):
    with contextlib.suppress(KVStoreError):
        parts_of(worker.client).store.call(Op.STATS, b"", meanwhile=worker.client.close)
    is_given_back()


def test_while_the_store_stands_still_and_a_call_has_timed_out(core, worker, cluster, is_given_back):
    with standing_still(core):
        with pytest.raises(TransferTimeout):
            worker.client.lease(cluster.hashes(4), 5.0)
        worker.client.close(0.1)
    is_given_back()


def test_while_the_store_stands_still_for_longer_than_a_call(core, worker, cluster, is_given_back):
    """The goodbye is said again and again."""
    with standing_still(core):
        with pytest.raises(TransferTimeout):
            worker.client.lease(cluster.hashes(4), 5.0)
        for known in parts_of(worker.client).store.open:
            known.close()
        worker.client.close(0.1)
        time.sleep(1.0)  # Its first connection has been given up.
        assert core.pool.stats().num_pinned == 4
    is_given_back()


@pytest.mark.parametrize("ends", ["closed again", "collected"])
def test_one_that_was_interrupted(cluster, worker, is_given_back, monkeypatch, ends):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(parts_of(worker.client).threads, "await_callbacks", interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.client.close()
    monkeypatch.undo()
    if ends == "closed again":
        worker.client.close()
    else:
        cluster.clients.clear()
        worker.client = None
        gc.collect()
    is_given_back()


def test_who_collects_one_does_not_wait_for_its_store(cluster, wait_until):
    core = cluster.add("a", mover=False, call_timeout_s=20.0)
    worker, hashes = cluster.worker("a"), cluster.hashes(4)
    worker.save(hashes, range(4))
    assert worker.client.pin(hashes).num_blocks == 4

    def collect():
        cluster.clients.clear()
        worker.client = None
        gc.collect()

    with standing_still(core):
        for known in parts_of(worker.client).store.open:
            known.close()  # Over none that is open the goodbye could be said.
        in_time(collect)
        assert core.pool.stats().num_pinned == 4
    wait_until(lambda: core.pool.stats().num_pinned == 0)


@pytest.mark.parametrize("timeout_s", [None, -1, math.nan, "1"])
def test_a_time_that_is_none_closes_nothing(worker, cluster, timeout_s):
    with pytest.raises(InvalidRequest, match="timeout_s"):
        worker.client.close(timeout_s)
    assert worker.client.lookup(cluster.hashes(4)).num_local == 4


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10, 0])
def test_any_other_time_is_one(worker, is_given_back, timeout_s):
    worker.client.close(timeout_s)
    is_given_back()


def test_where_the_socket_was_removed_by_others(core, worker, cluster, is_given_back):
    os.unlink(core.control_path)
    with pytest.raises(StoreUnavailable):
        parts_of(worker.client).store.connect()
    assert worker.client.pin(cluster.hashes(2)).num_blocks == 2, "the store lives"
    worker.client.close()
    is_given_back()


@pytest.mark.parametrize("where", ["under the lock", "where the thread is started"])
def test_in_a_handler_while_its_thread_learns_that_the_store_has_ended(cluster, worker, monkeypatch, where):
    cluster.clients.clear()  # One that hangs would hang again when it is closed there.
    start, closed = threading.Thread.start, []

    def close_once():
        if not closed:
            closed.append(1)
            worker.client.close(1.0)

    def interrupted(thread):
        if thread.name == "raykv-unmap":
            close_once()
        start(thread)

    if where == "under the lock":
        monkeypatch.setattr(attachment, "JobThreads", lambda: (close_once(), JobThreads())[1])
    else:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
    in_time(parts_of(worker.client).lose)
    assert closed


def test_after_the_store_has_ended_where_no_thread_can_be_started(worker, monkeypatch, wait_until):
    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(attachment.threading, "Thread", NoThread)
    parts_of(worker.client).lose()
    monkeypatch.undo()
    in_time(worker.client.close, 5.0)
    assert parts_of(worker.client).is_unmapped


def test_a_lease_of_a_closed_client_is_not_held(worker, cluster):
    lease = worker.client.lease(cluster.hashes(4), 30.0)
    assert lease.held()
    worker.client.close()
    assert not lease.held()
    with pytest.raises(StoreUnavailable):
        lease.block(0)


def test_any_call_names_a_connection_that_broke(core, worker, cluster, monkeypatch, wait_until):
    """The store keeps what it gave over it until then."""
    store = parts_of(worker.client).store
    connect = store.connect_anew

    def refuse(*_):
        raise StoreUnavailable("no descriptor is left")

    monkeypatch.setattr(store, "connect_anew", refuse)
    with store.for_jobs.taken() as broken:
        broken.call(Op.LEASE, encode(Ask(parts_of(worker.client).chain(cluster.hashes(4)), 30.0)), timeout_s=5.0)
        broken.channel.unheard = 1
        broken.close()
    assert store.broken.untold
    monkeypatch.setattr(store, "connect_anew", connect)
    store.broken.name_again_s = 0.0
    worker.client.pin(cluster.hashes(2))
    assert not store.broken.untold


def test_those_that_wait_for_anothers_connection_wait_no_longer_than_a_call(core, worker, monkeypatch):
    store, tried, goes_on = parts_of(worker.client).store, [], threading.Event()

    def late(*_):
        tried.append(1)
        goes_on.wait(10)
        raise TransferTimeout("late")

    monkeypatch.setattr(store, "connect", late)
    store.calls.close()
    errors, lock = [], threading.Lock()

    def ask():
        try:
            store.call(Op.STATS, b"")
        except KVStoreError as error:
            with lock:
                errors.append(type(error))

    first = threading.Thread(target=ask, daemon=True)
    first.start()
    while not tried:
        assert first.is_alive()
    others = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(5)
    assert errors == [TransferTimeout] * 4
    goes_on.set()
    first.join(5)
    assert tried == [1]


def test_a_question_that_waited_all_its_time_is_not_asked(worker):
    connection = parts_of(worker.client).store.calls
    turn = [0]
    assert connection.turns.take(turn)
    with pytest.raises(TransferTimeout, match="not asked"):
        connection.call(Op.STATS, timeout_s=0.05)
    connection.turns.end(turn)
    assert not connection.closed


@pytest.mark.parametrize("left_s", [0.0005, 0.0, -1.0])
def test_a_question_whose_turn_comes_too_late_for_an_answer_is_not_asked(worker, monkeypatch, left_s):
    """It would only close the connection for those that wait behind it."""
    connection, now_s, others = parts_of(worker.client).store.calls, [100.0], [0]
    monkeypatch.setattr("kvstore.rpc.client.clock", SimpleNamespace(now_s=lambda: now_s[0]))
    assert connection.turns.take(others)

    def end_late(_):
        now_s[0] += 20.0 - left_s
        connection.turns.end(others)

    monkeypatch.setattr(connection, "check_turn", end_late)
    num_calls = connection.num_calls
    with pytest.raises(TransferTimeout, match="not asked"):
        connection.call(Op.STATS, timeout_s=20.0)
    assert (connection.num_calls, connection.closed) == (num_calls, False)
    assert connection.call(Op.STATS, timeout_s=20.0), "the next one has its turn"


def test_what_has_no_answer_is_said_if_no_question_is_under_way(worker):
    connection: ControlClient = parts_of(worker.client).store.calls
    said = []
    connection.call(Op.STATS, timeout_s=5.0, meanwhile=lambda: said.append(connection.send_if_free(Op.GOODBYE)))
    assert said == [False]
    with pytest.raises(StoreBusy):
        connection.call(Op.STATS, timeout_s=5.0, meanwhile=lambda: connection.send(Op.GOODBYE))


def test_two_threads_that_say_last_words_do_not_take_the_connection_from_each_other(core, worker, monkeypatch):
    store, others, said = parts_of(worker.client).store, [], []
    send = store.calls.channel.send

    def send_slowly(*args):
        if not others:
            others.append(threading.Thread(target=lambda: said.append(store.is_said(Op.UNPIN_ALL)), daemon=True))
            others[0].start()
            others[0].join(0.2)  # It has a connection to say it over, and waits for that.
            assert said == []
        send(*args)

    monkeypatch.setattr(store.calls.channel, "send", send_slowly)
    assert store.is_said(Op.UNPIN_ALL)
    others[0].join(5)
    assert said == [True]


def test_last_words_over_a_connection_that_another_thread_just_closed_are_not_said(worker, monkeypatch):
    connection: ControlClient = parts_of(worker.client).store.calls
    has_room = connection.channel.has_room
    monkeypatch.setattr(connection.channel, "has_room", lambda: (connection.channel.sock.close(), has_room())[1])
    assert not connection.send_if_free(Op.GOODBYE)


def test_last_words_do_not_wait_for_a_store_that_reads_nothing(core, worker):
    connection: ControlClient = parts_of(worker.client).store.calls
    with standing_still(core):
        connection.channel.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection.channel.sock.send(encode_short(Op.RELEASE, Flag.ONE_WAY, 1, encode(0)))
        connection.channel.sock.settimeout(30.0)
        begin_s = time.monotonic()
        assert not connection.send_if_free(Op.GOODBYE)
        assert time.monotonic() - begin_s < 10.0
        assert not connection.closed


def test_work_whose_connection_was_closed_goes_on_to_its_end(wait_until):
    threads, gone = JobThreads(), Awaited(-1, math.inf)

    def steps():
        yield gone
        return 7

    begun, asked = Work(steps), Work(steps)
    threads.start(begun)
    threads.start_asked(asked, gone)
    assert [begun.future.result(5), asked.future.result(5)] == [7, 7]
    wait_until(lambda: len(threads) == 0)
    assert threads.shutdown(5)


@pytest.mark.parametrize(
    ("timeout", "is_refused"), [(-1, False), (-0.5, False), (math.inf, False), (math.nan, True), (10**400, True)]
)
def test_a_job_is_abandoned_with_any_time(worker, cluster, monkeypatch, timeout, is_refused):
    copies, goes_on = threading.Event(), threading.Event()
    copy = parts_of(worker.client).copier.into_slots

    def held(*args):
        copies.set()
        assert goes_on.wait(10)
        return copy(*args)

    monkeypatch.setattr(parts_of(worker.client).copier, "into_slots", held)
    job = worker.client.save(cluster.hashes(2, seed=5), [0, 1])
    assert copies.wait(5)
    if is_refused:
        with pytest.raises(InvalidRequest):
            job.abandon(timeout)
    elif timeout < 0:
        in_time(lambda: job.abandon(timeout), 5.0)
    else:
        threading.Timer(0.1, goes_on.set).start()
        assert job.abandon(timeout)
    goes_on.set()
    with contextlib.suppress(JobAbandoned):
        job.result(10)


def test_a_task_that_is_cancelled_leaves_the_job_to_others(worker, cluster, monkeypatch):
    goes_on = threading.Event()
    copy = parts_of(worker.client).copier.into_slots
    monkeypatch.setattr(parts_of(worker.client).copier, "into_slots", lambda *args: (goes_on.wait(10), copy(*args)))

    async def wait():
        # More than there are threads that copy: the last ones are queued.
        jobs = [worker.client.save(cluster.hashes(2, seed=seed), [0, 1]) for seed in range(10, 16)]

        async def await_it():
            return await jobs[-1]

        other = asyncio.create_task(await_it())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(await_it(), 0.05)
        goes_on.set()
        return await asyncio.wait_for(other, 10)

    assert asyncio.run(wait()).num_blocks == 2


def test_an_interrupt_of_who_does_the_job_while_waiting_is_nobody_elses(worker):
    def steps():
        raise KeyboardInterrupt
        yield

    work = Work(steps, math.inf)
    with pytest.raises(KeyboardInterrupt):
        work.do()
    with pytest.raises(JobAbandoned, match="interrupted"):
        work.future.result(0)


class Copier:
    is_closed = False

    def close(self):
        self.is_closed = True


def test_a_stage_that_is_lost_while_a_job_takes_it_is_mapped_or_not_taken():
    link = StageLink(lambda *_: b"", None, 1, ())
    stage = AttachedStage(1, 1, Copier())
    link.attached, lock = stage, link.lock

    class LosingFirst:
        """Where a thread comes to the lock another one finds that the mover has ended."""

        def __enter__(self):
            link.lock = lock
            losing = threading.Thread(target=link.lose, args=(stage,))
            losing.start()
            losing.join(5)
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    link.lock, link._closed = LosingFirst(), True
    taken = link.take()
    assert taken is None or not taken.copier.is_closed


def test_a_store_that_stands_still_does_not_hold_up_a_result_for_a_new_connection(cluster):
    core = cluster.add("a", mover=False, call_timeout_s=3.0)
    worker, hashes = cluster.worker("a"), cluster.hashes(4)
    worker.save(hashes, range(4))
    waits = []
    connect = parts_of(worker.client).store.connect_anew
    parts_of(worker.client).store.connect_anew = lambda *args: (waits.append(args[2]), connect(*args))[1]
    with standing_still(core):
        assert worker.load(hashes, range(4), timeout_s=0.1).num_blocks == 0
    assert waits
    assert max(waits) < 1.0


@pytest.mark.parametrize("verb", ["pin", "lease", "begin_publish"])
def test_beside_a_call_that_waits_for_a_new_connection(core, worker, cluster, is_given_back, wait_until, verb):
    client, ended = worker.client, []
    args = ([0, 1],) if verb == "begin_publish" else (cluster.hashes(4),)

    def ask():
        with pytest.raises(StoreUnavailable, match="closed"):
            getattr(client, verb)(*args)
        ended.append(1)

    with standing_still(core):
        with pytest.raises(TransferTimeout):
            client.stats()
        parts_of(client).store.calls.close()
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        wait_until(lambda: parts_of(client).store.renewing.now is not None)
        # Another one that is free says the goodbye, before the store comes to the new one.
        client.close(0.0)
    asking.join(5)
    assert ended
    is_given_back()
    wait_until(lambda: core.control.handoffs.table.num_slots == 0)
    wait_until(
        lambda: all(known.closed for known in parts_of(client).store.open)
    )  # The late goodbye has one of its own.


@pytest.mark.parametrize("timeout_s", [0, 0.05])
@pytest.mark.parametrize("has_to_connect", [False, True])
def test_a_lookup_takes_no_longer_than_it_may(cluster, timeout_s, has_to_connect):
    core = cluster.add("a", mover=False, call_timeout_s=20.0)
    client = cluster.client("a")
    if not has_to_connect:
        client.lookup(cluster.hashes(4))
    assert len(parts_of(client).store.for_lookups) == (not has_to_connect)

    def look():
        with pytest.raises(TransferTimeout):
            client.lookup(cluster.hashes(4), timeout_s=timeout_s)

    with standing_still(core):
        in_time(look)


def test_what_connecting_took_of_a_lookups_time_is_not_there_for_its_answer(worker, cluster, monkeypatch):
    now_s, limits, lookups = [100.0], [], parts_of(worker.client).store.for_lookups
    monkeypatch.setattr("kvstore.client.client.clock", SimpleNamespace(now_s=lambda: now_s[0]))
    take = lookups.take

    def take_slowly(*args):
        connection = take(*args)
        call = connection.call
        connection.call = lambda *args, timeout_s, **more: (
            limits.append(timeout_s),
            call(*args, timeout_s=timeout_s, **more),
        )[1]
        now_s[0] += 15.0
        return connection

    monkeypatch.setattr(lookups, "take", take_slowly)
    assert worker.client.lookup(cluster.hashes(4), timeout_s=20.0).num_local == 4
    assert limits == [pytest.approx(5.0)]


def test_a_handler_whose_thread_waits_for_its_turn_is_refused(worker, wait_until):
    """To wait behind its own thread would be for ever, and for all others too."""
    connection, refused = parts_of(worker.client).store.calls, []
    others = [0]
    assert connection.turns.take(others)

    def handler(now):
        with pytest.raises(StoreBusy):
            connection.call(Op.STATS, timeout_s=5.0)
        with pytest.raises(StoreBusy):
            connection.send(Op.HANDOFF_SOON)
        refused.append(1)
        connection.turns.end(others)

    check = connection.check_turn
    connection.check_turn = lambda now: check(now) if refused or now[0] else handler(now)
    in_time(lambda: connection.call(Op.STATS, timeout_s=5.0))
    assert refused


def test_callbacks_of_a_store_that_has_ended_are_waited_for(cluster, core, worker, wait_until):
    goes_on, ended = threading.Event(), []
    job = worker.client.save(cluster.hashes(4), range(4))
    job.result(5)
    job.add_done_callback(lambda _: (goes_on.wait(5), ended.append(1)))
    parts_of(worker.client).lose()
    threading.Timer(0.2, goes_on.set).start()
    worker.client.close()
    assert ended


def test_a_job_of_a_store_that_has_ended_is_waited_for(worker, cluster, monkeypatch):
    copies, goes_on, seen = threading.Event(), threading.Event(), []
    copy = parts_of(worker.client).copier.into_slots
    monkeypatch.setattr(
        parts_of(worker.client).copier,
        "into_slots",
        lambda *args: (copies.set(), goes_on.wait(20), copy(*args))[2],
    )
    job = worker.client.save(cluster.hashes(2, seed=5), [0, 1])
    assert copies.wait(5)
    monkeypatch.setattr(parts_of(worker.client), "unmap", lambda **_: seen.append(job.done()))
    parts_of(worker.client).lose()
    threading.Timer(0.2, goes_on.set).start()
    worker.client.close()
    assert seen
    assert all(seen), "the memory that it copies to was unmapped"
    monkeypatch.undo()
    parts_of(worker.client).unmap(copies_are_over=True)


def test_a_stage_that_comes_when_its_client_was_closed_meanwhile_is_unmapped(monkeypatch):
    monkeypatch.setattr("kvstore.client.handoff.stage_link.stage_uuid", lambda _: "07")
    monkeypatch.setattr(
        "kvstore.client.handoff.stage_link.decode_stage", lambda _: SimpleNamespace(slab=1, generation=1)
    )
    copier = Copier()

    def make(*_):
        link.close()
        return copier

    monkeypatch.setattr("kvstore.client.handoff.stage_link.StageCopier", make)
    caches = SimpleNamespace(layout=None, shape=SimpleNamespace(block_bytes=1))
    link = StageLink(lambda *_: b"", caches, 1, ())
    assert link._attach() is None
    assert link.slab == 0
    assert copier.is_closed


def test_a_handler_that_attaches_within_an_attachment_gets_none(monkeypatch):
    monkeypatch.setattr("kvstore.client.handoff.stage_link.stage_uuid", lambda _: "07")
    taken = []

    def ask(*_):
        taken.append(link.take())
        raise StoreUnavailable("of this test")

    caches = type("Caches", (), {"layout": None, "shape": type("Shape", (), {"block_bytes": 1})})
    link = StageLink(ask, caches, 1, ())

    def attach():
        with pytest.raises(StoreUnavailable):
            link._attach()

    in_time(attach)
    assert taken == [None]


def test_in_a_handler_while_its_thread_pins_the_memory(worker, monkeypatch):
    class Driver:
        def check_same_addresses(self, device):
            worker.client.close(0.1)
            raise InvalidRequest("of this test")

    monkeypatch.setattr(kvstore.kernels, "host_register", Driver(), raising=False)
    mapping = parts_of(worker.client).mapping

    def pin():
        with pytest.raises(InvalidRequest):
            mapping.pinned(1, 1, 0)

    in_time(pin)
    assert mapping.close(copies_are_over=True)

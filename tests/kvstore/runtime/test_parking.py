"""One thread that watches for all that waits."""

import contextlib
import functools
import gc
import math
import os
import signal
import socket
import threading
import time

import pytest

from kvstore.client.job_threads import JobThreads
from kvstore.client.work import Awaited, Work
from kvstore.runtime import clock
from kvstore.runtime.parking import Parking


@pytest.fixture
def parking():
    made = Parking()
    yield made
    made.close()


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def waiting_threads():
    return {thread for thread in threading.enumerate() if thread.name == "raykv-waiting"}


def far():
    return clock.now_s() + 60


def test_what_is_parked_goes_on_once_when_there_is_something_to_read(parking, pair):
    here, there = pair
    called = threading.Semaphore(0)
    parking.park(here.fileno(), far(), called.release)
    assert not called.acquire(timeout=0.05)
    there.send(b"xx")
    assert called.acquire(timeout=5)
    assert not called.acquire(timeout=0.05), "though all of it is still to be read"
    assert len(parking) == 0
    parking.park(here.fileno(), far(), called.release)
    assert called.acquire(timeout=5), "for what came before"


def test_what_is_parked_goes_on_when_the_other_side_ends(parking, pair):
    here, there = pair
    called = threading.Event()
    parking.park(here.fileno(), far(), called.set)
    there.close()
    assert called.wait(5)


def test_each_goes_on_when_its_own_time_is_over(parking):
    pairs, order, ended = [socket.socketpair() for _ in range(3)], [], threading.Event()
    began_s = clock.now_s()
    for (here, _), after_s in zip(pairs, (0.3, 0.1, 0.2), strict=True):
        call = lambda after_s=after_s: (order.append(after_s), len(order) == 3 and ended.set())  # noqa: E731
        parking.park(here.fileno(), began_s + after_s, call)
    assert ended.wait(5)
    assert order == [0.1, 0.2, 0.3]
    assert clock.now_s() - began_s >= 0.3
    for pair in pairs:
        for end in pair:
            end.close()


def test_what_left_is_not_called_and_its_descriptor_may_be_parked_again(parking, pair):
    here, there = pair
    called, again = threading.Event(), threading.Event()
    leave = parking.park(here.fileno(), far(), called.set)
    leave()
    parking.park(here.fileno(), far(), again.set)
    leave()  # Of one that is gone: it must not take the other's place.
    there.send(b"x")
    assert again.wait(5)
    assert not called.is_set()


@pytest.mark.parametrize("wait_s", [1e7, math.inf])
def test_one_that_may_wait_for_ever_does_not_end_the_thread(wait_s, parking):
    pairs, looked, called = [socket.socketpair() for _ in range(3)], threading.Event(), threading.Event()
    leave = parking.park(pairs[0][0].fileno(), clock.now_s() + wait_s, lambda: None)
    parking.park(pairs[1][0].fileno(), clock.now_s(), looked.set)
    assert looked.wait(5)  # From here on the thread sleeps for the first one alone.
    pairs[2][1].send(b"x")
    parking.park(pairs[2][0].fileno(), far(), called.set)
    assert called.wait(5)
    leave()
    for pair in pairs:
        for end in pair:
            end.close()


def test_work_that_its_waiter_leaves_goes_on_elsewhere(pair, wait_until):
    """A signal whose handler raises, as Ctrl-C does, ends the wait for a result and not the job."""

    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    def steps():
        while True:
            try:
                return here.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                yield Awaited(here.fileno(), far())

    here, there = pair
    threads, work = JobThreads(), Work(steps, 60.0)
    threads.start(work)
    wait_until(lambda: threads.num_parked == 1)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            work.do()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    there.send(b"x")
    assert work.future.result(5) == b"x"
    threads.shutdown()


def test_what_no_thread_can_be_started_for_is_done_once(monkeypatch):
    """A pool that takes it and raises all the same would have the next thread do it too."""
    threads, called, start = JobThreads(), [], threading.Thread.start

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads.call(lambda: called.append("first"))
    monkeypatch.setattr(threading.Thread, "start", start)
    threads.call(lambda: called.append("second"))
    threads.await_callbacks(5.0)
    assert called == ["first", "second"]
    threads.shutdown()


def test_one_that_fails_does_not_end_the_thread(parking, pair, caplog):
    here, there = pair
    called = threading.Event()
    parking.park(here.fileno(), clock.now_s(), lambda: 1 // 0)
    there.send(b"x")
    while len(parking):
        time.sleep(0.005)
    parking.park(here.fileno(), far(), called.set)
    assert called.wait(5)
    assert "could not go on" in caplog.text


def test_it_has_no_thread_before_it_is_used_and_leaves_none_and_no_descriptor(pair, wait_until):
    before, known = len(os.listdir("/proc/self/fd")), waiting_threads()
    parking = Parking()
    assert not waiting_threads() - known
    parking.park(pair[0].fileno(), far(), lambda: None)()
    (thread,) = waiting_threads() - known
    parking.close()
    thread.join(5)
    assert not thread.is_alive()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # Fewer where an earlier one ended meanwhile.


def test_a_descriptor_that_was_closed_while_it_was_parked_holds_up_no_other(parking, pair):
    gone, other = socket.socketpair()
    called, last = threading.Event(), threading.Event()
    parking.park(gone.fileno(), clock.now_s() + 0.05, called.set)
    gone.close()
    other.close()
    assert called.wait(5), "its time is over all the same"
    parking.park(pair[0].fileno(), clock.now_s() + 0.05, last.set)
    assert last.wait(5), "the thread goes on"


def test_without_a_thread_nothing_is_parked_and_the_next_one_starts_it(parking, pair, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        parking.park(pair[0].fileno(), far(), lambda: None)
    monkeypatch.undo()
    assert len(parking) == 0
    assert len(os.listdir("/proc/self/fd")) <= before
    called = threading.Event()
    parking.park(pair[0].fileno(), clock.now_s() + 0.05, called.set)
    assert called.wait(5)


@pytest.mark.parametrize(
    "error", [OSError("no descriptor is left"), RuntimeError("can't start new thread"), ValueError("it was closed")]
)
def test_work_that_cannot_be_parked_is_done_all_the_same(pair, error, wait_until):
    def refuse(fd, until_s, then):
        raise error

    def steps():
        yield Awaited(pair[0].fileno(), far())
        return pair[0].recv(1)

    threads = JobThreads()
    threads._parking.park = refuse
    begun, early = Work(steps), Work(steps, 60.0)
    threads.start(begun)
    threads.start_asked(early, Awaited(pair[0].fileno(), far()))
    pair[1].send(b"ab")
    assert {begun.future.result(5), early.future.result(5)} == {b"a", b"b"}
    threads.shutdown()


def test_the_thread_of_a_client_that_is_collected_ends(pair, wait_until):
    known = waiting_threads()
    threads = JobThreads()
    steps = iter(())

    def wait_once():
        yield Awaited(pair[0].fileno(), clock.now_s() + 0.01)
        return list(steps)

    work = Work(wait_once)
    threads.start(work)
    assert work.future.result(5) == []
    wait_until(functools.partial(lambda works: not works, threads._works))
    (thread,) = waiting_threads() - known
    del threads, work
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_what_is_parked_with_a_descriptor_that_others_closed_goes_on_when_its_number_is_parked_again(parking):
    here, there = socket.socketpair()
    other, peer = socket.socketpair()
    number, called, called_too = here.fileno(), threading.Event(), threading.Event()
    parking.park(number, far(), called.set)
    here.close()
    assert os.dup2(other.fileno(), number) == number
    parking.park(number, far(), called_too.set)
    assert called.wait(5)
    assert not called_too.is_set()
    peer.send(b"x")
    assert called_too.wait(5)
    os.close(number)
    for end in (there, other, peer):
        end.close()


def test_its_thread_ends_although_something_was_left_behind_when_it_was_closed():
    before = set(threading.enumerate())
    parking, gone_on = Parking(), []
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    parking.park(read_fd, clock.now_s() + 60.0, lambda: gone_on.append(1))
    with parking._lock:  # So that its thread sees both at once.
        parking._left_behind.append(lambda: gone_on.append(2))
        parking._take(read_fd)
        parking.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
        assert not thread.is_alive()
    assert gone_on == [2]
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.parametrize("where", ["before it runs", "when it may run"])
def test_the_handler_of_a_signal_that_comes_while_the_thread_is_started_waits_for_what_is_parked(
    parking, monkeypatch, wait_until, where
):
    start, seen, called = threading.Thread.start, [], threading.Event()
    with contextlib.ExitStack() as opened:
        pairs = [tuple(opened.enter_context(end) for end in socket.socketpair()) for _ in range(2)]

        def handler():
            monkeypatch.undo()
            mine = threading.Event()
            parking.park(pairs[1][0].fileno(), far(), mine.set)
            pairs[1][1].send(b"x")
            seen.append(mine.wait(5))

        def interrupted(thread):
            if where == "before it runs":
                handler()
            start(thread)
            if where == "when it may run":
                handler()

        monkeypatch.setattr(threading.Thread, "start", interrupted)
        parking.park(pairs[0][0].fileno(), far(), called.set)
        assert seen == [True]
        pairs[0][1].send(b"x")
        assert called.wait(5)
        # The second thread, where there was one, finds nothing to watch. It may not have been scheduled yet.
        wait_until(lambda: len(waiting_threads()) <= 1)


def test_what_others_parked_goes_on_where_the_thread_cannot_be_started(parking, monkeypatch):
    start, called = threading.Thread.start, threading.Event()
    with contextlib.ExitStack() as opened:
        pairs = [tuple(opened.enter_context(end) for end in socket.socketpair()) for _ in range(2)]

        def refuse(thread):
            monkeypatch.setattr(parking, "hurry", lambda: None)
            parking.park(pairs[1][0].fileno(), far(), called.set)
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            parking.park(pairs[0][0].fileno(), far(), lambda: pytest.fail("its caller was told that it is not parked"))
        assert called.is_set()
        assert len(parking) == 0
        monkeypatch.setattr(threading.Thread, "start", start)
        again = threading.Event()
        parking.park(pairs[0][0].fileno(), clock.now_s(), again.set)
        assert again.wait(5)

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from kvstore.runtime.threads.thread_pool import ThreadPool

LIMIT_S = 20.0


@pytest.fixture
def pool():
    made = ThreadPool(2, "raykv-test")
    yield made
    made.close(drop=True)


def test_it_starts_no_more_threads_than_it_needs_and_none_before(pool):
    names, go, both = set(), threading.Event(), threading.Barrier(3)

    def run():
        names.add(threading.current_thread().name)
        both.wait(LIMIT_S)
        go.wait(LIMIT_S)

    assert not pool.threads
    assert pool.run(run)
    assert len(pool.threads) == 1
    assert pool.run(run)
    both.wait(LIMIT_S)
    later = threading.Event()
    assert pool.run(later.set), "all threads have something to do: it waits"
    assert len(pool.threads) == 2
    assert not later.is_set()
    go.set()
    assert later.wait(LIMIT_S)
    assert names == {"raykv-test_0", "raykv-test_1"}


def test_an_error_ends_no_thread(pool, caplog):
    done = threading.Event()
    for error in (ValueError, SystemExit):
        assert pool.run(lambda error=error: (_ for _ in ()).throw(error("broken")))
    assert pool.run(done.set)
    assert done.wait(LIMIT_S)
    pool.close(wait=True)
    assert caplog.text.count("unexpected error") == 2


def test_what_was_taken_is_done_before_it_is_closed(pool):
    go, done = threading.Event(), []
    for number in range(5):
        assert pool.run(lambda number=number: (go.wait(LIMIT_S), done.append(number)))
    threading.Timer(0.1, go.set).start()
    pool.close(wait=True)
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert not pool.threads
    assert not pool.run(lambda: done.append("late"))


def test_what_no_thread_has_begun_can_be_dropped(pool):
    began, go, done = threading.Barrier(3), threading.Event(), []
    for _ in range(2):
        pool.run(lambda: (began.wait(LIMIT_S), go.wait(LIMIT_S), done.append("begun")))
    pool.run(lambda: done.append("dropped"))
    began.wait(LIMIT_S)
    pool.close(drop=True)
    go.set()
    pool.close(wait=True)
    assert done == ["begun", "begun"]


def test_without_any_thread_nothing_is_taken(pool, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    ran = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not pool.run(lambda: pytest.fail("its caller was told that it is not run"))
        try:
            raise OSError("what the caller is about to handle")
        except OSError:
            assert not pool.run(lambda: pytest.fail("nor this one"))
    assert pool.run(ran.set)
    assert ran.wait(LIMIT_S)


def test_one_thread_does_the_work_of_two_where_there_is_no_other(pool, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    go, ran = threading.Event(), threading.Event()
    assert pool.run(lambda: go.wait(LIMIT_S))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert pool.run(ran.set)
    assert not ran.is_set()
    go.set()
    assert ran.wait(LIMIT_S)


def test_it_keeps_nothing_of_what_it_has_run(pool):
    class Held:
        def __call__(self):
            pass

    held = Held()
    seen = weakref.ref(held)
    pool.run(held)
    pool.run(held)
    del held
    pool.close(wait=True)
    gc.collect()
    assert seen() is None


def test_the_interpreter_ends_after_what_was_taken():
    program = """
import time
from kvstore.runtime.threads.thread_pool import ThreadPool
pool = ThreadPool(1, "raykv-test")
for number in range(3):
    pool.run(lambda number=number: (time.sleep(0.1), print(number, flush=True)))
print("end", flush=True)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["end", "0", "1", "2"]
    assert not ran.stderr


def test_a_forked_child_ends_without_the_threads_of_its_parent():
    program = """
import os, sys, time
from kvstore.runtime.threads.thread_pool import ThreadPool
pool = ThreadPool(1, "raykv-test")
pool.run(lambda: time.sleep(0.1))
child = os.fork()
if not child:
    sys.exit(1 if pool.run(print) else 7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["7"]


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("where", ["before it runs", "when it may run"])
@pytest.mark.parametrize("waits_for", ["a step of its own", "the end of all"])
def test_the_handler_of_a_signal_that_comes_while_a_thread_is_started_waits_for_what_it_does(
    monkeypatch, most, where, waits_for
):
    pool, start, ran, seen = ThreadPool(most, "raykv-test"), threading.Thread.start, threading.Event(), []

    def handler():
        monkeypatch.undo()
        if waits_for == "a step of its own":
            mine = threading.Event()
            assert pool.run(mine.set)
            seen.append(mine.wait(5))
        else:
            closing = threading.Thread(target=lambda: pool.close(wait=True))
            closing.start()
            closing.join(5)
            seen.append(not closing.is_alive() and ran.is_set())

    def interrupted(thread):
        if where == "before it runs":
            handler()
        start(thread)
        if where == "when it may run":
            handler()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    assert pool.run(ran.set)
    assert seen == [True]
    assert ran.wait(LIMIT_S)
    pool.close(wait=True)
    assert not pool.threads


def test_a_handler_at_any_instruction_waits_for_what_the_threads_do():
    """As of a signal, but at each one in turn: this thread is held there for as long as the handler waits."""
    own = threading.get_ident()
    for at in range(1, 400):
        pool, left, seen, ran = ThreadPool(2, "raykv-test"), [at], [], threading.Event()

        def handler(frame, event, arg, pool=pool, left=left, seen=seen):
            if threading.get_ident() != own or "runtime" not in frame.f_code.co_filename:
                return handler
            frame.f_trace_opcodes = True
            if event == "opcode":
                left[0] -= 1
                if not left[0]:
                    sys.settrace(None)
                    mine = threading.Event()
                    seen.append(pool.run(mine.set) and mine.wait(5))
                    return None
            return handler

        before = sys.gettrace()
        try:
            sys.settrace(handler)
            assert pool.run(ran.set)
        finally:
            sys.settrace(before)
        assert ran.wait(LIMIT_S), at
        pool.close(wait=True)
        if not seen:
            break
        assert seen == [True], at
    assert 30 < at < 399


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("hurries", [False, True])
def test_a_handler_that_raises_at_any_instruction_costs_no_thread(most, hurries):
    """As of Ctrl-C. Afterwards all threads of the pool can still be busy at once."""
    own, num_raised, at = threading.get_ident(), 0, 0
    while num_raised == at:
        at += 1
        pool, left, ran = ThreadPool(most, "raykv-test"), [at], threading.Event()

        def handler(frame, event, arg, left=left):
            if threading.get_ident() != own or "thread_pool" not in frame.f_code.co_filename:
                return handler
            frame.f_trace_opcodes = True
            if event == "opcode":
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
            return handler

        if hurries:  # It finds a start that was interrupted.
            pool.take_place(threading.Thread())
            pool.queue.put(ran.set)
        before = sys.gettrace()
        try:
            sys.settrace(handler)
            pool.hurry() if hurries else pool.run(ran.set)
        except KeyboardInterrupt:
            num_raised += 1
        finally:
            sys.settrace(before)
        together = threading.Barrier(most + 1)
        for _ in range(most):
            assert pool.run(lambda together=together: together.wait(LIMIT_S))
        pool.hurry()  # As all that wait do.
        together.wait(LIMIT_S)
        closing = threading.Thread(target=pool.close, kwargs={"wait": True}, daemon=True)
        closing.start()
        closing.join(LIMIT_S)
        assert not closing.is_alive(), at
        assert not pool.threads
    assert at > 30


def test_many_threads_hand_over_at_once_while_it_is_closed():
    for _ in range(50):
        pool, done, taken, go = ThreadPool(3, "raykv-test"), [], [], threading.Event()

        def hand_over(pool=pool, done=done, taken=taken, go=go):
            go.wait(LIMIT_S)
            for _ in range(20):
                taken.append(pool.run(lambda: done.append(1)))

        givers = [threading.Thread(target=hand_over) for _ in range(4)]
        for giver in givers:
            giver.start()
        go.set()
        pool.close(wait=True)
        for giver in givers:
            giver.join(LIMIT_S)
        pool.close(wait=True)
        assert len(done) == sum(taken)
        assert not pool.threads


def test_as_many_steps_run_at_once_as_there_may_be_threads():
    """However the steps meet threads that start, and threads that become idle just then."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(1000):
            pool, entered, go = ThreadPool(4, "raykv-test"), threading.Semaphore(0), threading.Event()

            def stay(entered=entered, go=go):
                entered.release()
                go.wait(LIMIT_S)

            for _ in range(number % 4):
                pool.run(lambda: None)  # Its thread becomes idle while others are started, or before.
            for _ in range(4):
                pool.run(stay)
            all_run = [entered.acquire(timeout=LIMIT_S / 4) for _ in range(4)]
            go.set()
            pool.close(wait=True)
            assert all(all_run), f"in round {number} a step waited for a thread that may be started"
    finally:
        sys.setswitchinterval(interval_s)


def test_a_step_that_comes_while_a_thread_takes_another_gets_one_of_its_own(pool):
    come, both = threading.Event(), threading.Barrier(3)

    class Late(type(pool.idle)):
        def pop(self):
            come.wait(LIMIT_S)
            return super().pop()

    pool.idle = Late()
    assert pool.run(lambda: both.wait(LIMIT_S))
    until_s = time.monotonic() + LIMIT_S
    while pool.queue.qsize():  # Then it was taken, and its thread still counts as idle.
        assert time.monotonic() < until_s
    assert pool.run(lambda: both.wait(LIMIT_S))
    come.set()
    both.wait(LIMIT_S)


def test_a_step_that_comes_just_before_the_end_gets_a_thread_of_its_own(pool):
    """The pool is marked as closed, and a thread that has just taken a step looks for others."""
    taken, both, idle = threading.Event(), threading.Barrier(2), pool.idle

    class Late(type(idle)):
        def pop(self):
            taken.wait(LIMIT_S)
            return super().pop()

    pool.idle = Late()
    assert pool.run(lambda: both.wait(LIMIT_S))
    assert pool.run(lambda: both.wait(LIMIT_S))
    pool._forget = lambda: (taken.set(), time.sleep(0.2))  # Called between the mark and the end of the queue.
    pool.close(wait=True)
    assert not both.broken


def test_two_who_hand_over_the_first_steps_at_once_get_one_thread_where_there_is_one():
    pool, paused, go = ThreadPool(1, "raykv-test"), threading.Event(), threading.Event()

    class Slow(dict):
        def update(self, entries):
            super().update(entries)
            if not paused.is_set():
                paused.set()
                go.wait(LIMIT_S)

    pool.unbegun = Slow()
    busy, at_once = threading.Lock(), []

    def step():
        at_once.append(not busy.acquire(blocking=False))
        time.sleep(0.05)
        if not at_once[-1]:
            busy.release()

    first = threading.Thread(target=pool.run, args=(step,))
    first.start()
    assert paused.wait(LIMIT_S)
    pool.run(step)
    go.set()
    first.join(LIMIT_S)
    for _ in range(3):
        pool.run(step)
    pool.close(wait=True)
    assert at_once == [False] * 5


def test_a_step_runs_although_the_thread_that_was_to_take_it_lost_its_place_and_no_other_starts(monkeypatch):
    pool, ran, entered, go = ThreadPool(1, "raykv-test"), threading.Event(), threading.Event(), threading.Event()
    may_start, start = [True], threading.Thread.start

    class Idle(type(pool.idle)):
        def append(self, value):
            super().append(value)
            entered.set()
            go.wait(LIMIT_S)

    def refuse(thread):
        if not may_start:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: False)  # As just before it says that it is.
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.idle = Idle()
    assert pool.run(ran.set)
    assert entered.wait(LIMIT_S)
    pool.hurry()  # It takes the place of the thread that is just beginning, for which it needs none itself.
    may_start.clear()
    go.set()
    assert ran.wait(LIMIT_S)
    monkeypatch.undo()
    pool.close(wait=True)


def test_a_caller_that_runs_the_rest_takes_a_place_for_it(monkeypatch):
    pool, start, fails = ThreadPool(1, "raykv-test"), threading.Thread.start, [1]
    inside, most, entered, go = [], [], threading.Event(), threading.Event()

    def refuse_once(thread):
        if thread.name == "raykv-test" and fails:
            fails.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    def step():
        inside.append(1)
        most.append(len(inside))
        entered.set()
        go.wait(LIMIT_S)
        inside.pop()

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    pool.take_place(threading.Thread())  # A start that was interrupted.
    pool.queue.put(step)
    caller = threading.Thread(target=pool.hurry)
    caller.start()
    assert entered.wait(LIMIT_S)
    assert pool.run(step)
    threading.Timer(0.1, go.set).start()
    caller.join(LIMIT_S)
    pool.close(wait=True)
    assert most == [1, 1]


def test_what_is_dropped_is_dropped_although_it_was_closed_before(pool):
    began, go, done = threading.Barrier(3), threading.Event(), []
    for _ in range(2):
        pool.run(lambda: (began.wait(LIMIT_S), go.wait(LIMIT_S)))
    pool.run(lambda: done.append("dropped"))
    began.wait(LIMIT_S)
    pool.close()
    pool.close(drop=True)
    go.set()
    pool.close(wait=True)
    assert not done


def test_a_start_that_was_interrupted_for_good_is_made_up_for_by_the_next_step_of_any_thread():
    pool, ran = ThreadPool(1, "raykv-test"), threading.Event()
    pool.take_place(threading.Thread())
    caller = threading.Thread(target=pool.run, args=(ran.set,))
    caller.start()
    assert ran.wait(LIMIT_S)
    pool.close(wait=True)


def test_the_wait_for_the_end_sleeps_also_where_python_says_that_a_thread_has_ended(monkeypatch):
    pool, entered, go, num_hurries = ThreadPool(1, "raykv-test"), threading.Event(), threading.Event(), []
    pool.run(lambda: (entered.set(), go.wait(LIMIT_S)))
    assert entered.wait(LIMIT_S)
    hurry = pool.hurry
    monkeypatch.setattr(threading.Thread, "join", lambda *_: None)  # As after a join that was interrupted.
    monkeypatch.setattr(pool, "hurry", lambda: (num_hurries.append(1), hurry()))
    threading.Timer(0.2, go.set).start()
    pool.close(wait=True)
    assert len(num_hurries) < 1000

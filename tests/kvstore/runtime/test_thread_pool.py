import gc
import subprocess
import sys
import threading
import weakref

import pytest

from kvstore.runtime.thread_pool import ThreadPool

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

    assert not pool._threads
    assert pool.run(run)
    assert len(pool._threads) == 1
    assert pool.run(run)
    both.wait(LIMIT_S)
    later = threading.Event()
    assert pool.run(later.set), "all threads have something to do: it waits"
    assert len(pool._threads) == 2
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
    assert not pool._threads
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
from kvstore.runtime.thread_pool import ThreadPool
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
from kvstore.runtime.thread_pool import ThreadPool
pool = ThreadPool(1, "raykv-test")
pool.run(lambda: time.sleep(0.1))
with pool._lock:
    child = os.fork()
    if not child:
        sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["7"]

"""A copy by several threads that is interrupted: when it ends, no thread of it writes any more."""

from __future__ import annotations

import threading
import time

import pytest

from kvstore.kernels import host_copy

PARTS = [(at, at + 1) for at in range(4)]


def test_all_parts_are_done_once_whoever_does_them():
    done = []
    host_copy.in_parts(lambda begin, end: done.append((begin, end)), list(PARTS))
    assert sorted(done) == PARTS


@pytest.mark.parametrize("where", ["own part", "wait", "start"])
def test_an_interrupt_is_raised_only_when_no_helper_is_at_work(monkeypatch, where):
    caller, busy, working = threading.get_ident(), threading.Event(), []
    num_waits, num_starts = [], []

    def part(begin, end):
        if threading.get_ident() == caller:
            if where == "start":
                return
            assert busy.wait(10)
            if where == "own part":
                raise KeyboardInterrupt
            return
        working.append(begin)
        busy.set()
        time.sleep(0.3)
        working.remove(begin)

    class Interrupted(threading.Condition):
        def wait_for(self, predicate, timeout=None):
            num_waits.append(None)
            if where == "wait" and len(num_waits) == 1:
                raise KeyboardInterrupt
            return super().wait_for(predicate, timeout)

    class Started(threading.Thread):
        def start(self):
            super().start()  # Its wait for the thread to have begun is where a signal may come.
            num_starts.append(None)
            if where == "start" and len(num_starts) == 2:
                assert busy.wait(10)
                raise KeyboardInterrupt

    monkeypatch.setattr(host_copy.threading, "Condition", Interrupted)
    monkeypatch.setattr(host_copy.threading, "Thread", Started)
    with pytest.raises(KeyboardInterrupt):
        host_copy.in_parts(part, list(PARTS))
    assert working == []
    time.sleep(0.4)
    assert working == []
    assert busy.is_set()


def test_where_no_thread_can_be_started_one_does_all(monkeypatch):
    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    done = []
    monkeypatch.setattr(host_copy.threading, "Thread", Refused)
    host_copy.in_parts(lambda begin, end: done.append((begin, end)), list(PARTS))
    assert done == PARTS


def test_a_part_that_a_helper_could_not_copy_is_an_error_of_the_copy():
    caller, taken = threading.get_ident(), threading.Event()

    def part(begin, end):
        if threading.get_ident() != caller:
            taken.set()
            raise MemoryError("no memory for a view")
        assert taken.wait(10)

    with pytest.raises(MemoryError):
        host_copy.in_parts(part, list(PARTS))

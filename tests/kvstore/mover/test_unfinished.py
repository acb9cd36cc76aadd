"""READs and tasks of a mover whose end is not known."""

import queue
import threading

import pytest

from kvstore.errors import PeerLost
from kvstore.mover.unfinished import Unfinished


def with_lock(lock, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", lambda: lock)
        return Unfinished()


@pytest.mark.parametrize("table", ["questions", "reads"])
def test_nothing_is_forgotten_while_all_are_ended(monkeypatch, table):
    lock = threading.Lock()
    unfinished = with_lock(lock, monkeypatch)
    forgetting = threading.Thread(target=lambda: unfinished.forget(2))
    with lock:
        forgetting.start()
        forgetting.join(0.1)
        assert forgetting.is_alive(), "it waits for the lock"
        getattr(unfinished, table)[2] = None
    forgetting.join(5)
    assert 2 not in getattr(unfinished, table)


def test_all_are_told_when_the_mover_is_gone():
    unfinished, told = Unfinished(), []
    unfinished.reads = {1: (lambda done, error: told.append((done.read_id, done.terminal, error)), 4)}
    answer = unfinished.expect_answer(2)
    unfinished.abandoned[3] = 0.0
    unfinished.when_terminal({3}, lambda: told.append(3))
    error = PeerLost("gone")
    unfinished.fail(error)
    assert sorted(told, key=str) == [(1, True, error), 3]
    assert answer.get_nowait()
    with pytest.raises(queue.Empty):
        answer.get_nowait()
    assert not unfinished.abandoned


def test_an_end_just_when_it_is_asked_for_is_told_once(monkeypatch):
    class Lock:
        """A lock; what another thread does as soon as it is free."""

        then = None

        def __enter__(self):
            held.acquire()

        def __exit__(self, *failure):
            held.release()
            self.then, then = None, self.then
            if then is not None:
                then()

    held, lock, told = threading.Lock(), Lock(), []
    unfinished = with_lock(lock, monkeypatch)
    unfinished.abandoned[7] = 0.0
    lock.then = lambda: unfinished.end({7})
    unfinished.when_terminal({7}, lambda: told.append(7))
    assert told == [7]

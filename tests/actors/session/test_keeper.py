"""The thread on which a Ray is begun, without a Ray."""

from __future__ import annotations

import _thread
import signal
import threading
import time

import pytest

from kvstore.actors.session.keeper import Keeper
from kvstore.errors import StoreBusy, StoreUnavailable


def soon():
    return time.monotonic() + 10


def nothing():
    pass


def test_what_is_begun_runs_on_one_thread_that_outlives_its_callers():
    keeper, on = Keeper(), []
    for _ in range(2):
        caller = threading.Thread(
            target=lambda: keeper.do(lambda: on.append(threading.current_thread()), nothing, soon())
        )
        caller.start()
        caller.join(10)
    assert on[0] is on[1]
    assert (on[0].is_alive(), on[0].daemon) == (True, True)


def test_what_fails_is_raised_in_the_thread_that_waits():
    undone = []

    def fail():
        raise KeyError("no")

    with pytest.raises(KeyError):
        Keeper().do(fail, lambda: undone.append(1), soon())
    assert undone == []


def test_what_is_not_done_in_time_is_undone_afterwards_and_waited_for():
    keeper, go, undone = Keeper(), threading.Event(), []
    with pytest.raises(StoreUnavailable, match="was not connected to its Ray in time"):
        keeper.do(lambda: go.wait(10), lambda: undone.append(1), time.monotonic() + 0.05)
    with pytest.raises(StoreBusy, match="still leaving a Ray"):
        keeper.settle(time.monotonic() + 0.05)
    assert undone == []
    go.set()
    keeper.settle(soon())
    assert undone == [1]


@pytest.fixture
def _interruptible():
    """A shell starts what runs in its background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_what_is_interrupted_has_been_undone_when_the_interrupt_is_raised():
    undone = []

    def begin():
        _thread.interrupt_main()
        time.sleep(0.3)

    with pytest.raises(KeyboardInterrupt):
        Keeper().do(begin, lambda: undone.append(1), soon())
    assert undone == [1]

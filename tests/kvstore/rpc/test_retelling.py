"""What a store has to hear is told again until it answers."""

from __future__ import annotations

import sys
import threading

import pytest

from kvstore.errors import InvalidRequest, PeerLost, StoreNotRunning, TransferTimeout
from kvstore.rpc import retelling
from kvstore.rpc.framing import Op
from kvstore.rpc.retelling import Retelling


class Asked:
    """A store that fails the first questions with what `failures` holds, and answers all others."""

    def __init__(self, *failures):
        self.failures, self.heard, self.is_over = list(failures), [], False

    def __call__(self, op, payload):
        self.heard.append(payload)
        if self.failures:
            raise self.failures.pop(0)

    def retelling(self):
        return Retelling(self, lambda: self.is_over)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(retelling, "PAUSES_S", (0.01,))


def test_what_is_answered_is_told_once_and_on_the_calling_thread():
    store = Asked()
    told, before = store.retelling(), threading.active_count()
    told.tell(Op.HANDOFF_ABORT, b"a")
    assert (store.heard, len(told), threading.active_count()) == ([b"a"], 0, before)


def test_what_is_not_answered_is_told_again_in_order_until_it_is(wait_until):
    store = Asked(TransferTimeout("late"), PeerLost("broken"), StoreNotRunning("stopped"), TransferTimeout("late"))
    told = store.retelling()
    told.tell(Op.HANDOFF_ABORT, b"a")
    told.tell(Op.HANDOFF_ABORT, b"b")
    wait_until(lambda: len(told) == 0)
    assert {b"a", b"b"} == set(store.heard)
    assert store.failures == []


def test_what_the_store_refuses_is_heard():
    store = Asked(InvalidRequest("no"))
    told = store.retelling()
    told.tell(Op.HANDOFF_ABORT, b"a")
    assert (len(told), store.heard) == (0, [b"a"])


def test_an_interrupt_loses_no_message(wait_until):
    store = Asked(KeyboardInterrupt())
    told = store.retelling()
    with pytest.raises(KeyboardInterrupt):
        told.tell(Op.HANDOFF_ABORT, b"a")
    wait_until(lambda: len(told) == 0)
    assert store.heard == [b"a", b"a"]


def threads_that_tell():
    return [thread for thread in threading.enumerate() if thread.name == "raykv-retelling"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_thread_that_failed_the_next_message_starts_another_one(wait_until):
    store = Asked(TransferTimeout("late"), ZeroDivisionError("of this test"))
    told = store.retelling()
    told.tell(Op.HANDOFF_ABORT, b"a")
    wait_until(lambda: not store.failures and not threads_that_tell())
    assert len(told) == 1, "it failed at this one"
    told.tell(Op.HANDOFF_ABORT, b"b")
    wait_until(lambda: len(told) == 0)
    assert set(store.heard) == {b"a", b"b"}


def test_a_handler_tells_something_while_its_thread_starts_the_one_that_tells_again(monkeypatch, wait_until):
    store = Asked(TransferTimeout("late"))
    told, within = store.retelling(), []

    class Interrupted(threading.Thread):
        def start(self):
            if not within:
                within.append(1)
                told.tell(Op.HANDOFF_ABORT, b"b")
            super().start()

    telling = threading.Thread(target=told.tell, args=(Op.HANDOFF_ABORT, b"a"), daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(retelling.threading, "Thread", Interrupted)
        telling.start()
        telling.join(5)
    assert not telling.is_alive(), "it waits for its own lock"
    assert within
    wait_until(lambda: len(told) == 0)
    assert set(store.heard) == {b"a", b"b"}


@pytest.mark.parametrize("ends", ["store", "client"])
def test_nothing_is_told_to_a_store_that_ended_or_for_a_client_that_did(ends, wait_until):
    store = Asked(*[TransferTimeout("late")] * 1000)
    told = store.retelling()
    told.tell(Op.HANDOFF_ABORT, b"a")
    wait_until(lambda: len(store.heard) > 2)
    if ends == "client":
        told.close()
    store.is_over = ends == "store"
    wait_until(lambda: not threads_that_tell())


def test_a_thread_that_cannot_be_started_is_tried_with_the_next_message(monkeypatch, wait_until):
    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    store = Asked(TransferTimeout("late"))
    told = store.retelling()
    with monkeypatch.context() as patch:
        patch.setattr(retelling.threading, "Thread", Refused)
        told.tell(Op.HANDOFF_ABORT, b"a")
    assert len(told) == 1
    told.tell(Op.HANDOFF_ABORT, b"b")
    wait_until(lambda: len(told) == 0)
    assert store.heard == [b"a", b"b", b"a"]


def test_it_is_closed_again_in_a_handler_within_its_close():
    """Before each line that is run for it."""
    num_within = 0

    def close_within(told, at):
        def trace(frame, event, arg):
            nonlocal left
            left -= event == "line"
            if left == 0 and event == "line":
                sys.settrace(None)
                told.close()
            return trace

        left = at
        sys.settrace(trace)
        try:
            told.close()
        finally:
            sys.settrace(None)
        return left <= 0

    while True:
        told, ended = Asked().retelling(), []
        closing = threading.Thread(
            target=lambda told=told, ended=ended, at=num_within + 1: ended.append(close_within(told, at)), daemon=True
        )
        closing.start()
        closing.join(5)
        assert ended, f"it hangs, from line {num_within + 1} on"
        if not ended[0]:
            break
        num_within += 1
    assert num_within > 1

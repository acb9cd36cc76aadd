"""Answers made on threads: each question gets one, and questions that wait together get the same."""

from __future__ import annotations

import threading

import pytest

from kvstore.blocks.codec import decode_counts
from kvstore.errors import PoolExhausted, StoreBusy
from kvstore.node import later
from kvstore.node.later import SharedAnswer, answer_later
from kvstore.rpc.framing import Flag, Message, Op, unpack_error
from kvstore.runtime.threads.store_threads import Blocking, StoreThreads

WITHIN_S = 10.0


class Heard:
    """A connection, as far as an answer needs it."""

    def __init__(self):
        self.answers, self._one_more = [], threading.Semaphore(0)

    def send(self, op, flag, request, payload):
        self.answers.append((op, flag, request, payload))
        self._one_more.release()
        return True

    def wait(self):
        assert self._one_more.acquire(timeout=WITHIN_S)
        return self.answers[-1]


@pytest.fixture
def threads():
    made = StoreThreads()
    yield made
    made.stop()


def question(request):
    return Message(Op.STATS, Flag.REQUEST, request, b"")


@pytest.mark.parametrize(
    ("error", "kind"), [(PoolExhausted("full"), PoolExhausted), (KeyError("a bug"), later.KVStoreError)]
)
def test_what_goes_wrong_is_the_answer_at_once(threads, error, kind):
    def work():
        raise error

    heard = Heard()
    answer_later(threads, Blocking.STAGE, heard, question(3), work)
    _, flag, request, payload = heard.wait()
    assert (flag, request) == (Flag.ERROR, 3)
    assert type(unpack_error(payload)) is kind


def test_those_that_asked_before_it_was_begun_share_an_answer(threads):
    begun, may_end, made = threading.Semaphore(0), threading.Event(), []

    def work():
        made.append(None)
        number = len(made)
        begun.release()
        assert may_end.wait(WITHIN_S)
        return {"number": number}

    shared, heard = SharedAnswer(threads, Blocking.STATS, work), [Heard() for _ in range(5)]
    for at in range(2):  # As many as there are threads: each is begun, so that nothing after it may share its answer.
        shared.ask(heard[at], question(at))
        assert begun.acquire(timeout=WITHIN_S)
    for at in range(2, 5):
        shared.ask(heard[at], question(at))
    may_end.set()
    answers = [each.wait() for each in heard]
    assert [request for _, _, request, _ in answers] == list(range(5))
    numbers = [decode_counts(payload)["number"] for _, _, _, payload in answers]
    assert sorted(numbers[:2]) == [1, 2]
    assert numbers[2:] == [3, 3, 3], "what was asked later is answered by a later look"
    shared.ask(heard[0], question(9))
    assert decode_counts(heard[0].wait()[3])["number"] == 4


def test_too_many_questions_are_refused_and_the_others_are_answered(threads, monkeypatch):
    monkeypatch.setattr(later, "_MAX_SHARED", 3)
    may_end = threading.Event()
    shared = SharedAnswer(threads, Blocking.STATS, lambda: may_end.wait(WITHIN_S) and {})
    heard, refused = Heard(), 0
    for request in range(20):
        try:
            shared.ask(heard, question(request))
        except StoreBusy:
            refused += 1
    assert refused >= 20 - 3 * 3, "two that were begun, and one that waits"
    may_end.set()
    for _ in range(20 - refused):
        heard.wait()
    assert len(heard.answers) == 20 - refused


def test_a_question_that_no_thread_takes_is_forgotten(threads, monkeypatch):
    shared, heard = SharedAnswer(threads, Blocking.STATS, dict), Heard()
    with monkeypatch.context() as patch:
        patch.setattr(threads, "submit", lambda kind, run: False)
        with pytest.raises(StoreBusy, match="STATS"):
            shared.ask(heard, question(1))
    shared.ask(heard, question(2))
    heard.wait()
    assert [request for _, _, request, _ in heard.answers] == [2]

"""How long an engine with nothing to compute waits in a step, and that one with something to compute does not."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvstore.integrations.vllm import worker
from kvstore.integrations.vllm.options import Options
from kvstore.integrations.vllm.plan import StepPlan, Wakeup
from kvstore.integrations.vllm.stats import Stats
from kvstore.integrations.vllm.worker import WorkerSide
from kvstore.part import WHOLE


@pytest.fixture
def side(monkeypatch):
    """A worker that says how long it waited for jobs, and waits no longer than that."""
    made = WorkerSide(Options(), None, None, WHOLE, True, Stats())
    made.waited_s = []
    monkeypatch.setattr(made._job_ended, "wait", made.waited_s.append)
    return made


class Answered(Wakeup):
    """Says how long it was waited for."""

    def __init__(self):
        super().__init__()
        self.waited_s = []

    def wait(self, timeout=None):
        self.waited_s.append(timeout)
        return self.is_set()


RUNNING = SimpleNamespace(job=SimpleNamespace(done=lambda: False))


def test_a_step_that_computes_waits_for_nothing(side):
    side._loads["r"], answered = RUNNING, Answered()
    side.poll(StepPlan(is_computing=True, num_waiting=3, answered=answered))
    assert side.waited_s == answered.waited_s == []


def test_a_step_with_nothing_at_all_waits_for_nothing(side):
    side.poll(StepPlan(answered=Answered()))
    assert side.waited_s == []


def test_answers_are_waited_for_longer_the_more_are_due_and_the_more_is_to_be_hashed(side):
    answered = Answered()
    for num_waiting, num_tokens in ((1, 0), (4, 0), (1, 10_000), (10**6, 0)):
        side.poll(StepPlan(num_waiting=num_waiting, num_unhashed_tokens=num_tokens, answered=answered))
    one, four, long, many = answered.waited_s
    assert one < four == 4 * one < many == worker._LONGEST_WAIT_S
    assert one < long < many


def test_an_answer_ends_the_wait_and_only_that_one(side):
    wakeup = Wakeup()
    wakeup.set()
    side.poll(StepPlan(num_waiting=1, answered=wakeup))
    assert not wakeup.is_set()


def test_a_wakeup_that_was_sent_to_another_process_is_not_that_of_this_one():
    wakeup = Wakeup()
    wakeup.set()
    plan = pickle.loads(pickle.dumps(StepPlan(num_waiting=2, answered=wakeup)))
    assert plan.num_waiting == 2
    assert not plan.answered.is_set()


def test_the_end_of_a_copy_ends_the_wait(side):
    done = []
    side._loads["r"] = SimpleNamespace(job=SimpleNamespace(done=lambda: bool(done)))
    side.poll(StepPlan(answered=Answered()))
    assert side.waited_s == [worker._LONGEST_WAIT_S]
    running = side._running(None, None, SimpleNamespace(add_done_callback=done.append))
    assert not side._job_ended.is_set()
    done[0](running.job)
    assert side._job_ended.is_set(), "set by the job's end, so that the next wait is over at once"

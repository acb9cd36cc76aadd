"""How long an engine with nothing to compute waits in a step, and that one with something to compute does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvstore.integrations.vllm import worker
from kvstore.integrations.vllm.options import Options
from kvstore.integrations.vllm.plan import StepPlan
from kvstore.integrations.vllm.stats import Stats
from kvstore.integrations.vllm.worker import WorkerSide
from kvstore.part import WHOLE


@pytest.fixture
def side(monkeypatch):
    """A worker that says how long it waited, and waits no longer than that."""
    made = WorkerSide(Options(), None, None, WHOLE, True, Stats())
    made.waited_s = []
    monkeypatch.setattr(made._job_ended, "wait", made.waited_s.append)
    return made


def test_a_step_that_computes_waits_for_nothing(side):
    side._loads["r"] = SimpleNamespace(job=SimpleNamespace(done=lambda: False))
    side.poll(StepPlan(is_computing=True, num_waiting=3))
    assert side.waited_s == []


def test_a_step_with_nothing_at_all_waits_for_nothing(side):
    side.poll(StepPlan())
    assert side.waited_s == []


def test_answers_are_waited_for_longer_the_more_are_due(side):
    for num_waiting in (1, 4, 10**6):
        side.poll(StepPlan(num_waiting=num_waiting))
    one, four, many = side.waited_s
    assert one < four == 4 * one < many == worker._LONGEST_WAIT_S


def test_the_end_of_a_copy_ends_the_wait(side):
    done = []
    side._loads["r"] = SimpleNamespace(job=SimpleNamespace(done=lambda: bool(done)))
    side.poll(StepPlan())
    assert side.waited_s == [worker._IDLE_WAIT_S]
    running = side._running(None, None, SimpleNamespace(add_done_callback=done.append))
    assert not side._job_ended.is_set()
    done[0](running.job)
    assert side._job_ended.is_set(), "set by the job's end, so that the next wait is over at once"

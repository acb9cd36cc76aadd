"""How long an engine with nothing to compute waits in a step, and that one with something to compute does not."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from kvstore.part import WHOLE

RUNNING = SimpleNamespace(job=SimpleNamespace(done=lambda: False))


@pytest.fixture
def parts():
    """What is tested. Imported where warnings of vLLM's own imports are none of ours."""
    from kvstore.integrations.vllm import options, plan, stats, worker

    return SimpleNamespace(
        worker=worker, StepPlan=plan.StepPlan, Wakeup=plan.Wakeup, Options=options.Options, Stats=stats.Stats
    )


@pytest.fixture
def side(parts, monkeypatch):
    """A worker that says how long it waited for jobs, and waits no longer than that."""
    made = parts.worker.WorkerSide(parts.Options(), None, None, WHOLE, True, parts.Stats())
    made.waited_s = []
    monkeypatch.setattr(made._job_ended, "wait", made.waited_s.append)
    return made


@pytest.fixture
def answered(parts, monkeypatch):
    """Says how long it was waited for, and is waited for no longer than that."""
    made, waited_s = parts.Wakeup(), []
    monkeypatch.setattr(made, "wait", waited_s.append)
    made.waited_s = waited_s
    return made


def test_a_step_that_computes_waits_for_nothing(parts, side, answered):
    side._loads["r"] = RUNNING
    side.poll(parts.StepPlan(is_computing=True, num_waiting=3, answered=answered))
    assert side.waited_s == answered.waited_s == []


def test_a_step_with_nothing_at_all_waits_for_nothing(parts, side, answered):
    side.poll(parts.StepPlan(answered=answered))
    assert side.waited_s == answered.waited_s == []


def test_answers_are_waited_for_longer_the_more_are_due_and_the_more_is_to_be_hashed(parts, side, answered):
    for num_waiting, num_tokens in ((1, 0), (4, 0), (1, 10_000), (10**6, 0)):
        side.poll(parts.StepPlan(num_waiting=num_waiting, num_unhashed_tokens=num_tokens, answered=answered))
    one, four, long, many = answered.waited_s
    assert one < four == 4 * one < many == parts.worker._LONGEST_WAIT_S
    assert one < long < many


def test_an_answer_ends_the_wait_and_only_that_one(parts, side):
    wakeup = parts.Wakeup()
    wakeup.set()
    side.poll(parts.StepPlan(num_waiting=1, answered=wakeup))
    assert not wakeup.is_set()


def test_a_wakeup_that_was_sent_to_another_process_is_not_that_of_this_one(parts):
    wakeup = parts.Wakeup()
    wakeup.set()
    plan = pickle.loads(pickle.dumps(parts.StepPlan(num_waiting=2, answered=wakeup)))
    assert plan.num_waiting == 2
    assert not plan.answered.is_set()


def test_the_end_of_a_copy_ends_the_wait(parts, side, answered):
    done = []
    side._loads["r"] = SimpleNamespace(job=SimpleNamespace(done=lambda: bool(done)))
    side.poll(parts.StepPlan(answered=answered))
    assert side.waited_s == [parts.worker._LONGEST_WAIT_S]
    running = side._running(None, None, SimpleNamespace(add_done_callback=done.append))
    assert not side._job_ended.is_set()
    done[0](running.job)
    assert side._job_ended.is_set(), "set by the job's end, so that the next wait is over at once"

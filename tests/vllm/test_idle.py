"""How long an engine with nothing to compute waits in a step, and that one with something to compute does not."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from kvstore.part import WHOLE

NOT_QUEUED = SimpleNamespace(is_set=lambda: False)
RUNNING = SimpleNamespace(job=SimpleNamespace(done=lambda: False), queued=NOT_QUEUED)


@pytest.fixture
def parts():
    """What is tested. Imported where warnings of vLLM's own imports are none of ours."""
    from kvstore.integrations.vllm import landing, options, plan, stats, worker

    return SimpleNamespace(
        worker=worker,
        landing=landing,
        StepPlan=plan.StepPlan,
        Wakeup=plan.Wakeup,
        Options=options.Options,
        Stats=stats.Stats,
    )


@pytest.fixture
def side(parts, monkeypatch):
    """A worker that says how long it waited for jobs, and waits no longer than that."""
    made = parts.worker.WorkerSide(parts.Options(), None, None, WHOLE, 0, True, parts.Stats())
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


def test_answers_that_end_the_wait_are_waited_for_as_long_as_may_be(parts, side, answered):
    side.poll(parts.StepPlan(num_waiting=1, answered=answered))
    assert answered.waited_s == [parts.landing.LONGEST_WAIT_S]


def test_others_are_waited_for_longer_the_more_are_due_and_the_more_is_to_be_hashed(parts, side, answered):
    answered.is_shared = False
    for num_waiting, num_tokens in ((1, 0), (4, 0), (1, 10_000), (10**6, 0)):
        side.poll(parts.StepPlan(num_waiting=num_waiting, num_unhashed_tokens=num_tokens, answered=answered))
    one, four, long, many = answered.waited_s
    assert one < four == 4 * one < many == parts.landing.LONGEST_WAIT_S
    assert one < long < many


def test_a_wakeup_that_was_sent_to_another_process_is_not_that_of_this_one(parts):
    wakeup = parts.Wakeup()
    wakeup.set()
    plan = pickle.loads(pickle.dumps(parts.StepPlan(num_waiting=2, answered=wakeup)))
    assert plan.num_waiting == 2
    assert not plan.answered.is_set()
    assert not plan.answered.is_shared


def test_the_end_of_a_copy_ends_the_wait_and_one_that_was_seen_does_not(parts, side, answered, monkeypatch):
    callbacks, ended = [], []
    side._loads["r"] = SimpleNamespace(job=SimpleNamespace(done=lambda: bool(ended)), queued=NOT_QUEUED)
    side._running(None, None, SimpleNamespace(add_done_callback=callbacks.append))
    callbacks[0](None)
    assert side._job_ended.is_set(), "the end of another job, a step ago"

    def wait(seconds):
        assert not side._job_ended.is_set()
        side.waited_s.append(seconds)
        ended.append(True)

    monkeypatch.setattr(side._job_ended, "wait", wait)
    monkeypatch.setattr(side, "_end_load", lambda load: None)
    side.poll(parts.StepPlan(answered=answered))
    (waited_s,) = side.waited_s
    assert 0 < waited_s <= parts.landing.LONGEST_WAIT_S


def test_what_vllm_has_yet_to_hear_is_waited_for_by_nobody(parts, side, answered):
    """With asynchronous scheduling the next step is begun before it takes this one's news in."""
    side._received.add("r")
    assert side.poll(parts.StepPlan(answered=answered))[1] == {"r"}
    side._saves["other"] = [RUNNING]
    side.poll(parts.StepPlan(answered=answered))
    assert side.waited_s == []
    side.poll(parts.StepPlan(answered=answered))
    assert side.waited_s

"""How long an engine with nothing to compute waits in a step, and that one with something to compute does not."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from kvstore.blocks.part import WHOLE
from kvstore.blocks.shape import KVShape

SPACE = SimpleNamespace(shape=KVShape(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4))
NOT_QUEUED = SimpleNamespace(is_set=lambda: False)
RUNNING = SimpleNamespace(job=SimpleNamespace(done=lambda: False), queued=NOT_QUEUED)


@pytest.fixture
def parts():
    """What is tested. Imported where warnings of vLLM's own imports are none of ours."""
    from kvstore.integrations.vllm import options, plan, stats
    from kvstore.integrations.vllm.worker_side import worker

    return SimpleNamespace(
        worker=worker,
        StepPlan=plan.StepPlan,
        LoadPlan=plan.LoadPlan,
        Local=plan.Local,
        Options=options.Options,
        Stats=stats.Stats,
    )


@pytest.fixture
def side(parts, monkeypatch):
    """A worker that says how long it waited for jobs, and waits no longer than that."""
    made = parts.worker.WorkerSide(parts.Options(), None, None, WHOLE, 0, True, parts.Stats())
    made.waited_s = []
    monkeypatch.setattr(made.job_ended, "wait", made.waited_s.append)
    return made


@pytest.fixture
def answered(parts):
    """Says how long it was waited for, and is waited for no longer than that."""
    waited_s = []
    return SimpleNamespace(of_scheduler=parts.Local(SimpleNamespace(wait=waited_s.append)), waited_s=waited_s)


def test_a_step_that_computes_waits_for_nothing(parts, side, answered):
    side.loads["r"] = RUNNING
    side.poll(parts.StepPlan(is_computing=True, num_waiting=3, answered=answered.of_scheduler))
    assert side.waited_s == answered.waited_s == []


def test_a_step_with_nothing_at_all_waits_for_nothing(parts, side, answered):
    side.poll(parts.StepPlan(answered=answered.of_scheduler))
    assert side.waited_s == answered.waited_s == []


def test_answers_that_end_the_wait_are_waited_for_as_long_as_may_be(parts, side, answered):
    side.poll(parts.StepPlan(num_waiting=1, answered=answered.of_scheduler))
    assert answered.waited_s == [parts.worker.LONGEST_WAIT_S]


def test_others_are_waited_for_longer_the_more_are_due_and_the_more_is_to_be_hashed(parts, side, answered, monkeypatch):
    monkeypatch.setattr(parts.worker.time, "sleep", answered.waited_s.append)
    for num_waiting, num_tokens in ((1, 0), (4, 0), (1, 10_000), (10**6, 0)):
        side.poll(parts.StepPlan(num_waiting=num_waiting, num_unhashed_tokens=num_tokens))
    one, four, long, many = answered.waited_s
    assert one < four == 4 * one < many == parts.worker.LONGEST_WAIT_S
    assert one < long < many


def test_a_wakeup_that_was_sent_to_another_process_is_not_that_of_this_one(parts, answered):
    plan = pickle.loads(pickle.dumps(parts.StepPlan(num_waiting=2, answered=answered.of_scheduler)))
    assert plan.num_waiting == 2
    assert plan.answered.value is None


def test_the_end_of_a_copy_ends_the_wait_and_one_that_was_seen_does_not(parts, side, answered, monkeypatch):
    callbacks, ended = [], []
    side.loads["r"] = SimpleNamespace(job=SimpleNamespace(done=lambda: bool(ended)), queued=NOT_QUEUED)
    side._running(None, SimpleNamespace(part=WHOLE, space=SPACE), SimpleNamespace(add_done_callback=callbacks.append))
    callbacks[0](None)
    assert side.job_ended.is_set(), "the end of another job, a step ago"

    def wait(seconds):
        assert not side.job_ended.is_set()
        side.waited_s.append(seconds)
        ended.append(True)

    monkeypatch.setattr(side.job_ended, "wait", wait)
    monkeypatch.setattr(side, "_end_load", lambda load: None)
    side.poll(parts.StepPlan(answered=answered.of_scheduler))
    (waited_s,) = side.waited_s
    assert 0 < waited_s <= parts.worker.LONGEST_LOAD_WAIT_S


@pytest.mark.parametrize("kind", ["load", "save"])
@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_a_load_into_host_memory_ends_in_the_step_that_begins_it(parts, side, answered, monkeypatch, kind, is_on_gpu):
    """Others wait less long: a step of a GPU is short, and nobody waits for a save."""
    side.cache.is_on_gpu = is_on_gpu
    held = {"load": side.loads, "save": side.saves}[kind]
    held["r"] = RUNNING if kind == "load" else [RUNNING]
    clock_s = [100.0]

    def wait(seconds):
        side.waited_s.append(seconds)
        clock_s[0] += seconds

    monkeypatch.setattr(parts.worker.time, "monotonic", lambda: clock_s[0])
    monkeypatch.setattr(side.job_ended, "wait", wait)
    side.poll(parts.StepPlan(answered=answered.of_scheduler))
    longest_s = parts.worker.LONGEST_LOAD_WAIT_S if kind == "load" and not is_on_gpu else parts.worker.LONGEST_WAIT_S
    assert side.waited_s == [pytest.approx(longest_s)]


@pytest.mark.parametrize("is_computing", [False, True])
def test_all_cores_copy_where_nothing_else_is_to_be_done(parts, side, answered, monkeypatch, is_computing):
    asked = []
    job = SimpleNamespace(done=lambda: False, add_done_callback=lambda told: None)
    client = SimpleNamespace(
        part=WHOLE, space=SPACE, load=lambda *args, **options: (asked.append(options["num_copy_threads"]), job)[1]
    )
    monkeypatch.setattr(side.cache, "client", lambda: client)
    monkeypatch.setattr(parts.worker, "num_idle_copy_threads", lambda: 3)
    load = parts.LoadPlan(req_id="r", hashes=[b"1"], block_ids=[3], num_engine_tokens=0)
    side.begin(parts.StepPlan(loads=[load], is_computing=is_computing))
    assert asked == [0 if is_computing else 3]


def test_what_vllm_has_yet_to_hear_is_waited_for_by_nobody(parts, side, answered):
    """With asynchronous scheduling the next step is begun before it takes this one's news in."""
    side.received.add("r")
    assert side.poll(parts.StepPlan(answered=answered.of_scheduler))[1] == {"r"}
    side.saves["other"] = [RUNNING]
    side.poll(parts.StepPlan(answered=answered.of_scheduler))
    assert side.waited_s == []
    side.poll(parts.StepPlan(answered=answered.of_scheduler))
    assert side.waited_s

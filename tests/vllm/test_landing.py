"""Loads whose requests are computed while their copies go on: what waits for them, and what may not begin meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from sides import request, scheduler_side

from kvstore.blocks.part import WHOLE
from kvstore.client.results import BlockFailure, LoadResult, MissReason
from kvstore.errors import CopyStuck, JobRunning, KernelError, KVStoreError


@pytest.fixture
def parts():
    """What is tested. Imported where warnings of vLLM's own imports are none of ours."""
    from kvstore.integrations.vllm import options, plan, stats
    from kvstore.integrations.vllm.scheduler_side import tracked
    from kvstore.integrations.vllm.worker_side import worker

    return SimpleNamespace(worker=worker, plan=plan, options=options, stats=stats, tracked=tracked)


class Job:
    """A load that ends when it is told to."""

    def __init__(self):
        self.ended, self.outcome, self.streams_waited = threading.Event(), LoadResult(num_blocks=2, num_local=2), 0

    def done(self):
        return self.ended.is_set()

    def wait_on(self, stream=None, timeout=60.0):
        self.streams_waited += 1

    def result(self, timeout=60.0):
        if not self.ended.wait(timeout):
            raise JobRunning("not yet")
        if isinstance(self.outcome, KVStoreError):
            raise self.outcome
        return self.outcome


@pytest.fixture
def side(parts, monkeypatch):
    """A worker with one load of two blocks under way, that waits for nothing."""
    made = parts.worker.WorkerSide(parts.options.Options(), None, None, WHOLE, 0, True, parts.stats.Stats())
    monkeypatch.setattr(parts.worker, "LONGEST_LOAD_WAIT_S", 0.0)
    load = parts.plan.LoadPlan(req_id="r", hashes=[b"1", b"2"], block_ids=[3, 4], num_engine_tokens=0)
    made.load = made.loads["r"] = parts.worker.Running(load, None, Job(), 0.0)
    return made


@pytest.fixture
def idle(parts):
    return parts.plan.StepPlan()


@pytest.fixture
def computing(parts):
    return parts.plan.StepPlan(is_computing=True)


def test_a_load_that_may_still_be_refused_is_not_handed_over(side, idle):
    assert side.poll(idle) == (set(), set())
    assert not side.load.job.streams_waited


def test_a_queued_load_is_received_behind_a_wait_of_the_stream(side, idle, computing):
    side.load.queued.set()
    assert side.poll(idle) == (set(), {"r"})
    assert side.load.job.streams_waited == 1
    assert side.take_report().landing == {"r": 1}
    assert side.poll(computing) == (set(), set())
    assert side.take_report() is None
    side.load.job.ended.set()
    assert side.poll(computing) == (set(), set()), "nobody hears of it twice"
    assert side.take_report().landing == {"r": -1}
    assert side.take_failed_block_ids() == set()


def test_others_that_compute_do_not_wait_for_a_load(side, computing):
    side.load.queued.set()
    assert side.poll(computing) == (set(), set())
    side.load.job.ended.set()
    assert not side.load.job.streams_waited


@pytest.mark.parametrize("how", ["the device failed", "the lease was over"])
def test_an_engine_that_has_computed_from_blocks_that_did_not_come_ends(side, idle, how):
    side.load.queued.set()
    side.poll(idle)
    failures = tuple(BlockFailure(index=at, block_ids=(at,), reason=MissReason.LEASE_EXPIRED) for at in range(2))
    side.load.job.outcome = (
        KernelError("no device") if how == "the device failed" else LoadResult(num_blocks=0, failed=failures)
    )
    side.load.job.ended.set()
    with pytest.raises(CopyStuck, match="restart it"):
        side.poll(idle)


def test_blocks_of_a_preempted_request_are_given_away_after_its_load(side, idle, parts):
    side.load.queued.set()
    side.poll(idle)
    threading.Timer(0.05, side.load.job.ended.set).start()
    side.settle(parts.plan.StepPlan(settle={"r"}))
    assert side.load.job.done()
    assert side.take_report().landing == {"r": 0}


def test_blocks_of_an_ended_request_are_freed_after_its_load(side, idle, parts):
    scheduler, asked = scheduler_side(), request()
    scheduler.tracked["r"] = parts.tracked.Tracked(asked, is_loading=True)
    side.load.queued.set()
    _, received = side.poll(idle)
    scheduler.heard(received, side.take_report())
    assert scheduler.ended(asked, [])[0], "vLLM has to keep its blocks"
    side.begin(scheduler.next_plan)
    assert side.poll(idle) == (set(), set())
    side.load.job.ended.set()
    assert side.poll(idle) == ({"r"}, set())
    scheduler.heard(set(), side.take_report())
    assert not scheduler.ending.requests
    assert not scheduler.tracked


def test_reports_of_several_workers_are_put_together(parts):
    report = parts.plan.WorkerReport(landing=Counter(r=1)).aggregate(parts.plan.WorkerReport(landing=Counter(r=-1)))
    assert report.landing == {"r": 0}
    both = parts.plan.WorkerReport(landing=Counter(r=-1)).aggregate(parts.plan.WorkerReport(landing=Counter(s=-1)))
    assert both.landing == {"r": -1, "s": -1}

"""Fetches over a lane that nobody has measured, and READs that do not end."""

import re
import threading
from types import SimpleNamespace

import pytest

from kvstore.client.results import MissReason
from kvstore.errors import TransferTimeout
from kvstore.handoff.lanes import StageLane, StageLanes
from kvstore.runtime import clock
from tests.kvstore.handed_off import Held, fetch, reason, same
from tests.kvstore.handoff.host_stages import nothing_held


@pytest.fixture
def held(pair, stages, monkeypatch):
    """The transport into the reader's stage: its READs begin when `go` is set."""
    monkeypatch.setattr("kvstore.handoff.lanes._LEAST_S", 0.1)
    stages[1].transport = made = Held(stages[1].transport)
    yield made
    made.go.set()


def test_a_short_fetch_measures_a_lane_in_about_its_time_and_the_lane_has_not_failed(cluster, pair, held, wait_until):
    source, target = pair
    ticket = source.client.publish(range(4))
    result = fetch(target, ticket, range(4), timeout_s=0.05)
    assert reason(result) is MissReason.TIMEOUT
    assert float(re.search(r"not finished after ([0-9.]+) s", result.failed[0].detail)[1]) <= 0.1
    held.go.set()
    assert fetch(target, ticket, range(4)).route == "gpu"
    assert all(same(source, range(4), target, range(4)))
    nothing_held(cluster, wait_until)


def test_a_lane_on_which_short_fetches_wait_in_vain_for_most_of_a_reads_limit_has_failed(
    cluster, pair, held, monkeypatch, wait_until
):
    monkeypatch.setattr("kvstore.handoff.lanes._READ_WITHIN_S", 0.4)
    source, target = pair
    ticket = source.client.publish(range(4))
    result = wait_until(lambda: (found := fetch(target, ticket, range(4), timeout_s=0.05)).num_blocks and found)
    assert (result.num_blocks, result.route) == (4, "host")
    assert "the lane between the GPUs failed" in result.note
    held.go.set()
    nothing_held(cluster, wait_until)


def test_to_ask_for_a_lane_takes_the_time_of_its_fetch(pair, monkeypatch):
    source, target = pair
    given_s, ticket = [], source.client.publish(range(4))

    def no_answer(lanes, peer, slab, stage, timeout_s, until_s):
        given_s.append(timeout_s)
        raise TransferTimeout("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(StageLanes, "find", no_answer)
        assert reason(fetch(target, ticket, range(4), timeout_s=0.05)) is MissReason.TIMEOUT
    assert given_s == [1.0]
    assert fetch(target, ticket, range(4)).num_blocks == 4


def test_who_waits_for_another_ones_measurement_does_so_for_its_own_time(cluster, pair, held, wait_until):
    source, target = pair
    tickets = [source.client.publish(range(4)) for _ in range(2)]
    jobs = [target.client.fetch(ticket, list(range(4)), timeout_s=0.05) for ticket in tickets]
    assert [reason(job.result(20)) for job in jobs] == [MissReason.TIMEOUT] * 2
    held.go.set()
    for ticket in tickets:
        assert fetch(target, ticket, range(4)).num_blocks == 4
    nothing_held(cluster, wait_until)


PEER = SimpleNamespace(node_id="p", epoch=b"e" * 8, client=SimpleNamespace(call=lambda op, timeout_s: b""))
STAGE = SimpleNamespace(slab=b"s", generation=1)


@pytest.fixture
def measured(monkeypatch):
    """Lanes from a peer with one stage, whose measurements are what a test appends."""
    measured = []

    def measure(lanes, name, description, generation, num_warm, stage, until_s, silence):
        measured.pop(0)(until_s, silence)
        return StageLane(name, description, generation, 0.0, "it failed", 0.0)

    monkeypatch.setattr("kvstore.handoff.lanes.stages_of", lambda answer, slab: [(7, 1, 1, None)])
    monkeypatch.setattr(StageLanes, "_measure", measure)
    return measured


def test_reads_that_measure_have_some_time_however_little_the_fetch_has(measured):
    given_s = []
    measured.append(lambda until_s, silence: given_s.append(until_s - before_s))
    before_s = clock.now_s()
    StageLanes(None, None).find(PEER, 7, STAGE, 1.0, before_s)
    assert given_s[0] >= 1.0


def test_a_lane_that_was_measured_has_no_silence_left(measured):
    lanes, silent_s = StageLanes(None, None), []
    measured.append(lambda until_s, silence: silence.add("lane", clock.now_s() - 5.0))
    measured.append(lambda until_s, silence: silent_s.append(silence.total_s()))
    for _ in range(2):
        lanes.find(PEER, 7, STAGE, 1.0, clock.now_s())
    assert silent_s == [0.0]


def test_the_wait_for_another_ones_measurement_ends_before_that_does(measured, monkeypatch):
    monkeypatch.setattr("kvstore.handoff.lanes._LEAST_S", 0.01)
    lanes, begun, goes_on, ends = StageLanes(None, None), threading.Event(), threading.Event(), threading.Event()
    measured.append(lambda until_s, silence: (begun.set(), goes_on.wait(60)))
    measured.append(lambda until_s, silence: None)

    def wait_for_it():
        with pytest.raises(TransferTimeout, match="another fetch measures"):
            lanes.find(PEER, 7, STAGE, 1.0, clock.now_s())
        ends.set()

    both = [
        threading.Thread(target=lanes.find, args=(PEER, 7, STAGE, 1.0, clock.now_s()), daemon=True),
        threading.Thread(target=wait_for_it, daemon=True),
    ]
    try:
        both[0].start()
        assert begun.wait(20)
        both[1].start()
        assert ends.wait(20)
    finally:
        goes_on.set()
        for each in both:
            each.join(20)

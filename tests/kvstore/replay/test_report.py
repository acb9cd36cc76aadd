"""Rows of a plan, the table for a person, and the bar on a terminal."""

from __future__ import annotations

import pytest
from small_traces import random_prompts, trace_of

from kvstore.errors import InvalidRequest
from kvstore.replay import report
from kvstore.replay.model import Rates
from kvstore.replay.report import POLICIES, Plan, progress_bar, run_plan, show_table

TRACE = trace_of(*random_prompts(2, 50))
RATES = Rates(1000.0, 1.0, 1000)


def silent(_):
    return lambda: None


def run(plan, trace=TRACE):
    return run_plan(trace, plan, RATES, silent)


def test_a_row_for_each_policy_and_capacity():
    rows = run(Plan(POLICIES, [2, 20]))
    assert [(row["capacity_blocks"], row["policy"]) for row in rows] == [
        (size, name) for size in (2, 20) for name in POLICIES
    ]
    for row in rows:
        assert row["num_references"] == TRACE.num_references
        assert row["prefix_hit_ratio"] == round(row["num_hits"] / row["num_references"], 4)
        assert 0 < row["modelled_ttft_p50_s"] <= row["modelled_ttft_p99_s"]
        assert row["us_per_reference"] > 0
        assert "num_nodes" not in row


def test_more_hits_mean_less_time():
    few, many = run(Plan(["lru"], [1, 100]))
    assert few["num_hits"] < many["num_hits"]
    assert few["modelled_ttft_p50_s"] > many["modelled_ttft_p50_s"]


def test_several_nodes_say_what_the_largest_was_given():
    (row,) = run(Plan(["lru"], [10], 2, "round-robin"), trace_of([1], [2], [1], [2]))
    assert (row["num_nodes"], row["routing"], row["largest_node_share"], row["num_hits"]) == (2, "round-robin", 0.5, 2)


def test_the_bound_of_several_nodes_is_of_one_cache_with_all_their_blocks():
    (one,), (two,) = run(Plan(["bound"], [8])), run(Plan(["bound"], [4], 2, "prefix"))
    assert one["num_hits"] == two["num_hits"]
    for routing in ("round-robin", "prefix"):
        (row,) = run(Plan(["lru"], [4], 2, routing))
        assert row["num_hits"] <= two["num_hits"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_nodes": 0}, "--nodes: wanted 1 to 1024, got 0; leave it out for one"),
        ({"num_nodes": 5000}, "--nodes: wanted 1 to 1024, got 5000"),
        ({"routing": "random"}, "--routing: wanted round-robin or prefix, got 'random'"),
        ({"tie_blocks": -1}, "--tie-blocks: wanted 0 or more, got -1"),
    ],
)
def test_a_plan_that_cannot_be(settings, says):
    with pytest.raises(InvalidRequest, match=says):
        Plan(["lru"], [1], **settings)


def test_the_table_is_not_cut_in_a_pipe(capsys):
    show_table(TRACE, run(Plan(POLICIES, [1000, 100_000], 2)))
    shown = capsys.readouterr().out
    assert "small (test): 50 requests in 49 s" in shown
    assert "100,000" in shown
    assert "largest node" in shown
    assert "modelled" in shown
    assert "…" not in shown


def test_no_bar_without_a_terminal(capsys):
    with progress_bar(1, 2) as begin:
        begin("lru")()
    assert capsys.readouterr() == ("", "")


def test_a_long_replay_says_how_far_it_is_without_a_terminal(capsys, monkeypatch):
    times_s = iter([0.0, 2.0, 6.0, 6.0, 7.0, 8.0, 8.0])
    monkeypatch.setattr(report.clock, "now_s", lambda: next(times_s))
    with progress_bar(1, 4, is_long=True) as begin:
        tick = begin("real, lru")
        for _ in range(4):
            tick()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"real, lru: {done} of 4 requests" for done in (0, 2, 4)]


def test_a_bar_on_a_terminal_stands_on_stderr(capsys, monkeypatch):
    class Terminal(report.Console):
        def __init__(self, **settings):
            super().__init__(force_terminal=True, **settings)

    monkeypatch.setattr(report, "Console", Terminal)
    with progress_bar(1, 100) as begin:
        tick = begin("lru, 5 blocks")
        for _ in range(100):
            tick()
    out, err = capsys.readouterr()
    assert out == ""
    assert "lru, 5 blocks" in err

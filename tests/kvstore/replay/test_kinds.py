"""Made traces: the same for the same seed, valid, and with the statistics that docs/replay.md says."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.replay.formats import read_trace
from kvstore.replay.kinds import BLOCK_TOKENS, KINDS, MAX_TOKENS, as_mooncake, make_requests


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_makes_the_same_trace(kind):
    one, same, other = (as_mooncake(make_requests(kind, 60.0, seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other or kind == "loop"


def test_a_seed_makes_what_it_always_made():
    rows = make_requests("conversation", 60.0, 0)
    assert (len(rows), rows[0].input_tokens, rows[0].output_tokens) == (197, 2555, 256)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_trace_of_the_mooncake_format(kind, tmp_path):
    path = tmp_path / "made.jsonl"
    path.write_text(as_mooncake(make_requests(kind, 90.0, 3)))
    trace = read_trace(path)
    assert (trace.format_name, trace.block_tokens) == ("mooncake", BLOCK_TOKENS)
    assert 0 <= trace.requests[0].time_s <= trace.requests[-1].time_s < 90
    assert max(each.input_tokens for each in trace.requests) <= MAX_TOKENS
    # As in the published traces, an id has one predecessor only, so that chaining makes no more blocks than ids.
    ids = {each for line in path.read_text().splitlines() for each in json.loads(line)["hash_ids"]}
    assert ids == set(range(trace.num_blocks))


def share_seen(rows):
    seen, num_hits, num_references = set(), 0, 0
    for row in rows:
        num_hits += sum(each in seen for each in row.ids)
        num_references += len(row.ids)
        seen.update(row.ids)
    return num_hits / num_references


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        ("conversation", 0.30, 0.45),
        ("tool-agent", 0.75, 0.87),
        ("coding-agent", 0.92, 0.97),
        ("long-documents", 0.42, 0.62),
        ("scan", 0.15, 0.35),
        ("loop", 0.0, 0.7),
        ("mix", 0.70, 0.85),
    ],
)
def test_how_much_was_seen_before(kind, least, most):
    assert least <= share_seen(make_requests(kind, 1200.0, 5)) <= most


def test_a_loop_comes_again_in_the_same_order():
    rows = make_requests("loop", 1200.0, 0)
    assert len(rows) == 600
    assert [row.ids[:-1] for row in rows[:300]] == [row.ids[:-1] for row in rows[300:]]


def test_a_scan_has_prompts_that_come_once():
    rows = make_requests("scan", 600.0, 0)
    uses = Counter(each for row in rows for each in row.ids)
    once = [row for row in rows if len(row.ids) == 120 and all(uses[each] == 1 for each in row.ids)]
    assert len(once) > 100
    assert once[0].time_s >= 100


def test_a_session_only_grows():
    rows = make_requests("coding-agent", 600.0, 1)
    longest = max(rows, key=lambda row: len(row.ids)).ids
    path = [row.ids for row in rows if row.ids[:60] == longest[:60]]
    assert len(path) > 2
    assert [len(ids) for ids in path] == sorted(len(ids) for ids in path)


def test_a_kind_that_is_not_there():
    with pytest.raises(
        ConfigError, match=r"KIND: wanted conversation, tool-agent, .*mix, got 'chat'; `kvstore trace make"
    ):
        make_requests("chat", 60.0, 0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_a_time_that_is_none(seconds):
    with pytest.raises(InvalidRequest, match="--seconds: wanted a number above 0, at most 86400, got"):
        make_requests("loop", seconds, 0)


def test_a_time_in_which_nothing_comes():
    with pytest.raises(InvalidRequest, match="--seconds: wanted time for a request, got 1e-06, in which none came"):
        make_requests("conversation", 1e-6, 0)

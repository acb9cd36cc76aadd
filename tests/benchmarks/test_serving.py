"""What the serving benchmark makes of its rows; its engines need vLLM and minutes, and run by hand."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks.serving import in_turn, main
from benchmarks.serving_report import paired, ratios


def row(what, *times_ms, **more):
    return {"what": what, "times_ms": list(times_ms), **more}


def first_tokens(num_tokens, none, own, dict_warm, cold, warm):
    return [
        row("first token", none, way="none", state="cold", num_tokens=num_tokens),
        row("first token", own, way="own", state="cold", num_tokens=num_tokens),
        row("first token", dict_warm, way="dict", state="warm", num_tokens=num_tokens),
        row("first token", cold, way="raykv", state="cold", num_tokens=num_tokens),
        row("first token", warm, way="raykv", state="warm", num_tokens=num_tokens),
    ]


def test_ratios_compare_what_was_measured_at_the_same_length():
    rows = first_tokens(512, 200.0, 210.0, 30.0, 210.0, 40.0) + first_tokens(1500, 700.0, 1414.0, 39.0, 707.0, 35.0)
    assert [{key: found[key] for key in ("ratio", "num_tokens", "is")} for found in ratios(rows)] == [
        {"ratio": "warm / bound", "num_tokens": 512, "is": 1.333},
        {"ratio": "recompute / warm", "num_tokens": 512, "is": 5.0},
        {"ratio": "cold / no connector", "num_tokens": 512, "is": 1.0},
        {"ratio": "cold / no connector, no prefix cache", "num_tokens": 512, "is": 1.05},
        {"ratio": "warm / bound", "num_tokens": 1500, "is": 0.897},
        {"ratio": "recompute / warm", "num_tokens": 1500, "is": 20.0},
        {"ratio": "cold / no connector", "num_tokens": 1500, "is": 0.5},
        {"ratio": "cold / no connector, no prefix cache", "num_tokens": 1500, "is": 1.01},
    ]


def test_ways_are_compared_prompt_by_prompt():
    """What the machine did while a prompt was asked falls on both of a pair."""
    assert paired([11.0, 44.0, 22.0], [10.0, 40.0, 20.0]) == {"is": 1.1, "low": 1.1, "high": 1.1, "num_pairs": 3}
    assert paired([10.0, 30.0, 20.0, 20.0], [10.0] * 4) == {"is": 2.0, "low": 1.75, "high": 2.25, "num_pairs": 4}
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0], [1.0])


def test_conversations_are_compared_round_by_round():
    rows = [
        {"what": "conversations", "way": way, "walls_s": walls_s}
        for way, walls_s in (("none", [20.0, 40.0]), ("own", [10.0, 20.0]), ("raykv", [5.0, 10.0]))
    ]
    assert [(found["ratio"], found["is"]) for found in ratios(rows)] == [
        ("conversations: raykv / none", 0.25),
        ("conversations: raykv / own", 0.5),
    ]


@pytest.mark.parametrize(("number", "names"), [(-1, "cba"), (0, "abc"), (1, "cba"), (2, "abc")])
def test_every_other_round_is_asked_in_the_opposite_order(number, names):
    assert "".join(in_turn("abc", number)) == names


def test_ratios_of_hand_offs_are_of_one_lane():
    rows = [
        row("hand-off", time_ms, way=way, state=state, lane=lane, num_tokens=1500)
        for lane, state, ours, ticket, theirs in (
            ("default", "decode", 40.0, 30.0, 50.0),
            ("default", "prefill", 700.0, 350.0, 1400.0),
            ("tcp", "decode", 95.0, 190.0, 95.0),
            ("tcp", "prefill", 700.0, 70.0, 700.0),
        )
        for way, time_ms in (("raykv", ours), ("ticket", ticket), ("nixl", theirs))
    ]
    assert [(found["lane"], found["ratio"], found["is"]) for found in ratios(rows)] == [
        ("default", "decode: raykv / NixlConnector", 0.8),
        ("default", "decode: ticket / NixlConnector", 0.6),
        ("default", "prefill: raykv / NixlConnector", 0.5),
        ("default", "prefill: ticket / NixlConnector", 0.25),
        ("tcp", "decode: raykv / NixlConnector", 1.0),
        ("tcp", "decode: ticket / NixlConnector", 2.0),
        ("tcp", "prefill: raykv / NixlConnector", 1.0),
        ("tcp", "prefill: ticket / NixlConnector", 0.1),
    ]


@pytest.mark.parametrize("num_tokens", ["32", "3300"])
def test_prompts_that_no_engine_holds_are_refused(num_tokens):
    answer = CliRunner().invoke(main, ["--tokens", num_tokens])
    assert answer.exit_code == 2
    assert "is not in the range" in answer.output

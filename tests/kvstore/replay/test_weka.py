"""Conversations of coding agents: scopes of ids, subagents, both kinds of their times."""

from __future__ import annotations

import json

import pytest

from kvstore.errors import InvalidRequest
from kvstore.replay.formats import read_trace


def request(t, *ids, **fields):
    return {"t": t, "type": "n", "model": "m", "in": 64 * len(ids), "out": 3, "hash_ids": list(ids), **fields}


def subagent(t, *requests):
    return {"t": t, "type": "subagent", "agent_id": "a", "requests": list(requests)}


def conversation(*requests, **fields):
    return {"id": "x", "models": ["m"], "block_size": 64, "requests": list(requests), **fields}


def read(tmp_path, *lines):
    path = tmp_path / "weka.json"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return read_trace(path)


def blocks(trace):
    return [(each.time_s, list(each.blocks)) for each in trace.requests]


def test_fields(tmp_path):
    trace = read(tmp_path, conversation(request(0.5, 1, 2), request(2.0, 1, 2, 3)))
    assert (trace.format_name, trace.block_tokens) == ("weka", 64)
    assert blocks(trace) == [(0.5, [0, 1]), (2.0, [0, 1, 2])]
    assert [(each.input_tokens, each.output_tokens) for each in trace.requests] == [(128, 3), (192, 3)]


def test_conversations_are_merged_by_time(tmp_path):
    trace = read(tmp_path, conversation(request(0.0, 1), request(5.0, 1, 2)), conversation(request(2.0, 3)))
    assert [each.time_s for each in trace.requests] == [0.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("scope", "num_blocks"), [({}, 2), ({"hash_id_scope": "local"}, 2), ({"hash_id_scope": "global"}, 1)]
)
def test_local_ids_mean_blocks_of_their_conversation_alone(tmp_path, scope, num_blocks):
    assert read(tmp_path, *[conversation(request(0.0, 1), **scope)] * 2).num_blocks == num_blocks


def test_a_subagent_shares_the_ids_of_its_conversation(tmp_path):
    trace = read(tmp_path, conversation(request(0.0, 1, 2), subagent(3.0, request(4.0, 1, 9)), request(9.0, 1, 2, 3)))
    assert blocks(trace) == [(0.0, [0, 1]), (4.0, [0, 2]), (9.0, [0, 1, 3])]


def test_times_of_subagents_may_count_from_their_begin(tmp_path):
    trace = read(
        tmp_path, conversation(request(0.0, 1), subagent(3.0, request(0.0, 2), request(7.0, 3)), request(5.0, 4))
    )
    assert [each.time_s for each in trace.requests] == [0.0, 3.0, 5.0, 10.0]


def test_a_request_without_ids_is_left_out(tmp_path):
    assert len(read(tmp_path, conversation(request(0.0, 1), {"t": 1.0, "type": "n", "in": 5, "out": 1})).requests) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (conversation(request("soon", 1)), r"conversation 1: wanted an object with requests of t.*Expected `float`"),
        ({"requests": 3}, r"conversation 1: wanted an object with requests"),
        (conversation(request(0.0, 1), hash_id_scope="odd"), r"wanted hash_id_scope local or global, got 'odd'"),
        (conversation(request(0.0, 1), block_size=-1), r"wanted one block_size in all conversations, .*got \[-1\]"),
        (conversation(request(-1.0, 1)), r"conversation 1: wanted a time from 0 to 1e\+11 s, got -1 s"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, line, says):
    with pytest.raises(InvalidRequest, match=says):
        read(tmp_path, line)


def test_a_wrong_line_of_several_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match=r"weka.json line 2: wanted an object with requests"):
        read(tmp_path, conversation(request(0.0, 1)), {"requests": [3]})


def test_blocks_of_two_sizes_are_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"wanted one block_size in all conversations, 1 or more, got \[16, 64\]"):
        read(tmp_path, conversation(request(0.0, 1)), conversation(request(0.0, 1), block_size=16))


def test_subagents_in_subagents_without_end_are_refused(tmp_path):
    inner = [request(1.0, 1)]
    for _ in range(430):
        inner = [subagent(1.0, *inner)]
    with pytest.raises(InvalidRequest, match=r"weka\.json.*: wanted "):
        read(tmp_path, conversation(*inner))

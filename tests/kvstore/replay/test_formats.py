"""Every format is found by its first record; what is wrong in a file is named with its line and a remedy."""

from __future__ import annotations

import json

import pytest

from kvstore.errors import ChainBroken, InvalidRequest
from kvstore.replay.formats import FORMATS, read_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 6, "hash_ids": [0, 2, 3]},
]
BAILIAN = [
    {"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 33, "output_length": 9, "type": "text",
     "turn": 1, "hash_ids": [5, 5, 6]},
    {"chat_id": 8, "parent_chat_id": 7, "timestamp": 62.0, "input_length": 20, "output_length": 9, "type": "text",
     "turn": 2, "hash_ids": [5, 6]},
]  # fmt: skip
WEKA = {"id": "a", "block_size": 32, "requests": [{"t": 1.0, "type": "s", "in": 40, "out": 2, "hash_ids": [1, 2]}]}


def written(tmp_path, *lines):
    path = tmp_path / "trace"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_mooncake(tmp_path):
    trace = read_trace(written(tmp_path, *MOONCAKE))
    assert (trace.format_name, trace.block_tokens, trace.name) == ("mooncake", 512, "trace")
    assert [(each.time_s, each.input_tokens, each.output_tokens) for each in trace.requests] == [
        (0.0, 1000, 5),
        (3.0, 1536, 6),
    ]
    assert [list(each.blocks) for each in trace.requests] == [[0, 1], [0, 2, 3]]


def test_bailian_ids_are_of_single_blocks_and_are_chained_here(tmp_path):
    trace = read_trace(written(tmp_path, *BAILIAN))
    assert (trace.format_name, trace.block_tokens) == ("bailian", 16)
    assert [each.time_s for each in trace.requests] == [61.5, 62.0]
    assert [list(each.blocks) for each in trace.requests] == [[0, 1, 2], [0, 3]]


def test_weka_is_found_on_one_line_and_on_many(tmp_path):
    for text in (json.dumps(WEKA), json.dumps(WEKA, indent=1), json.dumps([WEKA]), json.dumps([WEKA], indent=1)):
        trace = read_trace(written(tmp_path, text))
        assert (trace.format_name, trace.block_tokens, trace.num_references) == ("weka", 32, 2)


def test_a_table(tmp_path):
    trace = read_trace(written(tmp_path, "0,a,10", "1,b,10", "1,a,10"))
    assert (trace.format_name, trace.block_tokens) == ("csv", 16)
    assert [list(each.blocks) for each in trace.requests] == [[0], [1], [0]]
    assert [each.input_tokens for each in trace.requests] == [16, 16, 16]


def test_lines_that_are_empty_are_passed_over(tmp_path):
    assert len(read_trace(written(tmp_path, "", MOONCAKE[0], "  ", MOONCAKE[1], "")).requests) == 2


def test_the_size_of_a_block_can_be_said(tmp_path):
    row = {"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [0, 1, 2]}
    assert read_trace(written(tmp_path, row), block_tokens=16).block_tokens == 16
    assert read_trace(written(tmp_path, WEKA), block_tokens=16).block_tokens == 16


def test_a_format_can_be_named(tmp_path):
    rows = [{**MOONCAKE[0], "chat_id": 1}]
    assert read_trace(written(tmp_path, *rows)).format_name == "bailian"
    assert read_trace(written(tmp_path, *rows), "mooncake").format_name == "mooncake"


def test_the_remedy_for_an_id_twice_is_one(tmp_path):
    path = written(tmp_path, {**MOONCAKE[1], "hash_ids": [0, 1, 0]})
    assert read_trace(path, "bailian").num_blocks == 3


def changed(**fields):
    return {**MOONCAKE[1], **fields}


@pytest.mark.parametrize(
    ("row", "kind", "says"),
    [
        (changed(timestamp=-1), InvalidRequest, r"line 2: wanted a time from 0 to 1e\+11 s, got -0.001 s; let the"),
        (changed(hash_ids=[0, 1, 0]), ChainBroken, r"line 2: wanted each id of a request once.*got 0 twice; .*bailian"),
        (changed(hash_ids=[0]), ChainBroken, r"line 2: wanted 3 ids, for 1536 tokens in blocks of 512, got 1; a chain"),
        (changed(hash_ids=[0, 1, 2, 3]), ChainBroken, r"line 2: wanted 3 ids, .*got 4; .*--block-tokens"),
        (changed(hash_ids="0"), InvalidRequest, r"line 2: wanted a line of the mooncake.*Expected `array`"),
        (changed(hash_ids=[0, 1, 2.5]), InvalidRequest, r"line 2: wanted a line of the mooncake.*\$.hash_ids\[2\]`"),
        (changed(hash_ids=[0, 1, None]), InvalidRequest, r"line 2: wanted a line of the mooncake"),
        (changed(input_length=-5, hash_ids=[]), InvalidRequest, r"line 2: wanted 0 or more input tokens, got -5"),
        (changed(output_length=-1), InvalidRequest, r"line 2: wanted 0 or more output tokens, got -1; repair"),
        (changed(timestamp="3"), InvalidRequest, r"line 2: wanted a line of the mooncake.*Expected `float`"),
        ({"timestamp": 1}, InvalidRequest, r"line 2: wanted a line of the mooncake.*missing required field"),
        ('{"timestamp": 1e999, "input_length": 1, "hash_ids": [0]}', InvalidRequest, r"line 2: .*out of range"),
        ('{"timestamp": NaN, "input_length": 1, "hash_ids": [0]}', InvalidRequest, r"line 2: .*malformed"),
        ('{"timestamp": 3000, "input_le', InvalidRequest, r"line 2: wanted a line of the mooncake.*truncated"),
        (changed(delay=100), InvalidRequest, r"line 2: wanted a line of the mooncake.*unknown field `delay`"),
        (changed(timestamp=2e14), InvalidRequest, r"line 2: wanted a time from 0 to 1e\+11 s, got 2e\+11 s; let"),
        ('{"timestamp": ' + "[" * 5000, InvalidRequest, r"line 2: wanted a line of the mooncake"),
        ("[1, 2]", InvalidRequest, r"line 2: wanted a line of the mooncake.*Expected `object`"),
        ("rubbish", InvalidRequest, r"line 2: wanted a line of the mooncake.*; repair the line, or name"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path, row, kind, says):
    with pytest.raises(kind, match=says) as found:
        read_trace(written(tmp_path, MOONCAKE[0], row))
    assert type(found.value) is kind


def test_times_that_go_back_are_named(tmp_path):
    with pytest.raises(InvalidRequest, match=r"line 3: wanted a time of 3 s or more.*got 2 s; sort the lines by time"):
        read_trace(written(tmp_path, *MOONCAKE, changed(timestamp=2000)))


def test_a_long_line_is_cut_in_the_error(tmp_path):
    with pytest.raises(InvalidRequest) as found:
        read_trace(written(tmp_path, MOONCAKE[0], changed(hash_ids=["x" * 5000])))
    assert len(str(found.value)) < 500


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file(tmp_path, content):
    with pytest.raises(InvalidRequest, match="wanted a trace, got an empty file; `kvstore trace make` writes one"):
        read_trace(written(tmp_path, content))


@pytest.mark.parametrize(
    "line", ["hello", "{}", "[]", "3", '{"timestamp": 0}', '{"a": ', '{"hash_ids": [1]}', "null", "[[1, 2]]"]
)
def test_a_file_of_no_known_format(tmp_path, line):
    with pytest.raises(InvalidRequest, match=r"line 1: wanted a line .*mooncake.*bailian.*weka.*csv.*--format"):
        read_trace(written(tmp_path, line))


def test_lines_before_the_first_record_count(tmp_path):
    with pytest.raises(InvalidRequest, match="line 3: wanted a line"):
        read_trace(written(tmp_path, "", " ", "hello"))


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_named_format_that_it_is_not(tmp_path, format_name):
    with pytest.raises(InvalidRequest, match=r"line 1: wanted .*got 'hello'"):
        read_trace(written(tmp_path, "hello"), format_name)


def test_a_trace_without_a_block(tmp_path):
    with pytest.raises(InvalidRequest, match="wanted requests with ids of blocks, got 1 without; use another file"):
        read_trace(written(tmp_path, {"timestamp": 0, "input_length": 0, "hash_ids": []}))


def test_a_file_that_is_not_there_a_folder_and_bytes(tmp_path):
    with pytest.raises(InvalidRequest, match="wanted a trace file, got No such file or directory; name a file"):
        read_trace(tmp_path / "none")
    with pytest.raises(InvalidRequest, match="wanted a trace file, got Is a directory"):
        read_trace(tmp_path)
    (tmp_path / "zst").write_bytes(b"(\xb5/\xfd\x00")
    with pytest.raises(InvalidRequest, match=r"wanted text in UTF-8, got byte 0xb5 at 1; .*decompress"):
        read_trace(tmp_path / "zst")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"requests":' * 50_000, "[\n" * 50_000 + '"requests"'])
def test_values_that_are_nested_without_end_are_refused(tmp_path, text):
    with pytest.raises(InvalidRequest, match=r"trace line 1: wanted .*, got "):
        read_trace(written(tmp_path, text))


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = written(tmp_path, "\ufefftime,obj_id", "0,a", "1,a")
    assert read_trace(path).num_references == 2
    assert read_trace(written(tmp_path, "\ufeff" + json.dumps(MOONCAKE[0]))).format_name == "mooncake"


def every(seconds, count, unit):
    return [{"timestamp": at * seconds * unit, "input_length": 9, "hash_ids": [at]} for at in range(count)]


@pytest.mark.parametrize(
    ("rows", "line", "got"),
    [
        ([MOONCAKE[0], changed(timestamp=3.25)], 2, "got 2 requests in 3.25 ms, so they may be seconds; say --time"),
        ([row for row in every(1, 200, 1) for _ in range(2)], 400, "got 400 requests in 199 ms"),
    ],
)
def test_times_that_are_plainly_seconds_are_not_read_as_milliseconds(tmp_path, rows, line, got):
    path = written(tmp_path, *rows)
    with pytest.raises(InvalidRequest, match=rf"line {line}: wanted times in milliseconds, {got}"):
        read_trace(path)
    assert read_trace(path, time_unit="s").requests[-1].time_s == rows[-1]["timestamp"]
    assert read_trace(path, time_unit="ms").requests[-1].time_s == rows[-1]["timestamp"] / 1000


def test_milliseconds_in_which_requests_come_at_once_are_milliseconds(tmp_path):
    at_once = [{**row, "timestamp": 0} for row in every(1, 300, 1)]
    assert len(read_trace(written(tmp_path, *at_once)).requests) == 300
    busy, artifacts = every(4, 300, 1), every(0.03, 300, 1000)  # Times like 90.00000000000001 have a fraction, too.
    assert read_trace(written(tmp_path, *busy)).requests[-1].time_s == pytest.approx(1.196)
    assert read_trace(written(tmp_path, *artifacts)).requests[-1].time_s == pytest.approx(8.97)


def test_the_unit_of_times_can_be_said_of_every_format(tmp_path):
    assert read_trace(written(tmp_path, "1500,a"), time_unit="ms").requests[0].time_s == 1.5
    assert read_trace(written(tmp_path, *BAILIAN), time_unit="ms").requests[0].time_s == 0.0615
    assert read_trace(written(tmp_path, WEKA), time_unit="ms").requests[0].time_s == 0.001

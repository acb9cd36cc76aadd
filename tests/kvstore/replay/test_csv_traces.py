"""Tables of objects: with a header or without one, and what is no such table."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.replay.csv_traces import csv_records

PATH = Path("t.csv")


def read(*lines):
    return [(each.time, *each.ids) for each in csv_records(lines, PATH)]


@pytest.mark.parametrize("head", [(), ("time,obj_id,size",), ("", "ts, id"), ("Timestamp,KEY",)])
def test_a_header_is_passed_over(head):
    assert read(*head, "0,7,100", "1.5, 8 ,100", "2,7") == [(0.0, "7"), (1.5, "8"), (2.0, "7")]


@pytest.mark.parametrize(
    "line",
    ["x,7", "1", "1,", "nan,7", "inf,7", ",7", "1;7;100", "1e400,7,1,2", "1_0,7", "\u0663,7", "1,7,big", "1,7,100,ttl"],
)
def test_a_line_that_is_none_is_named(line):
    with pytest.raises(
        InvalidRequest, match=r"t.csv line 2: wanted time,obj_id or time,obj_id,size.*; put these columns"
    ):
        read("0,7,100", line)


def test_only_the_first_line_is_a_header():
    with pytest.raises(InvalidRequest, match="line 2"):
        read("time,id", "time,id")


@pytest.mark.parametrize(
    "head",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens", "Timestamp,Model,Request tokens,Response tokens", "obj_id,time",
        "time", '{"timestamp": "now", "hash_ids": "a"}', "time,obj_id,size,ttl",
    ],
)  # fmt: skip
def test_columns_of_another_format_are_not_read_as_ids(head):
    with pytest.raises(InvalidRequest, match=r"t.csv line 1: wanted time,obj_id or .*, got .*; put these columns"):
        read(head, "0,7,100")

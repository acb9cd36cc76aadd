"""Tables of objects: with a header or without one, and what is no such table."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.replay.csv_traces import csv_records

PATH = Path("t.csv")


def read(*lines):
    return [(each.time_s, *each.ids) for each in csv_records(lines, PATH)]


@pytest.mark.parametrize("head", [(), ("time,obj_id,size",), ("", "ts, id")])
def test_a_header_is_passed_over(head):
    assert read(*head, "0,7,100", "1.5, 8 ,100", "2,7") == [(0.0, "7"), (1.5, "8"), (2.0, "7")]


@pytest.mark.parametrize("line", ["x,7", "1", "1,", "nan,7", "inf,7", ",7", "1;7;100"])
def test_a_line_that_is_none_is_named(line):
    with pytest.raises(
        InvalidRequest, match=r"t.csv line 2: wanted time,obj_id or time,obj_id,size.*; put these columns"
    ):
        read("0,7,100", line)


def test_only_the_first_line_is_a_header():
    with pytest.raises(InvalidRequest, match="line 2"):
        read("time,id", "time,id")

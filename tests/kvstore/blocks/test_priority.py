import math
import pickle

import pytest

import kvstore
from kvstore.blocks.priority import (
    NORMAL,
    Priority,
    Retention,
    as_priority,
    check_priority_s,
    check_terms,
    retention_of,
)
from kvstore.errors import InvalidRequest


def test_a_priority_has_an_order_a_name_and_a_public_place():
    assert Priority.LOW < Priority.NORMAL < Priority.HIGH
    assert [as_priority(name) for name in ("low", "normal", "high")] == list(Priority)
    assert as_priority(kvstore.Priority.HIGH) is Priority.HIGH
    assert pickle.loads(pickle.dumps(Priority.LOW)) is Priority.LOW


@pytest.mark.parametrize("value", ["LOW", "", "urgent", 0, 1.0, True, None, b"low"])
def test_what_is_no_priority_is_refused(value):
    with pytest.raises(InvalidRequest, match="priority: wanted 'low', 'normal' or 'high'"):
        as_priority(value)


def test_times_of_priorities():
    assert [check_priority_s(value) for value in (None, 5, 0.5, 86_400)] == [None, 5.0, 0.5, 86_400.0]
    for value in (0, -1, math.nan, math.inf, -math.inf, "5", True, 86_401):
        with pytest.raises(InvalidRequest, match="priority_s: wanted "):
            check_priority_s(value)


def test_only_a_priority_that_can_end_has_a_time():
    assert check_terms("low", 5) == (Priority.LOW, 5.0)
    assert check_terms(Priority.NORMAL, None) == (Priority.NORMAL, None)
    with pytest.raises(
        InvalidRequest, match=r"priority_s: wanted it with .*got 600 with 'normal'.*leave priority_s out"
    ):
        check_terms("normal", 600)


def test_a_retention_begins_now():
    assert retention_of("high", 5, 100.0) == Retention(Priority.HIGH, 105.0)
    assert retention_of(Priority.LOW, None, 100.0) == Retention(Priority.LOW, math.inf)
    assert retention_of("normal", None, 100.0) == NORMAL

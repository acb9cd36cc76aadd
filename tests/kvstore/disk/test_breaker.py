"""When a disk is off, and for how long."""

import errno

import pytest

from kvstore.disk.breaker import Breaker

REST_S, MOST_S = 8.0, 20.0


@pytest.fixture
def breaker(monkeypatch):
    monkeypatch.setattr("kvstore.disk.breaker._FIRST_REST_S", REST_S)
    monkeypatch.setattr("kvstore.disk.breaker._MOST_REST_S", MOST_S)
    return Breaker()


def broken(code=errno.EIO):
    return OSError(code, "broken")


def test_a_new_disk_is_on(breaker):
    assert (breaker.is_off(0.0), breaker.reason, breaker.num_trips) == (False, "", 0)


def test_three_errors_in_a_row(breaker):
    breaker.failed(broken(), 0.0)
    breaker.failed(broken(), 0.0)
    breaker.passed()
    breaker.failed(broken(), 1.0)
    breaker.failed(broken(), 1.0)
    assert not breaker.is_off(1.0)
    breaker.failed(broken(), 1.0)
    assert breaker.is_off(1.0)
    assert "broken" in breaker.reason
    assert not breaker.is_off(1.0 + REST_S)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENODEV, errno.ENXIO])
def test_some_errors_count_at_once(breaker, code):
    breaker.failed(broken(code), 0.0)
    assert breaker.is_off(0.0)


def test_the_rest_doubles_up_to_the_most_until_something_passes(breaker):
    now_s, rests = 0.0, []
    breaker.trip("hangs", now_s)
    for rest_s in (REST_S, 2 * REST_S, MOST_S, MOST_S):
        assert breaker.is_off(now_s + rest_s - 0.1)
        now_s += rest_s
        assert not breaker.is_off(now_s)
        breaker.failed(broken(), now_s)  # One is enough now.
        rests.append(rest_s)
    assert breaker.num_trips == 5
    breaker.passed()
    assert not breaker.is_off(now_s)
    breaker.trip("hangs", now_s)
    assert not breaker.is_off(now_s + REST_S), "the first rest again"


def test_errors_while_it_is_off_change_nothing(breaker):
    breaker.trip("hangs", 0.0)
    breaker.failed(broken(), 1.0)
    breaker.trip("other", 1.0)
    assert (breaker.num_trips, breaker.reason) == (1, "hangs")
    assert not breaker.is_off(REST_S)

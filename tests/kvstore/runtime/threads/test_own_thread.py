"""A function on a thread of its own: its result or its error is in the future."""

from __future__ import annotations

import threading

import pytest

from kvstore.runtime.threads.own_thread import on_thread

WAIT_S = 20.0


def test_the_result_comes_from_a_thread_of_this_name_that_keeps_no_process_alive():
    name, is_daemon = on_thread(
        "raykv-test", lambda: (threading.current_thread().name, threading.current_thread().daemon)
    ).result(WAIT_S)
    assert (name, is_daemon) == ("raykv-test", True)


def test_an_error_of_a_thread_is_in_its_future():
    with pytest.raises(ValueError, match="invalid literal"):
        on_thread("raykv-test", lambda: int("x")).result(WAIT_S)

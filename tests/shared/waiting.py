"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import KVStoreError


def eventually(question: Callable[[], Any], timeout_s: float = 10.0, pause_s: float = 0.01) -> Any:
    """Wait until a function says something true, and return that; an error of ours counts as not yet."""
    deadline_s, last = time.monotonic() + timeout_s, None
    while time.monotonic() < deadline_s:
        try:
            last = question()
            if last:
                return last
        except KVStoreError as error:
            last = error
        time.sleep(pause_s)
    pytest.fail(f"not within {timeout_s} s; last answer: {last!r}")

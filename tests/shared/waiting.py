"""Waiting for what other processes do, and making them stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import KVStoreError


def eventually(question: Callable[[], Any], timeout_s: float = 10.0, pause_s: float | None = None) -> Any:
    """Wait until a function says something true, and return that; an error of ours counts as not yet.

    Without `pause_s` it is asked less often the longer it lasts, so that the answer is a twentieth of that time late at
    most: asking costs those who are asked, too.
    """
    began_s = time.monotonic()
    deadline_s, last = began_s + timeout_s, None
    while (now_s := time.monotonic()) < deadline_s:
        try:
            last = question()
            if last:
                return last
        except KVStoreError as error:
            last = error
        time.sleep(min(0.1, max(0.01, (now_s - began_s) / 20)) if pause_s is None else pause_s)
    pytest.fail(f"not within {timeout_s} s; last answer: {last!r}")


def stop_process(pid: int) -> None:
    """Send SIGSTOP and wait until every thread has stopped: on a busy machine some go on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    eventually(lambda: {state_of(task) for task in tasks.iterdir()} <= set("TtZ"))


def state_of(process: Path) -> str:
    """Return the kernel's letter for what a process or thread does, given its folder in /proc."""
    return (process / "stat").read_text().rsplit(")", 1)[1].split()[0]

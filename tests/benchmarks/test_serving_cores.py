"""Which core a measurement runs on."""

from __future__ import annotations

import os

from benchmarks import serving_cores


def test_a_thread_goes_to_the_fastest_core_and_may_leave_it(monkeypatch):
    cores, at = os.sched_getaffinity(0), []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, where: at.append(set(where)))
    monkeypatch.setattr(serving_cores, "loop_s", lambda: {3: 0.3, 5: 0.1, 7: 0.2}[next(iter(at[-1]))])
    assert serving_cores.to_fastest_core() == 0.1
    assert at == [{3}, {5}, {7}, {5}, {3, 5, 7}]
    monkeypatch.undo()
    assert os.sched_getaffinity(0) == cores


def test_a_loop_takes_time():
    assert 0 < serving_cores.loop_s() < 1

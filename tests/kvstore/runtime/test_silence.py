"""How long a process has left questions without an answer."""

from __future__ import annotations

import pytest

from kvstore.runtime.silence import Silence


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 100.0

    monkeypatch.setattr("kvstore.runtime.clock.now_s", lambda: Clock.now_s)
    return Clock


def test_the_silence_of_each_kind_ends_with_its_own_answer(clock):
    silence = Silence()
    for kind in ("lease", "transport", "lease"):
        asked_s, clock.now_s = clock.now_s, clock.now_s + 1.0
        silence.add(kind, asked_s)
    assert silence.total_s() == 3.0
    silence.end("lease", "never asked")
    assert silence.total_s() == 1.0
    silence.end("transport")
    assert silence.total_s() == 0.0


def test_seconds_in_which_several_questions_waited_count_once(clock):
    silence = Silence()
    clock.now_s = 103.0
    silence.add("lease", 100.0)
    silence.add("transport", 100.0)
    clock.now_s = 104.0
    silence.add("lease", 102.0)
    assert silence.total_s() == 4.0

"""What an engine with nothing to compute waits for, and that one with something to compute does not wait."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvstore.hashing import Namespace
from kvstore.integrations.vllm import scheduler
from kvstore.integrations.vllm.options import Options
from kvstore.integrations.vllm.scheduler import SchedulerSide
from kvstore.integrations.vllm.stats import Stats
from kvstore.shape import KVShape

SPACE = Namespace(model="m", shape=KVShape(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=16))
LONG_S = 60.0


class Lookups:
    """Keeps what it is asked; the test answers."""

    def __init__(self):
        self.asked = []

    def ask(self, question):
        self.asked.append(question)

    def is_held_up(self):
        return False


@pytest.fixture
def side(monkeypatch):
    monkeypatch.setattr(scheduler, "_IDLE_WAIT_S", LONG_S)
    made = SchedulerSide(Options(), 16, 1, loads=True, saves=True, emits_events=False, stats=Stats())
    made._space, made._lookups = SPACE, Lookups()
    assert made._idle_left_s == LONG_S
    return made


def request(name="new", num_tokens=100):
    return SimpleNamespace(request_id=name, num_prompt_tokens=num_tokens, skip_reading_prefix_cache=False)


def step(side, computing=()):
    """A step of the engine that computes something for some requests."""
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return side.plan(
        SimpleNamespace(
            total_num_scheduled_tokens=len(computing), preempted_req_ids=None, scheduled_new_reqs=[],
            scheduled_cached_reqs=cached, num_scheduled_tokens=dict.fromkeys(computing, 1),
        )
    )  # fmt: skip


def took_s(side, asked, num_engine_tokens=0):
    began_s = time.monotonic()
    side.await_answer(asked, num_engine_tokens)
    return time.monotonic() - began_s


def answer_soon(side):
    def answer():
        while not side._lookups.asked:
            time.sleep(0.001)
        question = side._lookups.asked[-1]
        question.hashes, question.num_blocks = SPACE.block_hashes(range(100)), 6
        question.answered()

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_an_idle_engine_has_its_answer_in_the_first_step(side):
    asked, thread = request(), answer_soon(side)
    side.await_answer(asked, 0)
    assert side.match(asked, 0) == (96, True)
    thread.join()


def test_what_the_engine_has_itself_is_not_waited_for(side):
    asked = request("covered")
    assert took_s(side, asked, 96) < LONG_S / 2
    assert side.match(asked, 96) == (0, False)


def test_a_step_that_computes_does_not_wait(side):
    step(side, computing=["other"])
    assert took_s(side, request()) < LONG_S / 2
    assert side.match(request(), 0) == (None, False)
    side.ended(request("other"))
    step(side)
    side.allocated(request("next"), None, 0)  # vLLM has chosen it for this step
    assert took_s(side, request("third")) < LONG_S / 2


def test_a_load_under_way_is_not_kept_waiting(side):
    asked, thread = request(), answer_soon(side)
    side.await_answer(asked, 0)
    thread.join()
    side.match(asked, 0)
    side.allocated(asked, SimpleNamespace(get_block_ids=lambda: [list(range(7))]), 96)
    assert took_s(side, request("second")) < LONG_S / 2, "in the step that begins it"
    assert step(side).loads[0].req_id == "new"
    assert took_s(side, request("third")) < LONG_S / 2, "in those after it"


def test_waiting_is_bounded_for_all_requests_of_a_step(side, monkeypatch):
    monkeypatch.setattr(scheduler, "_IDLE_WAIT_S", 0.05)
    step(side)
    took = [took_s(side, request(str(number))) for number in range(50)]
    assert sum(took) < 50 * 0.05 / 2
    assert all(side.match(request(str(number)), 0) == (None, False) for number in range(50))
    step(side)
    assert took_s(side, request("0")) >= 0.04, "the next step waits again"

"""Waits that end, and what happens to work that is late."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvstore.integrations.serve.waiting import Bounded, Learned

WAIT_S = 20.0


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def test_what_a_thread_returns_comes_back():
    bounded = Bounded("work", WAIT_S)

    assert asyncio.run(bounded.do(lambda value: value + 1, 1)) == 2
    assert bounded.num_without == 0


def test_work_that_is_late_is_not_waited_for_and_the_loop_goes_on(gate):
    async def run():
        bounded = Bounded("work", 0.05, pause_s=WAIT_S)
        ticks = asyncio.create_task(count_until(bounded.do(gate.wait, WAIT_S)))
        assert await ticks > 1  # Others ran meanwhile.
        # The store is silent: it is not asked again for a while.
        assert await bounded.do(int) is None
        assert bounded.num_without == 2
        bounded.close()

    async def count_until(work):
        task, num_ticks = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0)
            num_ticks += 1
        assert task.result() is None
        return num_ticks

    asyncio.run(run())


def test_work_that_fails_is_none_and_the_next_is_done():
    async def run():
        bounded = Bounded("work", WAIT_S)
        assert await bounded.do(int, "x") is None
        assert await bounded.do(int, "3") == 3

    asyncio.run(run())


def test_no_more_is_begun_than_may_be_open(gate):
    async def run():
        bounded = Bounded("work", 0.01, max_open=1)
        assert await bounded.do(gate.wait, WAIT_S) is None
        assert await bounded.do(int, "3") is None
        gate.set()
        async with asyncio.timeout(WAIT_S):
            while await bounded.do(int, "3") is None:
                await asyncio.sleep(0.01)

    asyncio.run(run())


def get_until(learned, value):
    waiting = threading.Event()
    for _ in range(2_000):
        if learned.get() == value:
            return True
        waiting.wait(0.01)
    return False


def test_something_slow_is_none_until_it_is_known(gate):
    learned = Learned("it", lambda: gate.wait(WAIT_S) and 5, 0.01)

    assert learned.get() is None
    gate.set()
    assert get_until(learned, 5)


def test_a_failed_attempt_is_made_again_and_what_is_known_can_be_renewed():
    answers = iter([ValueError("not yet"), None, 1, 2])

    def find():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    learned = Learned("it", find, 0.001)
    assert get_until(learned, 1)
    learned.renew()
    assert get_until(learned, 2)

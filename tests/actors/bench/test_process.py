"""An object in another process, as benchmarks use it."""

from collections import Counter
from threading import Event

import pytest

from kvstore.actors.bench.process import InProcess
from kvstore.errors import InvalidRequest, StoreUnavailable
from kvstore.pool.pool import Pool


@pytest.fixture
def make():
    made = []

    def start(factory, *args):
        made.append(InProcess(factory, *args))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_calls_go_to_one_object_in_the_order_in_which_they_began(make):
    counter = make(Counter, "aab")
    counter.begin("update", "bcc")
    counter.begin("total")
    assert counter.answer(20) is None
    assert counter.answer(20) == 6
    assert counter.ask("most_common", 20, 1) == [("a", 2)]


def test_errors_of_ours_come_as_themselves_and_the_object_lives_on(make):
    pool = make(Pool, 4)
    with pytest.raises(InvalidRequest):
        pool.ask("reserve", 20, 0, "w")
    assert list(pool.ask("reserve", 20, 2, "w").slots) == [0, 1]


def test_who_does_not_answer_in_time_or_has_ended_is_an_error(make):
    slow = make(Event)
    with pytest.raises(StoreUnavailable, match="within"):
        slow.ask("wait", 0.01, 0.5)
    ended = make(Counter)
    ended.close()
    with pytest.raises(StoreUnavailable):
        ended.ask("total", 1)

"""Every scenario under every schedule; and that the explorer finds what it is there to find."""

from __future__ import annotations

import pytest

from kvstore import pool, slots
from poolcheck.explore import ScheduleFailed, explore, replay
from poolcheck.scenarios import SCENARIOS

_FILES = frozenset({pool.__file__, slots.__file__})


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_schedule_up_to_three_preemptions(name):
    explored = explore(SCENARIOS[name], max_preemptions=3)
    assert explored.num_schedules > 10


@pytest.mark.parametrize(
    "name", ["claim_pin_evict", "two_writers_one_victim", "clear_under_reader", "release_meets_expire"]
)
def test_a_preemption_at_every_line_of_the_pool(name):
    explored = explore(SCENARIOS[name], max_preemptions=1, files=_FILES)
    assert explored.num_points > 100 * explored.num_schedules


# The explorer itself.


def racy_counter(run):
    count = [0]

    def add():
        seen = count[0]
        run.step()
        count[0] = seen + 1

    def at_end():
        assert count == [2], "an addition was lost"

    return [add, add], at_end


def crossed_locks(run):
    one, two = run.lock(), run.lock()

    def body(first, second):
        def run_it():
            with first, second:
                pass

        return run_it

    return [body(one, two), body(two, one)], lambda: None


def test_a_lost_update_is_found_and_its_schedule_repeats_it():
    with pytest.raises(ScheduleFailed, match="an addition was lost") as failed:
        explore(racy_counter)
    printed = str(failed.value).split("schedule ")[1].splitlines()[0]
    for _ in range(3):
        with pytest.raises(ScheduleFailed, match="an addition was lost") as again:
            replay(racy_counter, printed)
        assert again.value.schedule == failed.value.schedule
    assert replay(racy_counter, "0.0").choices, "the order that harms nobody"


def test_without_preemptions_it_is_not_found():
    assert explore(racy_counter, max_preemptions=0).num_schedules == 2


def test_threads_that_wait_for_each_other_are_found():
    with pytest.raises(ScheduleFailed, match="wait for ever"):
        explore(crossed_locks)


def test_all_orders_of_independent_steps_are_run():
    orders = set()

    def scenario(run):
        order = []

        def body(me):
            def run_it():
                for _ in range(2):
                    order.append(me)
                    run.step()

            return run_it

        return [body("x"), body("y")], lambda: orders.add("".join(order))

    explore(scenario, max_preemptions=3)
    assert orders == {"xxyy", "xyxy", "xyyx", "yxxy", "yxyx", "yyxx"}


def test_a_schedule_that_does_not_fit_is_refused():
    with pytest.raises(ScheduleFailed, match="names thread 5"):
        replay(racy_counter, "5")

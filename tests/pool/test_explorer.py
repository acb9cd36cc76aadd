"""Every scenario under every schedule; and that the explorer finds what it is there to find."""

from __future__ import annotations

import pytest

from kvstore.pool import block_index, pool, runs, slot_columns, slots
from kvstore.pool.eviction import block_uses, ghosts, learned, lru, soft_pins, touch_log
from poolcheck.chains import NAMESPACES
from poolcheck.explore import explore, replay
from poolcheck.handoff_scenarios import HANDOFFS
from poolcheck.run import Run, ScheduleFailed
from poolcheck.scenarios import SCENARIOS
from poolcheck.world import World, learned_eviction

_FILES = frozenset(
    module.__file__ for module in (pool, slots, block_index, runs, slot_columns, lru, touch_log, soft_pins)
)
_LEARNED = _FILES | {module.__file__ for module in (learned, block_uses, ghosts)}


@pytest.mark.parametrize("name", [*SCENARIOS, *HANDOFFS])
def test_every_schedule_up_to_three_preemptions(name):
    explored = explore((SCENARIOS | HANDOFFS)[name], max_preemptions=3)
    assert explored.num_schedules > 10


@pytest.mark.parametrize(
    "name", ["claim_pin_evict", "two_writers_one_victim", "clear_under_reader", "release_meets_expire"]
)
def test_a_preemption_at_every_line_of_the_pool(name):
    explored = explore(SCENARIOS[name], max_preemptions=1, files=_FILES)
    assert explored.num_points > 100 * explored.num_schedules


@pytest.fixture
def learned_pools(monkeypatch):
    monkeypatch.setattr("poolcheck.world.make_eviction", learned_eviction)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_schedule_up_to_two_preemptions_under_learned_reuse(learned_pools, name):
    explored = explore(SCENARIOS[name], max_preemptions=2)
    assert explored.num_schedules > 10


def test_a_preemption_at_every_line_under_learned_reuse(learned_pools):
    explored = explore(SCENARIOS["claim_pin_evict"], max_preemptions=1, files=_LEARNED)
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


def what_is_left(world):
    table = world.pool.table
    index, columns = table.index, table.columns
    slots = zip(index.block_hash, columns.generation, columns.ref_count, table.eviction.stamp, strict=True)
    return bytes(world.memory), tuple(slots), tuple(index.space_of(NAMESPACES[0]).ready.items()), world.pool.stats()


@pytest.mark.parametrize("name", ["claim_pin_evict", "clear_under_reader", "write_clear_read", "two_writers"])
def test_schedules_that_end_where_another_has_been_miss_no_outcome(name):
    def outcomes(*, prune):
        found = set()

        def scenario(run):
            bodies, at_end = SCENARIOS[name](run)
            world = next(cell.cell_contents for cell in at_end.__closure__ if isinstance(cell.cell_contents, World))

            def note_and_check():
                found.add(what_is_left(world))
                at_end()

            return bodies, note_and_check

        return explore(scenario, max_preemptions=2, prune=prune).num_points, found

    (few, some), (many, all_of_them) = outcomes(prune=True), outcomes(prune=False)
    assert few < many
    assert some == all_of_them
    assert len(some) > 1


def test_what_a_thread_remembers_is_part_of_its_state():
    def states(value):
        def scenario(run):
            def remember():
                seen = run.value  # On the run, which is no part of a state.
                run.step()
                assert seen == run.value

            return [remember, run.step], lambda: None

        run = Run((), known={})
        run.value = value
        run.execute(scenario)
        return run.known

    assert states(1) == states(1)
    assert states(1) != states(2)


def test_a_known_state_is_gone_on_from_when_more_switches_are_left():
    first = Run((), known={})
    first.execute(SCENARIOS["write_clear_read"])
    again = Run((), known=dict(first.known))
    again.execute(SCENARIOS["write_clear_read"])
    assert (len(first.choices) > 5, again.choices) == (True, [])
    cheaper = Run((), known={state: spent + 1 for state, spent in first.known.items()})
    cheaper.execute(SCENARIOS["write_clear_read"])
    assert (cheaper.choices, cheaper.known) == (first.choices, first.known)


def test_every_place_is_come_to_with_as_few_switches_as_without_pruning():
    def fewest_switches(*, prune):
        fewest = {}

        def scenario(run):
            run.fewest, run.passed = fewest, [0, 0, 0]  # On the run, which is no part of a state.

            def body():
                for _ in range(3):
                    run.step()
                    run.passed[run.current] += 1
                    spent = sum(choice.before not in (-1, choice.chosen) for choice in run.choices)
                    place = (*run.passed, run.current)
                    run.fewest[place] = min(run.fewest.get(place, spent), spent)

            return [body] * 3, lambda: None

        return explore(scenario, max_preemptions=2, prune=prune).num_points, fewest

    (few, some), (many, all_of_them) = fewest_switches(prune=True), fewest_switches(prune=False)
    assert few < many
    assert some == all_of_them

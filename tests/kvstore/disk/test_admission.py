"""What is worth a write: the filter of seen blocks, and the budget of bytes."""

from disk_made import digest

from kvstore.disk.admission import SeenFilter, WriteBudget

HOUR_S = 3600.0


def test_a_block_is_seen_the_second_time():
    seen = SeenFilter(100)
    assert [seen.saw(digest(1)), seen.saw(digest(2)), seen.saw(digest(1)), seen.saw(digest(1))] == [
        False, False, True, True,
    ]  # fmt: skip


def test_the_oldest_blocks_are_forgotten():
    seen = SeenFilter(4)
    for number in range(4):
        seen.saw(digest(number))
    assert seen.saw(digest(3)), "the last ones are remembered"
    for number in range(10, 20):
        seen.saw(digest(number))
    assert not seen.saw(digest(0))


def test_no_budget_is_no_bound():
    budget = WriteBudget(0, 0.0)
    assert all(budget.take(1 << 40, 0.0) for _ in range(3))


def test_an_hour_of_the_budget_at_once_and_more_as_time_passes():
    budget = WriteBudget(2400, 100.0)
    assert budget.take(60, 100.0)
    assert budget.take(40, 100.0)
    assert not budget.take(1, 100.0)
    assert budget.take(50, 100.0 + HOUR_S / 2)
    assert not budget.take(51, 100.0 + HOUR_S)
    assert budget.take(50, 100.0 + HOUR_S)
    assert not budget.take(101, 100.0 + 100 * HOUR_S), "no more than an hour's worth is kept"
    assert budget.take(100, 100.0 + 100 * HOUR_S)

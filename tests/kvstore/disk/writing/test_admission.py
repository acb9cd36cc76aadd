"""What is worth a write: the filter of seen blocks, and the budget of bytes."""

from disk_made import digest

from kvstore.disk.writing.admission import SeenFilter, WriteBudget

HOUR_S = 3600.0


def saw(seen, number, now_s, gap_s=1.0):
    return seen.saw([digest(number)], now_s, gap_s)[0][0]


def test_uses_are_counted_up_to_enough():
    seen = SeenFilter(100, enough=3)
    assert [saw(seen, 1, now_s) for now_s in (0.0, 2.0, 4.0, 6.0, 8.0)] == [1, 2, 3, 4, 4]
    assert seen.saw([digest(1), digest(2)], 10.0, 1.0) == [(4, True), (1, True)]
    assert [seen.num_uses(digest(number)) for number in (1, 2, 3)] == [4, 1, 0]


def test_what_comes_soon_after_a_use_is_the_same_use():
    seen = SeenFilter(100, enough=9)
    assert [saw(seen, 1, now_s) for now_s in (0.0, 0.9, 1.0, 1.9)] == [1, 1, 2, 2]
    assert saw(seen, 1, 30.0, 60.0) == 2, "a save of the prompt that loaded it"
    assert saw(seen, 1, 61.0, 60.0) == 3
    assert seen.saw([digest(2), digest(2)], 5.0, 1.0) == [(1, True), (1, False)], "a block that is named twice"


def test_the_oldest_blocks_are_forgotten():
    seen = SeenFilter(4, enough=2)
    for number in range(4):
        saw(seen, number, 0.0)
    assert saw(seen, 3, 2.0) == 2, "the last ones are remembered"
    for number in range(10, 20):
        saw(seen, number, 4.0)
    assert saw(seen, 0, 6.0) == 1
    assert len(seen) <= 8


def test_a_block_that_is_used_again_and_again_is_not_forgotten():
    seen = SeenFilter(4, enough=200)
    for number in range(100):
        assert saw(seen, 0, 2.0 * number) == number + 1
        saw(seen, 1000 + number, 2.0 * number)


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

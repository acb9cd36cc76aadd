"""What waits at a replica."""

from __future__ import annotations

from kvstore.integrations.serve.open_work import OpenWork


def test_tokens_wait_until_their_request_ends():
    work = OpenWork()
    work.begin("r1", "a", 100)
    work.begin("r2", "a", 10)
    work.begin("r3", "b", 1)

    assert [work.tokens_at(name, None) for name in "abc"] == [110, 1, 0]
    work.end("r1", "a")
    work.end("r1", "a")
    assert [work.tokens_at(name, 0) for name in "abc"] == [10, 1, 0]


def test_requests_of_other_routers_count_as_much_as_the_last_ones_of_this_one():
    work = OpenWork()
    for number in range(500):
        work.begin(f"r{number}", "a", 64)
        work.end(f"r{number}", "a")
    work.begin("r", "a", 64)

    assert round(work.mean_tokens) == 64
    assert work.tokens_at("a", 1) == 64
    assert 64 + 2 * 63 <= work.tokens_at("a", 3) <= 64 + 2 * 64


def test_a_request_that_is_sent_again_counts_once_and_a_replica_that_ended_not_at_all():
    work = OpenWork()
    work.begin("r1", "a", 100)
    work.begin("r1", "b", 100)
    work.begin("r2", "b", 1)

    assert [work.tokens_at(name, 0) for name in "ab"] == [0, 101]
    work.forget("b")
    assert work.tokens_at("b", 0) == 0


def test_requests_whose_end_is_never_told_are_forgotten():
    work = OpenWork(max_requests=2)
    for number in range(5):
        work.begin(f"r{number}", "a", 1)

    assert work.tokens_at("a", 0) == 2


def test_an_end_that_is_told_before_its_begin_is_an_end():
    work = OpenWork()
    work.end("r1", "a")
    work.begin("r1", "a", 100)
    assert work.tokens_at("a", 0) == 0

    work.begin("r1", "a", 100)  # It comes once more.
    assert work.tokens_at("a", 0) == 100


def test_the_late_end_of_an_attempt_does_not_end_the_next_one():
    work = OpenWork()
    work.begin("r1", "b", 100)
    work.end("r1", "a")

    assert [work.tokens_at(name, 0) for name in "ab"] == [0, 100]


def test_so_many_early_ends_are_remembered_and_no_more():
    work = OpenWork()
    for number in range(1_001):
        work.end(f"r{number}", "a")
    work.begin("r0", "a", 1)
    work.begin("r1", "a", 1)

    assert work.tokens_at("a", 0) == 1

"""A router's memory of what it sent where."""

from __future__ import annotations

from router_made import chain

from kvstore.integrations.serve.hints import RoutedHints

TTL_S = 10.0


def make(max_hints=100):
    return RoutedHints(max_hints, TTL_S)


def test_a_replica_is_expected_to_have_the_leading_blocks_that_it_was_sent():
    hints = make()
    hints.note(chain(1, 2, 3), "a", 0.0)
    hints.note(chain(1, 9), "b", 0.0)

    assert hints.prefixes(chain(1, 2, 3, 4), ["a", "b", "c"], 1.0) == {"a": 3, "b": 1}


def test_a_block_behind_one_that_was_not_sent_counts_for_nothing():
    hints = make()
    hints.note(chain(1, 2), "a", 0.0)

    assert hints.prefixes(chain(5, 2), ["a"], 1.0) == {}


def test_replicas_that_are_not_asked_about_are_left_out():
    hints = make()
    hints.note(chain(1), "a", 0.0)

    assert hints.prefixes(chain(1), ["b"], 1.0) == {}


def test_a_stale_hint_is_none_and_another_request_renews_it():
    hints = make()
    hints.note(chain(1, 2), "a", 0.0)
    hints.note(chain(1), "a", 8.0)

    assert hints.prefixes(chain(1, 2), ["a"], 10.0) == {"a": 2}
    assert hints.prefixes(chain(1, 2), ["a"], 11.0) == {"a": 1}
    assert hints.prefixes(chain(1, 2), ["a"], 18.1) == {}


def test_the_oldest_prompt_falls_out_end_first():
    hints = make(max_hints=4)
    hints.note(chain(1, 2, 3), "a", 0.0)
    hints.note(chain(7, 8), "a", 1.0)

    assert len(hints) == 4
    assert hints.prefixes(chain(1, 2, 3), ["a"], 1.0) == {"a": 2}
    assert hints.prefixes(chain(7, 8), ["a"], 1.0) == {"a": 2}


def test_a_replica_that_ended_is_forgotten():
    hints = make()
    hints.note(chain(1, 2), "a", 0.0)
    hints.note(chain(1), "b", 0.0)
    hints.forget("a")

    assert hints.prefixes(chain(1, 2), ["a", "b"], 0.0) == {"b": 1}
    assert len(hints) == 1
    hints.clear()
    assert len(hints) == 0


def test_no_more_blocks_are_expected_than_a_cache_holds():
    hints = make()
    hints.limit_blocks = 3
    hints.note(chain(1, 2), "a", 0.0)
    hints.note(chain(7, 8), "a", 1.0)
    hints.note(chain(1, 2), "b", 1.0)

    assert hints.prefixes(chain(1, 2), ["a", "b"], 1.0) == {"a": 1, "b": 2}
    assert hints.prefixes(chain(7, 8), ["a", "b"], 1.0) == {"a": 2}
    assert len(hints) == 5


def test_too_many_hints_are_taken_from_the_replica_that_has_most():
    hints = make(max_hints=5)
    hints.note(chain(9), "b", 0.0)
    hints.note(chain(1, 2, 3, 4), "a", 1.0)
    hints.note(chain(5), "c", 2.0)

    assert hints.prefixes(chain(9), ["b"], 2.0) == {"b": 1}
    assert hints.prefixes(chain(1, 2, 3, 4), ["a"], 2.0) == {"a": 3}


def test_a_replica_that_was_sent_more_has_more_to_lose():
    hints = make()
    hints.note(chain(1, 2, 3, 4), "a", 0.0)
    hints.note(chain(1, 2), "b", 0.0)

    assert hints.pressures(["a", "b"], 1.0) == {"a": 0.25, "b": 0.0}
    assert hints.pressures(["a", "b", "c"], 1.0) == {"a": 0.5, "b": 0.25, "c": 0.0}


def test_where_the_block_that_has_to_go_was_used_lately_is_more_to_lose_than_where_it_rested():
    hints = make()
    hints.limit_blocks = 2
    hints.note(chain(1, 2), "a", 0.0)
    hints.note(chain(3, 4), "b", 6.0)

    assert hints.pressures(["a", "b"], 8.0) == {"a": 0.0, "b": 0.375}
    hints.note(chain(5), "c", 7.0)  # It has a free place.
    assert hints.pressures(["a", "b", "c"], 8.0) == {"a": 0.75, "b": 0.75, "c": 0.0}


def test_stale_hints_take_no_place():
    hints = make()
    hints.note(chain(1, 2, 3, 4), "a", 0.0)
    hints.note(chain(5), "b", 5.0)

    assert hints.pressures(["a", "b"], TTL_S + 1.0) == {"a": 0.0, "b": 0.5}
    assert len(hints) == 1
    assert hints.pressures(["nobody"], 0.0) == {"nobody": 0.0}

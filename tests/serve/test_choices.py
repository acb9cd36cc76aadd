"""The benchmark of what routers choose, small: real routers, simulated replicas, the same requests for each."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="Ray Serve is not in this environment; `make test-serve` has it")

from benchmarks.serve_choices import measure, no_cluster

SETTINGS = {
    "replicas": 4, "streams": 24, "num_requests": 400, "think_s": 1.0, "cache_blocks": 160, "tokens_per_s": 2_500.0,
    "answer_tokens_per_s": 100.0, "seeds": 2,
}  # fmt: skip


def rows_of(mix, *routers):
    with no_cluster():
        return [measure(router, mix, SETTINGS) for router in routers]


@pytest.mark.parametrize("mix", ["shared", "hot", "conversations", "mixed"])
def test_more_is_cached_than_by_turns_and_no_replica_has_most_of_the_work(mix):
    ours, turns = rows_of(mix, "prefix", "round robin")

    assert ours["cached_share"] > 1.2 * turns["cached_share"]
    assert ours["busiest_to_mean"] < 2.0, ours
    assert ours["first_token_p90_ms"] < turns["first_token_p90_ms"]


def test_one_short_beginning_of_all_conversations_does_not_bring_all_of_them_to_one_replica():
    ours, affinity = rows_of("conversations", "prefix", "affinity")

    assert affinity["most_asked_to_mean"] == 4.0  # of four replicas, one has it all
    assert ours["most_asked_to_mean"] < 1.5
    assert ours["cached_share"] > affinity["cached_share"]

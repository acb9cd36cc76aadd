"""The bound is what the best of all ways to keep blocks hits, found here by trying them all."""

from __future__ import annotations

import itertools

import pytest
from small_traces import random_prompts, trace_of

from kvstore.replay.bound import next_uses, replay_bound
from kvstore.replay.kinds import make_requests
from kvstore.replay.simulate import replay_pools


def nothing():
    pass


def parents_of(trace):
    found = {}
    for request in trace.requests:
        found.update(zip(request.blocks, [None, *request.blocks], strict=False))
    return found


def best_of_all(trace, num_blocks):
    """The most hits of any way: after each request any whole prefixes of what was there and what it brought."""
    parents = parents_of(trace)
    best = {frozenset(): 0}
    for request in trace.requests:
        following = {}
        for kept, num_hits in best.items():
            num_hits += sum(block in kept for block in request.blocks)
            there = kept | set(request.blocks)
            for size in range(min(num_blocks, len(there)) + 1):
                for chosen in itertools.combinations(there, size):
                    if all(parents[block] is None or parents[block] in chosen for block in chosen):
                        state = frozenset(chosen)
                        following[state] = max(following.get(state, 0), num_hits)
        best = following
    return max(best.values())


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
def test_no_way_to_keep_blocks_hits_more_and_one_hits_as_much(seed, num_blocks):
    trace = trace_of(*random_prompts(seed, 8, num_ids=2, most=3))
    assert replay_bound(trace.requests, num_blocks, nothing).num_hits == best_of_all(trace, num_blocks)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_blocks", [1, 5, 20, 1000])
def test_no_policy_of_the_pool_exceeds_it(seed, num_blocks):
    trace = trace_of(*random_prompts(seed, 200, num_ids=4, most=5))
    bound = replay_bound(trace.requests, num_blocks, nothing)
    assert replay_pools(trace, "lru", num_blocks, nothing).num_hits <= bound.num_hits


def test_with_room_for_all_it_hits_all_that_came_before():
    trace = trace_of([1, 2, 3], [1, 2, 4], [1, 2, 3], [5])
    outcome = replay_bound(trace.requests, 100, nothing)
    assert list(outcome.hits) == [0, 2, 3, 0]
    assert outcome.num_evictions == 0


def test_a_block_that_never_comes_again_takes_no_place():
    outcome = replay_bound(trace_of([1], [2], [3], [1]).requests, 1, nothing)
    assert (list(outcome.hits), outcome.num_evictions) == ([0, 0, 0, 1], 0)
    assert replay_bound(trace_of([1], [2], [3]).requests, 1, nothing).num_evictions == 0


def test_of_a_loop_larger_than_the_cache_it_keeps_a_part():
    trace = trace_of(*([each] for _ in range(10) for each in range(10)))
    assert replay_pools(trace, "lru", 9, nothing).num_hits == 0
    assert replay_bound(trace.requests, 9, nothing).num_hits >= 80


def test_next_uses_name_the_next_request():
    trace = trace_of([1, 2], [1], [1, 2])
    assert [list(each) for each in next_uses(trace.requests)] == [[1, 2], [2], [3, 3]]


def test_more_blocks_never_hit_less():
    made = make_requests("long-documents", 300.0, 1)
    trace = trace_of(*(each.ids for each in made), times_s=[each.time_s for each in made])
    hits = [replay_bound(trace.requests, size, nothing).num_hits for size in (100, 500, 2000, 10_000)]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1]

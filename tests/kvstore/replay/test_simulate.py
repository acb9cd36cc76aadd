"""The pool's LRU does what a plain list does; requests find their nodes."""

from __future__ import annotations

import pytest
from small_traces import random_prompts, trace_of

from kvstore.replay import simulate
from kvstore.replay.simulate import POOL_POLICIES, Nodes, TraceClock, best_node, make_pool, replay_pools, use_blocks


def nothing():
    pass


class PlainLru:
    """A list, the least recent first; of one prompt the deepest first. Only leaves are evicted, none of the prompt."""

    def __init__(self, num_blocks):
        self.num_blocks, self.kept, self.num_evictions = num_blocks, [], 0
        self.parents = {}

    def use(self, blocks):
        self.parents.update(zip(blocks, [None, *blocks], strict=False))
        num_hits = next((at for at, block in enumerate(blocks) if block not in self.kept), len(blocks))
        stored = blocks[:num_hits]
        for block in blocks[num_hits:]:
            if len(self.kept) >= self.num_blocks and not self.evict_one(stored):
                break
            self.kept.append(block)
            stored.append(block)
        self.kept = [block for block in self.kept if block not in stored] + stored[::-1]
        return num_hits

    def evict_one(self, held):
        inner = {self.parents[block] for block in self.kept}
        for block in self.kept:
            if block not in inner and block not in held:
                self.kept.remove(block)
                self.num_evictions += 1
                return True
        return False


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 20])
def test_lru_is_a_plain_list(seed, num_blocks):
    trace, plain = trace_of(*random_prompts(seed, 120, num_ids=3, most=5)), PlainLru(num_blocks)
    outcome = replay_pools(trace, "lru", num_blocks, nothing)
    assert list(outcome.hits) == [plain.use(list(request.blocks)) for request in trace.requests]
    assert outcome.num_evictions == plain.num_evictions


@pytest.mark.parametrize("policy", POOL_POLICIES)
def test_a_pool_is_whole_after_each_request_and_nothing_stays_held(policy):
    trace, clock = trace_of(*random_prompts(3, 60)), TraceClock()
    pool = make_pool(policy, 6, clock)
    for request in trace.requests:
        clock.now_s = request.time_s
        use_blocks(pool, trace.chain_of(request))
        pool.check_integrity()
    stats = pool.stats()
    assert (stats.num_leases, stats.num_writes, stats.num_pinned, stats.num_writing) == (0, 0, 0, 0)


@pytest.mark.parametrize("policy", POOL_POLICIES)
def test_with_room_for_all_every_block_is_missed_once(policy):
    trace = trace_of(*random_prompts(1, 100))
    outcome = replay_pools(trace, policy, 1000, nothing)
    assert outcome.num_hits == trace.num_references - trace.num_blocks
    assert outcome.num_evictions == 0


def test_of_a_prompt_longer_than_the_cache_its_beginning_is_kept():
    trace = trace_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert list(replay_pools(trace, "lru", 3, nothing).hits) == [0, 3]


def test_an_empty_prompt_is_no_reference():
    assert list(replay_pools(trace_of([], [1], []), "lru", 3, nothing).hits) == [0, 0, 0]


def test_a_tick_for_each_request():
    ticks = []
    replay_pools(trace_of([1], [2], [1]), "lru", 3, lambda: ticks.append(1))
    assert len(ticks) == 3


def test_a_policy_sees_the_time_of_the_trace(monkeypatch):
    clocks, seen_s = [], []

    def noting(policy, num_blocks, now_s):
        clocks.append(now_s)
        return make_pool(policy, num_blocks, now_s)

    monkeypatch.setattr(simulate, "make_pool", noting)
    trace = trace_of([1], [2], [3], times_s=[0.5, 3.0, 3.0])
    replay_pools(trace, "default", 3, lambda: seen_s.append([clock() for clock in clocks]), Nodes(2))
    assert seen_s == [[0.5, 0.5], [3.0, 3.0], [3.0, 3.0]]


def test_round_robin_takes_turns():
    trace = trace_of([1], [1], [1], [1, 2])
    outcome = replay_pools(trace, "lru", 10, nothing, Nodes(2))
    assert list(outcome.hits) == [0, 0, 1, 1]
    assert outcome.node_references == (2, 3)


def test_by_prefix_a_request_goes_where_most_of_it_is_and_a_new_one_where_least_was_given():
    trace = trace_of([1, 2, 3], [4], [5], [4, 6], [1, 2, 3, 7])
    outcome = replay_pools(trace, "lru", 10, nothing, Nodes(2, "prefix"))
    assert list(outcome.hits) == [0, 0, 0, 1, 3]
    assert outcome.node_references == (7, 4)


@pytest.mark.parametrize(
    ("prefixes", "given", "tie_blocks", "node"),
    [
        ([3, 5, 4], [0, 9, 0], 0, 1),
        ([3, 5, 4], [0, 9, 1], 1, 2),
        ([3, 5, 4], [0, 9, 1], 2, 0),
        ([0, 0], [4, 4], 0, 0),
        ([0, 0], [4, 3], 0, 1),
    ],
)
def test_the_best_node(prefixes, given, tie_blocks, node):
    assert best_node(prefixes, given, tie_blocks) == node

"""Blocks have one number and one hash for the same ids from the root on, and for nothing else."""

from __future__ import annotations

import pytest
from small_traces import random_prompts, trace_of

from kvstore.replay.traces import NAMESPACE, Chains


def test_the_same_id_after_another_predecessor_is_another_block():
    first, second, third = (list(request.blocks) for request in trace_of([1, 2, 3], [1, 2, 4], [5, 2, 3]).requests)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert not set(first) & set(third)


def test_an_id_may_come_again_deeper_in_a_chain():
    (request,) = trace_of([7, 7, 7]).requests
    assert len(set(request.blocks)) == 3


@pytest.mark.parametrize("seed", range(5))
def test_hashes_are_equal_where_all_ids_up_to_there_are(seed):
    prompts = random_prompts(seed, 30)
    trace = trace_of(*prompts)
    seen = {}
    for ids, request in zip(prompts, trace.requests, strict=True):
        chain = trace.chain_of(request)
        chain.check_unique()
        for depth, own in enumerate(chain):
            assert seen.setdefault(own, ids[: depth + 1]) == ids[: depth + 1]
    assert len(seen) == trace.num_blocks == len({tuple(ids[:n]) for ids in prompts for n in range(1, len(ids) + 1)})


def test_a_chain_is_one_of_the_store_from_its_root():
    trace = trace_of(["a", "b"])
    chain = trace.chain_of(trace.requests[0])
    assert (chain.namespace, chain.parent, chain.start, len(chain)) == (NAMESPACE, NAMESPACE, 0, 2)


def test_hashes_do_not_depend_on_what_came_before():
    alone, later = trace_of([1, 2]), trace_of([9], [1, 2])
    assert alone.chain_of(alone.requests[0]) == later.chain_of(later.requests[1])


def test_two_scopes_share_no_block():
    chains = Chains()
    blocks = [list(chains.blocks_of([1, 2], scope)) for scope in ("", "a", "b", "a")]
    assert blocks[1] == blocks[3]
    assert len({block for each in blocks for block in each}) == 6
    assert len({row.tobytes() for row in chains.digests()}) == 6


def test_an_empty_prompt_has_an_empty_chain():
    trace = trace_of([], [1])
    assert len(trace.chain_of(trace.requests[0])) == 0
    assert trace.num_references == 1

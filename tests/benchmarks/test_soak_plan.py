"""What a soak will do follows from its seed, and nothing is left out of it."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from tests.soak import plan
from tests.soak.plan import Fault, Verb


def test_the_choices_of_a_seed_are_the_same_in_every_run_and_differ_between_lives():
    first = list(islice(plan.choices(5, 2, 0), 200))
    assert first == list(islice(plan.choices(5, 2, 0), 200))
    for other in ((6, 2, 0), (5, 3, 0), (5, 2, 1)):
        assert first != list(islice(plan.choices(*other), 200))
    assert list(islice(plan.faults(5), 50)) == list(islice(plan.faults(5), 50)) != list(islice(plan.faults(6), 50))


@pytest.mark.parametrize("client", range(2))
def test_every_verb_comes_and_every_run_of_a_chain_is_possible(client):
    chosen = list(islice(plan.choices(1, client, 0), 5000))
    num_chains = len(plan.chains(plan.space()))
    assert {choice.verb for choice in chosen} == set(Verb)
    for choice in chosen:
        assert 0 <= choice.chain < num_chains
        assert 0 <= choice.first < choice.first + choice.num_blocks <= plan.CHAIN_BLOCKS
        assert choice.skip_tokens <= choice.num_blocks * plan.SHAPE.block_size
        assert 0 <= choice.wait_s <= 0.2
        assert choice.num_copies in (1, 2)
    skips = {choice.skip_tokens for choice in chosen}
    assert 0 in skips
    assert any(skip % plan.SHAPE.block_size for skip in skips)
    assert any(choice.first for choice in chosen)


def test_clients_mostly_save_what_those_of_the_other_node_do_not():
    for client in (0, 1):
        saves = [c for c in islice(plan.choices(1, client, 0), 2000) if c.verb is Verb.SAVE]
        own = sum(choice.chain // plan.NUM_BRANCHES % 2 == client for choice in saves)
        assert 0.8 < own / len(saves) < 1.0


@pytest.mark.parametrize("seed", range(5))
def test_each_kind_of_process_is_met_in_the_first_faults_and_every_fault_later(seed):
    chosen = [choice.fault for choice in islice(plan.faults(seed), 100)]
    assert {Fault.KILL_CLIENT, Fault.KILL_MOVER, Fault.KILL_STORE, Fault.STOP_MOVER} <= set(chosen[:5])
    assert set(chosen) == set(Fault)
    assert Counter(chosen)[Fault.KILL_STORE] >= 5


def test_chains_share_prefixes_and_are_more_than_the_store_holds():
    chains = plan.chains(plan.space())
    blocks = {block_hash for chain in chains for block_hash in chain}
    assert len(blocks) * plan.SHAPE.block_bytes > 3 * plan.CAPACITY_BYTES
    assert len(blocks) < sum(len(chain) for chain in chains)
    assert not blocks & set(plan.probe_chain(0, 4)) | set(plan.probe_chain(1, 4)) & set(plan.probe_chain(0, 4))
    for space in (plan.weights_space(), plan.ranks_space()):
        assert not blocks & {block_hash for chain in plan.chains(space) for block_hash in chain}

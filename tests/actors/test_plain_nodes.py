"""Stores and movers as plain processes, with real NIXL in host memory: what benchmarks and GPU tests stand on."""

import os
import signal

import pytest
import torch

from kvstore.actors.plain_nodes import plain_nodes
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.client.results import MissReason
from kvstore.config import StoreConfig
from kvstore.errors import StoreUnavailable

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16", block_size=16)
NUM_BLOCKS = 16


@pytest.fixture(scope="module")
def nodes():
    with plain_nodes(StoreConfig(name="plain", capacity_bytes=8 << 20, num_directory_shards=2)) as started:
        yield started


@pytest.fixture
def pair(nodes):
    """(client, caches) on each node; the first has something to hand off."""
    space = Namespace(model="plain", shape=SHAPE)
    clients = [Client(node.control_path, space) for node in nodes]
    caches = []
    for value, client in enumerate(clients):
        dims = (2, NUM_BLOCKS, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
        caches.append([torch.full(dims, layer + 0.5 - value, dtype=torch.bfloat16) for layer in range(2)])
        client.register_kv_caches(caches[-1])
    yield list(zip(clients, caches, strict=True))
    for client in clients:
        client.close()


def test_blocks_go_from_one_process_to_the_other(nodes, pair):
    (source, sent), (target, got) = pair
    result = target.fetch(source.publish(range(NUM_BLOCKS)), range(NUM_BLOCKS)).result(30)
    assert (result.num_blocks, result.num_peer, result.peers) == (NUM_BLOCKS, NUM_BLOCKS, (nodes[0].node_id,))
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def test_saved_blocks_are_found_through_either_shard_of_their_directory(nodes, pair):
    (source, sent), (target, got) = pair
    chains = [source.space.block_hashes([seed] * 2 * SHAPE.block_size) for seed in range(6)]
    assert {chain.root_key % 2 for chain in chains} == {0, 1}
    for at, chain in enumerate(chains):
        source.save(chain, [2 * at, 2 * at + 1]).result(30)
        assert target.load(chain, [2 * at, 2 * at + 1]).result(30).num_peer == 2
    assert all(torch.equal(a[:, :12], b[:, :12]) for a, b in zip(sent, got, strict=True))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_mover_that_was_killed_is_replaced_and_hand_offs_go_on(nodes, pair, victim, eventually):
    (source, sent), (target, got) = pair
    ticket, pid = source.publish(range(NUM_BLOCKS), ttl_s=60), nodes[victim].ask("pids", 10)["mover"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: nodes[victim].ask("pids", 10)["mover"] not in (0, pid), 30)
    # What was published is in the store's memory, which no mover's death touches.
    result = eventually(lambda: (r := target.fetch(ticket, range(NUM_BLOCKS)).result(30)).num_blocks and r, 30)
    assert (result.num_blocks, result.failed) == (NUM_BLOCKS, ())
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))
    assert target.fetch(ticket, range(NUM_BLOCKS)).result(30).failed[0].reason is MissReason.USED


def test_every_process_ends_with_the_block(process_lives):
    with plain_nodes(StoreConfig(name="short", capacity_bytes=8 << 20), num_nodes=1) as (node,):
        pids = node.ask("pids", 10)
        assert all(process_lives(pid) for pid in pids.values())
    assert not process_lives(pids["store"])
    with pytest.raises(StoreUnavailable):
        node.ask("pids", 1)

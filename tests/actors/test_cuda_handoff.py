"""Hand-offs from GPU to GPU on real clusters: over NVLink between two nodes, and between two GPUs of one node."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from cuda_engine import CudaEngine

pytest.importorskip("ray", reason="needs Ray beside torch and CuPy")

import kvstore
from kvstore.actors.calls import call
from kvstore.errors import KVStoreError
from kvstore.results import MissReason

pytestmark = [pytest.mark.multi_gpu(2), pytest.mark.ray, pytest.mark.timeout(240)]

NUM_BLOCKS = 128


@pytest.fixture(scope="module")
def store(ray_cluster):
    started = kvstore.start("512MiB", name="cuda-handoff", timeout_s=120, max_handoff_fraction=1.0)
    yield started
    started.stop()


@pytest.fixture
def space(request):
    shape = kvstore.KVShape(num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
    return kvstore.Namespace(model=request.node.name, shape=shape)


@pytest.fixture
def make_engine(store, space, node_ids):
    made = []

    def make(node, gpu, axes="PBTHD", attach=True, peers=()):
        client = store.client(space, node_id=node_ids[node])
        engine = CudaEngine(client, axes, num_blocks=2 * NUM_BLOCKS, device=f"cuda:{gpu}")
        made.append(engine)
        if attach:
            route = client.attach_handoff("256MiB", peers=[node_ids[peer] for peer in peers])
            assert route.route == "gpu", route
            assert all(rate > 20 for rate in route.gb_per_s.values()), route
        return engine

    yield make
    for engine in made:
        engine.client.close()


@pytest.fixture
def pids_of(store, node_ids):
    return lambda node: call("store", kvstore.node_store(node_ids[node], name="cuda-handoff").pids.remote(), 20)


def hand_off(source, target):
    ids, there = list(range(NUM_BLOCKS)), [2 * NUM_BLOCKS - 1 - i for i in range(NUM_BLOCKS)]
    want = source.tokens(ids).cpu()
    target.poison()
    ticket = source.client.publish(ids)
    source.poison()
    result = target.client.fetch(ticket, there).result(60)
    assert result.num_blocks == NUM_BLOCKS, result.failed[0]
    assert torch.equal(target.tokens(there).cpu(), want)
    return result


@pytest.mark.parametrize(("here", "there"), [("PBTHD", "PBTHD"), ("PBTHD", "BHLPTD"), ("BHLPTD", "BPTHD")])
def test_between_nodes_over_nvlink(make_engine, here, there):
    source, target = make_engine(0, 0, here), make_engine(1, 1, there, peers=[0])
    result = hand_off(source, target)
    assert (result.route, result.num_peer, result.note) == ("gpu", NUM_BLOCKS, "")


def test_between_two_gpus_of_one_node(make_engine):
    source, target = make_engine(0, 0), make_engine(0, 1, peers=[0])
    result = hand_off(source, target)
    assert (result.route, result.note) == ("gpu", "")


def test_between_two_engines_of_one_gpu(make_engine):
    source, target = make_engine(0, 0), make_engine(0, 0)
    result = hand_off(source, target)
    assert (result.route, result.num_local, result.num_bytes) == ("gpu", NUM_BLOCKS, 0)


def test_to_an_engine_without_a_stage_through_host_memory(make_engine):
    source, target = make_engine(0, 0), make_engine(1, 1, attach=False)
    result = hand_off(source, target)
    assert (result.route, result.num_peer) == ("host", NUM_BLOCKS)
    assert "no stage" in result.note


def test_the_mover_of_either_side_is_killed_and_the_engines_go_on(make_engine, pids_of, node_ids, eventually):
    source, target = make_engine(0, 0), make_engine(1, 1)
    hand_off(source, target)
    for victim in (0, 1):
        ticket = source.client.publish(list(range(NUM_BLOCKS)), ttl_s=60)
        pid = pids_of(victim)["mover"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda victim=victim, pid=pid: pids_of(victim)["mover"] not in (0, pid), 30)
        result = target.client.fetch(ticket, list(range(NUM_BLOCKS))).result(60)
        if victim == 0:
            assert result.failed[0].reason is MissReason.PEER_LOST, "the stage went with its mover"
        else:
            assert (result.num_blocks, result.route) == (NUM_BLOCKS, "host")
        # The engines' own memory and their mappings are whole, and the next mover has another stage.
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            try:
                if hand_off(source, target).route == "gpu":
                    break
            except (KVStoreError, AssertionError):
                time.sleep(0.5)
        assert hand_off(source, target).route == "gpu"

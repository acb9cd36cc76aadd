"""Hand-offs from GPU to GPU between real stores and movers: over NVLink, inside one GPU, and after a mover's death."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from inner_parts import parts_of

from cuda_engine import CudaEngine
from kvstore.actors.plain_nodes import plain_nodes
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.client.results import MissReason
from kvstore.config import StoreConfig
from kvstore.engine.cuda_order import CudaOrder
from kvstore.errors import KVStoreError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
two_gpus = pytest.mark.multi_gpu(2)

NUM_BLOCKS = 128
SHAPE = KVShape(num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
UP_S = 30.0
#: Some 50 ms of a GPU of 1.8 GHz.
LONG_CYCLES = 90_000_000


@pytest.fixture(scope="module")
def nodes():
    config = StoreConfig(name="cuda-handoff", capacity_bytes=256 << 20, max_handoff_fraction=1.0)
    with plain_nodes(config) as started:
        yield started


@pytest.fixture
def make_engine(nodes, request):
    made, space = [], Namespace(model=request.node.name, shape=SHAPE)

    def make(node, gpu, axes="PBTHD", attach=True, peers=()):
        client = Client(nodes[node].control_path, space)
        engine = CudaEngine(client, axes, num_blocks=2 * NUM_BLOCKS, device=f"cuda:{gpu}")
        made.append(engine)
        if attach:
            engine.route = client.attach_handoff("256MiB", peers=[nodes[peer].node_id for peer in peers])
        return engine

    yield make
    for engine in made:
        engine.client.close()


def hand_off(source, target):
    ids, there = list(range(NUM_BLOCKS)), [2 * NUM_BLOCKS - 1 - i for i in range(NUM_BLOCKS)]
    want = source.tokens(ids).cpu()
    target.poison()
    ticket = source.client.publish(ids)
    source.poison()
    result = target.client.fetch(ticket, there).result(60)
    assert result.num_blocks == NUM_BLOCKS, result.failed[0]
    assert torch.equal(target.tokens(there).cpu(), want)
    source.fill()
    return result


@two_gpus
@pytest.mark.parametrize(("here", "there"), [("PBTHD", "PBTHD"), ("PBTHD", "BHLPTD"), ("BHLPTD", "BPTHD")])
def test_between_nodes_over_nvlink(make_engine, nodes, here, there):
    source, target = make_engine(0, 0, here), make_engine(1, 1, there, peers=[0])
    assert target.route.route == "gpu", target.route
    assert target.route.gb_per_s[nodes[0].node_id] > 20, target.route
    result = hand_off(source, target)
    assert (result.route, result.num_peer, result.note) == ("gpu", NUM_BLOCKS, "")


@two_gpus
def test_between_two_gpus_of_one_node(make_engine):
    source, target = make_engine(0, 0), make_engine(0, 1, peers=[0])
    result = hand_off(source, target)
    assert (result.route, result.note) == ("gpu", "")


def test_between_two_engines_of_one_gpu(make_engine):
    source, target = make_engine(0, 0), make_engine(0, 0)
    result = hand_off(source, target)
    assert (result.route, result.num_local, result.num_bytes) == ("gpu", NUM_BLOCKS, 0)


def overwritten_at_once(source, target):
    """Publish blocks behind a long wait and overwrite them on the same stream; whether the old bytes were fetched.

    The stream that packs comes to it even later.
    """
    ids, there = list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS, 2 * NUM_BLOCKS))
    want, computed = source.tokens(ids).cpu(), torch.cuda.Event()
    target.poison()
    torch.cuda.synchronize()
    late = torch.cuda.Stream()
    with torch.cuda.stream(late):
        torch.cuda._sleep(3 * LONG_CYCLES)
    parts_of(source.client).stage.attached.copier.streams[True].wait_stream(late)
    torch.cuda._sleep(LONG_CYCLES)
    computed.record()
    ticket = source.client.publish(ids)
    assert not computed.query(), "nobody waited for the device"
    source.poison()
    result = target.client.fetch(ticket, there).result(60)
    assert (result.num_blocks, result.route) == (NUM_BLOCKS, "gpu")
    same = torch.equal(target.tokens(there).cpu(), want)
    source.fill()
    return same


@pytest.mark.parametrize("ahead", [True, False])
def test_the_store_hears_when_the_device_comes_to_blocks_that_were_published_ahead(make_engine, nodes, ahead):
    source, target = make_engine(0, 0), make_engine(0, 0)
    ids, there = list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS, 2 * NUM_BLOCKS))
    want = source.tokens(ids).cpu()
    target.poison()
    torch.cuda.synchronize()
    before = source.client.stats()["calls"].get("HANDOFF_PACKING", 0)
    if ahead:
        torch.cuda._sleep(LONG_CYCLES)
    publication = source.client.begin_publish(ids)
    result = target.client.fetch(publication.ticket, there).result(60)
    publication.job.result(60)
    assert (result.num_blocks, result.route) == (NUM_BLOCKS, "gpu")
    assert torch.equal(target.tokens(there).cpu(), want)
    assert source.client.stats()["calls"].get("HANDOFF_PACKING", 0) - before == int(ahead)


def test_blocks_are_the_engines_again_in_the_order_of_its_stream(make_engine):
    assert overwritten_at_once(make_engine(0, 0), make_engine(0, 0))


def test_without_the_engines_wait_what_is_written_next_would_be_sent(make_engine, monkeypatch):
    monkeypatch.setattr(CudaOrder, "hold_engine", lambda self: None)
    assert not overwritten_at_once(make_engine(0, 0), make_engine(0, 0))


def test_between_two_nodes_that_share_a_gpu_by_whichever_way_is_no_emulation(make_engine, nodes):
    source, target = make_engine(0, 0), make_engine(1, 0, peers=[0])
    result = hand_off(source, target)
    if target.route.route == "host":
        assert target.route.why_not
        assert result.route == "host"
    else:
        assert target.route.gb_per_s[nodes[0].node_id] >= 3


def test_to_an_engine_without_a_stage_through_host_memory(make_engine):
    source, target = make_engine(0, 0), make_engine(1, 0, attach=False)
    result = hand_off(source, target)
    assert (result.route, result.num_peer) == ("host", NUM_BLOCKS)
    assert "no stage" in result.note


@two_gpus
@pytest.mark.parametrize("victim", [0, 1])
def test_a_mover_is_killed_and_the_engines_go_on(make_engine, nodes, victim):
    source, target = make_engine(0, 0), make_engine(1, 1)
    assert hand_off(source, target).route == "gpu"
    ticket = source.client.publish(list(range(NUM_BLOCKS)), ttl_s=60)
    pid = nodes[victim].ask("pids", UP_S)["mover"]
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + UP_S
    while nodes[victim].ask("pids", UP_S)["mover"] in (0, pid):
        assert time.monotonic() < deadline_s, "no other mover came up"
        time.sleep(0.05)
    result = target.client.fetch(ticket, list(range(NUM_BLOCKS))).result(60)
    if victim == 0:
        assert result.failed[0].reason is MissReason.PEER_LOST, "the stage went with its mover"
    else:
        assert (result.num_blocks, result.route) == (NUM_BLOCKS, "host")
        assert result.note.startswith("stage_lost")
    # The engines' own memory and their mappings are whole, and the next mover has another stage.
    seen = []
    while not seen or (seen[-1] != "gpu" and time.monotonic() < deadline_s):
        try:
            result = hand_off(source, target)
            seen.append(result.route if not result.note else result.note)
        except KVStoreError as error:
            seen.append(str(error))
        except AssertionError as error:  # A node that failed is left alone for a while.
            seen.append(str(error).splitlines()[0])
        time.sleep(0.2)
    assert seen[-1] == "gpu", seen

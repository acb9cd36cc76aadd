"""A cache on a GPU and a real store in processes of its own: what it brings back, and its sudden end."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from cuda_engine import CudaEngine

pytest.importorskip("ray", reason="needs Ray beside torch and CuPy")

import kvstore
from kvstore.client.results import MissReason
from kvstore.errors import KVStoreError

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.timeout(240)]
LONG_CYCLES = 2_000_000_000  # a second and more


@pytest.fixture(scope="module")
def store():
    started = kvstore.start("256MiB", name="cuda", timeout_s=120)
    yield started
    started.stop()


@pytest.fixture
def space(request):
    shape = kvstore.KVShape(num_layers=8, num_kv_heads=8, head_dim=64, dtype="bfloat16", block_size=16)
    return kvstore.Namespace(model=request.node.name, shape=shape)


@pytest.fixture
def make_engine(store, space):
    made = []

    def make(axes="PBTHD", **options):
        made.append(CudaEngine(store.client(space), axes, num_blocks=256, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.client.close()


@pytest.mark.parametrize("axes", ["PBTHD", "BHLPTD"])
def test_a_chain_comes_back_bit_for_bit(make_engine, space, axes):
    engine, rng = make_engine(axes), np.random.default_rng(1)
    hashes = space.block_hashes(rng.integers(0, 50_000, 128 * 16))
    saved, loaded = rng.permutation(256)[:128], rng.permutation(256)[:128]
    want = engine.tokens(saved)
    assert engine.save(hashes, saved).num_written == 128
    engine.poison()
    assert engine.load(hashes, loaded, 40).num_blocks == 128
    assert torch.equal(engine.tokens(loaded)[:, :, :, 40:], want[:, :, :, 40:])
    other = make_engine("BPTHD")
    assert other.load(hashes, loaded).num_blocks == 128
    assert torch.equal(other.tokens(loaded), want)


def test_a_store_killed_while_its_blocks_are_copied(make_engine, space, store):
    engine, stream = make_engine(), torch.cuda.Stream()
    hashes = space.block_hashes(np.arange(64 * 16))
    engine.save(hashes, range(64))
    want = engine.tokens(range(64))
    (pid,) = (node["pid"] for node in store.stats()["nodes"].values())
    engine.poison()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        job = engine.client.load(hashes, list(range(100, 164)))
        save = engine.client.save(space.block_hashes(np.arange(64 * 16) + 5), list(range(64)))
    job.wait_on(torch.cuda.Stream())
    os.kill(pid, signal.SIGKILL)
    result = job.result(60)
    # Either the store's word came before its end, and then every byte is right, or nothing counts.
    assert result.num_blocks in (0, 64)
    if result.num_blocks:
        assert torch.equal(engine.tokens(range(100, 164)), want)
    with pytest.raises(KVStoreError):
        save.result(60)
    lost = engine.client.load(hashes, list(range(64))).result(60)
    assert (lost.num_blocks, lost.failed[0].reason) == (0, MissReason.STORE_LOST)
    assert int(torch.ones(5, device="cuda").sum()) == 5


def test_the_next_life_of_the_store_serves_a_new_client(make_engine, space, store, eventually):
    def a_new_engine():
        return make_engine()

    engine = eventually(a_new_engine, 60)
    hashes = space.block_hashes(np.arange(32 * 16))
    want = engine.tokens(range(32))
    assert engine.save(hashes, range(32)).num_written == 32
    engine.poison()
    assert engine.load(hashes, range(32)).num_blocks == 32
    assert torch.equal(engine.tokens(range(32)), want)

"""Client.save and load of caches on a GPU, with a real node core and its sockets; kernels and driver are real.

Sleeps of a stream are long against everything that is compared with them, so that what is shown does not hang on
how fast the machine is.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from inner_parts import parts_of

from cuda_engine import FORMS, POISON, CudaEngine
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.client.results import MissReason
from kvstore.engine import cuda_copier
from kvstore.engine.cuda_copier import CopyPath
from kvstore.engine.cuda_order import CudaOrder
from kvstore.errors import InvalidRequest, JobRunning, KernelError, KVStoreError, RegistrationFailed
from kvstore.memory import mapping
from kvstore.memory.pinning import ArenaPinning

pytestmark = pytest.mark.gpu
PATHS = ["staged", "direct"]
LONG_CYCLES = 1_000_000_000  # half a second and more


def space_of(planes="kv", **changes):
    sizes = {"num_layers": 3, "num_kv_heads": 4, "head_dim": 32, "dtype": "bfloat16", "block_size": 16} | changes
    if planes == "single":
        sizes["num_kv_heads"] = 1
    return Namespace(model="cuda", shape=KVShape(planes=planes, **sizes))


def hashes_of(space, num_blocks, seed=0):
    return space.block_hashes(np.random.default_rng(seed).integers(0, 50_000, num_blocks * space.shape.block_size))


@pytest.fixture
def make_engine(cluster, monkeypatch):
    """Makes engines on one node; the arena is pinned in many small pieces, the ring has small chunks."""
    monkeypatch.setattr(mapping, "ArenaPinning", functools.partial(ArenaPinning, piece_bytes=1 << 18))
    monkeypatch.setattr(cuda_copier, "CHUNK_BYTES", 1 << 16)

    def make(axes="PBTHD", space=None, part=None, **options):
        if not cluster.nodes:
            cluster.add("a", mover=False, capacity_bytes=32 << 20)
        cluster.clients.append(Client(cluster.nodes["a"].control_path, space or space_of(), part))
        return CudaEngine(cluster.clients[-1], axes, **options)

    return make


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
def test_what_was_saved_comes_back_bit_for_bit_and_nothing_else_is_written(make_engine, form, path):
    planes, axes = FORMS[form]
    engine = make_engine(axes, space_of(planes), copy_path=path)
    assert parts_of(engine.client).copier.path is CopyPath(path)
    hashes, rng = hashes_of(engine.client.space, 20), np.random.default_rng(1)
    saved, loaded = rng.permutation(64)[:20], rng.permutation(64)[:20]
    want = engine.tokens(saved)
    assert engine.save(hashes, saved).num_written == 20
    engine.poison()
    assert engine.load(hashes, loaded).num_blocks == 20
    assert torch.equal(engine.tokens(loaded), want)
    rest = np.setdiff1d(np.arange(64), loaded)
    assert (engine.tokens(rest).contiguous().view(torch.uint8) == POISON).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("skip_tokens", [0, 21, 100])
def test_a_load_that_is_queued_in_two_parts_is_whole(make_engine, monkeypatch, path, skip_tokens):
    engine = make_engine(copy_path=path)
    monkeypatch.setattr(cuda_copier, "FIRST_BYTES", 4 * engine.client.slot_bytes)
    hashes, rng = hashes_of(engine.client.space, 20), np.random.default_rng(8)
    saved, loaded = rng.permutation(64)[:20], rng.permutation(64)[:20]
    engine.save(hashes, saved)
    want = engine.tokens(saved)
    engine.poison()
    assert engine.load(hashes, loaded, skip_tokens).num_blocks == 20
    got = engine.tokens(loaded)
    assert torch.equal(got[:, :, :, skip_tokens:], want[:, :, :, skip_tokens:])
    assert (got[:, :, :, :skip_tokens].contiguous().view(torch.uint8) == POISON).all()


@pytest.mark.parametrize("form", [form for form in FORMS if FORMS[form][0] == "kv"])
def test_engines_of_unlike_layouts_share_blocks(make_engine, form):
    one, other = make_engine("PBTHD"), make_engine(FORMS[form][1])
    hashes, ids = hashes_of(one.client.space, 12), np.random.default_rng(2).permutation(64)[:12]
    one.save(hashes, range(12))
    assert other.load(hashes, ids).num_blocks == 12
    assert torch.equal(other.tokens(ids), one.tokens(range(12)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("saver", "loader"), [(16, 8), (8, 16), (32, 16), (16, 32), (32, 8)])
def test_engines_of_other_block_sizes_share_blocks(make_engine, saver, loader, path):
    one = make_engine("PBTHD", block_size=saver, copy_path=path)
    other = make_engine("BPHTD", block_size=loader, copy_path=path)
    hashes, rng = hashes_of(one.client.space, 12), np.random.default_rng(6)
    saved, loaded = (rng.permutation(64)[: 12 * 16 // size] for size in (saver, loader))
    assert one.save(hashes, saved).num_written == 12
    other.poison()
    assert other.load(hashes, loaded, 21).num_blocks == 12
    assert torch.equal(other.tokens(loaded)[:, :, :, 21:], one.tokens(saved)[:, :, :, 21:])
    assert (other.tokens(loaded)[:, :, :, :21].contiguous().view(torch.uint8) == POISON).all()
    # A run that begins inside a block of the engine.
    tail, held = hashes[3:10], loaded[3 * 16 // loader : -(-10 * 16 // loader)]
    other.poison()
    assert other.load(tail, held).num_blocks == 7
    lead = 3 * 16 % loader
    got = other.tokens(held)
    assert torch.equal(got[:, :, :, lead : lead + 112], one.tokens(saved)[:, :, :, 48:160])
    assert (got[:, :, :, :lead].contiguous().view(torch.uint8) == POISON).all()
    assert (got[:, :, :, lead + 112 :].contiguous().view(torch.uint8) == POISON).all()


@pytest.mark.parametrize("path", PATHS)
def test_ranks_save_and_load_their_parts(make_engine, path):
    space = space_of(num_layers=4, num_layer_groups=2)
    ranks = [make_engine("PBTHD", space, (tp, 2, pp, 2), copy_path=path) for pp in range(2) for tp in range(2)]
    whole = make_engine("BPHTD", space, copy_path=path)
    hashes, ids = hashes_of(space, 9), np.random.default_rng(7).permutation(64)[:9]
    jobs = [rank.client.save(hashes, range(9)) for rank in ranks]
    assert all(job.result(60).num_blocks == 9 for job in jobs)
    assert whole.load(hashes, ids).num_blocks == 9
    layers = [torch.cat([rank.tokens(range(9)) for rank in ranks[2 * pp : 2 * pp + 2]], 1) for pp in range(2)]
    want = torch.cat(layers)
    assert torch.equal(whole.tokens(ids), want)
    for rank in ranks:
        rank.poison()
        assert rank.load(hashes, ids, 5).num_blocks == 9
    layers = [torch.cat([rank.tokens(ids) for rank in ranks[2 * pp : 2 * pp + 2]], 1) for pp in range(2)]
    assert torch.equal(torch.cat(layers)[:, :, :, 5:], want[:, :, :, 5:])


def test_a_hand_off_between_caches_on_a_gpu(make_engine):
    one, other = make_engine("PBTHD"), make_engine("BPHTD")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        one.fill()
        ticket = one.client.publish(list(range(9)))
    ids = np.random.default_rng(8).permutation(64)[:9]
    assert other.client.fetch(ticket, ids).result(60).num_blocks == 9
    assert torch.equal(other.tokens(ids), one.tokens(range(9)))


def test_a_cache_on_the_cpu_shares_blocks_with_one_on_the_gpu(make_engine):
    gpu, cpu = make_engine("BPHTD"), make_engine("PBTHD", device="cpu")
    first, second = (hashes_of(gpu.client.space, 5, seed) for seed in (1, 2))
    gpu.save(first, range(5))
    cpu.load(first, range(10, 15))
    assert torch.equal(cpu.tokens(range(10, 15)), gpu.tokens(range(5)))
    cpu.save(second, range(20, 25))
    gpu.load(second, range(30, 35))
    assert torch.equal(gpu.tokens(range(30, 35)), cpu.tokens(range(20, 25)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("skip", [0, 1, 16, 37, 8 * 16 - 1, 8 * 16])
def test_no_byte_of_a_skipped_token_is_written(make_engine, path, skip):
    engine = make_engine("PBTHD", copy_path=path)
    hashes, ids = hashes_of(engine.client.space, 8), np.random.default_rng(3).permutation(64)[:8]
    want = engine.tokens(range(8))
    engine.save(hashes, range(8))
    engine.poison()
    poisoned = engine.tokens(ids)
    result = engine.load(hashes, ids, skip)
    assert (result.num_blocks, result.failed) == (8, ())
    got = engine.tokens(ids)
    assert torch.equal(got[:, :, :, skip:], want[:, :, :, skip:])
    assert torch.equal(got[:, :, :, :skip], poisoned[:, :, :, :skip])


def test_the_path_follows_the_length_of_runs(make_engine):
    large = space_of(num_layers=32, num_kv_heads=8, head_dim=128)  # 2 MiB a block
    assert parts_of(make_engine("BHLPTD", large, num_blocks=4).client).copier.path is CopyPath.DIRECT
    small = Namespace(model="cuda", shape=large.shape)
    assert parts_of(make_engine("PBTHD", small, num_blocks=4).client).copier.path is CopyPath.STAGED
    with pytest.raises(InvalidRequest, match="copy_path"):
        make_engine("PBTHD", copy_path="fastest")


# The order of streams. Where a wait is taken out, the same steps are shown to go wrong.


def without_event(self):
    return CudaOrder(torch.cuda.current_stream(), torch.cuda.Event())


def saved_after_a_write(engine):
    """Queue a long wait and a write of blocks, and save them at once; returns whether the write was saved."""
    hashes, stream = hashes_of(engine.client.space, 6), torch.cuda.Stream()
    engine.poison()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        engine.fill()
        job = engine.client.save(hashes, list(range(6)))
    assert job.result(60).num_written == 6
    torch.cuda.synchronize()
    engine.load(hashes, range(20, 26))
    return torch.equal(engine.tokens(range(20, 26)), engine.tokens(range(6)))


@pytest.mark.parametrize("path", PATHS)
def test_a_save_waits_for_the_forward_pass_before_it(make_engine, path):
    assert saved_after_a_write(make_engine(copy_path=path))


def test_a_save_without_its_event_would_be_too_early(make_engine, monkeypatch):
    monkeypatch.setattr(cuda_copier.CudaCopier, "order", without_event)
    assert not saved_after_a_write(make_engine())


def read_before_a_load(engine):
    """Queue a long wait and a read of blocks, and load over them at once; returns whether it read the old bytes."""
    hashes, stream = hashes_of(engine.client.space, 6), torch.cuda.Stream()
    engine.save(hashes, range(6))
    engine.poison()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        seen = [raw.clone() for raw in engine.raw]
        job = engine.client.load(hashes, list(range(30, 36)))
    assert job.result(60).num_blocks == 6
    torch.cuda.synchronize()
    assert (engine.tokens(range(30, 36)).contiguous().view(torch.uint8) != POISON).any()
    return all(bool((raw == POISON).all()) for raw in seen)


@pytest.mark.parametrize("path", PATHS)
def test_a_load_waits_for_whoever_used_its_blocks_before(make_engine, path):
    assert read_before_a_load(make_engine(copy_path=path))


def test_a_load_without_its_event_would_be_too_early(make_engine, monkeypatch):
    monkeypatch.setattr(cuda_copier.CudaCopier, "order", without_event)
    assert not read_before_a_load(make_engine())


def read_after_a_load(engine, wait_on):
    """Load behind a long wait, and have another stream read the blocks; returns whether it saw the loaded bytes."""
    hashes, stream, reader = hashes_of(engine.client.space, 6), torch.cuda.Stream(), torch.cuda.Stream()
    engine.save(hashes, range(6))
    want = engine.tokens(range(6))
    engine.poison()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        job = engine.client.load(hashes, list(range(30, 36)))
    wait_on(job, reader)
    # The host did not wait for the bytes.
    assert not stream.query()
    assert not job.done()
    with torch.cuda.stream(reader):
        seen = [raw.clone() for raw in engine.raw]
    assert job.result(60).num_blocks == 6
    torch.cuda.synchronize()
    for raw, old in zip(engine.raw, seen, strict=True):
        raw.copy_(old)
    return torch.equal(engine.tokens(range(30, 36)), want)


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_waits_for_a_load_on_its_stream_and_not_on_the_host(make_engine, path):
    assert read_after_a_load(make_engine(copy_path=path), lambda job, stream: job.wait_on(stream))


@pytest.mark.parametrize("path", PATHS)
def test_what_is_launched_when_a_load_says_that_it_is_queued_reads_its_bytes(make_engine, monkeypatch, path):
    queued, load = threading.Event(), Client.load
    monkeypatch.setattr(Client, "load", lambda *args: load(*args, on_queued=queued.set))

    def when_queued(job, stream):
        assert queued.wait(30)
        job.wait_on(stream, timeout=0.0)

    assert read_after_a_load(make_engine(copy_path=path), when_queued)
    queued.clear()
    other = make_engine(copy_path=path)
    assert not read_after_a_load(other, lambda job, stream: queued.wait(30)), "queued is not in place"


def test_an_engine_that_does_not_wait_reads_too_early(make_engine):
    def queued_only(job, stream):
        job.wait_on(torch.cuda.Stream())

    assert not read_after_a_load(make_engine(), queued_only)


def test_wait_on_takes_the_current_stream_and_has_an_end(make_engine):
    engine = make_engine()
    hashes = hashes_of(engine.client.space, 6)
    engine.save(hashes, range(6))
    want = engine.tokens(range(6))
    engine.poison()
    job = engine.client.load(hashes, list(range(6)))
    job.wait_on()
    assert torch.equal(engine.tokens(range(6)), want)
    job.result(60)
    torch.cuda._sleep(LONG_CYCLES)
    job = engine.client.save(hashes_of(engine.client.space, 6, 1), list(range(6)))
    with pytest.raises(JobRunning, match="not all queued"):
        job.wait_on(timeout=0.01)
    job.result(60)
    job.wait_on(timeout=0.01)


@pytest.mark.parametrize("default_stream", [True, False])
def test_copies_do_not_wait_for_the_engines_later_work(make_engine, default_stream):
    engine = make_engine()
    hashes = hashes_of(engine.client.space, 6)
    engine.save(hashes, range(6))
    torch.cuda.synchronize()
    stream = torch.cuda.default_stream() if default_stream else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        jobs = [engine.client.load(hashes, list(range(30, 36)))]
        jobs.append(engine.client.save(hashes_of(engine.client.space, 6, 1), list(range(6))))
        torch.cuda._sleep(2 * LONG_CYCLES)
    for job in jobs:
        job.result(60)
    assert not stream.query()
    torch.cuda.synchronize()


def test_a_graph_that_is_being_captured_is_left_alone(make_engine):
    engine = make_engine()
    hashes, graph, x = hashes_of(engine.client.space, 2), torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x += 1
        with pytest.raises(InvalidRequest, match="captured"):
            engine.client.save(hashes, [0, 1])
    graph.replay()
    assert engine.save(hashes, [0, 1]).num_written == 2
    assert x.tolist() == [1.0] * 4


# Many at once.


def test_shared_blocks_never_change_while_another_stream_reads_them(make_engine):
    """Stored blocks are larger than the part that is skipped, and the reader compares all the time."""
    engine = make_engine("PBTHD", space_of(block_size=64), num_blocks=32)
    hashes, ids = hashes_of(engine.client.space, 16), np.random.default_rng(4).permutation(32)[:16]
    engine.save(hashes, ids)
    skip = 64 * 5 + 23
    engine.fill()  # The engine's own bytes are other ones than the stored.
    torch.cuda.synchronize()
    caches = [tensor.view(torch.int16) for tensor in engine.tensors]  # As numbers, what is none is unlike itself.
    old = [cache.clone() for cache in caches]
    whole, inside = torch.from_numpy(ids[:5]).cuda(), int(ids[5])
    reader, wrong = torch.cuda.Stream(), torch.zeros((), dtype=torch.int64, device="cuda")
    num_reads, num_loads = 0, 0
    while num_reads < 3000 or num_loads < 50:
        jobs = [engine.client.load(hashes, ids, skip) for _ in range(3)]
        num_loads += len(jobs)
        while not all(job.done() for job in jobs):
            with torch.cuda.stream(reader):
                for cache, before in zip(caches, old, strict=True):
                    wrong += (cache[:, whole] != before[:, whole]).sum()
                    wrong += (cache[:, inside, :23] != before[:, inside, :23]).sum()
            num_reads += 1
        assert [job.result(1).num_blocks for job in jobs] == [16] * 3
        reader.synchronize()
    assert int(wrong) == 0
    assert all(bool((cache != before).any()) for cache, before in zip(caches, old, strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_rings_are_used_again_and_again_by_many_jobs_at_once(make_engine, path):
    engine = make_engine(num_blocks=256, copy_path=path)
    assert engine.client.space.shape.block_bytes * 16 > 3 * cuda_copier.CHUNK_BYTES
    want = [engine.tokens(range(16 * at, 16 * at + 16)) for at in range(8)]
    for turn in range(4):
        chains = [hashes_of(engine.client.space, 16, 100 * turn + at) for at in range(8)]
        saves = [engine.client.save(chain, list(range(16 * at, 16 * at + 16))) for at, chain in enumerate(chains)]
        assert all(job.result(60).num_written == 16 for job in saves)
        places = np.random.default_rng(turn).permutation(np.arange(128, 256)).reshape(8, 16)
        more = engine.client.save(hashes_of(engine.client.space, 16, 100 * turn + 99), list(range(16)))
        loads = [engine.client.load(chain, ids) for chain, ids in zip(chains, places, strict=True)]
        assert all(job.result(60).num_blocks == 16 for job in loads)
        assert more.result(60).num_written == 16
        for ids, tokens in zip(places, want, strict=True):
            assert torch.equal(engine.tokens(ids), tokens)


# Giving up, and losing the store.


def test_an_abandoned_load_touches_nothing_once_abandon_says_so(make_engine):
    engine = make_engine()
    hashes, stream = hashes_of(engine.client.space, 6), torch.cuda.Stream()
    engine.save(hashes, range(6))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        job = engine.client.load(hashes, list(range(30, 36)))
    job.wait_on(torch.cuda.Stream())  # Its copies are queued, and wait.
    assert not job.abandon(0.05)
    assert job.abandon(30)
    engine.poison()
    job.result(60)
    torch.cuda.synchronize()
    assert all(bool((raw == POISON).all()) for raw in engine.raw)
    assert engine.load(hashes, range(6)).num_blocks == 6


def test_a_store_lost_in_the_middle_of_a_load_is_a_miss_and_its_memory_goes(make_engine, cluster, wait_until):
    engine = make_engine()
    client, hashes, stream = engine.client, hashes_of(engine.client.space, 6), torch.cuda.Stream()
    engine.save(hashes, range(6))
    pinning, inode = parts_of(client).mapping.pinning, os.fstat(cluster.nodes["a"].state.arena.fd).st_ino
    assert pinning.num_registered_bytes > 0
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        job = client.load(hashes, list(range(30, 36)))
    job.wait_on(torch.cuda.Stream())
    cluster.stop_node("a")
    assert job.result(60).num_blocks == 6, "all was leased and queued"
    lost = client.load(hashes, list(range(6))).result(60)
    assert (lost.num_blocks, lost.failed[0].reason) == (0, MissReason.STORE_LOST)
    wait_until(lambda: f" {inode} " not in Path("/proc/self/maps").read_text())
    assert pinning.num_registered_bytes == 0
    with pytest.raises(KVStoreError):
        client.save(hashes_of(client.space, 6, 1), list(range(6))).result(60)
    # The engine and another store go on.
    assert int(torch.ones(5, device="cuda").sum()) == 5
    other = make_engine()
    assert other.save(hashes, range(6)).num_written == 6


def test_close_unpins_and_unmaps(make_engine, cluster):
    engine = make_engine()
    pinning, inode = parts_of(engine.client).mapping.pinning, os.fstat(cluster.nodes["a"].state.arena.fd).st_ino
    engine.save(hashes_of(engine.client.space, 6), range(6))
    cluster_maps = Path("/proc/self/maps").read_text().count(f" {inode} ")
    engine.client.close()
    assert pinning.num_registered_bytes == 0
    assert Path("/proc/self/maps").read_text().count(f" {inode} ") == cluster_maps - 1


def test_a_client_closed_before_its_copies_are_over_unmaps_after_them(make_engine, wait_until):
    engine = make_engine()
    client, hashes, stream = engine.client, hashes_of(engine.client.space, 6), torch.cuda.Stream()
    engine.save(hashes, range(6))
    want = engine.tokens(range(6))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        job = client.load(hashes, list(range(30, 36)))
    job.wait_on(torch.cuda.Stream())
    client.close(0.05)
    assert parts_of(client).mapping.pinning.num_registered_bytes > 0
    job.result(60)
    assert torch.equal(engine.tokens(range(30, 36)), want)
    wait_until(lambda: parts_of(client).mapping.pinning.num_registered_bytes == 0, 20)


# Errors.


def test_memory_that_cannot_be_pinned_is_a_miss_with_a_reason(make_engine, monkeypatch):
    engine = make_engine()
    hashes = hashes_of(engine.client.space, 6)
    engine.save(hashes, range(6))

    def refuse(slots, timeout_s):
        raise RegistrationFailed("the driver refused")

    monkeypatch.setattr(parts_of(engine.client).mapping.pinning, "wait", refuse)
    result = engine.load(hashes, range(6))
    assert (result.num_blocks, result.failed[0].reason) == (0, MissReason.OTHER)
    assert "the driver refused" in result.failed[0].detail
    with pytest.raises(RegistrationFailed):
        engine.save(hashes_of(engine.client.space, 6, 1), range(6))
    monkeypatch.undo()
    assert engine.load(hashes, range(6)).num_blocks == 6


def test_a_refused_launch_is_an_error_of_the_job_and_nothing_of_it_is_stored(make_engine, cluster):
    engine = make_engine()
    hashes = hashes_of(engine.client.space, 6)
    ring = parts_of(engine.client).copier.saves.copies
    ring._max_ctas = 0
    with pytest.raises(KernelError, match="max_ctas"):
        engine.save(hashes, range(6))
    assert engine.client.lookup(hashes).num_local == 0
    ring._max_ctas = None
    assert engine.save(hashes, range(6)).num_written == 6
    cluster.check()


@pytest.mark.parametrize("refuses_events", [False, True])
def test_a_publication_of_which_a_part_is_queued_keeps_its_slots_until_the_device_is_through(
    make_engine, cluster, monkeypatch, refuses_events
):
    engine = make_engine()
    copies, begin = (
        parts_of(engine.client).copier.saves.copies,
        parts_of(engine.client).copier.saves.begin,
    )
    save, queued = copies.save, []

    def refused(spans, slots, ids):
        torch.cuda._sleep(LONG_CYCLES)
        save(spans, slots, ids)
        mark = torch.cuda.current_stream().record_event()
        if refuses_events:
            patch.setattr(torch.cuda.Stream, "record_event", no_event)
        queued.append(mark)
        raise RuntimeError("too many resources requested for launch")

    def no_event(self, *args):
        raise RuntimeError("no event can be had")

    with monkeypatch.context() as patch:
        patch.setattr(copies, "save", refused)
        publication = engine.client.begin_publish(range(6))
        while not queued:
            time.sleep(0.001)
        while not queued[0].query():
            assert cluster.nodes["a"].pool.stats().num_writing == 6, "its kernels may still write there"
            time.sleep(0.01)
        with pytest.raises(KernelError, match="too many resources"):
            publication.job.result(20)
    assert begin.query()
    assert cluster.nodes["a"].pool.stats().num_writing == 0
    assert engine.client.publish(range(6)).num_blocks == 6


def test_a_device_without_memory_for_the_buffers_refuses_the_cache(make_engine, monkeypatch):
    monkeypatch.setattr(cuda_copier, "CHUNK_BYTES", 1 << 42)
    with pytest.raises(KernelError, match="memory"):
        make_engine(copy_path="staged")


def test_an_engine_whose_device_failed_gets_typed_errors_and_goes_on(repo_root):
    """A failed kernel breaks the process's CUDA context for good, so this has a process of its own."""
    script = repo_root / "tests/kvstore/cuda_failed_device.py"
    env = {**os.environ, "PYTHONPATH": f"{repo_root}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=110, env=env, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:4] == ["save KernelError", "load KernelError", "stored 0", "closed"]


def test_jobs_that_cannot_be_copied_leave_no_slot_behind(make_engine, cluster, monkeypatch):
    engine = make_engine()
    before = cluster.nodes["a"].pool.stats()

    def fail(*args, **options):
        raise RuntimeError("the driver answered CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(parts_of(engine.client).copier.saves.copies, "save", fail)
    for seed in range(5):
        with pytest.raises(KernelError, match="INVALID_VALUE"):
            engine.save(hashes_of(engine.client.space, 6, seed), range(6))
    deadline_s = time.monotonic() + 5
    while cluster.nodes["a"].pool.stats() != before:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)

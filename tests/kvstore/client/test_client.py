"""Bad input to a client: each a typed error, and nothing changed; and what jobs are."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from inner_parts import parts_of

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.part import Part
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.client.job import Job
from kvstore.errors import (
    ChainBroken,
    ConfigError,
    InvalidRequest,
    JobAbandoned,
    JobRunning,
    LayoutMismatch,
    NamespaceMismatch,
    PeerLost,
    StoreNotRunning,
    StoreUnavailable,
    TransferError,
    TransferTimeout,
)
from kvstore.node import load_service

NUM_BLOCKS = 12


@pytest.fixture(scope="module")
def world(cluster_class):
    """One node with three stored blocks, and a worker to which nothing bad may happen."""
    cluster = cluster_class()
    cluster.add("a")
    worker = cluster.worker("a", NUM_BLOCKS)
    worker.save(cluster.hashes(3), range(3))
    yield cluster, worker
    cluster.stop()


@pytest.fixture
def unchanged(world, wait_until):
    """Whatever the test does leaves the pool, the engine's cache and the client's registration as they were."""
    cluster, worker = world
    wait_until(lambda: cluster.nodes["a"].pool.num_leases() == 0)
    before, cache = cluster.nodes["a"].pool.stats(), worker.bytes()
    yield
    # A load gives its lease back without waiting for an answer.
    wait_until(lambda: cluster.nodes["a"].pool.num_leases() == 0)
    cluster.check()
    assert cluster.nodes["a"].pool.stats() == before
    assert worker.bytes() == cache
    assert worker.client.lookup(cluster.hashes(3)).num_local == 3


BAD_IDS = {
    "below range": [0, 1, -1],
    "above range": [0, 1, NUM_BLOCKS],
    "far above": [0, 1, 2**40],
    "twice": [0, 1, 1],
    "too few": [0, 1],
    "too many": [0, 1, 2, 3],
    "none": [],
    "floats": [0.0, 1.0, 2.0],
    "float array": np.arange(3.0),
    "text": ["0", "1", "2"],
    "nested": [[0, 1, 2]],
    "one number": 3,
    "nothing": None,
    "ragged": [[0], [1, 2], [3]],
    "bools": [True, False, True],
    "too big": [0, 1, 2**80],
    "wraps around": np.array([0, 1, 2**64 - 1], dtype=np.uint64),
}


@pytest.mark.parametrize("name", BAD_IDS)
@pytest.mark.parametrize("verb", ["save", "load"])
def test_bad_block_ids(world, unchanged, verb, name):
    cluster, worker = world
    with pytest.raises(InvalidRequest, match="block_ids"):
        getattr(worker.client, verb)(cluster.hashes(3), BAD_IDS[name])


GOOD_IDS = {
    "list": [3, 4, 5],
    "tuple": (3, 4, 5),
    "range": range(3, 6),
    "int32": np.array([3, 4, 5], np.int32),
    "uint8": np.array([3, 4, 5], np.uint8),
    "tensor": torch.tensor([3, 4, 5]),
}


@pytest.mark.parametrize("name", GOOD_IDS)
def test_good_block_ids(world, name):
    cluster, worker = world
    assert worker.client.load(cluster.hashes(3), GOOD_IDS[name]).result(5).num_blocks == 3
    assert all(worker.block(i) == worker.block(i + 3) for i in range(3))


VERBS = {
    "lookup": lambda client, hashes: client.lookup(hashes),
    "lease": lambda client, hashes: client.lease(hashes, 5.0),
    "save": lambda client, hashes: client.save(hashes, [0, 1, 2]),
    "load": lambda client, hashes: client.load(hashes, [0, 1, 2]),
    "prefetch": lambda client, hashes: client.prefetch(hashes),
}


@pytest.mark.parametrize("verb", VERBS)
def test_hashes_of_another_namespace(world, unchanged, verb):
    cluster, worker = world
    other = Namespace(model="m2", shape=cluster.space.shape).block_hashes(range(12))
    with pytest.raises(NamespaceMismatch, match="this client's space"):
        VERBS[verb](worker.client, other)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("hashes", [[b"x" * 32] * 3, b"x" * 96, None, (1, 2, 3)], ids=["list", "bytes", "None", "ints"])
def test_what_is_no_block_hashes(world, unchanged, verb, hashes):
    with pytest.raises(InvalidRequest, match="wanted BlockHashes"):
        VERBS[verb](world[1].client, hashes)


@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_block_named_twice(world, unchanged, verb):
    cluster, worker = world
    good = cluster.hashes(3)
    twice = BlockHashes(good.namespace_digest, good.parent, 0, good[0] + good[1] + good[0])
    with pytest.raises(ChainBroken):
        VERBS[verb](worker.client, twice)


def test_a_tail_whose_parent_is_not_stored(world, unchanged):
    cluster, worker = world
    job = worker.client.save(cluster.hashes(6, seed=8)[3:], [0, 1, 2])
    with pytest.raises(ChainBroken, match="parent is not resident"):
        job.result(5)


@pytest.mark.parametrize("skip", [-1, 1.0, "3", None, 13, 10**9])
def test_a_bad_skip(world, unchanged, skip):
    cluster, worker = world
    with pytest.raises(InvalidRequest, match="skip_prefix_tokens"):
        worker.client.load(cluster.hashes(3), [0, 1, 2], skip)


def test_a_skip_of_everything_writes_nothing(world, unchanged):
    cluster, worker = world
    result = worker.client.load(cluster.hashes(3), [5, 6, 7], 12).result(5)
    assert (result.num_blocks, result.failed) == (3, ())


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan"), "3", 86401, 1e9, True])
def test_a_bad_ttl(world, unchanged, ttl_s):
    cluster, worker = world
    client, hashes = worker.client, cluster.hashes(3)
    ticket = client.prepare_ticket(1)
    with client.lease(hashes) as lease:
        calls = (
            lambda: client.lease(hashes, ttl_s), lambda: lease.renew(ttl_s), lambda: client.pin(hashes, ttl_s=ttl_s),
            lambda: client.publish([0], ttl_s=ttl_s), lambda: client.begin_publish([0], ttl_s=ttl_s),
            lambda: client.publish([0], ttl_s=ttl_s, ticket=ticket), lambda: client.prepare_ticket(1, ttl_s=ttl_s),
        )  # fmt: skip
        for call in calls:
            with pytest.raises(InvalidRequest, match=r"^ttl_s: wanted a number of seconds above 0, at most 86400"):
                call()


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "3", 1e6, [1]])
def test_a_bad_timeout(world, unchanged, timeout_s):
    cluster, worker = world
    client, hashes = worker.client, cluster.hashes(3)
    calls = (
        lambda: client.load(hashes, [0, 1, 2], timeout_s=timeout_s),
        lambda: client.prefetch(hashes, timeout_s=timeout_s),
        lambda: client.lookup(hashes, timeout_s=timeout_s),
        lambda: client.lookup(hashes, remote=False, timeout_s=timeout_s),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidRequest, match=r"^timeout_s: wanted a number of seconds from 0 to 86400"):
            call()


@pytest.mark.parametrize("num_threads", [-1, "4", 1.5, None, 5000])
def test_a_bad_number_of_threads(world, unchanged, num_threads):
    cluster, worker = world
    with pytest.raises(InvalidRequest, match="num_copy_threads"):
        worker.client.load(cluster.hashes(3), [0, 1, 2], num_copy_threads=num_threads)


def test_what_is_no_path_and_no_namespace_makes_no_client(world, unchanged):
    cluster, _ = world
    path = cluster.nodes["a"].control_path
    for wrong in (None, world, 5):
        with pytest.raises(InvalidRequest, match=r"control_path: wanted the path that Store\.control_path"):
            Client(wrong, cluster.space)
        with pytest.raises(InvalidRequest, match=r"space: wanted a kvstore\.Namespace"):
            Client(path, wrong)


def test_a_lease_shows_the_blocks_that_it_has(world, unchanged):
    cluster, worker = world
    with worker.client.lease(cluster.hashes(3)) as lease:
        assert bytes(lease.block(np.int64(2))) == bytes(lease.block(-1))
        for index in (3, 99, -4, "0", None, 1.0, slice(2)):
            with pytest.raises(InvalidRequest, match="one of 3 leased blocks"):
                lease.block(index)


def test_nothing_to_do(world, unchanged):
    cluster, worker = world
    empty = cluster.hashes(0)
    assert worker.client.lookup(empty).num_blocks == 0
    assert worker.save(empty, []).num_blocks == 0
    assert worker.load(empty, []).num_blocks == 0


def test_without_a_registered_cache(world, unchanged):
    cluster, _ = world
    with cluster.client("a") as client:
        for verb in ("save", "load"):
            with pytest.raises(InvalidRequest, match="register_kv_caches"):
                VERBS[verb](client, cluster.hashes(3))


def layers(num_blocks=4, dtype=torch.float32, **changes):
    sizes = {"planes": 2, "tokens": 4, "heads": 2, "dim": 8, "layers": 2} | changes
    dims = (sizes["planes"], num_blocks, sizes["tokens"], sizes["heads"], sizes["dim"])
    return [torch.zeros(dims, dtype=dtype) for _ in range(sizes["layers"])]


BAD_CACHES = {
    "too few layers": layers(layers=1),
    "too many layers": layers(layers=3),
    "block size": layers(tokens=6),
    "heads": layers(heads=4),
    "head dim": layers(dim=16),
    "dtype": layers(dtype=torch.bfloat16),
    "unlike layers": [*layers(layers=1), *layers(num_blocks=5, layers=1)],
    "empty": [],
    "no tensors": [1, 2],
    "nothing": None,
}


@pytest.mark.parametrize("name", BAD_CACHES)
def test_tensors_of_another_layout_are_refused_and_the_old_ones_stay(world, unchanged, name):
    cluster, worker = world
    with pytest.raises(LayoutMismatch):
        worker.client.register_kv_caches(BAD_CACHES[name])
    assert worker.client.load(cluster.hashes(3), [0, 1, 2]).result(5).num_blocks == 3


CHANGES = {
    "shape": lambda t: t.resize_(2, 6, 4, 2, 8),
    "stride": lambda t: t.as_strided_(t.shape, (t.stride(0), t.stride(1), t.stride(3), t.stride(2) * 2, t.stride(4))),
    "dtype": lambda t: setattr(t, "data", t.data.to(torch.float16)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("verb", ["save", "load"])
def test_tensors_changed_since_they_were_registered(world, unchanged, verb, name):
    cluster, _ = world
    with cluster.client("a") as client:
        caches = layers(num_blocks=4)
        client.register_kv_caches(caches)
        CHANGES[name](caches[1])
        with pytest.raises(LayoutMismatch):
            VERBS[verb](client, cluster.hashes(3))
        assert not caches[0].any()


# Stores that do not fit, or are not there.


def test_no_store_at_that_path(world, tmp_path):
    with pytest.raises(StoreNotRunning, match="no node store answers"):
        Client(str(tmp_path / "none.sock"), world[0].space)


def test_blocks_larger_than_the_slots(world, unchanged):
    cluster, _ = world
    big = Namespace(model="big", shape=KVShape(num_layers=4, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4))
    with pytest.raises(ConfigError) as caught:
        cluster.client("a", big)
    assert str(big.shape.block_bytes) in str(caught.value)
    assert str(cluster.space.shape.block_bytes) in str(caught.value)


def test_a_capacity_below_two_blocks(cluster):
    cluster.add("a", capacity_bytes=1 << 16)
    big = Namespace(
        model="big", shape=KVShape(num_layers=16, num_kv_heads=8, head_dim=32, dtype="float32", block_size=4)
    )
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        cluster.client("a", big)
    # The store is still undivided, and takes a namespace that fits.
    worker = cluster.worker("a", 4)
    assert worker.save(cluster.hashes(2), range(2)).num_written == 2


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Part(0, 3, 0, 1), "the 2 KV heads of a block, got tp_size=3"),
        ((0, 4, 0, 1), "the 2 KV heads of a block, got tp_size=4"),
        ((0, 1, 1, 2), "the 1 layer groups of a block, got pp_size=2"),
    ],
)
def test_a_part_that_blocks_do_not_have(world, unchanged, part, words):
    cluster, _ = world
    with pytest.raises(LayoutMismatch, match=words):
        Client(cluster.nodes["a"].control_path, cluster.space, part)


def test_the_whole_as_a_part(world):
    cluster, _ = world
    Client(cluster.nodes["a"].control_path, cluster.space, Part(0, 1, 0, 1)).close()


def test_a_closed_client(world, unchanged):
    cluster, _ = world
    worker = cluster.worker("a", 4)
    lease = worker.client.lease(cluster.hashes(3), 30.0)
    worker.client.close()
    worker.client.close()
    with pytest.raises(StoreUnavailable):
        lease.block(0)
    hashes = cluster.hashes(3)
    client = worker.client
    for verb in VERBS:
        with pytest.raises(StoreUnavailable, match="wanted an open client"):
            VERBS[verb](client, hashes)
    for call in (lambda: client.publish([0]), lambda: client.begin_publish([0]), lambda: client.prepare_ticket(1)):
        with pytest.raises(StoreUnavailable, match="wanted an open client"):
            call()
    ticket = world[1].client.prepare_ticket(1)
    with pytest.raises(StoreUnavailable, match="wanted an open client"):
        client.fetch(ticket, [0])
    with pytest.raises(StoreUnavailable):
        worker.client.stats()
    with pytest.raises(StoreUnavailable):
        worker.client.register_kv_caches(worker.caches)


def test_a_store_that_was_restarted_is_another_one(cluster):
    cluster.add("a")
    worker = cluster.worker("a", 4)
    hashes = cluster.hashes(2)
    worker.save(hashes, range(2))
    old = cluster.nodes["a"]
    cluster.stop_node("a")
    new = cluster.add("a")
    parts_of(worker.client).store.path = new.control_path
    parts_of(worker.client).store.for_jobs.idle.clear()
    assert old.state.epoch != new.state.epoch
    result = worker.load(hashes, range(2))
    assert result.num_blocks == 0
    assert "another one" in result.failed[0].detail
    with pytest.raises(StoreUnavailable, match="restarted"):
        worker.save(hashes, range(2))


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:raykv-arena")


def test_close_unmaps_the_arena_whatever_errors_of_its_jobs_are_kept(cluster):
    cluster.add("a")
    worker = cluster.worker("a", 4)
    cluster.stop_node("a")
    before = num_mappings()
    with pytest.raises((StoreUnavailable, TransferError)) as kept:
        worker.client.save(cluster.hashes(2), range(2)).result(10)
    worker.client.close()
    assert num_mappings() == before - 1
    assert kept.value.__traceback__ is not None


def test_an_aborted_save_leaves_nothing(world, unchanged, monkeypatch):
    cluster, worker = world

    def fail(pages, indexes, slots):
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(parts_of(worker.client).copier, "into_slots", fail)
    with pytest.raises(RuntimeError, match="the copy failed"):
        worker.save(cluster.hashes(4, seed=3), range(4))


# Copies of any layout.


@pytest.mark.parametrize("form", ["blocks first", "pairs", "dict", "cross layer"])
def test_what_one_layout_saves_another_loads(world, form):
    cluster, worker = world
    with cluster.client("a") as client:
        if form == "blocks first":
            caches = [torch.zeros(7, 2, 4, 2, 8) for _ in range(2)]
            get = lambda layer, block: caches[layer][block]  # noqa: E731
        elif form == "pairs":
            caches = [(torch.zeros(7, 4, 2, 8), torch.zeros(7, 4, 2, 8)) for _ in range(2)]
            get = lambda layer, block: torch.stack([t[block] for t in caches[layer]])  # noqa: E731
        elif form == "dict":
            caches = {f"layers.{i}": torch.zeros(2, 7, 4, 2, 8) for i in range(2)}
            get = lambda layer, block: caches[f"layers.{layer}"][:, block]  # noqa: E731
        else:
            caches = torch.zeros(7, 2, 2, 2, 4, 8)
            get = lambda layer, block: caches[block, :, layer].permute(1, 2, 0, 3)  # noqa: E731
        client.register_kv_caches(caches, "BHLPTD" if form == "cross layer" else None)
        assert client.load(cluster.hashes(3), [6, 0, 3]).result(5).num_blocks == 3
        for i, block in enumerate([6, 0, 3]):
            for layer in range(2):
                assert torch.equal(get(layer, block), worker.caches[layer][:, i])
        assert not get(0, 1).any()


# Jobs.


def test_a_job_can_be_waited_for_polled_and_awaited(world):
    cluster, worker = world
    job = worker.client.load(cluster.hashes(3), [0, 1, 2])
    assert job.result(5).num_blocks == 3
    assert job.done()
    assert "3 blocks, done" in repr(job)

    async def load():
        return await worker.client.load(cluster.hashes(3), [0, 1, 2])

    assert asyncio.run(asyncio.wait_for(load(), 5)).num_blocks == 3


def test_a_job_that_takes_longer_goes_on():
    future: Future[int] = Future()
    job, told = Job(future, "load of 1 block", lambda timeout_s: True), threading.Event()
    job.add_done_callback(lambda done: told.set() if done is job else None)
    with pytest.raises(JobRunning, match="still running"):
        job.result(0.01)
    assert not job.done()
    future.set_result(3)
    assert job.result(0.01) == 3
    assert told.wait(1)


def test_a_jobs_own_timeout_is_not_taken_for_waiting():
    future: Future[int] = Future()
    future.set_exception(TimeoutError("of the job"))
    with pytest.raises(TimeoutError, match="of the job"):
        Job(future, "x", lambda timeout_s: True).result(1)


class Gate:
    """Holds a copy until it is opened."""

    def __init__(self, copy):
        self.copy, self.entered, self.open = copy, threading.Event(), threading.Event()

    def __call__(self, *args):
        self.entered.set()
        assert self.open.wait(5)
        self.copy(*args)


def test_a_job_is_not_abandoned_while_it_copies(world, unchanged, monkeypatch):
    cluster, worker = world
    gate = Gate(parts_of(worker.client).copier.out_of_slots)
    monkeypatch.setattr(parts_of(worker.client).copier, "out_of_slots", gate)
    job = worker.client.load(cluster.hashes(3), [0, 1, 2])
    assert gate.entered.wait(5)
    assert not job.abandon(0.05)
    gate.open.set()
    job.result(5)
    assert job.abandon(1)


def test_an_abandoned_load_writes_nothing_any_more(cluster):
    cluster.add("a")
    worker = cluster.worker("a", 8)
    hashes = cluster.hashes(3)
    worker.save(hashes, range(3))
    copier = parts_of(worker.client).copier
    gate = Gate(lambda: None)
    taken = parts_of(worker.client).store.for_jobs.taken

    def wait_then_take():
        gate()
        return taken()

    parts_of(worker.client).store.for_jobs.taken = wait_then_take
    before = worker.bytes()
    job = worker.client.load(hashes, [5, 6, 7])
    assert gate.entered.wait(5)
    assert job.abandon(1)
    gate.open.set()
    result = job.result(5)
    assert result.num_blocks == 0
    assert "abandoned" in result.failed[0].detail
    assert worker.bytes() == before
    assert copier is parts_of(worker.client).copier


def test_an_abandoned_load_gives_its_pins_back_at_once(cluster, wait_until, monkeypatch):
    core = cluster.add("a")
    worker, hashes = cluster.worker("a", 8), cluster.hashes(3)
    worker.save(hashes, range(3))
    answer, gate = load_service.send_piece, Gate(lambda: None)

    def late(*args, **more):
        gate()
        answer(*args, **more)

    monkeypatch.setattr(load_service, "send_piece", late)
    job = worker.client.load(hashes, [5, 6, 7])
    assert gate.entered.wait(5)
    assert job.abandon(1)
    assert core.pool.stats().num_pinned == 3
    gate.open.set()
    assert job.result(5).num_blocks == 0
    # Long before lease_ttl_s, which is 30 s here.
    wait_until(lambda: core.pool.stats().num_leases == 0)


def test_slots_claimed_for_a_save_that_did_not_hear_of_them_come_back(cluster, wait_until, monkeypatch):
    core = cluster.add("a", call_timeout_s=0.3)
    worker = cluster.worker("a", 8)
    prepare, gate = core.state.pool_service.prepare_store, Gate(lambda: None)

    def late(*args, **more):
        gate()
        return prepare(*args, **more)

    monkeypatch.setattr(core.state.pool_service, "prepare_store", late)
    with pytest.raises(TransferTimeout):
        worker.save(cluster.hashes(3), range(3))
    gate.open.set()
    wait_until(lambda: core.control.num_calls.get("PREPARE_STORE"))
    monkeypatch.undo()
    assert worker.save(cluster.hashes(2, seed=1), range(2)).num_written == 2
    wait_until(lambda: core.pool.stats().num_writing == core.pool.stats().num_writes == 0)
    assert worker.save(cluster.hashes(3), range(3)).num_written == 3


def test_a_client_that_is_closed_in_the_middle_of_a_copy_keeps_its_slots(cluster, wait_until, monkeypatch):
    core = cluster.add("a")
    worker = cluster.worker("a", 8)
    gate = Gate(parts_of(worker.client).copier.into_slots)
    monkeypatch.setattr(parts_of(worker.client).copier, "into_slots", gate)
    job = worker.client.save(cluster.hashes(3), range(3))
    assert gate.entered.wait(5)
    worker.client.close(0.1)
    time.sleep(0.2)
    assert core.pool.stats().num_writing == 3
    gate.open.set()
    with pytest.raises(PeerLost):
        job.result(5)
    wait_until(lambda: core.pool.stats().num_writing == 0)


def test_a_copy_that_outlasts_a_close_by_far_keeps_its_slots_to_its_end(cluster, wait_until, monkeypatch, caplog):
    """The thread that waits for it says so again and again."""
    monkeypatch.setattr("kvstore.client.attachment._LATE_S", 0.01)
    core = cluster.add("a", mover=False)
    worker = cluster.worker("a", 8)
    gate = Gate(parts_of(worker.client).copier.into_slots)
    monkeypatch.setattr(parts_of(worker.client).copier, "into_slots", gate)
    job = worker.client.save(cluster.hashes(3), range(3))
    assert gate.entered.wait(5)
    worker.client.close(0.0)
    wait_until(lambda: caplog.text.count("jobs of a closed client still run") >= 3)
    cluster.client("a").stats()  # What was said before is heard by then.
    assert core.pool.stats().num_writing == 3
    gate.open.set()
    with pytest.raises(PeerLost):
        job.result(5)
    wait_until(lambda: core.pool.stats().num_writing == 0)


def test_an_abandoned_save_publishes_nothing(cluster, wait_until):
    core = cluster.add("a")
    worker = cluster.worker("a", 8)
    gate = Gate(lambda: None)
    taken = parts_of(worker.client).store.for_jobs.taken

    def wait_then_take():
        gate()
        return taken()

    parts_of(worker.client).store.for_jobs.taken = wait_then_take
    job = worker.client.save(cluster.hashes(3), range(3))
    assert gate.entered.wait(5)
    assert job.abandon(1)
    gate.open.set()
    with pytest.raises(JobAbandoned):
        job.result(5)
    assert worker.client.lookup(cluster.hashes(3)).num_local == 0
    stats = core.pool.stats()
    assert (stats.num_free, stats.num_writes) == (stats.num_slots, 0)


def test_who_closes_a_client_that_loses_its_store_waits_for_the_end_of_its_memory(cluster, monkeypatch):
    cluster.add("a")
    client, ended, start = cluster.client("a"), threading.Event(), threading.Thread.start

    def start_late(thread):
        if thread.name == "raykv-unmap":
            start(threading.Thread(target=parts_of(client).end_jobs, args=(ended,), daemon=True))
            time.sleep(0.2)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    parts_of(client).lose()
    assert ended.wait(5)
    assert parts_of(client).is_unmapped


class NoThreads:
    """`threading` where no thread can be started, as while Python ends."""

    Event, Lock, RLock, TIMEOUT_MAX = threading.Event, threading.Lock, threading.RLock, threading.TIMEOUT_MAX

    class Thread:
        def __init__(self, *_, **__):
            pass

        def start(self):
            raise RuntimeError("can't start new thread")


def test_a_client_is_closed_whole_where_no_thread_can_be_started(cluster, monkeypatch, wait_until):
    core = cluster.add("a", mover=False)
    worker, hashes = cluster.worker("a"), cluster.hashes(3)
    worker.save(hashes, range(3))
    worker.client.pin(hashes)
    assert core.pool.stats().num_pinned == 3
    monkeypatch.setattr("kvstore.client.attachment.threading", NoThreads)
    worker.client.close(5.0)
    wait_until(lambda: core.pool.stats().num_pinned == 0)
    worker.client.close()
    with pytest.raises(StoreUnavailable, match="closed one"):
        worker.client.prefetch(hashes)


def test_a_client_is_made_where_no_thread_can_be_started(cluster, monkeypatch):
    cluster.add("a", mover=False)
    monkeypatch.setattr("kvstore.client.attachment.threading", NoThreads)
    worker = cluster.worker("a")
    monkeypatch.undo()
    worker.save(cluster.hashes(2), range(2))


def test_only_what_pin_returned_can_be_unpinned(cluster):
    cluster.add("a", mover=False)
    worker, hashes = cluster.worker("a"), cluster.hashes(2)
    for wrong in (hashes, None, 3):
        with pytest.raises(InvalidRequest, match=r"wanted what pin\(\) returned"):
            worker.client.unpin(wrong)


def test_too_few_engine_blocks_are_refused_with_how_many_are_wanted(cluster):
    cluster.add("a", mover=False)
    worker = cluster.worker("a")
    for publish in (worker.client.publish, worker.client.begin_publish):
        with pytest.raises(InvalidRequest, match=r"block_ids: wanted at least 1 engine block.*, got 0; "):
            publish([])
        with pytest.raises(InvalidRequest, match="block_ids: wanted a list of engine blocks, got int; "):
            publish(7)
        with pytest.raises(InvalidRequest, match="block_ids: wanted a list of engine blocks, got Tensor; "):
            publish(torch.tensor(7))
    for verb in (worker.client.save, worker.client.load):
        with pytest.raises(InvalidRequest, match="block_ids: wanted 4 engine blocks, got 2; "):
            verb(cluster.hashes(4), [0, 1])
    ticket = worker.client.publish([0, 1, 2])
    with pytest.raises(InvalidRequest, match="block_ids: wanted 3 engine blocks, got 1; "):
        worker.client.fetch(ticket, [3])

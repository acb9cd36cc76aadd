"""Copies that go on beside the thread that began them: what a job lets go of, and when.

A GPU's copier does so; here one for CPU tensors that copies when it is told to. The real one:
tests/kvstore/client/test_cuda_client.py.
"""

from __future__ import annotations

import threading

import pytest
import torch
from inner_parts import parts_of

from kvstore.client.results import MissReason
from kvstore.engine.cuda_copier import DIRECT_FROM_BYTES, CopyPath, chosen_path
from kvstore.engine.host_copier import HostCopier
from kvstore.errors import (
    ConfigError,
    CopyStuck,
    InvalidRequest,
    JobRunning,
    KernelError,
    LayoutMismatch,
    RegistrationFailed,
)
from kvstore.kernel_errors import kernel_errors


class Order:
    """A `CopyOrder` that is settled when its copies are made."""

    def __init__(self):
        self.queued, self.settled = threading.Event(), threading.Event()

    def end(self):
        self.queued.set()

    def wait_on(self, stream, timeout_s):
        return self.queued.wait(timeout_s)

    def hold_engine(self):
        raise AssertionError("only a publication in a stage does so")

    def settle(self, timeout_s):
        return self.settled.wait(timeout_s)


class LateCopier(HostCopier):
    """Copies out of slots when `go` is set, in `finish`."""

    def __init__(self, client, caches):
        client.register_kv_caches(caches)
        super().__init__(parts_of(client).copier.cache, parts_of(client).arena, client.slot_bytes, client.num_slots)
        self.late, self.go, self.at_finish, self.fails = [], threading.Event(), lambda: None, None
        parts_of(client).copier = self

    def order(self):
        return Order()

    def out_of_slots(self, *args):
        self.late.append(args)
        if self.fails is not None:
            raise self.fails

    def finish(self, pages):
        pages.order.end()
        assert self.go.wait(5)
        self.at_finish()
        for args in self.late:
            super().out_of_slots(*args)
        self.late.clear()
        pages.order.settled.set()


@pytest.fixture
def late(cluster):
    """A client on a node with three stored blocks, and its copier."""
    cluster.add("a", mover=False)
    cluster.worker("a", 8).save(cluster.hashes(3), range(3))
    client = cluster.client("a")
    copier = LateCopier(client, [torch.zeros(2, 8, 4, 2, 8) for _ in range(2)])
    yield client, copier
    copier.go.set()


def test_slots_stay_pinned_until_the_copies_out_of_them_are_over(cluster, late, wait_until):
    client, copier = late
    pool, held = cluster.nodes["a"].pool, []
    copier.at_finish = lambda: held.append(pool.num_leases())
    job = client.load(cluster.hashes(3), [0, 1, 2])
    job.wait_on(timeout=5)
    assert not job.done()
    copier.go.set()
    assert job.result(5).num_blocks == 3
    assert held == [1]
    assert copier.cache.caches[0].any()
    wait_until(lambda: pool.num_leases() == 0)


def test_waiting_on_copies_that_are_not_queued_has_an_end(cluster, late, monkeypatch):
    client, copier = late
    gate = threading.Event()
    monkeypatch.setattr(copier, "out_of_slots", lambda *args: gate.wait(5))
    job = client.load(cluster.hashes(3), [0, 1, 2])
    with pytest.raises(JobRunning, match="not all queued"):
        job.wait_on(timeout=0.02)
    gate.set()
    copier.go.set()
    job.wait_on(timeout=5)
    job.result(5)


def test_a_load_says_when_nothing_can_refuse_it_any_more(cluster, late):
    client, copier = late
    queued = threading.Event()
    job = client.load(cluster.hashes(3), [0, 1, 2], on_queued=queued.set)
    assert queued.wait(5)
    job.wait_on(timeout=0)
    assert not job.done()
    cluster.stop_node("a")  # What is leased stays mapped, and nobody writes there.
    copier.go.set()
    assert job.result(5).num_blocks == 3
    assert copier.cache.caches[0].any()


@pytest.mark.parametrize("why", ["a block is missing", "a copy is refused", "the lease was over"])
def test_a_load_that_may_still_fail_does_not_say_that_it_cannot(cluster, late, why):
    client, copier = late
    queued, num_blocks = threading.Event(), 3
    if why == "a block is missing":
        num_blocks = 4
    elif why == "a copy is refused":
        copier.fails = RegistrationFailed("not in time")
    else:
        object.__setattr__(client.config, "lease_margin_s", client.config.lease_ttl_s)
    copier.go.set()
    job = client.load(cluster.hashes(num_blocks), list(range(num_blocks)), on_queued=queued.set)
    assert job.result(10).num_blocks < num_blocks
    assert not queued.is_set()


def test_on_the_cpu_waiting_on_a_job_is_waiting_for_it(cluster):
    cluster.add("a", mover=False)
    worker = cluster.worker("a", 8)
    worker.save(cluster.hashes(3), range(3))
    job = worker.client.load(cluster.hashes(3), [4, 5, 6])
    job.wait_on(timeout=5)
    assert job.done()
    assert worker.block(5) == worker.block(1)


def test_a_load_is_abandoned_only_when_its_copies_are_over(cluster, late):
    client, copier = late
    job = client.load(cluster.hashes(3), [0, 1, 2])
    job.wait_on(timeout=5)
    assert not job.abandon(0.05)
    copier.go.set()
    assert job.abandon(5)
    job.result(5)


def test_a_failed_copy_is_awaited_before_its_slots_go(cluster, late, wait_until):
    client, copier = late
    pool, held = cluster.nodes["a"].pool, []
    copier.fails = KernelError("the driver refused")
    copier.at_finish = lambda: held.append(pool.num_leases())
    copier.go.set()
    with pytest.raises(KernelError, match="refused"):
        client.load(cluster.hashes(3), [0, 1, 2]).result(5)
    assert held == [1]
    wait_until(lambda: pool.num_leases() == 0)


def test_memory_that_is_not_pinned_is_a_miss_and_no_lost_store(cluster, late, wait_until):
    client, copier = late
    copier.fails = RegistrationFailed("not in time")
    copier.go.set()
    result = client.load(cluster.hashes(3), [0, 1, 2]).result(5)
    assert (result.num_blocks, result.failed[0].reason) == (0, MissReason.OTHER)
    assert "not in time" in result.failed[0].detail
    wait_until(lambda: cluster.nodes["a"].pool.num_leases() == 0)


@pytest.mark.parametrize("is_closed", ["after it", "before it"])
def test_a_save_that_is_stuck_keeps_its_slots_whatever_the_client_does(
    cluster, late, monkeypatch, wait_until, is_closed
):
    client, copier = late
    pool, before = cluster.nodes["a"].pool, cluster.nodes["a"].pool.stats()
    entered, known = threading.Event(), set(threading.enumerate())

    def stuck(pages, indexes, slots):
        entered.set()
        if is_closed == "before it":
            assert copier.go.wait(5)
        raise CopyStuck("the device did not come to it")

    monkeypatch.setattr(copier, "into_slots", stuck)
    job = client.save(cluster.hashes(2, seed=1), [0, 1])
    assert entered.wait(5)
    if is_closed == "before it":
        client.close(0.0)
        copier.go.set()
    with pytest.raises(CopyStuck):
        job.result(5)
    assert pool.stats().num_free == before.num_free - 2
    client.close()
    wait_until(lambda: not any(each.name == "raykv-unmap" for each in set(threading.enumerate()) - known))
    # What this client said before is heard by then.
    assert cluster.worker("a", 4).client.lookup(cluster.hashes(2, seed=1)).num_local == 0
    assert pool.stats().num_free == before.num_free - 2


def test_a_load_that_is_stuck_calls_no_block_the_engines_again(cluster, late, monkeypatch):
    client, copier = late

    def stuck(pages):
        raise CopyStuck("the device did not come to it")

    monkeypatch.setattr(copier, "finish", stuck)
    job = client.load(cluster.hashes(3), [0, 1, 2])
    with pytest.raises(CopyStuck):
        job.result(5)
    assert not job.abandon(0.02)


# Which way, and what is missing.


def test_the_path_follows_the_length_of_runs_unless_it_is_given():
    assert chosen_path(CopyPath.AUTO, DIRECT_FROM_BYTES) is CopyPath.DIRECT
    assert chosen_path(CopyPath.AUTO, DIRECT_FROM_BYTES - 1) is CopyPath.STAGED
    assert chosen_path(CopyPath.STAGED, 1 << 30) is CopyPath.STAGED
    assert chosen_path(CopyPath.DIRECT, 2) is CopyPath.DIRECT


def test_a_path_that_is_none_and_devices_that_are_none(cluster):
    cluster.add("a", mover=False)
    client = cluster.client("a")
    caches = [torch.zeros(2, 8, 4, 2, 8) for _ in range(2)]
    with pytest.raises(InvalidRequest, match="wanted one of 'auto', 'staged', 'direct', got 'fast'"):
        client.register_kv_caches(caches, copy_path="fast")
    with pytest.raises(LayoutMismatch, match="meta"):
        client.register_kv_caches(torch.empty((8, 2, 2, 2, 4, 8), device="meta"), "BHLPTD")
    client.register_kv_caches(caches, copy_path="direct")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test misses")
def test_a_machine_without_a_driver_says_so(cluster):
    cluster.add("a", mover=False)
    client = cluster.client("a")
    with pytest.raises(ConfigError, match="wanted the CUDA driver"):
        parts_of(client).mapping.pinned(client.slot_bytes, client.num_slots, 0)


@pytest.mark.parametrize(
    ("raised", "wanted", "said"),
    [
        (ImportError("install raykv[cuda13]"), ConfigError, "raykv"),
        (OSError("libcuda.so.1: cannot open"), ConfigError, "CUDA driver"),
        (RuntimeError("CUDA_ERROR_LAUNCH_FAILED"), KernelError, "preparing failed: CUDA_ERROR_LAUNCH_FAILED"),
        (ValueError("wanted slots"), KernelError, "wanted slots"),
        (InvalidRequest("a graph"), InvalidRequest, "a graph"),
    ],
)
def test_what_kernels_raise_becomes_ours(raised, wanted, said):
    with pytest.raises(wanted, match=said), kernel_errors("preparing"):
        raise raised

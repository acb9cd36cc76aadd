"""A machine that was suspended: its peers' leases went on, so nothing that it read under them counts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore.client import load
from kvstore.client.results import MissReason
from kvstore.runtime import clock

#: They measure how long something takes or waits in one process, and compare nothing with the end of a lease.
MEASURE_ONLY = {
    "cli",
    "client/handoff/stage_link", "engine/cuda_order", "handoff/lanes", "memory/pinning", "mover/nixl", "mover/parallel",
    "mover/process", "mover/reads", "runtime/clock", "runtime/guard", "tools/lane_probe",
}  # fmt: skip
#: Folders with no part in leases, or only that of a caller.
_BESIDE = {"actors", "bench", "integrations", "kernels"}


@pytest.fixture
def suspend(monkeypatch):
    """Has the machine sleep: the clock of leases goes on, the one of waits does not."""
    slept_s, awake_s = [0.0], clock.now_s
    monkeypatch.setattr("kvstore.runtime.clock.now_s", lambda: awake_s() + slept_s[0])

    def sleep(seconds: float) -> None:
        slept_s[0] += seconds

    return sleep


@pytest.fixture
def workers(cluster):
    cluster.add("a")
    cluster.add("b")
    one, two = cluster.worker("a", 8, seed=1), cluster.worker("b", 8, seed=2)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    return one, two, hashes


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no clock that counts suspended time")
def test_the_clock_counts_the_time_in_which_the_machine_was_suspended():
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before_s <= clock.now_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_nothing_that_grants_or_uses_leases_looks_at_another_clock(repo_root: Path):
    package = repo_root / "kvstore"
    paths = (path for path in package.glob("**/*.py") if path.relative_to(package).parts[0] not in _BESIDE)
    found = [path for path in paths if "time.monotonic" in path.read_text()]
    assert {path.relative_to(package).with_suffix("").as_posix() for path in found} == MEASURE_ONLY


def test_what_a_reader_that_slept_copied_out_is_a_miss(workers, suspend, monkeypatch):
    one, _, hashes = workers
    copy_out = load.Answer.copy_out

    def slow(self, *args, **more):
        yield from copy_out(self, *args, **more)
        suspend(3600.0)

    monkeypatch.setattr(load.Answer, "copy_out", slow)
    result = one.load(hashes, range(4))
    assert result.num_blocks == 0
    assert {failure.reason for failure in result.failed} == {MissReason.LEASE_EXPIRED}
    monkeypatch.setattr(load.Answer, "copy_out", copy_out)
    assert one.load(hashes, range(4)).num_blocks == 4


def test_what_a_store_that_slept_read_from_a_peer_is_a_miss(cluster, workers, suspend, monkeypatch):
    _, two, hashes = workers
    mover = cluster.nodes["b"].state.mover
    read = mover.read

    def slow(request, description, on_done, **more):
        def hear(done, error):
            suspend(3600.0)
            on_done(done, error)

        return read(request, description, hear, **more)

    monkeypatch.setattr(mover, "read", slow)
    before = two.bytes()
    assert two.load(hashes, range(4)).num_blocks == 0
    assert two.bytes() == before
    assert cluster.nodes["b"].pool.stats().num_idle == 0
    monkeypatch.setattr(mover, "read", read)
    assert two.load(hashes, range(4)).num_blocks == 4


def test_grants_end_while_their_store_sleeps(cluster, workers, suspend, wait_until):
    one, _, hashes = workers
    lease = one.client.lease(hashes, ttl_s=600.0)
    assert lease.held()
    suspend(601.0)
    assert not lease.held()
    wait_until(lambda: cluster.nodes["a"].pool.stats().num_leases == 0)

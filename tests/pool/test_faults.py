"""A fault at every step of every operation: nothing stays behind, and the same call then succeeds."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.remote.directory_link import Hints
from kvstore.remote.fetch import Fetcher
from kvstore.remote.peers import PeerBook
from kvstore.rpc.server import ControlServer
from poolcheck.faults import Faults, FaultyTransport, InjectedFault

NUM_BLOCKS, NUM_SLOTS = 3, 8


@dataclass
class Place:
    """Two nodes, a worker at each, and faults in everything that they do."""

    cluster: object
    faults: Faults
    one: object
    two: object

    @property
    def cores(self):
        return self.cluster.nodes.values()

    def hashes(self, seed=0, num_blocks=NUM_BLOCKS):
        return self.cluster.hashes(num_blocks, seed)

    def held(self):
        """What must be as it was: pins, writes, leases, quarantine; and every slot is somewhere."""
        found = {}
        for core in self.cores:
            core.pool.check_integrity()
            s = core.pool.stats()
            assert s.num_free + s.num_idle + s.num_pinned + s.num_writing + s.num_quarantined == s.num_slots
            found[core.state.node_id] = (s.num_pinned, s.num_writing, s.num_quarantined, s.num_leases, s.num_writes)
        return found

    def forgive(self):
        """Let no back-off stand between a fault and the next try."""
        for core in self.cores:
            core.state.hints.ask_after_s = 0.0
            for node_id in self.cluster.nodes:
                core.state.peers.succeeded(node_id)


def save(place):
    result = place.one.save(place.hashes(), range(NUM_BLOCKS))
    return result.num_blocks == NUM_BLOCKS and place.one.client.lookup(place.hashes(), remote=False).num_local == 3


def lease(place):
    with place.one.client.lease(place.hashes(), 1.2) as held:
        return len(held) == NUM_BLOCKS and bytes(held.block(0)) != b""


def load(place):
    place.one.caches[0].fill_(0.0)
    return place.one.load(place.hashes(), range(10, 13)).num_blocks == NUM_BLOCKS


def fetch(place):
    result = place.two.load(place.hashes(), range(10, 13), timeout_s=1.0)
    return result.num_blocks == NUM_BLOCKS


def evict(place):
    """Save into a pool that is full of other blocks."""
    return place.one.save(place.hashes(9, NUM_SLOTS), range(NUM_SLOTS)).num_blocks == NUM_SLOTS


def nothing(place):
    pass


def stored(place):
    assert save(place)


def full(place):
    for seed in (1, 2, 3):
        place.one.save(place.hashes(seed), range(NUM_BLOCKS))
    assert place.cluster.nodes["a"].pool.stats().num_free == 0


def make_place(cluster, faults, monkeypatch):
    settings = {
        "capacity_bytes": 1 << 16, "block_bytes": (1 << 16) // NUM_SLOTS, "max_pinned_fraction": 1.0,
        "lease_ttl_s": 1.2, "lease_margin_s": 0.1, "call_timeout_s": 1.0, "transfer_timeout_s": 1.0,
    }  # fmt: skip
    for node_id in "ab":
        cluster.add(node_id, wrap=lambda transport: FaultyTransport(transport, faults), **settings)
    faults.on_the_wire(monkeypatch)
    faults.in_copies(monkeypatch)
    place = Place(cluster, faults, cluster.worker("a", 24, seed=1), cluster.worker("b", 24, seed=2))
    for core in cluster.nodes.values():
        core.pool._yield = faults.in_pool
    return place


@pytest.fixture(name="place")
def _place(cluster, monkeypatch):
    return make_place(cluster, Faults(), monkeypatch)


def run_with_fault(place, operation, fail_at):
    """Run an operation that breaks at a step; whatever it says, it must say it in time and with our errors."""
    place.faults.arm(fail_at)
    begun_s = time.monotonic()
    with contextlib.suppress(KVStoreError, InjectedFault):
        operation(place)
    steps = place.faults.disarm()
    assert time.monotonic() - begun_s < 5.0, f"took {time.monotonic() - begun_s:.1f} s after a fault at {steps}"
    return steps


@pytest.mark.parametrize(
    ("before", "operation"),
    [(nothing, save), (stored, lease), (stored, load), (stored, fetch), (full, evict)],
    ids=["save", "lease", "load", "fetch", "evict"],
)
def test_a_fault_at_every_step_leaves_nothing(place, wait_until, before, operation):
    before(place)
    place.faults.arm()
    assert operation(place)
    steps = place.faults.disarm()
    wait_until(lambda: all(not any(counts) for counts in place.held().values()))
    assert len(steps) >= 4
    for fail_at, step in enumerate(steps):
        for core in place.cores:
            core.pool.clear(place.cluster.space.digest)
        before(place)
        run_with_fault(place, operation, fail_at)
        wait_until(lambda: all(not any(counts) for counts in place.held().values()))
        # A fetch whose client has left may still wait for its mover, and backs the peer off when it gives up.
        for _ in range(3):
            place.forgive()
            if again := operation(place):
                break
        assert again, f"after a fault at step {fail_at}, {step}, the same call fails"
        wait_until(lambda: all(not any(counts) for counts in place.held().values()))


# Ending.


def open_things():
    """Descriptors by what they are, and mappings of arenas."""
    kinds = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{name}").split(":")[0].split(" ")[0]] += 1
    kinds["arenas mapped"] = Path("/proc/self/maps").read_text().count("memfd:raykv-arena")
    return kinds


ENDINGS = ((Fetcher, "stop"), (Hints, "stop"), (PeerBook, "close"), (ControlServer, "stop"))


def shut_down(place, *, calmly):
    """End a worker that holds a lease, and both stores; `calmly` expects no fault."""
    expected = () if calmly else (KVStoreError, InjectedFault)
    with contextlib.suppress(*expected):
        place.two.client.close(1.0)
    for core in list(place.cores):
        with contextlib.suppress(*expected):
            core.stop()


def test_a_fault_at_every_step_of_a_shutdown_leaves_nothing_open(cluster_class, monkeypatch):
    def run(fail_at):
        with monkeypatch.context() as patch:
            cluster, faults = cluster_class(), Faults()
            place = make_place(cluster, faults, patch)
            stored(place)
            assert fetch(place)
            place.two.client.lease(place.hashes(), 1.2)
            for kind, name in ENDINGS:
                patch.setattr(kind, name, faults.before(getattr(kind, name), f"{kind.__name__}.{name}"))
            faults.arm(fail_at)
            shut_down(place, calmly=fail_at < 0)
            steps = faults.disarm()
            shut_down(place, calmly=True)
            cluster.stop()
            return steps

    steps = run(-1)
    gc.collect()
    before = open_things()
    assert len(steps) >= 8
    for fail_at, step in enumerate(steps):
        run(fail_at)
        gc.collect()
        assert open_things() == before, f"after a fault at step {fail_at}, {step}"

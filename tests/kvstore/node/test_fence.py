"""The fence: a real mover process whose READs never end is killed, its slots come back, another takes over."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvstore.client.results import MissReason
from kvstore.mover.transport import ReadState

ROOT = Path(__file__).parents[3]
#: A mover whose READs write nothing and never end, until a byte comes on its standard input.
MOVER = """
import os, sys, threading
import numpy as np
from kvstore.config import PROTOCOL_VERSION
from kvstore.rpc.connect import connect_local
from kvstore.mover.process import Mover
from tests.kvstore.loopback import LoopbackNetwork, LoopbackTransport
from kvstore.mover.transport import ReadState

class Stuck(LoopbackTransport):
    over = False
    def post(self, request):
        self._next += 1
        self.handles[self._next] = request
        return self._next
    def poll(self, handle):
        return ReadState.DONE if self.over else ReadState.RUNNING

client, fd = connect_local(sys.argv[1], {"role": "mover", "protocol": PROTOCOL_VERSION}, timeout_s=5.0)
transport = Stuck("stuck", np.zeros(1 << 17, np.uint8), LoopbackNetwork())
mover = Mover(client.detach(), transport)
threading.Thread(target=mover.run, args=(4096,), daemon=True).start()
for line in sys.stdin:
    if line == "end\\n":
        transport.over = True
    else:
        mover._sock.shutdown(2)
"""


class StuckMover:
    def __init__(self, core):
        self.gone = threading.Event()
        core.control.on_mover_gone = self.gone.set
        self.process = subprocess.Popen(
            [sys.executable, "-c", MOVER, core.control_path], cwd=ROOT, stdin=subprocess.PIPE, text=True
        )
        assert core.state.mover.wait_ready(10)
        assert core.state.mover.pid == self.process.pid

    def say(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def stop(self):
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()


@pytest.fixture
def stuck(cluster):
    """A node "a" with four saved blocks, and a node "b" whose mover never gets anywhere."""
    movers = []

    def make(**settings):
        cluster.add("a")
        core = cluster.add("b", mover=False, transfer_timeout_s=0.3, **settings)
        one, two = cluster.worker("a", 8, seed=1), cluster.worker("b", 8, seed=2)
        hashes = cluster.hashes(4)
        one.save(hashes, range(4))
        movers.append(StuckMover(core))
        return core, movers[0], one, two, hashes

    yield make
    for mover in movers:
        mover.stop()


def num_leases(cluster):
    return cluster.nodes["a"].pool.stats().num_leases


def test_a_mover_whose_read_stays_open_too_long_is_killed_and_replaced(cluster, stuck, wait_until):
    core, mover, one, two, hashes = stuck(max_quarantine_s=1.0)
    before = two.bytes()
    result = two.load(hashes, range(4))
    given_up_s = time.monotonic()
    assert (result.num_blocks, result.failed[0].reason) == (0, MissReason.TIMEOUT)
    assert core.pool.stats().num_quarantined == 4
    assert num_leases(cluster) == 1, "the source stays pinned while it may still be read"
    generation = core.state.mover.own.generation
    assert mover.gone.wait(5)
    assert mover.process.wait(5) == -9
    assert 0.5 < time.monotonic() - given_up_s < 3
    wait_until(lambda: core.pool.stats().num_quarantined == 0)
    wait_until(lambda: num_leases(cluster) == 0)
    assert core.stats()["num_fenced_movers"] == 1
    assert two.bytes() == before
    # Until another one is up, loads fail closed; the peer is not blamed.
    lost = two.load(hashes, range(4))
    assert lost.failed[0].reason is MissReason.PEER_LOST
    cluster.start_mover("b")
    assert core.state.mover.own.generation == generation + 1
    wait_until(lambda: core.state.peers.is_usable("a"))
    assert two.load(hashes, range(4)).num_blocks == 4
    assert all(two.block(i) == one.block(i) for i in range(4))


def test_at_the_cap_the_mover_is_killed_at_once(cluster, stuck, wait_until):
    core, mover, _, two, hashes = stuck(max_quarantined_fraction=0.02, max_quarantine_s=100.0)
    assert two.load(hashes, range(4)).failed[0].reason is MissReason.TIMEOUT
    assert mover.gone.wait(20)
    assert mover.process.wait(5) == -9
    wait_until(lambda: core.pool.stats().num_quarantined == 0)
    cluster.start_mover("b")
    wait_until(lambda: core.state.peers.is_usable("a"))
    assert two.load(hashes, range(4)).num_blocks == 4


def test_a_read_that_ends_in_time_saves_its_mover_and_frees_both_sides(cluster, stuck, wait_until):
    core, mover, _, two, hashes = stuck(max_quarantine_s=100.0)
    two.load(hashes, range(4))
    assert (core.pool.stats().num_quarantined, num_leases(cluster)) == (4, 1)
    mover.say("end")
    wait_until(lambda: core.pool.stats().num_quarantined == 0)
    wait_until(lambda: num_leases(cluster) == 0)
    assert mover.process.poll() is None
    assert core.stats()["num_fenced_movers"] == 0


def test_a_mover_that_hung_up_is_killed(cluster, stuck):
    core, mover, _, two, hashes = stuck(max_quarantine_s=100.0)
    two.load(hashes, range(4))
    mover.say("hang up")
    assert mover.gone.wait(5)
    assert mover.process.wait(5) == -9
    assert core.pool.stats().num_quarantined == 0


def test_the_stores_own_process_is_never_killed(cluster, wait_until):
    made = []

    class Stuck:
        def __init__(self, inner):
            self.inner, self.over = inner, False
            made.append(self)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def poll(self, handle):
            return self.inner.poll(handle) if self.over else ReadState.RUNNING

    cluster.add("a")
    core = cluster.add("b", wrap=Stuck, transfer_timeout_s=0.2, max_quarantine_s=0.1)
    one, two = cluster.worker("a", 8, seed=1), cluster.worker("b", 8)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    two.load(hashes, range(4))
    wait_until(lambda: core.control.fence.killed_pid == os.getpid())
    assert (core.pool.stats().num_quarantined, core.stats()["num_fenced_movers"]) == (4, 0)
    assert core.state.mover.own is not None, "it goes on serving"
    made[0].over = True
    wait_until(lambda: core.pool.stats().num_quarantined == 0)


def test_a_second_mover_is_turned_away_while_there_is_one(cluster):
    core = cluster.add("b")
    before = core.state.mover.own
    other = subprocess.Popen([sys.executable, "-c", MOVER, core.control_path], stdin=subprocess.PIPE, text=True)
    try:
        deadline_s = time.monotonic() + 10
        while core.stats()["calls"].get("MOVER_READY", 0) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert core.state.mover.own == before
        assert core.state.mover.pid == os.getpid()
    finally:
        other.kill()
        other.wait(10)
        other.stdin.close()

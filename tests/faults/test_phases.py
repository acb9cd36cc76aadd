"""Every process of a load killed or stopped at every phase of it, with real NIXL on both lanes.

A phase is reached by a gate in the process that runs it, never by waiting for a while. Whatever a load calls usable
is compared with its stamp, and afterwards nothing may be held anywhere and the same load must succeed.
"""

from __future__ import annotations

import signal
import threading
import time

import pytest

from kvstore.client.results import MissReason
from kvstore.engine.host_copier import HostCopier

LOAD_S = 1.0
#: The load's own time, a call to a peer, the mover's grace, and what a busy machine adds.
BOUND_S = LOAD_S + 0.7 + 1.0 + 3.0


@pytest.fixture(scope="module")
def clusters():
    return {}


@pytest.fixture
def cluster(request, clusters, start_cluster):
    """The cluster of a lane, made once, and once more after a test that left it broken."""
    made = clusters.pop(request.param, None) or start_cluster(lane=request.param)
    yield made
    made.resume()
    if made.is_whole:
        clusters[request.param] = made


class CopyGate:
    """Holds the worker's copies out of the arena."""

    def __init__(self, monkeypatch):
        self.open, self.held = threading.Event(), threading.Event()
        copy = HostCopier.out_of_slots

        def gated(*args, **options):
            self.held.set()
            assert self.open.wait(20)
            return copy(*args, **options)

        monkeypatch.setattr(HostCopier, "out_of_slots", gated)


class Phase:
    """A load of 64 blocks that waits in one phase until `go_on`."""

    def __init__(self, cluster, name, eventually, monkeypatch):
        self.cluster, self.name = cluster, name
        cluster.is_whole = False
        self.source, self.reader = cluster.engines["source"], cluster.engines["reader"]
        self.hashes = cluster.chain()
        self.source.save(self.hashes)
        reader = cluster.stores["reader"]
        reader.ask("forgive", node="source")
        eventually(lambda: self.reader.client.lookup(self.hashes).num_blocks == 64)
        # Connected, so that it is the phase that is met and not a handshake.
        eventually(lambda: self.reader.load(self.hashes[:1]).num_blocks == 1)
        self.copy = CopyGate(monkeypatch) if name == "copy" else None
        if name == "read":
            reader.ask("mover", do_="shut")
        elif name != "copy":
            reader.ask("shut", name=name)
        self.began_s = time.monotonic()
        self.job = self.reader.begin_load(self.hashes, timeout_s=LOAD_S)
        if self.copy is not None:
            assert self.copy.held.wait(5)
        elif name == "read":
            eventually(lambda: reader.ask("mover", do_="held") == ["read"], 5)
        else:
            eventually(lambda: reader.ask("held") == [name], 5)

    def go_on(self, reader_lives=True):
        if self.copy is not None:
            self.copy.open.set()
        elif reader_lives and self.name == "read":
            self.cluster.stores["reader"].ask("mover", do_="open")
        elif reader_lives:
            self.cluster.stores["reader"].ask("open")

    def end(self):
        result = self.reader.check(self.hashes, self.job.result(20))
        assert time.monotonic() - self.began_s < BOUND_S
        return result


@pytest.fixture
def reach(eventually, monkeypatch):
    return lambda cluster, name: Phase(cluster, name, eventually, monkeypatch)


def recover(cluster, hashes, eventually, victims=()):
    """What died is back, the same load succeeds, and nothing is held."""
    for node in ("source", "reader"):
        if node in victims:
            cluster.start_store(node)
            cluster.open(node)
    if "directory" in victims:
        cluster.restart_directory()
    for part in cluster.stores.values():
        assert part.ask("ready")
    if "source" in victims:
        cluster.engines["source"].save(hashes)
    eventually(lambda: cluster.engines["reader"].load(hashes, timeout_s=LOAD_S).num_blocks == 64, 20)
    assert cluster.engines["source"].load(hashes).num_blocks == 64
    cluster.settle()
    cluster.is_whole = True


PHASES = ("lease", "read", "publish", "copy")
VICTIMS = ("source_mover", "source", "reader_mover", "reader")
KILLED = [
    *((phase, victim) for victim in VICTIMS for phase in PHASES),
    ("ask", "directory"),
    ("publish", "directory"),
]
LANES = ("default", "tcp")


@pytest.mark.parametrize("cluster", LANES, indirect=True)
@pytest.mark.parametrize(("phase", "victim"), KILLED)
def test_killed(cluster, reach, eventually, phase, victim):
    met = reach(cluster, phase)
    pid = cluster.send(victim, signal.SIGKILL)
    if victim in cluster.stores:
        cluster.stores[victim].process.wait(10)
    elif victim == "directory":
        cluster.directory.process.wait(10)
    elif victim == "reader_mover" and phase == "publish":
        pass  # The control thread stands at the gate: it hears of the death afterwards.
    else:
        eventually(lambda: cluster.pid(victim) != pid)
    met.go_on(reader_lives=victim != "reader" and not (victim == "reader_mover" and phase == "read"))
    result = met.end()
    if victim == "directory" and phase == "publish":
        assert result.num_blocks == 64
    # While the worker copies, the store may have said all that it had to say: what it leased is the worker's to read.
    is_whole = phase == "copy" and result.num_blocks == 64
    if victim == "reader" and not is_whole:
        assert (result.num_blocks, result.failed[0].reason) == (0, MissReason.STORE_LOST)
    recover(cluster, met.hashes, eventually, (victim,))


#: A directory that stopped, and a worker, are met in test_hangs.py.
STOPPED = [
    *((phase, "source") for phase in ("lease", "publish", "copy")),
    *((phase, "source_mover") for phase in ("lease", "read", "publish")),
    *((phase, "reader_mover") for phase in ("lease", "read", "copy")),
    ("copy", "reader"),
]


@pytest.mark.parametrize("cluster", LANES, indirect=True)
@pytest.mark.parametrize(("phase", "victim"), STOPPED)
def test_stopped_and_resumed(cluster, reach, eventually, phase, victim):
    met = reach(cluster, phase)
    cluster.send(victim, signal.SIGSTOP)
    met.go_on(reader_lives=victim != "reader" and not (victim == "reader_mover" and phase == "read"))
    met.end()
    cluster.resume()
    if victim == "reader_mover" and phase == "read":
        cluster.stores["reader"].ask("mover", do_="open")
    if victim == "reader":
        cluster.stores["reader"].ask("open")
        cluster.open("reader")
    recover(cluster, met.hashes, eventually)

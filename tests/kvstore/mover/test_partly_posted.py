"""READs that failed after a part of them was posted: nothing says when that part ends, so their slots wait."""

import ctypes
import threading
import time

import numpy as np
import pytest

from kvstore.client.results import MissReason
from kvstore.errors import PeerLost, TransferError
from kvstore.kernels import vram
from kvstore.mover import nixl
from kvstore.mover.nixl import NixlTransport
from kvstore.mover.parallel import ParallelTransport
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState
from tests.kvstore.handed_off import fetch, is_empty, reason
from tests.kvstore.loopback import LoopbackNetwork, LoopbackTransport

SLOT_BYTES, NUM_SLOTS = 64, 8


class nixlRemoteDisconnectError(RuntimeError):
    pass


class nixlBackendError(RuntimeError):
    pass


class Bindings:
    """NIXL's bindings with an agent that refuses to post; it is asked for no more than a transport asks."""

    def __init__(self, error):
        self.error, self.posted, self.released = error, [], []

    def __getattr__(self, name):
        return lambda *args, **how: self if name in ("nixlAgent", "createBackend", "nixlAgentConfig") else b"agent"

    def prepXferDlist(self, *args):
        return 5

    def makeXferReq(self, *args):
        return 70 + len(self.posted)

    def postXferReq(self, handle, note):
        self.posted.append(handle)
        if self.error is not None:
            raise self.error

    def getXferStatus(self, handle):
        raise self.error

    def releaseXferReq(self, handle):
        self.released.append(handle)


def transport_over(bindings, monkeypatch, slot_bytes=SLOT_BYTES):
    monkeypatch.setattr(nixl, "load_bindings", lambda: bindings)
    monkeypatch.setattr(nixl.NixlTransport, "_prepare", lambda self, *args: 5)
    transport = NixlTransport("reader", 0, slot_bytes * NUM_SLOTS)
    transport.set_slots(slot_bytes, NUM_SLOTS)
    transport.add_peer("p", PeerDescription(agent=b"", address=0, slot_bytes=slot_bytes, num_slots=NUM_SLOTS))
    return transport


def request(local, remote, block_bytes=SLOT_BYTES, peer="p"):
    slots = (np.asarray(ids, np.int32) for ids in (local, remote))
    return ReadRequest(peer, block_bytes, *slots)


@pytest.mark.parametrize(
    "wanted",
    [request([0, 2], [0, 2]), request([0, 1], [1, 0]), request([0, 1], [0, 1], SLOT_BYTES - 8)],
    ids=["gaps", "crossed", "short blocks"],
)
def test_a_request_that_is_refused_after_a_part_was_started_is_lost(monkeypatch, wanted):
    bindings = Bindings(nixlBackendError("no"))
    transport = transport_over(bindings, monkeypatch)
    handle = transport.post(wanted)
    assert [transport.poll(handle) for _ in range(3)] == [ReadState.LOST] * 3
    assert bindings.released == [], "to let go of it stops nothing"


def test_a_request_of_one_descriptor_that_is_refused_was_not_started(monkeypatch):
    bindings = Bindings(nixlBackendError("no"))
    transport = transport_over(bindings, monkeypatch)
    with pytest.raises(TransferError, match="nixlBackendError: no"):
        transport.post(request([0, 1, 2], [3, 4, 5]))
    assert bindings.released == bindings.posted
    assert not transport.handles


def test_nothing_is_posted_to_a_peer_that_is_known_to_be_gone(monkeypatch):
    bindings = Bindings(nixlRemoteDisconnectError("gone"))
    transport = transport_over(bindings, monkeypatch)
    with pytest.raises(PeerLost, match="gone"):
        transport.post(request([0], [0]))
    with pytest.raises(PeerLost, match="disconnected before"):
        transport.post(request([0, 2], [0, 2]))
    assert len(bindings.posted) == 1, "so no part of the second is anywhere"
    bindings.error = None
    transport.add_peer("p", PeerDescription(agent=b"", address=0, slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS))
    transport.post(request([0, 2], [0, 2]))


class Losing(LoopbackTransport):
    """Loses every READ."""

    def post(self, request):
        return 99

    def poll(self, handle):
        return ReadState.LOST

    def release(self, handle):
        raise AssertionError("released")


def test_a_shared_read_of_which_a_part_is_lost_is_lost():
    network, block = LoopbackNetwork(), 1 << 20
    slab, source = np.zeros(8 * block, np.uint8), np.full(8 * block, 7, np.uint8)
    readers = [LoopbackTransport("good", slab, network), Losing("losing", slab, network)]
    transport = ParallelTransport(LoopbackTransport("usual", slab, network), lambda: readers, lambda peer: True)
    transport.set_slots(block, 8)
    peer = ParallelTransport(LoopbackTransport("peer", source, network), list, lambda peer: False)
    there = PeerDescription(agent=peer.describe(), address=0, slot_bytes=block, num_slots=8)
    transport.add_peer("p", there)
    handle, deadline_s = transport.post(request(range(8), range(8), block)), time.monotonic() + 5
    while transport.poll(handle) is ReadState.RUNNING:
        assert time.monotonic() < deadline_s
    assert transport.poll(handle) is ReadState.LOST
    transport.close()


class LosingBlocks:
    """A transport that loses READs once it is told to."""

    def __init__(self, transport):
        self._transport, self.loses = transport, False

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post(self, request):
        return "lost" if self.loses else self._transport.post(request)

    def poll(self, handle):
        return ReadState.LOST if handle == "lost" else self._transport.poll(handle)


@pytest.mark.parametrize("how", ["fetch", "load"])
def test_slots_of_a_read_that_was_posted_in_part_wait_for_the_movers_end(cluster, wait_until, how):
    made = []
    cluster.add("a")
    core = cluster.add("b", wrap=lambda transport: made.append(LosingBlocks(transport)) or made[-1])
    source, target = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    hashes = cluster.hashes(4)
    source.save(hashes, range(4))
    ticket = source.client.publish(range(4))
    made[0].loses = True
    if how == "fetch":
        assert reason(fetch(target, ticket, range(4), timeout_s=30)) is MissReason.PEER_LOST
    else:
        assert target.load(hashes, range(4), timeout_s=30).num_blocks == 0
    wait_until(lambda: core.pool.stats().num_quarantined == 4)
    assert core.state.mover.num_abandoned == 1
    cluster.kill_mover("b")
    wait_until(lambda: core.pool.stats().num_quarantined == 0)
    source.client.withdraw(ticket)
    wait_until(lambda: is_empty(core))


class Driver:
    """The CUDA driver with a queue of copies, of which the third is refused."""

    def __init__(self):
        self.queued, self.synchronized = [], threading.Event()

    def __getattr__(self, name):
        return lambda *args: 0

    def cuMemcpyAsync(self, target, at, num_bytes, stream):
        self.queued.append(target)
        return 700 if len(self.queued) == 3 else 0

    def cuStreamSynchronize(self, stream):
        self.queued.clear()
        return 0


def test_copies_between_gpus_have_ended_when_one_is_refused(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(vram, "_driver", lambda: driver)
    monkeypatch.setattr(vram, "_primary_context", lambda ordinal: ctypes.c_void_p())
    queue = vram.CopyQueue(0)
    with pytest.raises(RuntimeError, match="cuMemcpyAsync"):
        queue.copy([(0, 0, 1)] * 4, 0)
    assert driver.queued == []
    assert queue._events == {}
    assert queue.copy([(0, 0, 1)], 0) == 1

"""READs that several readers share: real NIXL, and what happens when parts end differently."""

from __future__ import annotations

import os
import threading
import time

import msgspec
import numpy as np
import pytest

from kvstore.errors import PeerLost, TransferError
from kvstore.mover.nixl import NixlTransport
from kvstore.mover.parallel import ParallelTransport, node_transport
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState
from tests.kvstore.loopback import LoopbackNetwork, LoopbackTransport

BLOCK_BYTES, NUM_SLOTS, NUM_READERS = 256 << 10, 32, 3
EVERYTHING = range(NUM_SLOTS)


def request(local, remote, peer, notification=b""):
    return ReadRequest(
        peer=peer,
        block_bytes=BLOCK_BYTES,
        local_slots=np.array(local, np.int32),
        remote_slots=np.array(remote, np.int32),
        notification=notification,
    )


def run(transport, wanted):
    handle, deadline_s = transport.post(wanted), time.monotonic() + 10
    try:
        while transport.poll(handle) is ReadState.RUNNING:
            assert time.monotonic() < deadline_s
    finally:
        transport.release(handle)


class Node:
    def __init__(self, name, lane):
        self.slab = np.zeros(BLOCK_BYTES * NUM_SLOTS, np.uint8)
        self.slots = self.slab.reshape(NUM_SLOTS, BLOCK_BYTES)
        where = (self.slab.ctypes.data, self.slab.nbytes)
        self.transport = node_transport(f"{name}-{lane}-{os.getpid()}", *where, lane, NUM_READERS)
        self.transport.set_slots(BLOCK_BYTES, NUM_SLOTS)

    def description(self, same_host):
        return PeerDescription(
            agent=self.transport.describe(), address=self.slab.ctypes.data, slot_bytes=BLOCK_BYTES,
            num_slots=NUM_SLOTS, same_host=same_host,
        )  # fmt: skip


@pytest.fixture(scope="module", params=["default", "tcp"])
def nodes(request):
    """A reading node and its source, as peer "here" of the same machine and as peer "away" of another."""
    reader, source = Node("reader", request.param), Node("source", request.param)
    reader.lane = request.param
    reader.transport.add_peer("here", source.description(same_host=True))
    reader.transport.add_peer("away", source.description(same_host=False))
    yield reader, source
    reader.transport.close()
    source.transport.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("raykv-read")]


@pytest.fixture(scope="module")
def noise():
    return np.random.default_rng(0).integers(0, 256, (NUM_SLOTS, BLOCK_BYTES), dtype=np.uint8)


@pytest.mark.parametrize("peer", ["here", "away"])
@pytest.mark.parametrize("count", [1, 4, 7, 8, NUM_SLOTS])
@pytest.mark.parametrize("notification", [b"", b"done"])
def test_every_block_is_there_when_the_read_is_done(nodes, noise, peer, count, notification):
    reader, source = nodes
    rng = np.random.default_rng(count)
    source.transport.notifications()
    for turn in range(3):
        np.add(noise, np.uint8(turn), out=source.slots)  # other bytes each time
        reader.slots[:] = 0
        local, remote = rng.permutation(NUM_SLOTS)[:count], rng.permutation(NUM_SLOTS)[:count]
        run(reader.transport, request(local, remote, peer, notification))
        assert np.array_equal(reader.slots[local], source.slots[remote])
        assert not np.delete(reader.slots, local, axis=0).any()
    deadline_s, heard, wanted = time.monotonic() + 10, [], [notification] * 3 if notification else []
    while len(heard) < len(wanted) and time.monotonic() < deadline_s:
        heard += source.transport.notifications()
    assert heard == wanted


def test_readers_share_what_is_worth_it(nodes):
    reader, _ = nodes

    def num_reads(count, peer, notification=b""):
        before = reader.transport.totals
        run(reader.transport, request(range(count), range(count), peer, notification))
        after = reader.transport.totals
        assert after.num_bytes - before.num_bytes == count * BLOCK_BYTES
        assert after.num_descriptors - before.num_descriptors == after.num_reads - before.num_reads
        return after.num_reads - before.num_reads

    assert [num_reads(count, "here") for count in (1, 4, 8, NUM_SLOTS)] == [1, 1, 2, NUM_READERS]
    assert num_reads(NUM_SLOTS, "away") == (NUM_READERS if reader.lane == "tcp" else 1)
    # One part may be through long before the others: a notification must not tell the peer that all are.
    assert num_reads(NUM_SLOTS, "here", b"done") == 1


def test_reads_that_are_under_way_together_end_each_by_itself(nodes):
    reader, source = nodes
    source.slots[:] = np.arange(NUM_SLOTS, dtype=np.uint8)[:, None] + 1
    reader.slots[:] = 0
    halves = [request(half, half, "here") for half in np.split(np.arange(NUM_SLOTS), 2)]
    handles = [reader.transport.post(half) for half in halves]
    for handle, half in zip(handles, halves, strict=True):
        deadline_s = time.monotonic() + 10
        while reader.transport.poll(handle) is ReadState.RUNNING:
            assert time.monotonic() < deadline_s
        assert np.array_equal(reader.slots[half.local_slots], source.slots[half.local_slots])
        reader.transport.release(handle)


def test_readers_cost_little_while_nothing_is_read(nodes):
    run(nodes[0].transport, request(range(8), range(8), "here"))
    began_s = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - began_s < 0.2


def test_metadata_of_something_else_is_a_lost_peer(nodes):
    reader, source = nodes
    good = source.description(same_host=True)
    for blob in (b"", b"abc", good.agent[:-1], good.agent + b"x", NixlTransport.__name__.encode(), bytes(4)):
        with pytest.raises(PeerLost, match="metadata of p"):
            reader.transport.add_peer("p", msgspec.structs.replace(good, agent=blob))
        with pytest.raises(PeerLost, match="'p'"):
            reader.transport.post(request([0], [0], "p"))


def test_a_slot_that_the_peer_does_not_have_fails_the_read_alone(nodes):
    reader, source = nodes
    source.slots[:] = 9
    with pytest.raises(TransferError):
        run(reader.transport, request(EVERYTHING, [*range(NUM_SLOTS - 1), NUM_SLOTS], "here"))
    run(reader.transport, request(EVERYTHING, EVERYTHING, "here"))
    assert (reader.slots == 9).all()


class Reader(LoopbackTransport):
    """Its READs end when the test says so, well or not."""

    def __init__(self, *args):
        super().__init__(*args)
        self.how, self.posting, self.released = ReadState.RUNNING, None, 0

    def post(self, wanted):
        if self.posting is not None:
            raise self.posting
        return super().post(wanted)

    def poll(self, handle):
        if isinstance(self.how, Exception):
            raise self.how
        return self.how

    def release(self, handle):
        assert self.how is not ReadState.RUNNING
        self.released += 1
        super().release(handle)


@pytest.fixture
def slow():
    """A transport with three readers that end when told to, and a peer "p" on this machine."""
    network, slab, readers = LoopbackNetwork(), np.zeros(BLOCK_BYTES * NUM_SLOTS, np.uint8), []
    peer = LoopbackTransport("peer", np.full(BLOCK_BYTES * NUM_SLOTS, 7, np.uint8), network)

    def make():
        readers.extend(Reader(f"local-{i}", slab, network) for i in range(NUM_READERS))
        return list(readers)

    transport = ParallelTransport(LoopbackTransport("usual", slab, network), make, lambda description: True)
    transport.set_slots(BLOCK_BYTES, NUM_SLOTS)
    agent = ParallelTransport(peer, list, lambda description: False).describe()
    transport.add_peer("p", PeerDescription(agent=agent, address=0, slot_bytes=BLOCK_BYTES, num_slots=NUM_SLOTS))
    yield transport, readers
    transport.close()
    assert list(network.slabs) == [b"peer"]


def ends(transport, handle, wait_until):
    """Return the state or the error with which a READ ends."""
    found = []

    def look():
        try:
            state = transport.poll(handle)
        except TransferError as error:
            state = error
        if state is not ReadState.RUNNING:
            found.append(state)
        return bool(found)

    wait_until(look)
    return found[0]


def still_runs(transport, handle):
    return all(transport.poll(handle) is ReadState.RUNNING for _ in range(100))


def test_a_read_is_done_when_its_last_part_is(slow, wait_until):
    transport, readers = slow
    handle = transport.post(request(EVERYTHING, EVERYTHING, "p"))
    for reader in readers:
        assert still_runs(transport, handle)
        reader.how = ReadState.DONE
    assert ends(transport, handle, wait_until) is ReadState.DONE
    transport.release(handle)
    assert [reader.released for reader in readers] == [1, 1, 1]


def test_a_part_that_failed_does_not_make_the_others_terminal(slow, wait_until):
    transport, readers = slow
    handle = transport.post(request(EVERYTHING, EVERYTHING, "p"))
    readers[1].how = TransferError("one link broke")
    assert still_runs(transport, handle)
    readers[0].how = ReadState.DONE
    assert still_runs(transport, handle), "reader 2 may still write"
    readers[2].how = ReadState.DONE
    for _ in range(2):
        assert str(ends(transport, handle, wait_until)) == "one link broke"
    transport.release(handle)
    assert [reader.released for reader in readers] == [1, 1, 1]


def test_a_part_that_cannot_be_posted_leaves_the_read_to_those_that_were(slow, wait_until):
    transport, readers = slow
    readers[0].posting = PeerLost("no connection")
    handle = transport.post(request(EVERYTHING, EVERYTHING, "p"))
    assert still_runs(transport, handle)
    for reader in readers[1:]:
        reader.how = ReadState.DONE
    assert isinstance(ends(transport, handle, wait_until), PeerLost)
    transport.release(handle)


def test_a_reader_that_waits_for_long_does_not_spin(slow, wait_until):
    transport, readers = slow
    handle = transport.post(request(EVERYTHING, EVERYTHING, "p"))
    time.sleep(0.3)
    began_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began_s < 0.25
    for reader in readers:
        reader.how = ReadState.DONE
    assert ends(transport, handle, wait_until) is ReadState.DONE
    transport.release(handle)


def test_a_reader_that_does_not_come_back_is_left_open_and_the_rest_is_closed(slow, monkeypatch, wait_until):
    transport, readers = slow
    inside, go = threading.Event(), threading.Event()

    def stuck(handle):
        inside.set()
        assert go.wait(10)
        return ReadState.DONE

    closed = []
    for reader in readers:
        monkeypatch.setattr(reader, "close", lambda reader=reader: (closed.append(reader), Reader.close(reader)))
    readers[1].how, readers[1].poll = ReadState.DONE, stuck
    transport.post(request(EVERYTHING, EVERYTHING, "p"))
    assert inside.wait(10)
    monkeypatch.setattr("kvstore.mover.parallel._STOP_TIMEOUT_S", 0.05)
    try:
        transport.close()
        assert closed == [readers[0], readers[2]]
    finally:
        go.set()
    # The fixture closes once more, now that it came back.
    monkeypatch.undo()


def test_readers_are_made_for_the_first_peer_that_needs_them():
    network, slab, made = LoopbackNetwork(), np.zeros(BLOCK_BYTES * 4, np.uint8), []
    peer = LoopbackTransport("peer", np.full(BLOCK_BYTES * 4, 7, np.uint8), network)

    def make():
        made.extend(LoopbackTransport(f"local-{i}", slab, network) for i in range(2))
        return list(made)

    transport = ParallelTransport(LoopbackTransport("usual", slab, network), make, lambda peer: peer.same_host)
    transport.set_slots(BLOCK_BYTES, 4)
    agent = ParallelTransport(peer, list, lambda description: False).describe()
    away = PeerDescription(agent=agent, address=0, slot_bytes=BLOCK_BYTES, num_slots=4)
    transport.add_peer("p", away)
    run(transport, request([0], [0], "p"))
    assert made == []
    transport.add_peer("p", msgspec.structs.replace(away, same_host=True))
    run(transport, request([1], [1], "p"))
    assert [reader.totals.num_reads for reader in made] == [1, 0]
    assert transport.totals.num_reads == 2
    transport.forget_peer("p")
    with pytest.raises(PeerLost, match="'p'"):
        transport.post(request([0], [0], "p"))
    transport.forget_peer("p")
    transport.close()

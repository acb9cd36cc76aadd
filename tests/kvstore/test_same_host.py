"""READs from peers of this machine by several readers: real NIXL, and what happens when parts end differently."""

from __future__ import annotations

import dataclasses
import os
import time

import numpy as np
import pytest

from kvstore.errors import PeerLost, TransferError
from kvstore.nixl_transport import NixlTransport
from kvstore.same_host import SameHostTransport
from kvstore.transport import LoopbackNetwork, LoopbackTransport, PeerDescription, ReadRequest, ReadState

BLOCK_BYTES, NUM_SLOTS, NUM_READERS = 256 << 10, 32, 3


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
    while transport.poll(handle) is ReadState.RUNNING:
        assert time.monotonic() < deadline_s
    transport.release(handle)


@pytest.fixture(scope="module")
def nixl():
    """(reading transport, its slots, source transport, its slots)."""
    slabs = [np.zeros(BLOCK_BYTES * NUM_SLOTS, np.uint8) for _ in range(2)]
    source = NixlTransport(f"same-source-{os.getpid()}", slabs[1].ctypes.data, slabs[1].nbytes)
    name, where = f"same-reader-{os.getpid()}", (slabs[0].ctypes.data, slabs[0].nbytes)
    reader = SameHostTransport(
        NixlTransport(name, *where),
        lambda i: NixlTransport(f"{name}-{i}", *where, progress_delay_us=None, separate_reader=False),
        NUM_READERS,
    )
    for transport in (reader, source):
        transport.set_slots(BLOCK_BYTES, NUM_SLOTS)
    for peer, same_host in (("here", True), ("away", False)):
        reader.add_peer(
            peer,
            PeerDescription(
                agent=source.describe(), address=slabs[1].ctypes.data, slot_bytes=BLOCK_BYTES,
                num_slots=NUM_SLOTS, same_host=same_host,
            ),
        )  # fmt: skip
    slots = [slab.reshape(NUM_SLOTS, BLOCK_BYTES) for slab in slabs]
    yield reader, slots[0], source, slots[1]
    reader.close()
    source.close()


@pytest.mark.parametrize("peer", ["here", "away"])
@pytest.mark.parametrize("count", [1, 4, 7, 8, NUM_SLOTS])
@pytest.mark.parametrize("notification", [b"", b"done"])
def test_every_block_is_there_when_the_read_is_done(nixl, peer, count, notification):
    reader, here, source, there = nixl
    rng = np.random.default_rng(count)
    source.notifications()
    for _ in range(3):
        there[:] = rng.integers(0, 256, there.shape, dtype=np.uint8)
        here[:] = 0
        local, remote = rng.permutation(NUM_SLOTS)[:count], rng.permutation(NUM_SLOTS)[:count]
        run(reader, request(local, remote, peer, notification))
        assert np.array_equal(here[local], there[remote])
        assert not np.delete(here, local, axis=0).any()
    deadline_s, heard, wanted = time.monotonic() + 10, [], [notification] * 3 if notification else []
    while len(heard) < len(wanted) and time.monotonic() < deadline_s:
        heard += source.notifications()
    assert heard == wanted


def test_readers_share_what_is_worth_it(nixl):
    reader, _, _, _ = nixl

    def num_reads(count, peer, notification=b""):
        before = reader.totals
        run(reader, request(range(count), range(count), peer, notification))
        after = reader.totals
        assert after.num_bytes - before.num_bytes == count * BLOCK_BYTES
        return after.num_reads - before.num_reads

    assert [num_reads(count, "here") for count in (1, 4, 8, NUM_SLOTS)] == [1, 1, 2, NUM_READERS]
    assert num_reads(NUM_SLOTS, "away") == 1
    # One part may be through long before the others: a notification must not tell the peer that all are.
    assert num_reads(NUM_SLOTS, "here", b"done") == 1


def test_readers_cost_nothing_while_nothing_is_read(nixl):
    run(nixl[0], request(range(8), range(8), "here"))
    began_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began_s < 0.1


class Reader(LoopbackTransport):
    """Its READs end when the test says so, well or not."""

    def __init__(self, *args):
        super().__init__(*args)
        self.states, self.posting, self.released = {}, None, []

    def post(self, wanted):
        if self.posting is not None:
            raise self.posting
        handle = super().post(wanted)
        self.states[handle] = ReadState.RUNNING
        return handle

    def poll(self, handle):
        if isinstance(self.states[handle], Exception):
            raise self.states[handle]
        return self.states[handle]

    def release(self, handle):
        assert self.states[handle] is not ReadState.RUNNING
        self.released.append(handle)
        super().release(handle)

    def end(self, how=ReadState.DONE):
        self.states = dict.fromkeys(self.states, how)


@pytest.fixture
def slow():
    """A transport with three readers that end when told to, and a peer "p" on this machine."""
    network, slab = LoopbackNetwork(), np.zeros(BLOCK_BYTES * NUM_SLOTS, np.uint8)
    peer = LoopbackTransport("peer", np.full(BLOCK_BYTES * NUM_SLOTS, 7, np.uint8), network)
    transport = SameHostTransport(
        LoopbackTransport("usual", slab, network), lambda i: Reader(f"local-{i}", slab, network), NUM_READERS
    )
    transport.set_slots(BLOCK_BYTES, NUM_SLOTS)
    transport.description = PeerDescription(
        agent=peer.describe(), address=0, slot_bytes=BLOCK_BYTES, num_slots=NUM_SLOTS, same_host=True
    )
    transport.add_peer("p", transport.description)
    yield transport
    transport.close()
    assert list(network.slabs) == [b"peer"]


def test_a_read_is_done_when_its_last_part_is(slow):
    handle = slow.post(request(range(NUM_SLOTS), range(NUM_SLOTS), "p"))
    for reader in slow._readers:
        assert slow.poll(handle) is ReadState.RUNNING
        reader.end()
    assert slow.poll(handle) is ReadState.DONE
    slow.release(handle)
    assert [len(reader.released) for reader in slow._readers] == [1, 1, 1]


def test_a_part_that_failed_does_not_make_the_others_terminal(slow):
    handle = slow.post(request(range(NUM_SLOTS), range(NUM_SLOTS), "p"))
    slow._readers[1].end(TransferError("one link broke"))
    assert slow.poll(handle) is ReadState.RUNNING
    slow._readers[0].end()
    assert slow.poll(handle) is ReadState.RUNNING, "reader 2 may still write"
    slow._readers[2].end()
    for _ in range(2):
        with pytest.raises(TransferError, match="one link broke"):
            slow.poll(handle)
    slow.release(handle)
    assert [len(reader.released) for reader in slow._readers] == [1, 1, 1]


def test_a_part_that_cannot_be_posted_leaves_the_read_to_those_that_were(slow):
    slow._readers[0].posting = PeerLost("no connection")
    handle = slow.post(request(range(NUM_SLOTS), range(NUM_SLOTS), "p"))
    assert slow.poll(handle) is ReadState.RUNNING
    for reader in slow._readers[1:]:
        reader.end()
    with pytest.raises(PeerLost, match="no connection"):
        slow.poll(handle)
    slow.release(handle)
    for reader in slow._readers:
        reader.posting = PeerLost("no connection")
    with pytest.raises(PeerLost, match="no connection"):
        slow.post(request(range(NUM_SLOTS), range(NUM_SLOTS), "p"))
    assert slow._reads == {}


def test_readers_are_made_for_the_first_peer_that_needs_them():
    network, slab, made = LoopbackNetwork(), np.zeros(BLOCK_BYTES * 4, np.uint8), []
    peer = LoopbackTransport("peer", np.full(BLOCK_BYTES * 4, 7, np.uint8), network)

    def make(i):
        made.append(LoopbackTransport(f"local-{i}", slab, network))
        return made[-1]

    transport = SameHostTransport(LoopbackTransport("usual", slab, network), make, 2)
    transport.set_slots(BLOCK_BYTES, 4)
    away = PeerDescription(agent=peer.describe(), address=0, slot_bytes=BLOCK_BYTES, num_slots=4)
    transport.add_peer("p", away)
    run(transport, request([0], [0], "p"))
    assert made == []
    transport.add_peer("p", dataclasses.replace(away, same_host=True))
    run(transport, request([1], [1], "p"))
    assert [reader.totals.num_reads for reader in made] == [1, 0]
    assert transport.totals.num_reads == 2
    transport.forget_peer("p")
    with pytest.raises(PeerLost, match="'p'"):
        transport.post(request([0], [0], "p"))
    transport.forget_peer("p")
    assert transport.describe() == b"usual"
    transport.close()

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import PeerLost, TransferError
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState, count_runs
from tests.kvstore.loopback import LoopbackNetwork, LoopbackTransport

SLOT_BYTES, BLOCK_BYTES, NUM_SLOTS = 64, 48, 8


def ints(*values: int):
    return np.array(values, dtype=np.int32)


@pytest.fixture
def pair():
    """A reader with an empty slab, and a peer named "b" whose slot i is full of i + 1."""
    network = LoopbackNetwork()
    reader = LoopbackTransport("a", np.zeros(NUM_SLOTS * SLOT_BYTES, np.uint8), network)
    slab = np.repeat(np.arange(1, NUM_SLOTS + 1, dtype=np.uint8), SLOT_BYTES)
    peer = LoopbackTransport("b", slab, network)
    for transport in (reader, peer):
        transport.set_slots(SLOT_BYTES, NUM_SLOTS)
    description = PeerDescription(agent=peer.describe(), address=0, slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS)
    reader.add_peer("b", description)
    return reader, peer


def request(local, remote, peer="b", notification=b""):
    return ReadRequest(
        peer=peer,
        block_bytes=BLOCK_BYTES,
        local_slots=ints(*local),
        remote_slots=ints(*remote),
        notification=notification,
    )


def test_a_read_copies_blocks_and_nothing_else(pair):
    reader, peer = pair
    handle = reader.post(request([5, 0], [2, 7], notification=b"done"))
    assert reader.poll(handle) is ReadState.DONE
    reader.release(handle)
    slots = reader.slab.reshape(NUM_SLOTS, SLOT_BYTES)
    assert (slots[5, :BLOCK_BYTES] == 3).all()
    assert (slots[0, :BLOCK_BYTES] == 8).all()
    assert not slots[:, BLOCK_BYTES:].any()
    assert not slots[[1, 2, 3, 4, 6, 7]].any()
    assert (reader.totals.num_reads, reader.totals.num_bytes, reader.totals.num_descriptors) == (1, 2 * BLOCK_BYTES, 2)
    assert peer.notifications() == [b"done"]
    assert peer.notifications() == []
    assert reader.notifications() == []


def test_an_unknown_peer_is_lost(pair):
    reader, _ = pair
    with pytest.raises(PeerLost, match="'c'"):
        reader.post(request([0], [0], peer="c"))
    reader.forget_peer("b")
    reader.forget_peer("b")
    with pytest.raises(PeerLost):
        reader.post(request([0], [0]))


def test_a_peer_that_left_is_lost(pair):
    reader, peer = pair
    peer.close()
    with pytest.raises(PeerLost):
        reader.post(request([0], [0]))
    assert reader.totals.num_reads == 0


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS])
def test_a_slot_out_of_range_is_refused(pair, slot):
    reader, _ = pair
    with pytest.raises(TransferError, match=str(slot)):
        reader.post(request([0], [slot], notification=b"no"))
    assert not reader.slab.any()


@pytest.mark.parametrize(
    ("local", "remote", "runs"),
    [
        ([], [], 0),
        ([3], [9], 1),
        ([3, 4, 5], [9, 10, 11], 1),
        ([3, 4, 6], [9, 10, 11], 2),
        ([3, 4, 5], [9, 11, 12], 2),
        ([3, 4, 5], [9, 8, 7], 3),
        ([5, 4, 3], [9, 10, 11], 3),
    ],
)
def test_runs_are_neighbours_in_order_on_both_sides(local, remote, runs):
    assert count_runs(ints(*local), ints(*remote)) == runs


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_runs_counted_one_by_one(pairs):
    runs = sum(1 for i, (a, b) in enumerate(pairs) if i == 0 or a != pairs[i - 1][0] + 1 or b != pairs[i - 1][1] + 1)
    assert count_runs(ints(*(a for a, _ in pairs)), ints(*(b for _, b in pairs))) == runs

"""Stages of a mover's slabs, which are made once for each GPU and each size."""

import numpy as np
import pytest

from kvstore.errors import RegistrationFailed
from kvstore.mover.messages import NewStage
from kvstore.mover.slabs import Slabs
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState
from tests.kvstore.loopback import LoopbackNetwork, LoopbackTransport

SLOT_BYTES = 64


class HostStage:
    """A stage in this process's memory."""

    def __init__(self, name, num_bytes, network):
        self.gpu, self.handle, self.closed = 0, name.encode(), False
        self.memory = np.zeros(num_bytes, np.uint8)
        self.address = self.memory.ctypes.data
        self.transport = LoopbackTransport(name, self.memory, network)

    def close(self):
        self.closed = True
        self.transport.close()


@pytest.fixture
def network():
    return LoopbackNetwork()


@pytest.fixture
def made():
    return []


@pytest.fixture
def slabs(network, made):
    memory = np.zeros(8 * SLOT_BYTES, np.uint8)

    def make(name, uuid, num_bytes):
        if num_bytes > 100 * SLOT_BYTES:
            raise RuntimeError("out of memory")
        made.append(HostStage(name, num_bytes, network))
        return made[-1]

    slabs = Slabs("own", LoopbackTransport("own", memory, network), memory.ctypes.data, make)
    yield slabs
    slabs.close()


def test_a_store_that_asks_again_for_a_stage_gets_the_one_that_it_did_not_hear_of(slabs, made):
    wanted = NewStage("01", SLOT_BYTES, 4)
    first = slabs.stage(wanted)
    assert slabs.stage(wanted) == first
    assert slabs.stage(NewStage("02", SLOT_BYTES, 4)) != first
    assert (len(made), slabs.stage(wanted)) == (2, first)


def test_a_stage_of_another_size_takes_the_place_of_the_one_of_which_nobody_heard(slabs, made, network):
    first = slabs.stage(NewStage("01", SLOT_BYTES, 4))
    other = slabs.stage(NewStage("02", SLOT_BYTES, 4))
    second = slabs.stage(NewStage("01", 2 * SLOT_BYTES, 3))
    assert [stage.closed for stage in made] == [True, False, False]
    assert len({first.slab, other.slab, second.slab}) == len({first.agent, other.agent, second.agent}) == 3
    peer = LoopbackTransport("peer", np.full(8 * SLOT_BYTES, 7, np.uint8), network)
    description = PeerDescription(
        agent=peer.describe(), address=0, slot_bytes=2 * SLOT_BYTES, num_slots=4, into=second.slab
    )
    slabs.add_peer("b", description)
    slot = np.array([2], np.int32)
    handle = slabs.post(ReadRequest(peer="b", block_bytes=2 * SLOT_BYTES, local_slots=slot, remote_slots=slot - 1))
    while slabs.poll(handle) is not ReadState.DONE:
        pass
    slabs.release(handle)
    assert made[2].memory.reshape(3, -1).any(axis=1).tolist() == [False, False, True]


def test_of_a_stage_that_cannot_be_made_nothing_is_held(slabs, made):
    slabs.stage(NewStage("01", SLOT_BYTES, 4))
    with pytest.raises(RegistrationFailed, match="out of memory"):
        slabs.stage(NewStage("01", SLOT_BYTES, 1000))
    assert made[0].closed
    again = slabs.stage(NewStage("01", SLOT_BYTES, 4))
    assert (len(made), again.agent) == (2, made[1].transport.describe())

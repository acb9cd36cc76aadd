"""READs between stages of one mover: which copies are queued, and which requests are refused before any is."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import PeerLost, TransferError
from kvstore.mover.gpu_copies import Neighbours
from kvstore.mover.transport import PeerDescription, ReadRequest

SIZE, NUM_SLOTS = 64, 8


class Stage:
    """Remembers what a GPU would be asked to copy."""

    address, gpu = 10_000, 0

    def __init__(self):
        self.asked = []

    def begin_copies(self, runs, source):
        self.asked.append((runs, source))
        return len(self.asked)

    def copies_done(self, mark):
        return True


@pytest.fixture
def stage():
    return Stage()


@pytest.fixture
def neighbours(stage):
    made = Neighbours(stage, SIZE, NUM_SLOTS)
    made.add_peer("other", PeerDescription(agent=b"", address=50_000, slot_bytes=SIZE, num_slots=4, gpu=1))
    return made


def request(local, remote, peer="other"):
    here, there = (np.array(ids, np.int32) for ids in (local, remote))
    return ReadRequest(peer=peer, block_bytes=SIZE, local_slots=here, remote_slots=there, notification=b"n")


def test_slots_that_follow_each_other_on_both_sides_are_one_copy(neighbours, stage):
    handle = neighbours.post(request([2, 3, 7], [0, 1, 2]))
    assert stage.asked == [([(10_128, 50_000, 128), (10_448, 50_128, 64)], 1)]
    neighbours.release(handle)
    assert neighbours.notifications() == [b"n"]
    assert (neighbours.totals.num_descriptors, neighbours.totals.num_bytes) == (2, 3 * SIZE)


@pytest.mark.parametrize("local", [[-1], [NUM_SLOTS], [0, NUM_SLOTS]])
def test_a_slot_that_this_stage_has_not_is_refused_before_any_copy(neighbours, stage, local):
    with pytest.raises(TransferError, match=r"local slots in \[0, 8\)"):
        neighbours.post(request(local, range(len(local))))
    assert stage.asked == []


@pytest.mark.parametrize("remote", [[-1], [4], [3, 4]])
def test_a_slot_that_the_other_stage_has_not_is_refused_before_any_copy(neighbours, stage, remote):
    with pytest.raises(TransferError, match=r"remote slots in \[0, 4\)"):
        neighbours.post(request(range(len(remote)), remote))
    assert stage.asked == []


def test_a_stage_that_was_not_added_is_lost(neighbours, stage):
    with pytest.raises(PeerLost, match="stranger"):
        neighbours.post(request([0], [0], "stranger"))
    assert stage.asked == []

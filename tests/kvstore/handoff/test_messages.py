"""What a peer answers to a claim."""

import numpy as np
import pytest

from kvstore.blocks.codec import encode
from kvstore.errors import PeerLost
from kvstore.handoff.messages import PeerClaimed, claimed_of


def answer(**fields) -> bytes:
    return encode(PeerClaimed(1, bytes(8), 0, 0, **fields))


def test_a_reason_is_clipped_whatever_a_peer_makes_of_it():
    assert claimed_of(answer(reason="r" * 1000), 3).reason == "r" * 1000
    assert claimed_of(answer(reason="r" * 5000), 3).reason == "r" * 1000


@pytest.mark.parametrize("num_slots", [0, 2, 4])
def test_as_many_slots_as_blocks_are_wanted(num_slots):
    assert len(claimed_of(answer(slots=np.arange(3, dtype=np.int32)), 3).slots) == 3
    with pytest.raises(PeerLost, match=f"wanted 3 slots of a peer, got {num_slots}"):
        claimed_of(answer(slots=np.arange(num_slots, dtype=np.int32)), 3)

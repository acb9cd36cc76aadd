"""What peers answer is checked to the last number that is still sensible."""

import numpy as np
import pytest

from kvstore.blocks.codec import encode
from kvstore.errors import PeerLost
from kvstore.remote.answers import grant_of, stages_of
from kvstore.remote.messages import PeerGrant
from kvstore.rpc.handoff_messages import StageFound


def grant(num_slots: int) -> bytes:
    slots = np.arange(num_slots, dtype=np.int32)
    return encode(PeerGrant(lease_id=1, epoch=bytes(8), namespace_version=0, mover_generation=1, slots=slots))


def test_a_grant_has_no_more_slots_than_were_wanted():
    assert len(grant_of(grant(3), 3).slots) == 3
    assert len(grant_of(grant(0), 3).slots) == 0
    with pytest.raises(PeerLost, match="wanted at most 3 slots of a peer, got 4"):
        grant_of(grant(4), 3)


def stages(gpu: int) -> bytes:
    return encode([
        StageFound(
            slab=1, generation=1, uuid="gpu", handle=b"", agent=b"agent", address=1 << 20, gpu=gpu, slot_bytes=1024,
            num_slots=8, num_warm=1,
        )
    ])  # fmt: skip


def test_a_stage_is_on_a_gpu_that_a_host_can_have():
    assert stages_of(stages(1023), into=0)[0][3].gpu == 1023
    with pytest.raises(PeerLost, match="on GPU 1024"):
        stages_of(stages(1024), into=0)

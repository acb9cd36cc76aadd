import numpy as np
import pytest

from kvstore import mover_messages
from kvstore.messages import NOTIFICATION
from kvstore.transport import ReadRequest

SLOTS = np.array([5, 0, 2**31 - 1], dtype=np.int32)


@pytest.mark.parametrize("notification", [b"", NOTIFICATION.pack(1, b"epoch678", b"reader78")])
@pytest.mark.parametrize("peer", ["", "node/ä/1"])
def test_mover_read(notification, peer):
    request = ReadRequest(
        peer=peer, block_bytes=1 << 20, local_slots=SLOTS, remote_slots=SLOTS[::-1], notification=notification
    )
    read = mover_messages.MoverRead(read_id=1, request=request, chunk_ends=np.array([1, 3], np.int32), timeout_s=0.25)
    back = mover_messages.unpack_mover_read(mover_messages.pack_mover_read(read))
    assert (back.read_id, back.chunk_ends.tolist(), back.timeout_s) == (1, [1, 3], 0.25)
    assert (back.request.peer, back.request.block_bytes, back.request.notification) == (peer, 1 << 20, notification)
    assert back.request.local_slots.tolist() == SLOTS.tolist()
    assert back.request.remote_slots.tolist() == SLOTS[::-1].tolist()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_mover_done(last, terminal):
    done = mover_messages.MoverDone(
        read_id=1, num_blocks=2, last=last, terminal=terminal, seconds=0.5, num_descriptors=3, error=b"{}"
    )
    assert mover_messages.unpack_mover_done(mover_messages.pack_mover_done(done)) == done

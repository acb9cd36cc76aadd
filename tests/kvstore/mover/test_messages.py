import numpy as np
import pytest

from kvstore.blocks.codec import encode
from kvstore.errors import ProtocolError
from kvstore.mover import messages
from kvstore.mover.transport import ReadRequest
from kvstore.rpc.messages import NOTIFICATION

SLOTS = np.array([5, 0, 2**31 - 1], dtype=np.int32)


@pytest.mark.parametrize("notification", [b"", NOTIFICATION.pack(1, b"epoch678", b"reader78")])
@pytest.mark.parametrize("peer", ["", "node/ä/1"])
def test_mover_read(notification, peer):
    request = ReadRequest(
        peer=peer, block_bytes=1 << 20, local_slots=SLOTS, remote_slots=SLOTS[::-1], notification=notification
    )
    read = messages.MoverRead(read_id=1, request=request, chunk_ends=np.array([1, 3], np.int32), timeout_s=0.25)
    back = messages.decode_mover_read(encode(read))
    assert (back.read_id, back.chunk_ends.tolist(), back.timeout_s) == (1, [1, 3], 0.25)
    assert (back.request.peer, back.request.block_bytes, back.request.notification) == (peer, 1 << 20, notification)
    assert back.request.local_slots.tolist() == SLOTS.tolist()
    assert back.request.remote_slots.tolist() == SLOTS[::-1].tolist()


@pytest.mark.parametrize(("local", "remote"), [(bytes(8), bytes(4)), (bytes(4), b""), (b"12345", b"12345")])
def test_slots_that_do_not_fit_are_refused(local, remote):
    with pytest.raises(ProtocolError):
        messages.decode_mover_read(encode([1, ["peer", 512, local, remote, b""], bytes(4), 0.5]))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_mover_done(last, terminal):
    done = messages.MoverDone(
        read_id=1, num_blocks=2, last=last, terminal=terminal, seconds=0.5, num_descriptors=3, error=b"{}"
    )
    assert messages.decode_mover_done(encode(done)) == done

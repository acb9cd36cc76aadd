import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import encode
from kvstore.remote import messages

CHAIN = BlockHashes(b"n" * 32, b"p" * 32, 3, bytes(range(96)))
SLOTS = np.array([5, 0, 2**31 - 1], dtype=np.int32)


def test_peer_lease():
    lease = messages.PeerLease(
        chain=CHAIN, block_bytes=2**32 - 1, slot_format=1, namespace_version=2**63, ttl_s=0.5, within_s=2.0,
        is_low=True,
    )  # fmt: skip
    assert messages.decode_peer_lease(encode(lease)) == lease


def test_peer_grant():
    grant = messages.PeerGrant(
        lease_id=2**64 - 1, epoch=b"12345678", namespace_version=3, mover_generation=4, slots=SLOTS
    )
    back = messages.decode_peer_grant(encode(grant))
    assert back.slots.tolist() == SLOTS.tolist()
    for name in ("lease_id", "epoch", "namespace_version", "mover_generation"):
        assert getattr(back, name) == getattr(grant, name)

"""What a node store grants to the stores of other nodes. Runs on the control thread, so nothing here may block.

A lease of a peer ends by its word, by its READ's notification or with its time, and with nothing else: a closed
connection says nothing of the peer's mover, which may be reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.blocks.codec import decode_count, encode
from kvstore.blocks.grants import Grant
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.bounds import clip
from kvstore.config import StoreConfig
from kvstore.errors import LayoutMismatch, PeerLost, ProtocolError
from kvstore.node.pool_verbs import deadline_after
from kvstore.remote.messages import PeerGrant, PeerTransport, decode_peer_lease
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Message, Op
from kvstore.rpc.messages import NOTIFICATION, OWNER_KEY_BYTES

if TYPE_CHECKING:
    from kvstore.node.core import NodeCore

#: Peers may always ask for as much.
_LEAST_MOST_TTL_S = 60.0


class PeerControl:
    """Serves peers, and keeps count of what they hold.

    Args:
        core: the node store.
        wake: called when a deadline was set, so that the control thread looks at it.
    """

    def __init__(self, core: NodeCore, wake: Callable[[], None]) -> None:
        self._core, self._wake = core, wake
        self._leases: dict[int, float] = {}

    def owner_in(self, hello: dict[str, Any]) -> str:
        """Return who owns the leases of the store that says this hello.

        Connections of one life of a store come and go, its leases stay its own. Its epoch is known to many, so it
        names a key too, which it has chosen at random for this store alone: nobody else can release them.

        Raises:
            ProtocolError: it does not name its key.
        """
        try:
            key = bytes.fromhex(hello["owner"])
        except (KeyError, TypeError, ValueError):
            key = b""
        if len(key) != OWNER_KEY_BYTES:
            raise ProtocolError(
                f"owner: wanted {OWNER_KEY_BYTES} bytes in hexadecimal, got {clip(hello.get('owner'))}; "
                "run one version of raykv everywhere"
            )
        return owner_of(key)

    def serve(self, connection: Connection, message: Message) -> bytes:
        """Serve one message of a peer.

        Raises:
            KVStoreError: refused; nothing changed.
        """
        match message.op:
            case Op.PEER_LEASE:
                return self._lease(connection.owner, message.payload)
            case Op.PEER_RELEASE:
                self._release(decode_count(message.payload), connection.owner)
                return b""
            case Op.PEER_TRANSPORT:
                return self._transport()
            case _:
                raise ProtocolError(f"a node store does not serve {message.op.name} to a peer")

    def notified(self, payload: bytes) -> None:
        """Peers' READs under our leases are through: their pins can go early.

        Raises:
            ProtocolError: these are no notifications; nothing changed.
        """
        if len(payload) % NOTIFICATION.size:
            raise ProtocolError(f"wanted notifications of {NOTIFICATION.size} bytes each, got {len(payload)} bytes")
        for lease_id, epoch, reader in NOTIFICATION.iter_unpack(payload):
            if epoch == self._core.epoch:
                self._release(lease_id, owner_of(reader))

    def tick(self, now_s: float) -> None:
        """Forget the leases whose time is over; the pool has dropped them."""
        for lease_id in [i for i, deadline_s in self._leases.items() if deadline_s < now_s]:
            self.ended(lease_id)

    def _lease(self, owner: str, payload: bytes) -> bytes:
        core, wanted = self._core, decode_peer_lease(payload)
        if core.closed_to_peers:
            core.check_serving()
        if wanted.slot_format != BLOCK_ORDER_VERSION:
            raise LayoutMismatch(
                f"blocks here are in byte order {BLOCK_ORDER_VERSION}, the peer wants {wanted.slot_format}; "
                "run one version of raykv everywhere"
            )
        namespace = wanted.chain.namespace
        if wanted.namespace_version > core.versions.get(namespace):
            core.hear_clearing(namespace, wanted.namespace_version)
        version, own = core.versions.get(namespace), core.mover.own
        grant = Grant()
        if core.attached_pool is not None and own is not None and version == wanted.namespace_version:
            known = core.block_bytes.get(namespace, wanted.block_bytes)
            if wanted.block_bytes != known:
                raise LayoutMismatch(
                    f"blocks of this namespace have {known} bytes here, the peer wants {wanted.block_bytes}; "
                    "run one version of raykv everywhere"
                )
            deadline_s = deadline_after(wanted.ttl_s, most_for_peers_s(core.config))
            grant = core.attached_pool.pin_prefix(wanted.chain, owner, deadline_s)
            if grant.packed_slots:
                self.began(grant.lease_id, deadline_s)
            else:
                core.attached_pool.release(grant.lease_id, owner)
        return encode(
            PeerGrant(
                lease_id=grant.lease_id if grant.packed_slots else 0,
                epoch=core.epoch,
                namespace_version=version,
                mover_generation=own.generation if own is not None else 0,
                slots=np.asarray(grant.slots, dtype=np.int32),
            )
        )

    def _transport(self) -> bytes:
        core, own = self._core, self._core.mover.own
        if own is None:
            raise PeerLost(f"the mover of node {core.node_id} is being replaced; try again")
        num_slots = core.pool.stats().num_slots
        return encode(PeerTransport(own.generation, own.agent, own.address, core.slot_bytes, num_slots))

    def _release(self, lease_id: int, owner: str) -> None:
        # Of a lease that somebody else holds nothing ends, also not the polling for its notification.
        if self._core.pool.release(lease_id, owner):
            self.ended(lease_id)

    def began(self, lease_id: int, deadline_s: float) -> None:
        """Expect a notification for a lease, or for a claim, until its deadline."""
        self._leases[lease_id] = deadline_s
        self._core.mover.expect_notifications(len(self._leases))
        self._wake()

    def ended(self, lease_id: int) -> None:
        """Expect none any more."""
        if self._leases.pop(lease_id, None) is not None:
            self._core.mover.expect_notifications(len(self._leases))


def owner_of(key: bytes) -> str:
    """Return who owns the leases of the store that names this key."""
    return f"store-{key.hex()}"


def most_for_peers_s(config: StoreConfig) -> float:
    """Return the longest lease that a peer gets: peers of the same configuration ask for no more."""
    return max(config.lease_ttl_s, _LEAST_MOST_TTL_S)

"""What a node store grants to the stores of other nodes. Runs on the control thread, so nothing here may block.

A lease of a peer ends by its word, by its READ's notification or with its time, and with nothing else: a closed
connection says nothing of the peer's mover, which may be reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.blocks.codec import decode_id, encode
from kvstore.blocks.grants import Grant
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.bounds import clip
from kvstore.config import StoreConfig
from kvstore.errors import LayoutMismatch, PeerLost, ProtocolError
from kvstore.node.pool_service import deadline_after
from kvstore.node.state import NodeState
from kvstore.remote.messages import PeerGrant, PeerTransport, decode_peer_lease
from kvstore.rpc.connection import Connection, Handler
from kvstore.rpc.framing import Message, Op
from kvstore.rpc.messages import NOTIFICATION, OWNER_KEY_BYTES

#: Peers may always ask for as much.
_LEAST_MOST_TTL_S = 60.0


class PeerControl:
    """Serves `routes` to peers, and keeps count of what they hold. One that raises KVStoreError changed nothing.

    Args:
        state: of the node store.
        wake: called when a deadline was set, so that the control thread looks at it.
    """

    def __init__(self, state: NodeState, wake: Callable[[], None]) -> None:
        self._state, self._service, self._wake = state, state.pool_service, wake
        self._leases: dict[int, float] = {}
        self.routes: dict[Op, Handler] = {
            Op.PEER_LEASE: self._lease,
            Op.PEER_RELEASE: self._release_lease,
            Op.PEER_TRANSPORT: self._transport,
        }

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

    def notified(self, payload: bytes) -> None:
        """Peers' READs under our leases are through: their pins can go early.

        Raises:
            ProtocolError: these are no notifications; nothing changed.
        """
        if len(payload) % NOTIFICATION.size:
            raise ProtocolError(f"wanted notifications of {NOTIFICATION.size} bytes each, got {len(payload)} bytes")
        for lease_id, epoch, reader in NOTIFICATION.iter_unpack(payload):
            if epoch == self._state.epoch:
                self._release(lease_id, owner_of(reader))

    def tick(self, now_s: float) -> None:
        """Forget the leases whose time is over; the pool has dropped them."""
        # A copy: those of stages end on another thread.
        for lease_id in [i for i, deadline_s in list(self._leases.items()) if deadline_s < now_s]:
            self.ended(lease_id)

    def _lease(self, connection: Connection, message: Message) -> bytes:
        state, service, owner = self._state, self._service, connection.owner
        wanted = decode_peer_lease(message.payload)
        service.check_serving_peers()
        if wanted.slot_format != BLOCK_ORDER_VERSION:
            raise LayoutMismatch(
                f"blocks here are in byte order {BLOCK_ORDER_VERSION}, the peer wants {wanted.slot_format}; "
                "run one version of raykv everywhere"
            )
        namespace = wanted.chain.namespace
        if wanted.namespace_version > state.versions.get(namespace):
            service.hear_clearing(namespace, wanted.namespace_version)
        version, own = state.versions.get(namespace), state.mover.own
        grant = Grant()
        if service.is_attached and own is not None and version == wanted.namespace_version:
            known = service.block_bytes.get(namespace, wanted.block_bytes)
            if wanted.block_bytes != known:
                raise LayoutMismatch(
                    f"blocks of this namespace have {known} bytes here, the peer wants {wanted.block_bytes}; "
                    "run one version of raykv everywhere"
                )
            deadline_s = deadline_after(wanted.ttl_s, most_for_peers_s(state.config))
            grant = service.current.pin_prefix(wanted.chain, owner, deadline_s)
            if grant.packed_slots:
                self.began(grant.lease_id, deadline_s)
            else:
                service.current.release(grant.lease_id, owner)
        return encode(
            PeerGrant(
                lease_id=grant.lease_id if grant.packed_slots else 0,
                epoch=state.epoch,
                namespace_version=version,
                mover_generation=own.generation if own is not None else 0,
                slots=np.asarray(grant.slots, dtype=np.int32),
            )
        )

    def _transport(self, connection: Connection, message: Message) -> bytes:
        own = self._state.mover.own
        if own is None:
            raise PeerLost(f"the mover of node {self._state.node_id} is being replaced; try again")
        num_slots = self._service.pool.num_slots
        return encode(PeerTransport(own.generation, own.agent, own.address, self._service.slot_bytes, num_slots))

    def _release_lease(self, connection: Connection, message: Message) -> bytes:
        self._release(decode_id(message.payload), connection.owner)
        return b""

    def _release(self, lease_id: int, owner: str) -> None:
        # Of a lease that somebody else holds nothing ends, also not the polling for its notification.
        if self._service.current.release(lease_id, owner):
            self.ended(lease_id)

    def began(self, lease_id: int, deadline_s: float) -> None:
        """Expect a notification for a lease, or for a claim, until its deadline."""
        self._leases[lease_id] = deadline_s
        self._state.mover.expect_notifications(len(self._leases))
        self._wake()

    def ended(self, lease_id: int) -> None:
        """Expect none any more."""
        if self._leases.pop(lease_id, None) is not None:
            self._state.mover.expect_notifications(len(self._leases))


def owner_of(key: bytes) -> str:
    """Return who owns the leases of the store that names this key."""
    return f"store-{key.hex()}"


def most_for_peers_s(config: StoreConfig) -> float:
    """Return the longest lease that a peer gets: peers of the same configuration ask for no more."""
    return max(config.lease_ttl_s, _LEAST_MOST_TTL_S)

"""The leases of other nodes' stores. Runs on the control thread, so nothing here may block.

A peer's lease ends only when the peer releases it, when its READ's notification arrives, or when its time expires.
A closed connection does not end it: the peer's mover may still be reading.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.blocks.codec import decode_id, encode
from kvstore.blocks.grants import Grant
from kvstore.blocks.indexes import ints_in
from kvstore.blocks.priority import NORMAL, OF_LOW_READER, Retention
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.bounds import check_seconds, clip
from kvstore.config import StoreConfig
from kvstore.errors import LayoutMismatch, PeerLost, ProtocolError
from kvstore.node.later import answer_all
from kvstore.node.state import NodeState
from kvstore.quotas import check_tenant
from kvstore.remote.answers import bytes_in
from kvstore.remote.load import Load
from kvstore.remote.messages import PeerGrant, PeerLease, PeerTransport, decode_peer_lease
from kvstore.rpc.connection import Connection, Handler
from kvstore.rpc.framing import Message, Op
from kvstore.rpc.messages import OWNER_KEY_BYTES, Progress
from kvstore.runtime import clock
from kvstore.runtime.clock import deadline_after

#: Peers may always ask for this much.
_LEAST_MOST_TTL_S = 60.0
#: What has come from the disk is granted after this share of the time that the peer waits. The rest is for the way of
#: the answer, and for a control thread that is busy.
_SHARE_FOR_DISK = 0.75


class PeerControl:
    """Serves `routes` to peers, and counts their leases. A route that raises KVStoreError changed nothing.

    Args:
        state: of the node store.
        wake: called when a deadline was set, so that the control thread looks at it.
    """

    def __init__(self, state: NodeState, wake: Callable[[], None]) -> None:
        self._state, self._service, self._wake = state, state.pool_service, wake
        self._leases: dict[int, float] = {}
        #: Held while their number changes and the mover is told, so that it is told the last number last.
        self._telling = threading.Lock()
        self._numbers = itertools.count(1)
        #: What peers wait for: loads that read this node's disk.
        self._bringing = set[Load]()
        self.routes: dict[Op, Handler] = {
            Op.PEER_LEASE: self._lease,
            Op.PEER_RELEASE: self._release_lease,
            Op.PEER_TRANSPORT: self._transport,
        }

    def owner_in(self, hello: dict[str, Any]) -> str:
        """Return the owner of the leases of the store that sent this hello.

        Leases belong to one life of the peer's store, not to one of its connections. Many processes know its epoch,
        so it also sends a random key, chosen for this store alone: no other process can release its leases.

        Raises:
            ProtocolError: the hello has no valid key.
        """
        if not (key := bytes_in(hello, "owner", OWNER_KEY_BYTES)):
            raise ProtocolError(
                f"owner: wanted {OWNER_KEY_BYTES} bytes in hexadecimal, got {clip(hello.get('owner'))}; "
                "run one version of raykv everywhere"
            )
        return owner_of(key)

    def tick(self, now_s: float) -> None:
        """Forget the leases that have expired; the pool has dropped them. Answer peers that have waited enough."""
        # A copy: claims on blocks of stages may end on another thread.
        for lease_id in [i for i, deadline_s in list(self._leases.items()) if deadline_s < now_s]:
            self.ended(lease_id)
        for load in [load for load in self._bringing.copy() if load.deadline_s < now_s]:
            load.end("timeout")  # All threads that read for peers may be busy.

    def wants_ticks(self) -> bool:
        """Return whether a peer waits for blocks of this node's disk."""
        return bool(self._bringing)

    def _lease(self, connection: Connection, message: Message) -> bytes | None:
        state, service, owner = self._state, self._service, connection.owner
        wanted = decode_peer_lease(message.payload)
        check_seconds("within_s", wanted.within_s)
        check_tenant(state.config.tenants, wanted.tenant)
        if service.is_closed_to_peers:
            service.check_serving()
        if wanted.slot_format != BLOCK_ORDER_VERSION:
            raise LayoutMismatch(
                f"blocks here are in byte order {BLOCK_ORDER_VERSION}, the peer wants {wanted.slot_format}; "
                "run one version of raykv everywhere"
            )
        namespace = wanted.chain.namespace
        if wanted.namespace_version > state.versions.get(namespace):
            service.hear_clearing(namespace, wanted.namespace_version)
        version, own = state.versions.get(namespace), state.mover.own
        if service.is_attached and own is not None and version == wanted.namespace_version:
            num_local = service.current.lookup(wanted.chain)
            if num_disk := service.lookup_disk(wanted.chain, num_local)[0]:
                self._bring(connection, message, wanted, num_local + num_disk)
                return None
        return encode(self._grant(owner, wanted))

    def _bring(self, connection: Connection, message: Message, wanted: PeerLease, num_blocks: int) -> None:
        """Bring blocks of this node's disk into its memory, and answer then: peers read memory only.

        What has come in a share of the time that the peer waits is granted.
        """
        state, service, asked = self._state, self._service, (connection, message.op, message.request)
        chain, owner = wanted.chain.head(num_blocks), f"bring-{next(self._numbers)}"
        within_s = min(_SHARE_FOR_DISK * wanted.within_s, state.config.call_timeout_s / 2)
        namespace, deadline_s = chain.namespace, clock.now_s() + within_s
        version_now = partial(state.versions.get, namespace)
        version, pool = version_now(), service.current  # The version before the pin.
        retention = _retention_of(wanted)
        grant = pool.pin_prefix(
            chain, owner, deadline_s + state.config.call_timeout_s, retention=retention, tenant=wanted.tenant
        )

        def answer(piece: Progress) -> None:
            if piece.report is not None:
                self._bringing.discard(load)
                # Nobody would give back what is granted to a connection that is closed.
                if not connection.closed:
                    answer_all([asked], lambda: self._grant(connection.owner, wanted))
                pool.release(grant.lease_id, owner)

        load = Load(
            chain=chain,
            block_bytes=wanted.block_bytes,
            owner=owner,
            lease_id=grant.lease_id,
            ttl_s=state.config.call_timeout_s,
            deadline_s=deadline_s,
            pool=pool,
            version_now=version_now,
            version=version,
            send=answer,
            is_open=lambda: not connection.closed,
            retention=retention,
            tenant=wanted.tenant,
            num_ready=grant.num_blocks,
            may_ask_peers=False,
        )
        self._bringing.add(load)
        self._wake()
        state.fetcher.begin(load)

    def _grant(self, owner: str, wanted: PeerLease) -> PeerGrant:
        """Lease what is in memory to a peer."""
        state, service, namespace = self._state, self._service, wanted.chain.namespace
        if service.is_closed_to_peers:  # Perhaps since the peer asked.
            service.check_serving()
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
            grant = service.current.pin_prefix(
                wanted.chain, owner, deadline_s, retention=_retention_of(wanted), tenant=wanted.tenant
            )
            # Compared again after the pin: a clearing is noted before new blocks can be stored.
            version = state.versions.get(namespace)
            if grant.packed_slots and version == wanted.namespace_version:
                self.began(grant.lease_id, deadline_s)
                service.traffic.granted_to_peer(grant.num_blocks * known)
            else:
                service.current.release(grant.lease_id, owner)
                grant = Grant()
        return PeerGrant(
            lease_id=grant.lease_id if grant.packed_slots else 0,
            epoch=state.epoch,
            namespace_version=version,
            mover_generation=own.generation if own is not None else 0,
            slots=ints_in(grant.packed_slots),
        )

    def _transport(self, connection: Connection, message: Message) -> bytes:
        own = self._state.mover.own
        if own is None:
            raise PeerLost(f"the mover of node {self._state.node_id} is being replaced; try again")
        num_slots = self._service.pool.num_slots
        return encode(PeerTransport(own.generation, own.agent, own.address, self._service.slot_bytes, num_slots))

    def _release_lease(self, connection: Connection, message: Message) -> bytes:
        self.release(decode_id(message.payload), connection.owner)
        return b""

    def release(self, lease_id: int, owner: str) -> None:
        """End a peer's lease before its time expires."""
        # If another owner holds the lease, nothing changes: the mover also keeps polling for its notification.
        if self._service.current.release(lease_id, owner):
            self.ended(lease_id)

    def began(self, lease_id: int, deadline_s: float) -> None:
        """Expect a notification for a lease, or for a claim, until its deadline."""
        with self._telling:
            self._leases[lease_id] = deadline_s
            self._state.mover.expect_notifications(len(self._leases))
        self._wake()

    def ended(self, lease_id: int) -> None:
        """Stop expecting a notification for a lease, or for a claim."""
        with self._telling:
            if self._leases.pop(lease_id, None) is not None:
                self._state.mover.expect_notifications(len(self._leases))


def _retention_of(wanted: PeerLease) -> Retention:
    return OF_LOW_READER if wanted.is_low else NORMAL


def owner_of(key: bytes) -> str:
    """Return the owner of the leases of the store that sends this key."""
    return f"store-{key.hex()}"


def most_for_peers_s(config: StoreConfig) -> float:
    """Return the longest lease that a peer gets. Peers with the same configuration do not ask for more."""
    return max(config.lease_ttl_s, _LEAST_MOST_TTL_S)

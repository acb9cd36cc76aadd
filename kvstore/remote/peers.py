"""Connections to other nodes' stores: found once through the cluster, then direct.

After a failure a peer is not asked for a while, longer each time: each call to a vanished node costs a timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.blocks.codec import encode
from kvstore.bounds import clip
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import KVStoreError, PeerLost, StoreUnavailable, TransferError, TransferTimeout
from kvstore.mover.transport import PeerDescription
from kvstore.remote.answers import EPOCH_BYTES, bytes_in, grant_of, transport_of
from kvstore.remote.messages import PeerGrant, PeerLease
from kvstore.rpc.client import ControlClient
from kvstore.rpc.connect import connect_remote
from kvstore.rpc.connection import Role
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import OWNER_KEY_BYTES
from kvstore.runtime import clock
from kvstore.runtime.silence import Silence

_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 15.0)
#: A node's failures are forgotten this long after its back-off.
_FORGIVEN_AFTER_S = 600.0
#: Most failed nodes that are remembered, those with the latest back-off: tickets may name nodes that never existed.
_MOST_FAILED = 1024
#: A call may take at least this long, even if its caller has no time left: else a healthy peer would seem to fail.
_LEAST_CALL_S = 1.0
#: A peer has failed when it was silent for this share of `call_timeout_s`. Less may be the short time of one load.
_SILENT_SHARE = 0.75
#: A peer keeps this many spare connections, or as many as are in use. Others are closed when one is given back.
_FEW_SPARE = 4


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """The address at which a store or directory listens, and the secret that it requires."""

    host: str
    port: int
    token: str

    def connect(self, role: Role, node_id: str, epoch: bytes, owner_key: bytes, timeout_s: float) -> ControlClient:
        """Return a new connection of the store of a node, in one of its lives.

        Raises:
            KVStoreError, OSError: there is no answer, or a refusal.
        """
        hello = {"role": role, "protocol": PROTOCOL_VERSION, "token": self.token, "node": node_id}
        hello |= {"epoch": epoch.hex(), "owner": owner_key.hex()}
        return connect_remote(self.host, self.port, hello, timeout_s=timeout_s)


def call_s(config: StoreConfig, deadline_s: float) -> float:
    """Return how many seconds a call to a peer may take, until this deadline."""
    return min(config.call_timeout_s, max(deadline_s - clock.now_s(), _LEAST_CALL_S))


#: Finds the address of a node's store through the cluster within some seconds; raises StoreUnavailable, PeerLost, or
#: TransferTimeout.
Resolver = Callable[[str, float], PeerAddress]


@dataclass(slots=True)
class Peer:
    """An open connection to the store of another node."""

    node_id: str
    client: ControlClient
    epoch: bytes
    #: The peer knows this store's leases by this key.
    owner_key: bytes
    same_host: bool = False
    #: Separate connections for questions whose answers may take long; each carries one question at a time.
    spare: list[ControlClient] = field(default_factory=list)
    #: The spare ones and those in use; perhaps some that were closed.
    opened: list[ControlClient] = field(default_factory=list)
    #: Shared by all connections of the node, also later ones.
    silence: Silence = field(default_factory=Silence)
    address: PeerAddress | None = None
    _transport: tuple[int, PeerDescription] | None = None

    def lease(
        self, connection: ControlClient, lease: PeerLease, meanwhile: Callable[[], None] = lambda: None
    ) -> PeerGrant:
        """Ask for a lease: one blocking call, for as long as the question says.

        Args:
            connection: of `PeerBook.take_spare`. The peer may read its disk first, and others must not wait for that.
            lease: the question.
            meanwhile: called before the wait; must not raise.
        """
        answer = self._ask(connection, Op.PEER_LEASE, encode(lease), lease.within_s, meanwhile)
        return grant_of(answer, len(lease.chain))

    def _ask(
        self,
        connection: ControlClient,
        op: Op,
        payload: bytes,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Ask the peer; raise PeerLost for any refusal, since another peer may not refuse."""
        asked_s = clock.now_s()
        try:
            answer = connection.call(op, payload, timeout_s=timeout_s, meanwhile=meanwhile)
        except TransferTimeout:
            self.silence.add(op.name, asked_s)
            raise
        except (TransferError, StoreUnavailable):
            raise
        except KVStoreError as error:
            raise PeerLost(f"node {self.node_id} refused: {type(error).__name__}: {error}") from error
        # A load asks for a connection and a lease first: only the answer to its last question ends all silence.
        self.silence.end(Op.HELLO.name, Op.PEER_LEASE.name, op.name)
        return answer

    def is_silent(self, call_timeout_s: float) -> bool:
        """Return whether the peer has failed: it was silent for too long since its last answers.

        The timeout of one question is no failure, for its load may have had little time left.
        """
        return self.silence.total_s() >= _SILENT_SHARE * call_timeout_s

    def release(self, lease_id: int) -> None:
        """Give a lease back without waiting."""
        self.client.send(Op.PEER_RELEASE, encode(lease_id))

    def close(self) -> None:
        """Close the common connection, and all spare ones that are not in use."""
        self.client.close()
        while self.spare:
            self.spare.pop().close()

    def known_transport(self, generation: int) -> tuple[str, PeerDescription] | None:
        """Return the result of `transport` if it is known without asking the peer; else None."""
        found = self._transport  # Once: another thread may be asking about the next life.
        return (self._transport_name(generation), found[1]) if found and found[0] == generation else None

    def transport(self, generation: int, timeout_s: float) -> tuple[str, PeerDescription]:
        """Return (name, description) of the peer's slab, for one life of its mover. It is asked for once."""
        found = self._transport
        if found is None or found[0] != generation:
            found = transport_of(self._ask(self.client, Op.PEER_TRANSPORT, b"", timeout_s), self.same_host)
            if found[0] != generation:
                raise PeerLost(f"the mover of node {self.node_id} was replaced meanwhile; try again")
            self._transport = found
        return self._transport_name(generation), found[1]

    def _transport_name(self, generation: int) -> str:
        return f"{self.node_id}/{self.epoch.hex()}/{generation}"


class PeerBook:
    """All peers of one store.

    Args:
        own_epoch: this life of the store.
        resolve: finds a node's address through the cluster; called on first contact and after failures only.
        timeout_s: of a call. A new connection may take so long where its caller names no other time.
    """

    def __init__(self, own_node_id: str, own_epoch: bytes, resolve: Resolver, timeout_s: float) -> None:
        self.own_node_id, self._own_epoch = own_node_id, own_epoch
        self.resolve, self._timeout_s = resolve, timeout_s
        self._secret = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self.peers: dict[str, Peer] = {}
        self.failures: dict[str, tuple[int, float]] = {}
        self._silences: dict[str, Silence] = {}

    def is_usable(self, node_id: str) -> bool:
        """Return whether a node may be asked. It is not this node, and not backed off."""
        return node_id != self.own_node_id and clock.now_s() >= self.failures.get(node_id, (0, 0.0))[1]

    def known(self, node_id: str) -> Peer | None:
        """Return a peer with an open connection, unless it is backed off. It may be this node itself."""
        if node_id != self.own_node_id and not self.is_usable(node_id):
            return None
        peer = self.peers.get(node_id)
        return peer if peer is not None and not peer.client.closed else None

    def get(self, node_id: str, within_s: float | None = None) -> Peer:
        """Return an open connection to a node's store. Open one within `within_s` if there is none.

        Raises:
            PeerLost: the node cannot be reached; it is backed off.
            TransferTimeout: it did not answer in time, which is no failure yet; its silence is counted.
        """
        peer = self.peers.get(node_id)
        if peer is not None and not peer.client.closed:
            return peer
        silence = self._silence_of(node_id)
        # Where a store hangs, its actor may hang, too: to find the address again could take a whole call's time.
        known = peer.address if peer is not None and silence.total_s() else None
        client, address = self._connect(node_id, known, within_s)
        peer = Peer(node_id, client, bytes.fromhex(client.hello["epoch"]), self._owner_key(node_id))
        peer.same_host, peer.silence, peer.address = client.is_to_this_host(), silence, address
        with self._lock:
            old = self.peers.get(node_id)
            if old is not None and not old.client.closed:
                client.close()
                return old
            ended = [self.peers.pop(known) for known, old in [*self.peers.items()] if old.client.has_ended()]
            self.peers[node_id], self._silences[node_id] = peer, silence
            # The silence of the others is kept: their connections were perhaps closed by timeouts.
            self._silences = {n: s for n, s in self._silences.items() if n in self.peers or s.total_s()}
        for old in ended:
            # Perhaps no load asks these nodes again: each connection would keep a file descriptor forever.
            old.close()
        return peer

    def of_life(self, node_id: str, epoch: bytes, within_s: float | None = None) -> Peer:
        """Return an open connection to a node's store, in the life `epoch` if it runs.

        A connection to a store that has ended stays open until it is used.

        Raises:
            PeerLost: it cannot be reached; it is backed off.
            TransferTimeout: as for `get`, also if only the connection to its later life took too long.
        """
        peer = self.get(node_id, within_s)
        if peer.epoch == epoch:
            return peer
        with contextlib.closing(self._connect(node_id, None, within_s)[0]) as client:
            if client.hello["epoch"] == peer.epoch.hex():
                return peer
        with self._lock:
            if self.peers.get(node_id) is peer:
                del self.peers[node_id]
        peer.close()
        return self.get(node_id, within_s)

    def _owner_key(self, node_id: str) -> bytes:
        # A different key for each node: a peer cannot use its key to act as this store at other nodes.
        return hashlib.blake2b(node_id.encode(), key=self._secret, digest_size=OWNER_KEY_BYTES).digest()

    def _silence_of(self, node_id: str) -> Silence:
        with self._lock:
            return self._silences.setdefault(node_id, Silence())

    def _lost(self, node_id: str, error: Exception) -> PeerLost:
        self.failed(node_id)
        return PeerLost(f"the store of node {node_id} cannot be reached: {error}")

    def _connect(
        self, node_id: str, address: PeerAddress | None, within_s: float | None
    ) -> tuple[ControlClient, PeerAddress]:
        """Return a new connection and its address. To find the address has as much time as to connect."""
        asked_s, timeout_s = clock.now_s(), within_s or self._timeout_s
        try:
            address = address or self.resolve(node_id, timeout_s)
            client = address.connect(Role.PEER, self.own_node_id, self._own_epoch, self._owner_key(node_id), timeout_s)
            if not bytes_in(client.hello, "epoch", EPOCH_BYTES):
                client.close()
                raise PeerLost(f"a peer named no epoch of {EPOCH_BYTES} bytes: {clip(client.hello.get('epoch'))}")
            return client, address
        except (KVStoreError, OSError) as error:
            # The kernel of a store that hangs accepts, its actor does not answer; of a host that vanished nothing does.
            if isinstance(error, TransferTimeout) or isinstance(error.__cause__, TimeoutError):
                silence = self._silence_of(node_id)
                silence.add(Op.HELLO.name, asked_s)
                if silence.total_s() < _SILENT_SHARE * self._timeout_s:
                    raise TransferTimeout(
                        f"wanted a connection to node {node_id} within {timeout_s:.2g} s, got none; try again"
                    ) from error
            raise self._lost(node_id, error) from error

    def take_spare(self, peer: Peer, within_s: float | None = None) -> ControlClient:
        """Return a connection to a peer, for the caller alone until `keep_spare`. Open one if none is spare.

        Raises:
            PeerLost: the peer cannot be reached, and is backed off; or its store was restarted.
            TransferTimeout: as for `get`.
        """
        with contextlib.suppress(IndexError):
            return peer.spare.pop()
        connection, _ = self._connect(peer.node_id, peer.address, within_s)
        if connection.hello["epoch"] != peer.epoch.hex():
            connection.close()
            raise PeerLost(f"the store of node {peer.node_id} was restarted; try again")
        with self._lock:
            peer.opened = [*_open_ones(peer.opened), connection]
        return connection

    def keep_spare(self, peer: Peer, connection: ControlClient) -> None:
        """Take back a connection of `take_spare`. Close those that are spare beyond a few and the number in use."""
        if peer.client.closed:
            connection.close()
        if connection.closed:
            return
        ended = []
        with self._lock:
            peer.spare.append(connection)
            if len(peer.spare) > _FEW_SPARE:
                peer.opened = _open_ones(peer.opened)
                num_in_use = len(peer.opened) - len(peer.spare)
                while len(peer.spare) > max(_FEW_SPARE, num_in_use):
                    # One by one from the oldest: a fetch may take the latest meanwhile, without the lock.
                    ended.append(peer.spare.pop(0))
        for old in ended:
            old.close()

    def failed(self, node_id: str) -> None:
        """Note a failure: close the connection and back the node off for a while.

        Loads that fail during the back-off began before it: all of them together count as one failure.
        """
        with self._lock:
            peer = self.peers.pop(node_id, None)
            self._silences.pop(node_id, None)
            now_s = clock.now_s()
            self.failures = {n: f for n, f in self.failures.items() if f[1] + _FORGIVEN_AFTER_S > now_s}
            count, until_s = self.failures.get(node_id, (0, 0.0))
            if now_s >= until_s:
                pause_s = _BACK_OFF_S[min(count, len(_BACK_OFF_S) - 1)]
                self.failures.pop(node_id, None)
                if len(self.failures) >= _MOST_FAILED:
                    del self.failures[min(self.failures, key=lambda known: self.failures[known][1])]
                self.failures[node_id] = (count + 1, now_s + pause_s)
        if peer is not None:
            peer.close()

    def succeeded(self, node_id: str) -> None:
        """Note a success: earlier failures are forgotten."""
        if node_id in self.failures:
            with self._lock:  # `failed` goes through all of them.
                self.failures.pop(node_id, None)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            peers, self.peers = list(self.peers.values()), {}
        for peer in peers:
            peer.close()


def _open_ones(connections: list[ControlClient]) -> list[ControlClient]:
    return [connection for connection in connections if not connection.closed]

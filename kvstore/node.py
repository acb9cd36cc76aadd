"""The node store: everything that one node keeps, as a plain class. actors/node_store.py wraps it for Ray.

One thread serves local workers, the mover and peers (kvstore.control_server); what has to wait for a
peer runs on threads of kvstore.fetch. The pool has its own lock, so any thread may call the verbs here.
"""

from __future__ import annotations

import base64
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from kvstore.arena import Arena, create_arena
from kvstore.chain import Chain, decode_chain
from kvstore.config import PROTOCOL_VERSION, StoreConfig, socket_dir
from kvstore.control_server import Connection, ControlServer
from kvstore.errors import (
    ConfigError,
    IncompatibleStore,
    InvalidRequest,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    StoreDraining,
    TransferError,
)
from kvstore.fetch import Fetcher, Load
from kvstore.hints import Hints
from kvstore.messages import (
    NOTIFICATION,
    U64,
    U64_F64,
    U64_U16,
    PeerGrant,
    Progress,
    pack_grant,
    pack_peer_grant,
    pack_progress,
    pack_ticket,
    unpack_lease,
    unpack_load,
    unpack_peer_lease,
    unpack_prepare,
)
from kvstore.mover_link import MoverLink
from kvstore.peers import PeerAddress, PeerBook, Resolver
from kvstore.pool import Grant, Pool, StoreTicket
from kvstore.shape import BLOCK_ORDER_VERSION
from kvstore.wire import Flag, Message, Op, pack_json, unpack_json

logger = logging.getLogger(__name__)

#: Slots begin at multiples of this, so that word-wide copies are always aligned.
SLOT_ALIGNMENT_BYTES = 64


class NodeCore:
    """State and verbs of one node store.

    Args:
        node_id: unique in the cluster.
        config: the same on every node.
        host: address at which peers reach this node.
        resolve_peer: finds another node's store through the cluster.
        resolve_directory: finds the directory through the cluster.
        on_mover_gone: called, on a thread of its own, when the mover's process is gone and has to be replaced.

    Raises:
        ConfigError: there is not enough memory; nothing is left behind.
    """

    def __init__(
        self,
        node_id: str,
        config: StoreConfig,
        host: str,
        resolve_peer: Resolver,
        resolve_directory: Callable[[], PeerAddress],
        on_mover_gone: Callable[[], None] = lambda: None,
    ) -> None:
        self.node_id, self.config = node_id, config
        self.epoch = secrets.token_bytes(8)
        self._host, self._token = host, secrets.token_hex(16)
        self._on_mover_gone = on_mover_gone
        self.arena: Arena = create_arena(config.capacity_bytes)
        self._pool: Pool | None = None
        self._slot_bytes = 0
        self._attach_lock = threading.Lock()
        self._versions: dict[bytes, int] = {}
        self._block_bytes: dict[bytes, int] = {}
        self._draining = self._closed_to_peers = False
        self._remote_leases: dict[int, float] = {}
        self._calls: dict[str, int] = {}
        self._mover = MoverLink(self._mover_terminal)
        self._peers = PeerBook(node_id, resolve_peer, config.call_timeout_s)
        self._hints = Hints(node_id, resolve_directory, config.call_timeout_s)
        self._fetcher: Fetcher | None = None
        self._server = ControlServer(self._serve, self._gone, self._tick, self._wants_ticks)
        self.control_path = str(socket_dir() / f"{node_id[:16]}-{self.epoch.hex()}.sock")
        self._server.listen_local(self.control_path)
        self._server.listen_remote(host)
        self._server.start()
        logger.info("node store %s: arena of %d bytes, epoch %s", node_id, config.capacity_bytes, self.epoch.hex())

    # Verbs that Ray callers use too.

    def peer_address(self) -> PeerAddress:
        """Return where peers reach this store, and the secret they have to name."""
        return PeerAddress(self._host, self._server.port, self._token)

    def attach(self, namespace: bytes, block_bytes: int) -> dict[str, int]:
        """Make room for blocks of one size; the first call divides the arena into slots.

        Raises:
            ConfigError: the blocks do not fit the slots; nothing changed.
            LayoutMismatch: the namespace is known with another block size in bytes; nothing changed.
        """
        with self._attach_lock:
            known = self._block_bytes.get(namespace, block_bytes)
            if known != block_bytes:
                raise LayoutMismatch(
                    f"blocks of this namespace have {known} bytes here, got a client with {block_bytes}; "
                    "run one version of raykv everywhere"
                )
            if self._pool is None:
                self._divide(max(block_bytes, self.config.block_bytes))
            if block_bytes > self._slot_bytes:
                raise ConfigError(
                    f"this store's slots hold {self._slot_bytes} bytes, got a namespace with blocks of "
                    f"{block_bytes}; restart it with block_bytes={block_bytes}"
                )
            self._block_bytes[namespace] = block_bytes
        assert self._pool is not None
        return {"slot_bytes": self._slot_bytes, "num_slots": self._pool.stats().num_slots}

    def _divide(self, block_bytes: int) -> None:
        slot_bytes = -(-block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        num_slots = self.config.capacity_bytes // slot_bytes
        if num_slots < 2:
            raise ConfigError(
                f"wanted room for at least 2 blocks of {slot_bytes} bytes, got a capacity of "
                f"{self.config.capacity_bytes}; raise capacity="
            )
        max_pinned = max(1, int(num_slots * self.config.max_pinned_fraction))
        self._slot_bytes = slot_bytes
        pool = Pool(num_slots, max_pinned)
        self._fetcher = Fetcher(
            self.config, pool, self._hints, self._peers, self._mover, BLOCK_ORDER_VERSION,
            lambda namespace: self._versions.get(namespace, 0), self._adopt_version,
        )  # fmt: skip
        self._mover.set_slots(slot_bytes, num_slots)
        self._hints.start(pool)
        self._pool = pool

    @property
    def pool(self) -> Pool:
        """The pool of the arena.

        Raises:
            InvalidRequest: no namespace has attached yet, so there are no slots.
        """
        if self._pool is None:
            raise InvalidRequest("no namespace has attached to this store yet; make a client first")
        return self._pool

    def lookup(self, chain: Chain) -> int:
        """Return how many leading blocks are readable on this node. No side effect."""
        return 0 if self._pool is None else self._pool.lookup(chain)

    def lookup_all(self, chain: Chain) -> list[tuple[str, int]]:
        """Return (node, prefix length), this node first and as it is, the others as the directory hints."""
        found = [(self.node_id, self.lookup(chain))]
        if found[0][1] < len(chain):
            found += [item for item in self._hints.locate(chain) if item[0] != self.node_id]
        return found

    def lease(self, chain: Chain, owner: str, ttl_s: float) -> Grant:
        """Pin the readable prefix of a run for `ttl_s` seconds.

        Raises:
            StoreDraining: nothing is granted any more.
        """
        self._check_serving()
        if self._pool is None:
            return Grant(0, ())
        grant = self._pool.pin_prefix(chain, owner, time.monotonic() + ttl_s)
        if not grant.slots:
            self._pool.release(grant.lease_id, owner)
            return Grant(0, ())
        self._server.wake()
        return grant

    def release(self, lease_id: int, owner: str) -> bool:
        """Drop a lease; whether it was still held."""
        return self._pool is not None and self._pool.release(lease_id, owner)

    def renew(self, lease_id: int, owner: str, ttl_s: float) -> bool:
        """Extend a lease to `ttl_s` from now; whether it was still held. Never shortens."""
        return self._pool is not None and self._pool.renew(lease_id, owner, time.monotonic() + ttl_s)

    def prepare_store(self, chain: Chain, owner: str, num_parts: int = 1) -> StoreTicket:
        """Claim slots for the blocks of a run that are not here.

        Raises:
            StoreDraining: nothing is granted any more.
            ChainBroken: the run cannot be attached; nothing changed.
        """
        self._check_serving()
        return self.pool.prepare_store(chain, owner, num_parts=num_parts)

    def complete_store(self, write_id: int, owner: str, part: int = 0) -> int:
        """Publish a write whose bytes are in place; returns how many blocks became findable."""
        published = self.pool.complete_store(write_id, owner, part=part)
        self._hints.publish_soon()
        return published

    def abort_store(self, write_id: int, owner: str) -> int:
        """Give a write up; returns how many slots came back."""
        return self.pool.abort_store(write_id, owner)

    def clear(self, namespace: bytes, version: int) -> int:
        """Make a namespace a miss; `version` must be later than the last clearing's, else nothing happens.

        Stores of different versions of a namespace grant each other nothing, so a node that has not heard
        yet cannot bring old blocks back.
        """
        if version <= self._versions.get(namespace, 0):
            return 0
        self._versions[namespace] = version
        cleared = 0 if self._pool is None else self._pool.clear(namespace)
        if self._pool is not None:
            self._hints.publish_soon()
        logger.info("cleared namespace %s: %d blocks", namespace.hex()[:12], cleared)
        return cleared

    def namespace_versions(self) -> dict[bytes, int]:
        """Return how often each namespace was cleared, for a store that joins."""
        return dict(self._versions)

    def begin_drain(self, max_bytes: int) -> list[bytes]:
        """Grant nothing to this node's workers any more, but go on serving peers.

        Returns:
            The most recently used chains, up to `max_bytes` of blocks, encoded, for a peer to `adopt`.
        """
        self._draining = True
        if self._pool is None:
            return []
        return [chain.encode() for chain in self._pool.hot_chains(max_bytes // self._slot_bytes)]

    def adopt(self, chains: list[bytes], timeout_s: float) -> int:
        """Fetch chains from whoever has them; returns how many blocks are here now."""
        if self._fetcher is None:
            return 0
        deadline_s, arrived = time.monotonic() + timeout_s, 0
        for encoded in chains:
            chain, left_s = decode_chain(encoded), deadline_s - time.monotonic()
            if left_s <= 0:
                break
            if chain.namespace not in self._block_bytes:
                continue
            ended = threading.Event()
            grant = self.pool.pin_prefix(chain, "adopt", time.monotonic() + self.config.lease_ttl_s)
            load = Load(
                chain=chain, block_bytes=self._block_bytes[chain.namespace], owner="adopt",
                lease_id=grant.lease_id, ttl_s=self.config.lease_ttl_s, deadline_s=deadline_s,
                send=lambda _, last, ended=ended: ended.set() if last else None,  # type: ignore[misc]
                num_ready=len(grant.slots),
            )  # fmt: skip
            self._fetcher.submit(load)
            ended.wait(left_s + 1.0)
            arrived += load.num_ready
            self.pool.release(grant.lease_id, "adopt")
        return arrived

    def drain(self, timeout_s: float) -> dict[str, int]:
        """Grant nothing any more, to peers either, and wait for leases and writes; returns what is left."""
        self._draining = self._closed_to_peers = True
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            left = self._left()
            if not any(left.values()):
                break
            time.sleep(0.02)
        return self._left()

    def undrain(self) -> None:
        """Serve again."""
        self._draining = self._closed_to_peers = False

    def _left(self) -> dict[str, int]:
        if self._pool is None:
            return {"num_leases": 0, "num_writes": 0}
        stats = self._pool.stats()
        return {"num_leases": stats.num_leases, "num_writes": stats.num_writes}

    def stats(self) -> dict[str, Any]:
        """Return counts of the pool, the engine and the calls served."""
        result: dict[str, Any] = {
            "node_id": self.node_id,
            "epoch": self.epoch.hex(),
            "pid": os.getpid(),
            "mover_pid": self._mover.pid,
            "host": self._host,
            "capacity_bytes": self.config.capacity_bytes,
            "slot_bytes": self._slot_bytes,
            "draining": self._draining,
            "num_abandoned_reads": self._mover.num_abandoned,
            "calls": dict(self._calls),
            "pool": None if self._pool is None else asdict(self._pool.stats()),
            "nixl": None,
        }
        if self._mover.own is not None:
            try:
                result["nixl"] = self._mover.stats(self.config.call_timeout_s)
            except TransferError as error:
                logger.debug("no mover statistics: %s", error)
        return result

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the mover has registered the arena."""
        return self._mover.wait_ready(timeout_s)

    def mover_pid(self) -> int:
        """Return the process id of the present mover, 0 when there is none."""
        return self._mover.pid

    def stop(self) -> None:
        """Close everything; may be called again. Workers that still map the arena keep their mapping."""
        self._draining = self._closed_to_peers = True
        if self._fetcher is not None:
            self._fetcher.stop()
        self._hints.stop()
        self._peers.close()
        self._server.stop()
        self.arena.close()

    def _check_serving(self) -> None:
        if self._draining:
            raise StoreDraining(f"node {self.node_id} is being drained; use another node or undrain it")

    # The control thread.

    def _serve(self, connection: Connection, message: Message) -> bytes | None:
        op, payload, owner = message.op, message.payload, connection.owner
        if op is Op.HELLO:
            return self._hello(connection, message)
        if not connection.role:
            raise ProtocolError("wanted HELLO first")
        self._calls[op.name] = self._calls.get(op.name, 0) + 1
        if connection.role == "mover":
            if op is Op.MOVER_NOTIFICATIONS:
                self._notified(payload)
            else:
                self._mover.serve(connection, message)
            return None
        if connection.role == "peer":
            return self._serve_peer(connection, message)
        match op:
            case Op.LOOKUP:
                return U64.pack(self.lookup(decode_chain(payload)))
            case Op.LEASE:
                chain, ttl_s = unpack_lease(payload)
                return pack_grant(self.lease(chain, owner, ttl_s))
            case Op.RELEASE:
                return U64.pack(self.release(U64.unpack(payload)[0], owner))
            case Op.RENEW:
                lease_id, ttl_s = U64_F64.unpack(payload)
                return U64.pack(self.renew(lease_id, owner, ttl_s))
            case Op.LOAD:
                self._load(connection, message)
                return None
            case Op.PREPARE_STORE:
                chain, num_parts = unpack_prepare(payload)
                return pack_ticket(self.prepare_store(chain, owner, num_parts))
            case Op.COMPLETE_STORE:
                self._complete(connection, message)
                return None
            case Op.ABORT_STORE:
                return U64.pack(self.abort_store(U64.unpack(payload)[0], owner))
            case Op.LOOKUP_ALL:
                threading.Thread(target=self._lookup_all, args=(connection, message), daemon=True).start()
                return None
            case Op.ATTACH:
                value = unpack_json(payload)
                return pack_json(self.attach(bytes.fromhex(value["namespace"]), int(value["block_bytes"])))
            case Op.STATS:
                threading.Thread(target=self._stats, args=(connection, message), daemon=True).start()
                return None
            case _:
                raise ProtocolError(f"a node store does not serve {op.name} to a {connection.role}")

    def _hello(self, connection: Connection, message: Message) -> bytes | None:
        value = unpack_json(message.payload)
        if value.get("protocol") != PROTOCOL_VERSION:
            raise IncompatibleStore(
                f"this node store speaks protocol {PROTOCOL_VERSION}, got {value.get('protocol')}; "
                "run one version of raykv everywhere"
            )
        answer = pack_json(
            {
                "protocol": PROTOCOL_VERSION,
                "epoch": self.epoch.hex(),
                "node": self.node_id,
                "config": self.config.to_json(),
                "arena_bytes": self.arena.num_bytes,
            }
        )
        role = value.get("role")
        if connection.local and role in ("client", "mover"):
            connection.role = role
            connection.send(Op.HELLO, Flag.REPLY, message.request, answer, (self.arena.fd,))
            return None
        if not connection.local and role == "peer":
            if not secrets.compare_digest(str(value.get("token")), self._token):
                raise IncompatibleStore("wrong token: this address now belongs to another life of the store")
            connection.role = "peer"
            return answer
        raise ProtocolError(f"wanted role client or mover locally, or peer remotely, got {role!r}")

    def _load(self, connection: Connection, message: Message) -> None:
        chain, ttl_s, timeout_s = unpack_load(message.payload)
        self._check_serving()
        if self._fetcher is None or chain.namespace not in self._block_bytes:
            raise InvalidRequest("wanted a namespace that has attached to this store, got another; make a client first")
        grant = self.pool.pin_prefix(chain, connection.owner, time.monotonic() + ttl_s)
        self._server.wake()
        load = Load(
            chain=chain,
            block_bytes=self._block_bytes[chain.namespace],
            owner=connection.owner,
            lease_id=grant.lease_id,
            ttl_s=ttl_s,
            deadline_s=time.monotonic() + timeout_s,
            send=lambda payload, last: self._answer_load(connection, message.request, payload, last),
        )
        load.num_ready = load.report.num_local = len(grant.slots)
        slots = np.asarray(grant.slots, dtype=np.int32)
        if len(grant.slots) == len(chain):
            load.send(pack_progress(Progress(grant.lease_id, 0, slots, load.report.to_json())), True)
            return
        if grant.slots:
            load.send(pack_progress(Progress(grant.lease_id, 0, slots)), False)
        self._fetcher.submit(load)

    @staticmethod
    def _answer_load(connection: Connection, request: int, payload: bytes, last: bool) -> None:
        connection.send(Op.LOAD, Flag.REPLY if last else Flag.PROGRESS, request, payload)

    def _complete(self, connection: Connection, message: Message) -> None:
        write_id, part = U64_U16.unpack(message.payload)
        published = self.pool.complete_store(write_id, connection.owner, part=part)
        # Answered after the directory has heard, so that who waits for a save can find it from any node.
        self._hints.publish_soon(
            lambda: self._reply(connection, Op.COMPLETE_STORE, message.request, U64.pack(published))
        )

    @staticmethod
    def _reply(connection: Connection, op: Op, request: int, payload: bytes) -> None:
        connection.send(op, Flag.REPLY, request, payload)

    def _lookup_all(self, connection: Connection, message: Message) -> None:
        answer = pack_json({"nodes": self.lookup_all(decode_chain(message.payload))})
        self._reply(connection, Op.LOOKUP_ALL, message.request, answer)

    def _stats(self, connection: Connection, message: Message) -> None:
        self._reply(connection, Op.STATS, message.request, pack_json(self.stats()))

    def _serve_peer(self, connection: Connection, message: Message) -> bytes | None:
        match message.op:
            case Op.PEER_LEASE:
                return self._peer_lease(connection, message.payload)
            case Op.PEER_RELEASE:
                lease_id = U64.unpack(message.payload)[0]
                self.pool.release(lease_id, "peers")
                self._remote_lease_ended(lease_id)
                return b""
            case Op.PEER_TRANSPORT:
                own = self._mover.own
                if own is None:
                    raise PeerLost(f"the mover of node {self.node_id} is being replaced; try again")
                return pack_json(
                    {
                        "generation": own.generation,
                        "agent": base64.b64encode(own.agent).decode(),
                        "address": own.address,
                        "slot_bytes": self._slot_bytes,
                        "num_slots": self.pool.stats().num_slots,
                    }
                )
            case _:
                raise ProtocolError(f"a node store does not serve {message.op.name} to a peer")

    def _peer_lease(self, connection: Connection, payload: bytes) -> bytes:
        wanted = unpack_peer_lease(payload)
        if self._closed_to_peers:
            self._check_serving()
        if wanted.slot_format != BLOCK_ORDER_VERSION:
            raise LayoutMismatch(
                f"blocks here are in byte order {BLOCK_ORDER_VERSION}, the peer wants {wanted.slot_format}; "
                "run one version of raykv everywhere"
            )
        namespace = wanted.chain.namespace
        if wanted.namespace_version > self._versions.get(namespace, 0):
            self._adopt_version(namespace, wanted.namespace_version)
        version, own = self._versions.get(namespace, 0), self._mover.own
        grant = Grant(0, ())
        if self._pool is not None and own is not None and version == wanted.namespace_version:
            known = self._block_bytes.get(namespace, wanted.block_bytes)
            if wanted.block_bytes != known:
                raise LayoutMismatch(
                    f"blocks of this namespace have {known} bytes here, the peer wants {wanted.block_bytes}; "
                    "run one version of raykv everywhere"
                )
            deadline_s = time.monotonic() + wanted.ttl_s
            grant = self._pool.pin_prefix(wanted.chain, "peers", deadline_s)
            if grant.slots:
                self._remote_leases[grant.lease_id] = deadline_s
                self._mover.expect_notifications(len(self._remote_leases))
                self._server.wake()
            else:
                self._pool.release(grant.lease_id, "peers")
        return pack_peer_grant(
            PeerGrant(
                lease_id=grant.lease_id if grant.slots else 0,
                epoch=self.epoch,
                namespace_version=version,
                mover_generation=own.generation if own is not None else 0,
                slots=np.asarray(grant.slots, dtype=np.int32),
            )
        )

    def _notified(self, payload: bytes) -> None:
        """A peer's READ under one of our leases is through: its pins can go early."""
        for lease_id, epoch in NOTIFICATION.iter_unpack(payload):
            if epoch == self.epoch:
                self.pool.release(lease_id, "peers")
                self._remote_lease_ended(lease_id)

    def _remote_lease_ended(self, lease_id: int) -> None:
        if self._remote_leases.pop(lease_id, None) is not None:
            self._mover.expect_notifications(len(self._remote_leases))

    def _adopt_version(self, namespace: bytes, version: int) -> None:
        self.clear(namespace, version)

    def _mover_terminal(self, read_id: int) -> None:
        if self._pool is not None:
            self._pool.end_quarantine(f"read-{read_id}")

    def _gone(self, connection: Connection) -> None:
        if connection.role == "mover":
            if self._mover.gone(connection):
                threading.Thread(target=self._on_mover_gone, name="raykv-mover-gone", daemon=True).start()
        elif self._pool is not None and connection.role == "client":
            dropped = self._pool.release_owner(connection.owner)
            if dropped:
                logger.info("client %s is gone: %d leases and writes came back", connection.owner, dropped)

    def _wants_ticks(self) -> bool:
        return self._pool is not None and self._pool.num_leases() > 0

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._pool is not None:
            self._pool.expire(now_s)
        for lease_id in [i for i, deadline_s in self._remote_leases.items() if deadline_s < now_s]:
            self._remote_lease_ended(lease_id)

"""The node store as a Ray actor: named, detached, pinned to its node, never restarted by Ray.

Its state is a cache, so the supervisor makes a new one, empty and with a new epoch. All logic is in
kvstore.node.core.NodeCore; this facade adds the child mover and the names by which peers find each other.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvstore.actors.calls import actor_class, actor_name, call, find_actor, node_address, ray_failures
from kvstore.actors.finding import own_version, shard_name
from kvstore.actors.metrics import Flusher
from kvstore.actors.mover import Mover, MoverActor
from kvstore.actors.serving import DRAIN, READY, show_life
from kvstore.blocks.chain import BlockHashes, decode_chain
from kvstore.blocks.grants import Grant, PinKind, StoreTicket
from kvstore.blocks.priority import Priority, retention_of
from kvstore.bounds import MAX_CHAIN_BYTES, MAX_OWNER_CHARS, check_bytes, check_count, check_digest, check_seconds, clip
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import (
    ConfigError,
    InvalidRequest,
    NamespaceMismatch,
    ProtocolError,
    RegistrationFailed,
    StoreUnavailable,
)
from kvstore.mover.keeper import MoverKeeper, StartedMover
from kvstore.node.core import NodeCore
from kvstore.node.handover.giving import end_later, hand_over
from kvstore.node.handover.needs import check_next
from kvstore.node.handover.old_life import OldLife
from kvstore.node.handover.taking import begin, take_old_life
from kvstore.node.handover.transfer import handover_path
from kvstore.node.inspection.answers import answer
from kvstore.quotas import check_tenant
from kvstore.remote.peers import PeerAddress
from kvstore.runtime import clock
from kvstore.runtime.clock import deadline_after
from kvstore.runtime.life import ASKED_TO_STOP

logger = logging.getLogger(__name__)


class NodeStore:
    """One node's store, called through its Ray handle.

    Callers over Ray name an `owner` for what they pin. The store does not notice when they die, so their leases end
    only at their deadline. Worker processes of the node use kvstore.Client instead: it is faster, and the store notices
    their end.

    Args:
        node_id: Ray's id of the node this actor is pinned to.
        config_json: settings of the store.
        protocol: that of the process that makes this actor. The node may have another version of raykv.

    Raises:
        ConfigError: that is another version, or has settings that this one does not know.
    """

    def __init__(self, node_id: str, config_json: str, protocol: int = PROTOCOL_VERSION) -> None:
        if protocol != PROTOCOL_VERSION:
            raise ConfigError(
                f"wanted raykv of protocol {protocol}, as the store's supervisor has it, got {own_version()} on the "
                f"node at {node_address()}; install one version of raykv on every node, and start the store again"
            )
        # The control thread shares the interpreter with Ray's threads; short slices keep its latency low.
        sys.setswitchinterval(1e-4)
        self._node_id, self._config = node_id, StoreConfig.from_json(config_json)
        show_life(store=self._config.name, node=node_id)
        self._mover_numbers = itertools.count(1)
        old, why_cold = take_old_life(handover_path(self._config.name, node_id), self._config, node_id)
        self._core, self._beginning = begin(self._make_core, old, why_cold)
        self._verbs = self._core.state.pool_service
        self._mover = self._core.state.mover
        self._keeper = MoverKeeper(node_id, self._start_mover, self._mover.wait_ready, self._config.call_timeout_s)
        self._keeper.start()
        self._metrics = Flusher(node_id, self._config.name, self._core.counts)
        if self._config.metrics:
            self._metrics.start()

    def _make_core(self, old: OldLife | None) -> NodeCore:
        find = self._resolve_peer, self._resolve_directory
        return NodeCore(self._node_id, self._config, node_address(), *find, lambda: self._keeper.replace(), old)

    def _resolve_peer(self, node_id: str, within_s: float) -> PeerAddress:
        what, name = f"store of node {node_id}", actor_name(self._config.name, "node", node_id)
        address: PeerAddress = call(what, find_actor(name).peer_address, timeout_s=within_s)
        return address

    def _resolve_directory(self, number: int = 0) -> PeerAddress:
        name = shard_name(self._config.name, number)
        address: PeerAddress = call("directory", find_actor(name).address, timeout_s=self._config.call_timeout_s)
        return address

    def _start_mover(self) -> StartedMover:
        name = f"raykv-{self._node_id[:12]}-{self.epoch()}-{next(self._mover_numbers)}-{secrets.token_hex(3)}"
        here = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
        with ray_failures("mover"):
            mover = actor_class(Mover, scheduling_strategy=here)
            started = mover.remote(self._core.control_path, name, self._config.to_json())
        return MoverActor(started, self._mover)

    def ping(self, within_s: float = 1.0) -> bool:
        """Return whether this store serves: its socket thread answers within `within_s` seconds."""
        return self._core.control.server.is_serving(within_s)

    @ray.method(concurrency_group=READY)
    def ready(self, timeout_s: float) -> bool:
        """Wait until the mover has registered the arena; return whether it has.

        Raises:
            RegistrationFailed: no mover can begin here, by its own words.
        """
        if self._mover.problem:
            raise RegistrationFailed(self._mover.problem)
        return self._mover.wait_ready(check_seconds("timeout_s", timeout_s))

    def settings(self) -> str:
        """Return the settings of this store, as `StoreConfig.from_json` reads them."""
        return self._config.to_json()

    def control_path(self) -> str:
        """Return the socket on which this node's workers reach the store."""
        return self._core.control_path

    def peer_address(self) -> PeerAddress:
        """Return where other stores reach this one."""
        return self._core.peer_address()

    def epoch(self) -> str:
        """Return the epoch of the store."""
        return self._core.state.epoch.hex()

    def pids(self) -> dict[str, int]:
        """Return the process ids of the store and its mover."""
        return {"store": os.getpid(), "mover": self._mover.pid}

    def stats(self) -> dict[str, Any]:
        """Return counts of the pool, NIXL and the served calls."""
        return self._core.stats()

    def stop(self, reason: str = ASKED_TO_STOP) -> None:
        """Close everything, and log the reason; the caller kills the actor afterwards."""
        self._metrics.stop()
        self._core.control.fence.expects_end = True
        self._keeper.stop()
        self._core.stop(reason)

    def attach(self, namespace: bytes, block_bytes: int) -> dict[str, int]:
        """Prepare the store for a namespace's blocks; the first call divides the arena into slots."""
        return self._verbs.attach(namespace, block_bytes)

    def lookup(self, hashes: BlockHashes) -> int:
        """Return how many leading blocks are readable on this node. No side effect."""
        return self._verbs.lookup(_chain(hashes))

    def lease(self, hashes: BlockHashes, owner: str, ttl_s: float = 30.0, tenant: str = "") -> Grant:
        """Pin the readable prefix of a chain for `ttl_s` seconds; it counts for the tenant."""
        return self._verbs.lease(_chain(hashes), _owner(owner), ttl_s, tenant=self._tenant(tenant))

    def renew(self, lease_id: int, owner: str, ttl_s: float = 30.0, epoch: bytes | None = None) -> bool:
        """Extend a lease, and return whether it was still held; `epoch`, if given, must be the store's."""
        return self._verbs.renew(lease_id, _owner(owner), ttl_s, epoch)

    def release(self, lease_id: int, owner: str, epoch: bytes | None = None) -> bool:
        """Drop a lease or a pin, and return whether this owner still held it in this epoch."""
        return self._verbs.release(lease_id, _owner(owner), epoch)

    def pin(self, hashes: BlockHashes, owner: str, ttl_s: float, soft: bool = False, tenant: str = "") -> Grant:
        """Keep the readable prefix of a chain here for `ttl_s` seconds, even if the owner dies."""
        deadline_after(ttl_s)
        kind = PinKind.SOFT if soft else PinKind.HARD
        return self._verbs.pin(_chain(hashes), _owner(owner), kind, ttl_s, tenant=self._tenant(tenant))

    def prepare_store(
        self,
        hashes: BlockHashes,
        owner: str,
        num_parts: int = 1,
        part: int = 0,
        ttl_s: float = 30.0,
        num_clears: int | None = None,
        priority: Priority | str = Priority.NORMAL,
        priority_s: float | None = None,
        tenant: str = "",
    ) -> StoreTicket:
        """Claim slots for blocks that are not here, or join the writers of their other parts.

        The store does not notice when this owner dies, so the slots come back `ttl_s` seconds after it granted them.
        The owner reads its clock before it asks, and must stop writing by then. If the namespace was cleared after
        `num_clears` was read, nothing is claimed, and the ticket has another `num_clears`. `priority` and `priority_s`
        are those of `Client.save`. The blocks are the tenant's.
        """
        deadline_after(ttl_s)
        retention = retention_of(priority, priority_s, clock.now_s())
        return self._verbs.prepare_store(
            _chain(hashes), _owner(owner), num_parts, part, ttl_s, num_clears, retention, tenant=self._tenant(tenant)
        )

    def _tenant(self, name: str) -> str:
        return check_tenant(self._config.tenants, name)

    def complete_store(
        self, write_id: int, owner: str, generations: bytes | None = None, epoch: bytes | None = None
    ) -> int:
        """Publish a write, and return how many blocks became findable. Generations must be the ticket's."""
        return self._verbs.complete_store(write_id, _owner(owner), generations, epoch)

    def abort_store(
        self, write_id: int, owner: str, generations: bytes | None = None, epoch: bytes | None = None
    ) -> int:
        """Abandon a write, and return how many slots came back."""
        return self._verbs.abort_store(write_id, _owner(owner), generations, epoch)

    def clear(self, namespace: bytes, version: int | None = None) -> int:
        """Make a namespace a miss here, and return the number of its blocks.

        By default `version` is the next one after the version that this store knows. A given one has to be later than
        that, or StaleVersion is raised and nothing is cleared. `Store.clear` reaches all nodes.
        """
        check_digest("namespace", namespace)
        return self._verbs.clear(namespace, version)

    def version(self, namespace: bytes) -> int:
        """Return the version of a namespace's last clearing that this store knows.

        Raises:
            StoreUnavailable: it gave its memory away, and cannot clear it any more.
        """
        check_digest("namespace", namespace)
        if self._verbs.current.is_frozen:
            raise StoreUnavailable("this life of the node store has ended, and the next one begins; ask that")
        return self._verbs.versions.get(namespace)

    def num_clears(self, namespace: bytes) -> int:
        """Return the `num_clears` for `prepare_store`; ask for it before the KV to store is computed."""
        check_digest("namespace", namespace)
        return self._verbs.current.num_clears(namespace)

    def begin_drain(self, max_bytes: int) -> list[bytes]:
        """Grant nothing to workers any more, and return hot chains for a peer to adopt."""
        return self._core.begin_drain(check_count("max_bytes", max_bytes, 0, 1 << 62))

    def tenants_of(self, chains: list[bytes]) -> list[str]:
        """Return whose the last block is that is here of each chain, for `adopt`; "" for the shared tenant."""
        return self._core.tenants_of(_chains(chains))

    @ray.method(concurrency_group=DRAIN)
    def adopt(self, chains: list[bytes], timeout_s: float, tenants: Sequence[str] = ()) -> int:
        """Fetch chains from other nodes, and return how many of their blocks are here now.

        They become the blocks of `tenants`, one for each chain, or of the shared tenant.
        """
        timeout_s = check_seconds("timeout_s", timeout_s)
        names = [self._tenant(name) for name in tenants]
        if names and len(names) != len(_chains(chains)):
            raise InvalidRequest(f"tenants: wanted one for each of {len(chains)} chains, got {len(names)}")
        return self._core.adopt(_chains(chains), timeout_s, names)

    @ray.method(concurrency_group=DRAIN)
    def drain(self, timeout_s: float) -> dict[str, int]:
        """Grant nothing any more, wait for leases and writes to end, and return what is left."""
        return self._core.drain(check_seconds("timeout_s", timeout_s))

    def undrain(self) -> None:
        """Serve again after a drain."""
        self._core.undrain()

    def beginning(self) -> dict[str, Any]:
        """Return how this store began: {"is_warm", "num_blocks", "num_held_slots", "why_cold"}."""
        return self._beginning.as_dict()

    @ray.method(concurrency_group=READY)
    def inspect(self, what: str, options: dict[str, Any]) -> Any:
        """Return what `kvstore inspect` shows of this node; see `kvstore.node.inspection.answers.answer`."""
        if not isinstance(options, dict):
            raise InvalidRequest(f"options: wanted a dict, got {type(options).__name__}")
        return answer(self._core, what, options)

    @ray.method(concurrency_group=READY)
    def check_next(self, needs: dict[str, Any]) -> None:
        """Raise ConfigError if a next store here cannot have the `needs_of` its settings; this one serves on."""
        check_next(self._core, needs)

    @ray.method(concurrency_group=DRAIN)
    def hand_over(self, path: str, wait_s: float) -> dict[str, int]:
        """Give the memory to the holder at `path`, for the next store of this node; see `Store.restart`.

        This store serves nobody afterwards, and ends by itself if its caller does not end it.
        """
        try:
            given = hand_over(self._core, path, check_seconds("wait_s", wait_s))
        finally:
            if self._core.state.pool_service.is_ending:
                threading.Thread(target=end_later, args=(self._core,), name="raykv-ending", daemon=True).start()
        return {"num_blocks": given.num_blocks, "num_held_slots": given.num_held_slots}

    def check_integrity(self) -> None:
        """Assert the invariants of the pool, and of the disk's; for tests and debugging."""
        self._core.pool.check_integrity()
        if (disk := self._core.state.disk) is not None and disk.pool.num_slots:
            disk.pool.check_integrity()


def _chain(hashes: BlockHashes) -> BlockHashes:
    if not isinstance(hashes, BlockHashes):
        raise NamespaceMismatch(f"hashes: wanted BlockHashes of a Namespace, got {type(hashes).__name__}")
    return hashes


def _chains(chains: list[bytes]) -> list[bytes]:
    if not isinstance(chains, list):
        raise InvalidRequest(f"chains: wanted what begin_drain() returned, got {type(chains).__name__}")
    for chain in chains:
        try:
            decode_chain(check_bytes("chain", chain, MAX_CHAIN_BYTES))
        except ProtocolError as error:
            raise InvalidRequest(f"chain: wanted what begin_drain() returned: {error}") from error
    return chains


def _owner(name: str) -> str:
    """Return an owner name that no worker and no peer can have."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_OWNER_CHARS:
        raise InvalidRequest(f"owner: wanted 1 to {MAX_OWNER_CHARS} characters, got {clip(name)}")
    return f"ray:{name}"

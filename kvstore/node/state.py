"""The state that the services of one node store share."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.config import StoreConfig
from kvstore.disk.tier import DiskTier
from kvstore.memory.arena import Arena
from kvstore.memory.presence import PresenceTable
from kvstore.mover.link import MoverLink
from kvstore.node.events.publisher import EventPublisher
from kvstore.node.pool_service import PoolService
from kvstore.remote.fetch import Fetcher
from kvstore.remote.peers import PeerBook
from kvstore.remote.shards.links import DirectoryLink
from kvstore.remote.versions import NamespaceVersions
from kvstore.runtime.threads.store_threads import StoreThreads


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state that the services of one node store share. Each part has its own lock where it needs one.

    Args:
        node_id: unique in the cluster.
        config: the same on every node.
        epoch: this life of the store.
        token: the secret that peers must send.
        arena: the node's memory for blocks.
        presence: tells this node's workers which chains are surely not here.
        pool_service: the slots of the arena.
        versions: of the namespaces that this node knows were cleared.
        mover: the process that reads from peers.
        threads: for work that has to wait.
        peers: the stores of other nodes; this store can be its own peer too.
        hints: the link to the directory.
        fetcher: the loads that need peers, or the disk.
        disk: the blocks on this node's disk; None for a store without a disk tier.
        events: publishes which blocks are here; None for a store that does not.
    """

    node_id: str
    config: StoreConfig
    epoch: bytes
    token: str
    arena: Arena
    presence: PresenceTable
    pool_service: PoolService
    versions: NamespaceVersions
    mover: MoverLink
    threads: StoreThreads
    peers: PeerBook
    hints: DirectoryLink
    fetcher: Fetcher
    disk: DiskTier | None = None
    events: EventPublisher | None = None

"""A cluster in one process: real node cores, sockets and clients; movers are threads that copy by memcpy."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import settings

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import PeerLost
from kvstore.memory.arena import attach_arena
from kvstore.mover.process import Mover
from kvstore.mover.slabs import Slabs
from kvstore.node.core import NodeCore
from kvstore.remote.directory import DirectoryServer
from kvstore.remote.directory_link import Hints
from kvstore.remote.versions import NamespaceVersions
from kvstore.rpc.connect import connect_local
from kvstore.rpc.framing import Flag, Message, Op, packets_of
from tests.kvstore.loopback import LoopbackNetwork, LoopbackTransport

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)
HOST = "127.0.0.1"

# An example that takes long on a busy machine is no failure.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def wait_until(condition, timeout_s: float = 20.0):
    """Wait for a condition and return what it said; the limit is one that a busy machine keeps, too."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.005)


class InProcessMover:
    """A mover on a thread. Its death is said by GOODBYE, since the process it lives in goes on.

    What ends a mover's process, an error that it did not expect, is `error` and its death here.
    """

    def __init__(
        self, core: NodeCore, name: str, network: LoopbackNetwork, wrap=lambda transport: transport, make_stage=None
    ):
        client, fd = connect_local(core.control_path, {"role": "mover", "protocol": PROTOCOL_VERSION}, timeout_s=5.0)
        self.arena = attach_arena(fd, core.state.arena.num_bytes)
        self.transport = LoopbackTransport(name, self.arena.bytes_view(), network)
        self.sock = client.detach()
        slabs = Slabs(name, wrap(self.transport), self.arena.address, make_stage) if make_stage else None
        self.mover, self.error = Mover(self.sock, slabs or wrap(self.transport), slabs), None
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def _live(self):
        with self.sock.dup() as last_words:
            try:
                self.mover.run(self.arena.address)
            except Exception as error:  # noqa: BLE001
                self.error = error
                self.say_goodbye(last_words)

    def die(self):
        self.say_goodbye(self.sock)
        self.join()

    @staticmethod
    def say_goodbye(sock):
        with contextlib.suppress(OSError):
            for packet in packets_of(Message(Op.GOODBYE, Flag.ONE_WAY, 0, b"")):
                sock.sendall(packet)

    def join(self):
        with contextlib.suppress(OSError):  # It has ended by itself.
            self.sock.shutdown(socket.SHUT_RD)
        self.thread.join(6.0)
        assert not self.thread.is_alive()
        self.transport.close()
        self.transport.slab = np.empty(0, np.uint8)
        self.arena.close()


class Worker:
    """A client with a registered cache of `num_blocks` engine blocks, filled by a seed."""

    def __init__(self, client: Client, num_blocks: int, seed: int = 0):
        self.client, shape = client, client.space.shape
        generator = torch.Generator().manual_seed(seed)
        dims = (2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.caches = [torch.randn(dims, generator=generator) for _ in range(shape.num_layers)]
        client.register_kv_caches(self.caches)

    def block(self, block_id: int) -> list[bytes]:
        return [cache[:, block_id].numpy().tobytes() for cache in self.caches]

    def bytes(self) -> list[bytes]:
        return [cache.numpy().tobytes() for cache in self.caches]

    def save(self, hashes, ids):
        return self.client.save(hashes, list(ids)).result(10)

    def load(self, hashes, ids, skip=0, **more):
        return self.client.load(hashes, list(ids), skip, **more).result(10)


class Cluster:
    """Node cores that know each other and a directory."""

    def __init__(self):
        self.network = LoopbackNetwork()
        self.directory = DirectoryServer(HOST, settle_s=0.0)
        #: Shards of the directory besides that one, for nodes with such a setting.
        self.more_shards: list[DirectoryServer] = []
        self.nodes: dict[str, NodeCore] = {}
        self.movers: dict[str, InProcessMover | None] = {}
        self.clients: list[Client] = []
        self.space = Namespace(model="m", shape=SHAPE)
        self.num_movers = 0
        #: Makes the stages of movers that are started from now on.
        self.make_stage = None

    def resolve(self, node_id, within_s):
        core = self.nodes.get(node_id)
        if core is None:
            raise PeerLost(f"wanted a node that runs, got {node_id}")
        return core.peer_address()

    def directory_address(self, number=0):
        return (self.directory, *self.more_shards)[number].address()

    def add(self, node_id: str, *, mover=True, wrap=lambda transport: transport, **settings) -> NodeCore:
        settings = {"capacity_bytes": 1 << 17, "call_timeout_s": 2.0, "transfer_timeout_s": 3.0} | settings
        core = NodeCore(node_id, StoreConfig(**settings), HOST, self.resolve, self.directory_address)
        self.nodes[node_id] = core
        if mover:
            self.start_mover(node_id, wrap)
        return core

    def start_mover(self, node_id: str, wrap=lambda transport: transport) -> InProcessMover:
        core, self.num_movers = self.nodes[node_id], self.num_movers + 1
        mover = InProcessMover(core, f"{node_id}-{self.num_movers}", self.network, wrap, self.make_stage)
        self.movers[node_id] = mover
        assert core.state.mover.wait_ready(5.0)
        return mover

    def kill_mover(self, node_id: str):
        mover = self.movers.pop(node_id)
        mover.die()
        wait_until(lambda: self.nodes[node_id].state.mover.pid == 0)

    def client(self, node_id: str, space: Namespace | None = None, tenant: str = "") -> Client:
        client = Client(self.nodes[node_id].control_path, space or self.space, tenant=tenant)
        self.clients.append(client)
        return client

    def worker(
        self, node_id: str, num_blocks: int = 80, seed: int = 0, space: Namespace | None = None, tenant: str = ""
    ) -> Worker:
        return Worker(self.client(node_id, space, tenant), num_blocks, seed)

    def hashes(self, num_blocks: int, seed: int = 0):
        tokens = np.random.default_rng(seed).integers(0, 1000, num_blocks * SHAPE.block_size)
        return self.space.block_hashes(tokens)

    def stop_node(self, node_id: str):
        core = self.nodes.pop(node_id)
        core.stop()
        mover = self.movers.pop(node_id, None)
        if mover is not None:
            mover.join()

    def check(self):
        for core in self.nodes.values():
            if core.state.pool_service.is_attached:
                core.pool.check_integrity()

    def stop(self):
        self.check()
        for client in self.clients:
            client.close(2.0)
        for node_id in list(self.nodes):
            self.stop_node(node_id)
        for shard in (self.directory, *self.more_shards):
            shard.stop()


@pytest.fixture(scope="session", autouse=True)
def socket_folder(tmp_path_factory):
    """Control sockets lie in a private folder with a short path."""
    import os
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rks", dir="/tmp") as folder:
        os.environ["RAYKV_SOCKET_DIR"] = folder
        yield
        os.environ.pop("RAYKV_SOCKET_DIR", None)


@pytest.fixture
def cluster():
    made = Cluster()
    yield made
    made.stop()


@pytest.fixture
def directory():
    made = DirectoryServer("127.0.0.1", settle_s=0.0)
    yield made
    made.stop()


@pytest.fixture
def start_hints():
    made = []

    def start(node_id, pool, resolve):
        versions = NamespaceVersions()
        hints = Hints(node_id, resolve, 2.0, versions, versions.advance)
        made.append(hints)
        if pool is not None:
            hints.start(2.0)
            hints.follow(pool)
        return hints

    yield start
    for hints in made:
        hints.stop()


@pytest.fixture(name="wait_until")
def _wait_until():
    return wait_until


@pytest.fixture(scope="session")
def cluster_class():
    return Cluster

"""Benchmark: control calls of a worker to its node's store, over the local socket and over the Ray handle.

Compared with a bare exchange of the same bytes: another process waits in epoll on the same kind of socket and answers
eight bytes. Wake-ups are most of a call, and some machines are slow at them.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch

from kvstore.actors.bench.cluster import on_node, two_nodes
from kvstore.actors.calls import call
from kvstore.actors.cluster import Store
from kvstore.actors.finding import node_store
from kvstore.actors.starting import start
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.config import StoreConfig

_TIMEOUT_S = 300.0
_BLOCK_SIZE = 16


class Echo:
    """The bare server: takes a packet, answers eight bytes, one client at a time."""

    def __init__(self) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind("")  # The kernel chooses an abstract name, which no file can collide with.
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def address(self) -> bytes:
        """Return where it listens."""
        return bytes(self._server.getsockname())

    def _serve(self) -> None:
        while True:
            client, _ = self._server.accept()
            with client, selectors.DefaultSelector() as selector:
                selector.register(client, selectors.EVENT_READ)
                while selector.select(_TIMEOUT_S) and client.recv(1 << 18):
                    client.sendall(bytes(8))


class Caller:
    """A worker that asks its node's store again and again."""

    def __init__(self, store: Store, space: Namespace, num_hashes: int, echo: bytes) -> None:
        self._echo = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The kernel's timeout: Python's would cost a system call each time.
        self._echo.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_TIMEOUT_S), 0))
        self._echo.connect(echo)
        self._client, self._handle = store.client(space), node_store(name=store.config.name)
        shape = space.shape
        cache = torch.zeros(num_hashes, 1, shape.num_layers, 2, _BLOCK_SIZE, shape.head_dim, dtype=torch.float16)
        self._client.register_kv_caches(cache, axes="BHLPTD")
        self._hashes = space.block_hashes(np.arange(num_hashes * _BLOCK_SIZE))
        self._client.save(self._hashes, range(num_hashes)).result(_TIMEOUT_S)

    def measure(self, op: str, way: str, num_hashes: int, rounds: int) -> list[float]:
        """Return the seconds of each call; every answer is checked."""
        hashes = self._hashes[:num_hashes]
        ask: Callable[[Any], int] = getattr(self, f"_{op}_{way}")
        seconds = []
        for number in range(rounds + rounds // 10 + 5):
            started_s = time.perf_counter()
            found = ask(hashes)
            ended_s = time.perf_counter()
            if found != num_hashes:
                raise AssertionError(f"{op} over {way}: wanted {num_hashes} blocks, got {found}")
            if number >= rounds // 10 + 5:
                seconds.append(ended_s - started_s)
        return seconds

    def _lookup_socket(self, hashes: Any) -> int:
        return self._client.lookup(hashes).num_local

    def _lookup_bare(self, hashes: Any) -> int:
        self._echo.sendall(hashes.data)
        return len(hashes) if len(self._echo.recv(1 << 18)) == 8 else -1

    def _lookup_ray(self, hashes: Any) -> int:
        return int(call("lookup", self._handle.lookup, hashes, timeout_s=_TIMEOUT_S))

    def _lease_socket(self, hashes: Any) -> int:
        lease = self._client.lease(hashes)
        return len(lease) if lease.release() else -1

    def _lease_ray(self, hashes: Any) -> int:
        grant = call("lease", self._handle.lease, hashes, "bench", timeout_s=_TIMEOUT_S)
        held = call("release", self._handle.release, grant.lease_id, "bench", timeout_s=_TIMEOUT_S)
        return len(grant.slots) if held else -1


def run_control(num_hashes: list[int], rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure lookup, and lease with release, of resident chains.

    Returns:
        Rows {"op": "lookup"|"lease", "way": "socket"|"ray"|"bare", "num_hashes", "p50_us", "p99_us"}.
    """
    rows: list[dict[str, Any]] = []
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype="float16", block_size=_BLOCK_SIZE)
    space = Namespace(model="bench", shape=shape)
    capacity = 4 * max(num_hashes) * shape.block_bytes
    with two_nodes() as nodes:
        store = start(StoreConfig(name="bench-control", capacity_bytes=capacity), None, _TIMEOUT_S)
        echo = on_node(Echo, nodes[0]).remote()
        address = call("echo", echo.address, timeout_s=_TIMEOUT_S)
        caller = on_node(Caller, nodes[0]).remote(store, space, max(num_hashes), address)
        try:
            for count in num_hashes:
                for op in ("lookup", "lease"):
                    for way in ("bare", "socket", "ray") if op == "lookup" else ("socket", "ray"):
                        progress(f"{op} of {count} hashes over {way}")
                        number = max(rounds // 10, 20) if way == "ray" else rounds
                        took_s = call(op, caller.measure, op, way, count, number, timeout_s=_TIMEOUT_S)
                        p50, p99 = (round(float(us), 1) for us in np.percentile(np.asarray(took_s) * 1e6, (50, 99)))
                        rows.append({"op": op, "way": way, "num_hashes": count, "p50_us": p50, "p99_us": p99})
        finally:
            ray.kill(caller)
            ray.kill(echo)
            store.stop()
    return rows

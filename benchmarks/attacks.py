"""What a healthy client sees beside attacks on the ports of its store and of the directory.

A store and a directory run in one process, a client that looks up every 2 ms in another, and this one attacks. Each
attack is measured in turns with quiet: p99 and the longest answer with it and without, and by how much the memory
of the attacked process grew.

Run: `python -m benchmarks.attacks [--json] [--rounds N] [--seconds S]`. Loopback only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import encode
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import KVStoreError, PeerLost
from kvstore.remote.messages import PeerLease
from kvstore.rpc.client import ControlClient
from kvstore.rpc.connect import connect_local, connect_remote
from kvstore.rpc.framing import HEADER, Op
from kvstore.rpc.messages import AskLookup
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

NAMESPACE, BLOCK_BYTES, NUM_BLOCKS = b"n" * 32, 4096, 64
CHAIN = BlockHashes(NAMESPACE, NAMESPACE, 0, b"".join(bytes([i]) * 32 for i in range(1, NUM_BLOCKS + 1)))
PEER = {
    "role": "peer", "protocol": PROTOCOL_VERSION, "node": "x", "epoch": b"epoch--1".hex(), "owner": b"owner--1".hex()
}  # fmt: skip
EVERY_S, WITHIN_S, NUM_DESCRIPTORS = 2e-3, 30.0, 512


def serve() -> None:
    """Be the store and the directory until standard input ends."""
    from kvstore.node.core import NodeCore
    from kvstore.remote.directory import DirectoryServer

    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))
    sys.setswitchinterval(1e-4)  # As a node store's process does.
    directory = DirectoryServer("127.0.0.1")

    def nobody(node_id: str, within_s: float) -> Any:
        raise PeerLost(f"there is no node {node_id}")

    core = NodeCore("a", StoreConfig(capacity_bytes=1 << 22), "127.0.0.1", nobody, directory.address)
    core.state.pool_service.attach(NAMESPACE, BLOCK_BYTES)
    core.state.pool_service.complete_store(
        core.state.pool_service.prepare_store(CHAIN, "benchmark").write_id, "benchmark"
    )
    ports = {"store": core.peer_address(), "directory": directory.address()}
    found = {name: [address.host, address.port, address.token] for name, address in ports.items()}
    sys.stdout.write(json.dumps(found | {"path": core.control_path}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


def look_up(path: str) -> None:
    """Be the healthy client: a time for each lookup, all of them told when a line is read."""
    client, fd = connect_local(path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=WITHIN_S)
    fd.close()
    times_ms, question = list[float](), encode(AskLookup(CHAIN, WITHIN_S, 0.0))
    while True:
        began_s = time.perf_counter()
        client.call(Op.LOOKUP, question, timeout_s=WITHIN_S)
        times_ms.append(1e3 * (time.perf_counter() - began_s))
        if select.select([sys.stdin], [], [], EVERY_S)[0]:
            if not sys.stdin.readline():
                return
            sys.stdout.write(json.dumps(times_ms) + "\n")
            sys.stdout.flush()
            times_ms.clear()


class Target:
    """The attacked process and the healthy client."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rka", dir="/tmp")
        self._environment = {**os.environ, "RAYKV_SOCKET_DIR": self._folder.name}
        self._victim = self._start("serve")
        assert self._victim.stdout is not None
        self.ports = json.loads(self._victim.stdout.readline())
        self._healthy = self._start("look_up", self.ports["path"])

    def _start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.attacks", "--be", *words]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
        )

    def times_ms(self) -> list[float]:
        """Return how long each lookup took since this was asked last."""
        assert self._healthy.stdin is not None
        assert self._healthy.stdout is not None
        self._healthy.stdin.write("\n")
        self._healthy.stdin.flush()
        times: list[float] = json.loads(self._healthy.stdout.readline())
        return times

    def rss_bytes(self) -> int:
        """Return the memory of the attacked process."""
        with open(f"/proc/{self._victim.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def dial(self, port: str) -> socket.socket:
        """Connect as a stranger."""
        host, number, _ = self.ports[port]
        return socket.create_connection((host, number), timeout=WITHIN_S)

    def peer(self) -> ControlClient:
        """Connect as the store of another node."""
        host, number, token = self.ports["store"]
        return connect_remote(host, number, PEER | {"token": token}, timeout_s=WITHIN_S)

    def worker(self) -> ControlClient:
        """Connect as a worker."""
        hello = {"role": "client", "protocol": PROTOCOL_VERSION}
        client, fd = connect_local(self.ports["path"], hello, timeout_s=WITHIN_S)
        fd.close()
        return client

    def stop(self) -> None:
        """End both processes."""
        for process in (self._healthy, self._victim):
            assert process.stdin is not None
            process.stdin.close()
            process.wait(WITHIN_S)
        self._folder.cleanup()


def frame(op: Op, payload: bytes = b"", *, more: int = 0, length: int | None = None) -> bytes:
    return HEADER.pack(b"RKV1", op, 0, more, len(payload) if length is None else length, 1) + payload


@contextlib.contextmanager
def strangers(target: Target, port: str, count: int) -> Iterator[list[socket.socket]]:
    """So many connections, as far as they are accepted."""
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(tuple(target.ports[port][:2]))
            socks.append(sock)
        yield socks


def long_hello(target: Target, port: str, until_s: float) -> None:
    """Strangers whose HELLO would be echoed, and that do not read."""
    body = json.dumps({"protocol": PROTOCOL_VERSION, "role": "x" * (24 << 20)}).encode()
    _sent_and_held(target, port, until_s, frame(Op.HELLO, body), 4)


def half_messages(target: Target, port: str, until_s: float) -> None:
    """Strangers that send 64 MiB but for the last byte."""
    _sent_and_held(target, port, until_s, frame(Op.HELLO, bytes((64 << 20) - 1), length=64 << 20), 4)


def fragments(target: Target, port: str, until_s: float) -> None:
    """Strangers that send pieces of a message without end."""
    _sent_and_held(target, port, until_s, frame(Op.HELLO, more=1) * 500_000, 4)


def nested_json(target: Target, port: str, until_s: float) -> None:
    """Strangers with a HELLO that is deep, one after the other."""
    _sent_and_held(target, port, until_s, frame(Op.HELLO, b"[" * 4000), 1)


def _sent_and_held(target: Target, port: str, until_s: float, data: bytes, count: int) -> None:
    while time.monotonic() < until_s:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                sock = stack.enter_context(target.dial(port))
                sock.settimeout(0.2)
                with contextlib.suppress(OSError):
                    sock.sendall(data)
            time.sleep(0.02)


def silence(target: Target, port: str, until_s: float) -> None:
    """700 connections that say nothing; the attacked process may open 512 descriptors."""
    while time.monotonic() < until_s:
        with strangers(target, port, 700):
            time.sleep(min(1.0, max(0.0, until_s - time.monotonic())))


def slow_hello(target: Target, port: str, until_s: float) -> None:
    """300 connections, each with a byte of a HELLO now and then."""
    data, at = frame(Op.HELLO, b"{}"), 0
    with strangers(target, port, 300) as socks:
        while time.monotonic() < until_s:
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.send(data[at % len(data) :][:1])
            at += 1
            time.sleep(0.2)


def long_chains(target: Target, port: str, until_s: float) -> None:
    """A peer that asks for leases of as many blocks as a message takes, and of more."""
    while time.monotonic() < until_s:
        for num_hashes in (250_000, 2_000_000):
            chain = BlockHashes(NAMESPACE, NAMESPACE, 0, os.urandom(32) * num_hashes)
            lease = PeerLease(
                chain=chain, block_bytes=BLOCK_BYTES, slot_format=1, namespace_version=0, ttl_s=1.0, within_s=1.0
            )
            with contextlib.suppress(KVStoreError), contextlib.closing(target.peer()) as peer:
                peer.call(Op.PEER_LEASE, encode(lease), timeout_s=WITHIN_S)


def unread_answers(target: Target, port: str, until_s: float) -> None:
    """A peer that asks and asks, and never reads."""
    questions = frame(Op.PEER_RELEASE, encode(1)) * 1000
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), target.peer().detach() as sock:
            sock.settimeout(0.5)
            while time.monotonic() < until_s:
                sock.sendall(questions)


def unread_answers_of_a_worker(target: Target, port: str, until_s: float) -> None:
    """A worker that asks for what takes longest, and never reads."""
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), target.worker().detach() as sock:
            sock.settimeout(0.5)
            while time.monotonic() < until_s:
                sock.send(frame(Op.STATS))


def malformed(target: Target, port: str, until_s: float) -> None:
    """A worker and a peer whose messages are none."""
    while time.monotonic() < until_s:
        for connect in (target.worker, target.peer):
            with contextlib.suppress(KVStoreError), contextlib.closing(connect()) as client:
                client.call(Op.LOAD, b"\xff" * 50, timeout_s=WITHIN_S)
        time.sleep(1e-3)


def computing(target: Target, port: str, until_s: float) -> None:
    """No attack: as many processes compute as there are processors, which shows what a busy machine costs alone."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(max(0.0, until_s - time.monotonic()))
    finally:
        for other in others:
            other.kill()
            other.wait(WITHIN_S)


OF_STRANGERS: list[Callable[[Target, str, float], None]] = [
    long_hello, half_messages, fragments, nested_json, silence, slow_hello
]  # fmt: skip
OF_OTHERS: list[Callable[[Target, str, float], None]] = [
    long_chains, unread_answers, unread_answers_of_a_worker, malformed, computing
]  # fmt: skip


def measure(attack: Callable[[Target, str, float], None], port: str, num_rounds: int, seconds: float) -> dict[str, Any]:
    """Attack and rest in turns, with processes of their own; returns one row."""
    target = Target()
    quiet_ms, beside_ms, most_bytes = list[float](), list[float](), 0
    try:
        time.sleep(1.0)
        target.times_ms()
        before_bytes = target.rss_bytes()
        for _ in range(num_rounds):
            time.sleep(seconds)
            quiet_ms += target.times_ms()
            attack(target, port, time.monotonic() + seconds)
            beside_ms += target.times_ms()
            most_bytes = max(most_bytes, target.rss_bytes())
            time.sleep(0.3)
            target.times_ms()
    finally:
        target.stop()
    return {
        "attack": attack.__name__,
        "port": port,
        "num_lookups": len(beside_ms),
        "quiet_p99_ms": round(float(np.percentile(quiet_ms, 99)), 3),
        "beside_p99_ms": round(float(np.percentile(beside_ms, 99)), 3),
        "quiet_max_ms": round(max(quiet_ms), 1),
        "beside_max_ms": round(max(beside_ms), 1),
        "more_rss_mib": round((most_bytes - before_bytes) / (1 << 20), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="attacks with this in their name")
    parser.add_argument("--be", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        serve() if arguments.be[0] == "serve" else look_up(arguments.be[1])
        return
    plan = [(attack, port) for port in ("store", "directory") for attack in OF_STRANGERS]
    plan += [(attack, "store") for attack in OF_OTHERS]
    chosen = [(attack, port) for attack, port in plan if arguments.only in attack.__name__]
    if not chosen:
        names = ", ".join(sorted({attack.__name__ for attack, _ in plan}))
        parser.error(f"--only: wanted a part of one of these names: {names}; got {arguments.only!r}")
    rows = []
    for attack, port in chosen:
        rows.append(measure(attack, port, arguments.rounds, arguments.seconds))
        if not arguments.json:
            print(rows[-1], flush=True)
    if arguments.json:
        print(as_document({"rows": rows, "provenance": provenance()}), end="")


if __name__ == "__main__":
    main()

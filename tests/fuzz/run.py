"""One run of the fuzzer: a cluster in this process, wrong frames at every door, and a client beside them that works."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import os
import random
import statistics
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from kvstore.client.job import Job
from kvstore.errors import KVStoreError
from kvstore.remote.peers import PeerAddress
from kvstore.rpc.server import ControlServer
from tests.fuzz.doors import Door, Liar, StuckError, without_agents
from tests.fuzz.frames import record
from tests.kvstore.conftest import Cluster, Worker, wait_until

#: After so many frames all that is built once has been built, and memory and descriptors are counted.
_WARM_FRAMES = 2000
_MAX_MORE_RSS_BYTES = 32 << 20
_MAX_MORE_FDS, _MAX_MORE_THREADS = 24, 64
_LEASE_S = 1.0
_BURY_EVERY = 20
#: Of malloc.h.
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
LIAR_EPOCH = b"epoch--2"
_NUM_BLOCKS = 6
#: Of a hundred frames, how many go where.
_SHARES = {"client": 36, "peer": 26, "stranger": 10, "directory": 12, "directory stranger": 4, "mover": 12}


@dataclass(slots=True)
class Outcome:
    """What a run counted, and what it found wrong."""

    seed: int
    num_frames: int
    seconds: float = 0.0
    frames: Counter[str] = field(default_factory=Counter)
    num_connections: dict[str, int] = field(default_factory=dict)
    healthy: dict[str, float] = field(default_factory=dict)
    more: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"frames": dict(self.frames)}


class Healthy(threading.Thread):
    """A client that saves, loads and looks up, and compares every byte that is said to be loaded."""

    def __init__(self, worker: Worker, reader: Worker, cluster: Cluster) -> None:
        super().__init__(daemon=True, name="healthy")
        self._worker, self._reader, self._cluster = worker, reader, cluster
        self.lookups_s: list[float] = []
        self.num_verified, self.wrong, self.ends = 0, list[str](), threading.Event()

    def run(self) -> None:
        """Work until `ends` is set."""
        seed = 100
        while not self.ends.is_set():
            seed += 1
            with contextlib.suppress(KVStoreError):  # A frame may have cleared, pinned or drained what is there.
                self.work(seed)
            time.sleep(0.01)

    def work(self, seed: int) -> int:
        """Save a run of blocks, look it up and load it on both nodes; returns how many were loaded there."""
        hashes, loaded = self._cluster.hashes(_NUM_BLOCKS, seed=seed), 0
        self._worker.save(hashes, range(_NUM_BLOCKS))
        for _ in range(5):
            began_s = time.perf_counter()
            self._worker.client.lookup(hashes)
            self.lookups_s.append(time.perf_counter() - began_s)
        for worker in (self._worker, self._reader):
            into = range(_NUM_BLOCKS, 2 * _NUM_BLOCKS)
            result = worker.load(hashes, into)
            for i in range(result.num_blocks):
                self.num_verified += 1
                if worker.block(into[i]) != self._worker.block(i):
                    self.wrong.append(f"block {i} of run {seed} is not what was saved")
            loaded += result.num_blocks
        return loaded


class Misled(threading.Thread):
    """A client whose store is told that a liar has all blocks."""

    def __init__(self, worker: Worker, cluster: Cluster, seed: int) -> None:
        super().__init__(daemon=True, name="misled")
        self._worker, self._cluster, self._rng = worker, cluster, random.Random(seed)
        self.wrong, self.ends = list[str](), threading.Event()

    def run(self) -> None:
        """Load from the liar until `ends` is set."""
        client, jobs = self._worker.client, list[Job[Any]]()
        ticket = dataclasses.replace(client.prepare_ticket(3), node_id="liar", epoch=LIAR_EPOCH, is_early=False)
        while not self.ends.is_set():
            self._cluster.nodes["misled"].state.peers.failures.clear()
            for _ in range(8):
                hashes = self._cluster.hashes(_NUM_BLOCKS, seed=self._rng.randrange(1 << 30))
                self._cluster.nodes["misled"].state.hints.remember(hashes.data[:32], [("liar", _NUM_BLOCKS)])
                jobs.append(client.load(hashes, range(_NUM_BLOCKS), timeout_s=0.05))
                jobs.append(client.fetch(ticket, range(3), timeout_s=0.05))
            for job in jobs:
                with contextlib.suppress(KVStoreError):
                    if job.result(20).num_blocks:
                        self.wrong.append("blocks came that nobody has")
            jobs.clear()


class Surprised(logging.Handler):
    """Keeps what the code under test logs of errors that nobody there expected, each kind once."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, if it is one."""
        if record.exc_info and record.exc_info[1] is not None:
            self.found.setdefault(type(record.exc_info[1]).__name__, f"{record.getMessage()}: {record.exc_info[1]!r}")


def bury(server: ControlServer) -> None:
    """Count as gone what the fuzzer's cut connections held: the process behind them is this one, which lives."""
    read_fd, write_fd = os.pipe()
    done = threading.Event()

    def then() -> None:
        server.unwatch(read_fd)
        alive = {c.owner for c in server.connections if not c.closed}
        for connection in [c for c in server.connections if c.closed and c.owner not in alive]:
            server.owners.died(connection)
        done.set()

    server.watch(read_fd, then)
    os.write(write_fd, b"x")
    if not done.wait(20.0):
        raise StuckError("the control thread does nothing")
    os.close(read_fd)
    os.close(write_fd)


def keep_no_freed_memory() -> None:
    """Have the allocator give back what is freed, or fragments of some fifty threads would look like growth.

    Before any thread is started.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)


def _counts() -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        rss_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"rss_bytes": rss_bytes, "fds": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


def fuzz(seed: int, num_frames: int, say: Callable[[str], None]) -> Outcome:
    """Send so many frames; what is wrong is in the outcome's findings."""
    outcome, died = Outcome(seed, num_frames), list[str]()
    hook = threading.excepthook
    threading.excepthook = lambda args: died.append(f"thread {args.thread and args.thread.name}: {args.exc_value!r}")
    surprised, cluster = Surprised(), Cluster()
    logging.getLogger("kvstore").addHandler(surprised)
    try:
        # Peers' leases end soon enough to see that nothing is held at the end.
        shorter = {
            "node.peer_service._LEAST_MOST_TTL_S": _LEASE_S,
            "remote.peers._LEAST_CALL_S": 0.1,
        }
        with contextlib.ExitStack() as patches:
            for name, seconds in shorter.items():
                patches.enter_context(mock.patch(f"kvstore.{name}", seconds))
            _run(cluster, outcome, say)
    except Exception:  # noqa: BLE001
        outcome.findings.append(traceback.format_exc())
    finally:
        threading.excepthook = hook
        logging.getLogger("kvstore").removeHandler(surprised)
    outcome.findings += [*died, *surprised.found.values()]
    return outcome


def _run(cluster: Cluster, outcome: Outcome, say: Callable[[str], None]) -> None:
    settings = {"capacity_bytes": 1 << 20, "lease_ttl_s": 1.1, "lease_margin_s": 0.1, "call_timeout_s": 1.0}
    for name in ("a", "b", "misled"):
        cluster.add(name, **settings)
    cluster.add("no mover", mover=False, **settings)
    recorder = record(cluster)
    said = recorder.said
    say(f"recorded {sum(map(len, said.values()))} frames of {len(said)} senders")
    store, alone, misled = cluster.nodes["a"], cluster.nodes["no mover"], cluster.nodes["misled"]
    peer = {
        "role": "peer",
        "token": store.state.token,
        "node": "x",
        "epoch": b"epoch--1".hex(),
        "owner": b"owner--1".hex(),
    }
    directory = cluster.directory.address()
    link = peer | {"role": "store", "token": directory.token}
    doors = {
        "client": Door(store.control_path, {"role": "client"}, said["client"]),
        "peer": Door(store.peer_address(), peer, said["peer"]),
        "stranger": Door(store.peer_address(), None, said["peer"] + said["stranger"]),
        "directory": Door(directory, link, said["store"]),
        "directory stranger": Door(directory, None, said["store"]),
        "mover": Door(alone.control_path, {"role": "mover"}, said["mover"]),
    }
    liar = Liar(outcome.seed, {"protocol": peer, "epoch": LIAR_EPOCH.hex()}, without_agents(said["to peer"]))
    resolve = misled.state.peers.resolve

    def resolve_misled(node: str, within_s: float) -> PeerAddress:
        return liar.address() if node == "liar" else resolve(node, within_s)

    misled.state.peers.resolve = resolve_misled
    healthy = Healthy(cluster.worker("a", 16, seed=7), cluster.worker("b", 16, seed=8), cluster)
    misled_client = Misled(cluster.worker("misled", 16, seed=9), cluster, outcome.seed)
    healthy.work(1)
    healthy.start()
    misled_client.start()
    before, began_s, rng = _counts(), time.monotonic(), random.Random(outcome.seed)
    names, weights = list(_SHARES), list(_SHARES.values())
    sent, said_at_s = 0, began_s
    while sent < outcome.num_frames:
        name = rng.choices(names, weights)[0]
        doors[name].send(rng)
        outcome.frames[name] += 1
        sent += 1
        if sent % _BURY_EVERY == 0:
            bury(store.control.server)
            bury(alone.control.server)
        if sent == min(_WARM_FRAMES, outcome.num_frames // 2):
            before = _counts()
        if time.monotonic() - said_at_s > 10:
            said_at_s = time.monotonic()
            say(f"{sent} frames, {_counts()}")
    for door in doors.values():
        door.leave()
    bury(store.control.server)
    bury(alone.control.server)
    for thread in (healthy, misled_client):
        thread.ends.set()
        thread.join(30.0)
        if thread.is_alive():
            outcome.findings.append(f"the {thread.name} client hangs")
    outcome.findings += misled_client.wrong[:3]
    outcome.frames["answers"] = liar.num_answers
    outcome.seconds = round(time.monotonic() - began_s, 1)
    outcome.num_connections = {name: door.num_connections for name, door in doors.items()}
    liar.stop()
    _check(cluster, outcome, healthy, before)


def _check(cluster: Cluster, outcome: Outcome, healthy: Healthy, before: dict[str, int]) -> None:
    findings = outcome.findings
    findings += healthy.wrong[:10]
    for name, core in cluster.nodes.items():
        if not core.control.server.is_serving(5.0):
            findings.append(f"node {name} does not serve")
        if not core.state.pool_service.is_attached:
            continue
        core.pool.check_integrity()
        with contextlib.suppress(AssertionError):
            wait_until(lambda pool=core.pool: not any(_held(pool)), 4 * _LEASE_S + 6.0)
        if any(_held(core.pool)):
            findings.append(f"node {name} still holds (leases, writes, quarantined) {_held(core.pool)}")
        if not core.state.hints.thread.is_alive():
            findings.append(f"node {name} has lost its link to the directory")
    if not cluster.directory.server.is_serving(5.0):
        findings.append("the directory does not serve")
    for name, mover in cluster.movers.items():
        if mover is not None and mover.error is not None:
            findings.append(f"the mover of node {name} ended: {mover.error!r}")
    lookups_s = sorted(healthy.lookups_s)
    healthy.lookups_s = []
    try:
        wait_until(lambda: healthy.work(10_001) == 2 * _NUM_BLOCKS, 20.0)
    except (AssertionError, KVStoreError) as error:
        findings.append(f"afterwards a save and loads do not work: {error!r}")
    after = _counts()
    outcome.more = {key: after[key] - before[key] for key in after}
    limits = {"rss_bytes": _MAX_MORE_RSS_BYTES, "fds": _MAX_MORE_FDS, "threads": _MAX_MORE_THREADS}
    findings += [f"{key} grew by {outcome.more[key]}" for key, most in limits.items() if outcome.more[key] > most]
    outcome.healthy = {
        "num_lookups": len(lookups_s),
        "num_verified_blocks": healthy.num_verified,
        "p50_ms": round(1e3 * statistics.median(lookups_s), 3),
        "p99_ms": round(1e3 * lookups_s[int(0.99 * len(lookups_s))], 3),
        "max_ms": round(1e3 * lookups_s[-1], 3),
    }


def _held(pool: Any) -> tuple[int, int, int]:
    stats = pool.stats()
    return stats.num_leases, stats.num_writes, stats.num_quarantined

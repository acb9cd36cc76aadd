"""The store under test and what is done to it: which process plays which part, faults, and how recovery is seen."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

import kvstore
from kvstore.actors.calls import actor_name, call, find_actor
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import KVStoreError
from kvstore.rpc.connect import connect_local
from tests.soak.audit import carries, processes_with
from tests.soak.engine import LAYOUTS, POISON, Engine
from tests.soak.fleet import shake
from tests.soak.plan import (
    CHAIN_BLOCKS,
    CLOCKS_APART_S,
    MAX_DESCRIPTORS,
    chains,
    probe_chain,
    ranks_space,
    space,
    weights_space,
)
from tests.soak.weights import Weights

_CALL_S = 10.0
_PROBE_BLOCKS = 4


class NotRecovered(RuntimeError):
    """Something did not come back within its time."""


def until(question: Callable[[], Any], timeout_s: float, what: str, pause_s: float = 0.05) -> Any:
    """Wait until a question has a true answer, and return that; an error of the store counts as not yet.

    Raises:
        NotRecovered: it has none in time.
    """
    deadline_s, last = time.monotonic() + timeout_s, None
    while time.monotonic() < deadline_s:
        try:
            if last := question():
                return last
        except KVStoreError as error:
            last = error
        time.sleep(pause_s)
    raise NotRecovered(f"{what}: not within {timeout_s} s; last answer: {last!r}")


class StoreUnderTest:
    """A running store of two nodes, with an engine of the driver's on each.

    Args:
        store: it.
        node_ids: its nodes.
        folder: takes the files that tell clients where the nodes' sockets are.
        mark: what the environment of every process of this run has in it; no other is ever signalled.
    """

    def __init__(self, store: Any, node_ids: list[str], folder: Path, mark: str) -> None:
        self.store, self.node_ids, self._mark = store, node_ids, mark
        self.path_files = [folder / f"node-{i}.path" for i in range(len(node_ids))]
        self.weights_file = folder / "weights"
        self._weights = Weights(self.weights_file, writer=True)
        self._weights_chains = itertools.cycle(chains(weights_space()))
        self._probes: dict[int, Engine] = {}
        self._numbers, self._clocks = itertools.count(), itertools.cycle((-0.5, 0.5))
        self.write_paths()
        self.limit_descriptors()

    def handle(self, node: int) -> Any:
        """Return the handle of a node's store."""
        return kvstore.node_store(self.node_ids[node], name=self.store.config.name)

    def ask(self, node: int, verb: str, *args: Any) -> Any:
        """Call a verb of a node's store."""
        return call(f"store of node {node}", getattr(self.handle(node), verb), *args, timeout_s=_CALL_S)

    def disk(self, node: int) -> dict[str, Any]:
        """Return the state and the counts of a node's disk tier."""
        found: dict[str, Any] = self.ask(node, "stats")["disk"]
        return found

    def disk_threads(self, node: int) -> list[str]:
        """Return the names of the threads of a node's disk tier."""

        def names(_: Any) -> list[str]:
            return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("raykv-disk"))

        found: list[str] = call(f"store of node {node}", self.handle(node).__ray_call__, names, timeout_s=_CALL_S)
        return found

    def wait_disks_on(self, timeout_s: float) -> None:
        """Wait until the disk tier of each node is on.

        Raises:
            NotRecovered: one is not.
        """
        for node in range(len(self.node_ids)):
            try:
                until(lambda node=node: not self.disk(node)["is_off"], timeout_s, f"disk tier of node {node} on again")
            except NotRecovered as error:
                raise NotRecovered(f"{error}; {self.disk(node)}") from error

    def write_paths(self) -> None:
        """Tell clients where the stores' sockets are now."""
        for node, path_file in enumerate(self.path_files):
            new = path_file.with_suffix(".new")
            new.write_text(str(self.ask(node, "control_path")))
            new.replace(path_file)

    def pids(self) -> dict[str, int]:
        """Return the process of each part: "store 0", "mover 0", ..., "directory", "supervisor"."""
        found = {}
        for node in range(len(self.node_ids)):
            found |= {f"{part} {node}": pid for part, pid in self.ask(node, "pids").items()}
        for part in ("directory", "supervisor"):
            actor = find_actor(actor_name(self.store.config.name, part))
            found[part] = call(part, actor.__ray_call__, lambda self: os.getpid(), timeout_s=_CALL_S)
        return found

    # Faults.

    def _open_process(self, part: str) -> tuple[int, int]:
        pid = self.pids()[part]
        if pid == 0:
            return 0, -1
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return 0, -1  # Killed before, and not replaced yet.
        if not carries(pid, self._mark):
            os.close(pidfd)
            return 0, -1
        return pid, pidfd

    def kill(self, part: str) -> int:
        """Kill a part's process; returns its id."""
        with self._signalled(part, signal.SIGKILL) as (pid, _):
            return pid

    def stop_for(self, part: str, seconds: float) -> None:
        """Stop a part's process and let it go on."""
        with self._signalled(part, signal.SIGSTOP) as (_, pidfd):
            try:
                time.sleep(seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    def shake(self, part: str, seconds: float) -> None:
        """Stop a part's process and let it go on, again and again."""
        with self._signalled(part, signal.SIGCONT) as (_, pidfd), contextlib.suppress(ProcessLookupError):
            shake(pidfd, seconds)

    def stop_gcs_for(self, seconds: float) -> None:
        """Stop Ray's control store and let it go on."""
        (pid,) = [pid for pid, command in processes_with(self._mark).items() if "/gcs_server" in command]
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)

    def crowd(self, node: int, seconds: float) -> int:
        """Hold more connections to a node's store than it has descriptors; returns how many it took."""
        path, taken = str(self.ask(node, "control_path")), []
        hello = {"role": "client", "protocol": PROTOCOL_VERSION}
        with contextlib.ExitStack() as held:
            deadline_s = time.monotonic() + seconds
            while time.monotonic() < deadline_s and len(taken) < MAX_DESCRIPTORS:
                try:
                    client, arena_fd = connect_local(path, hello, timeout_s=min(1.0, seconds))
                except KVStoreError:
                    break
                arena_fd.close()
                taken.append(held.enter_context(contextlib.closing(client)))
            time.sleep(max(0.0, deadline_s - time.monotonic()))
        return len(taken)

    def limit_descriptors(self) -> None:
        """Give every process of the store as few descriptors as `ulimit -n` would."""
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                if pid and carries(pid, self._mark):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))

    @contextlib.contextmanager
    def _signalled(self, part: str, number: signal.Signals) -> Iterator[tuple[int, int]]:
        pid, pidfd = 0, -1

        def opened() -> bool:
            nonlocal pid, pidfd
            pid, pidfd = self._open_process(part)
            return pidfd >= 0

        until(opened, 30.0, f"a process of {part}, to be sent {number.name}")
        try:
            signal.pidfd_send_signal(pidfd, number)
            yield pid, pidfd
        finally:
            os.close(pidfd)

    # Recovery.

    def wait_replaced(self, part: str, old_pid: int, timeout_s: float) -> None:
        """Wait until a part has another process; clients are told at once where a new store is.

        Raises:
            NotRecovered: it has not.
        """
        until(lambda: self.pids()[part] not in (0, old_pid), timeout_s, f"another process of {part}")
        self.write_paths()
        self.limit_descriptors()

    def wait_serving(self, timeout_s: float) -> None:
        """Wait until blocks that were just saved on one node are loaded on the other one, both ways.

        Raises:
            NotRecovered: it did not happen.
        """
        for source in range(len(self.node_ids)):
            until(lambda source=source: self._probe(source), timeout_s, f"a load of what node {source} has")

    def _probe(self, source: int) -> bool:
        self.write_paths()
        reader = (source + 1) % len(self.node_ids)
        hashes, ids = probe_chain(next(self._numbers), _PROBE_BLOCKS), list(range(_PROBE_BLOCKS))
        try:
            self._engine(source).cache.write(hashes, ids)
            self._engine(source).client.save(hashes, ids).result(30)
            self._engine(reader).cache.fill(ids, POISON)
            result = self._engine(reader).client.load(hashes, ids).result(30)
        except KVStoreError:
            self.close_probes()
            return False
        wrong = self._engine(reader).cache.wrong_blocks(hashes, ids, result.num_blocks)
        if wrong:
            raise NotRecovered(f"WRONG BYTES in a load of the driver's: {wrong}; {result}")
        if result.num_peer != _PROBE_BLOCKS:
            self.close_probes()
        return result.num_peer == _PROBE_BLOCKS

    def _engine(self, node: int) -> Engine:
        if node not in self._probes:
            self._probes[node] = Engine(self.path_files[node].read_text(), space(), LAYOUTS[node], _PROBE_BLOCKS)
        return self._probes[node]

    def close_probes(self) -> None:
        """Close the driver's engines; the next probe opens others."""
        while self._probes:
            self._probes.popitem()[1].close()

    # Weights.

    def clear(self) -> None:
        """Make all that clients saved and published a miss."""
        try:
            with clock_off_by(next(self._clocks) * CLOCKS_APART_S):
                self.store.clear(space())
        finally:
            self._weights.cleared()  # Perhaps on some nodes only.

    def change_weights(self) -> None:
        """Make all KV of the old weights a miss, then begin to save KV of the new ones."""
        with self._weights.changing():
            for changing in (weights_space(), ranks_space()):
                with clock_off_by(next(self._clocks) * CLOCKS_APART_S):
                    self.store.clear(changing)
            self._weights.changed()
        for _ in range(4):
            self.save_weights()

    def save_weights(self) -> None:
        """Save KV of the present weights, another chain on each node; as much as there is room for."""
        for path_file in self.path_files:
            hashes, ids = next(self._weights_chains), list(range(CHAIN_BLOCKS))
            with (
                contextlib.suppress(KVStoreError),
                contextlib.closing(Engine(path_file.read_text(), weights_space(), LAYOUTS[0], CHAIN_BLOCKS)) as engine,
            ):
                engine.cache.write(hashes, ids, self._weights.newest)
                engine.client.save(hashes, ids).result(30)


@contextlib.contextmanager
def clock_off_by(seconds: float) -> Iterator[None]:
    """Be a caller whose wall clock is wrong."""
    right, right_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: right() + seconds, lambda: right_ns() + int(seconds * 1e9)
    try:
        yield
    finally:
        time.time, time.time_ns = right, right_ns


def still_there(pids: list[int], timeout_s: float) -> list[int]:
    """Return which processes still live after some time."""
    deadline_s = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def session_logs() -> Path:
    """Return the folder in which Ray keeps the output of this cluster's actors."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())

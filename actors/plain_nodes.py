"""Node stores and their movers as plain processes of this machine, without Ray; they start in seconds.

For benchmarks and tests that are shorter than a start of Ray. They run the classes that the actors wrap, so only
finding processes differs from a cluster. A node ends with its standard input, and its mover with it, so none outlives
its parent process.

    python -m kvstore.actors.plain_nodes store NODE LOG_LEVEL CONFIG
    python -m kvstore.actors.plain_nodes mover CONTROL_PATH NAME LOG_LEVEL CONFIG
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvstore.config import StoreConfig
from kvstore.errors import PeerLost, StoreUnavailable
from kvstore.mover.keeper import MoverKeeper
from kvstore.node.core import NodeCore
from kvstore.remote.directory import DirectoryServer
from kvstore.remote.peers import PeerAddress

_HOST = "127.0.0.1"
_END_S = 10.0


class PlainNode:
    """The parent's handle of a node store in a child process."""

    def __init__(self, node_id: str, config: StoreConfig) -> None:
        self.node_id = node_id
        command = _command("store", node_id, config)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"raykv-{node_id}-answers", daemon=True)
        self._reader.start()
        self.control_path = ""

    def ask(self, verb: str, timeout_s: float, value: Any = None) -> Any:
        """Ask the process and return its answer.

        Raises:
            StoreUnavailable: the process ended, or did not answer in time.
        """
        assert self._process.stdin is not None, "made with a pipe"
        try:
            self._process.stdin.write(json.dumps([verb, value]) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except (OSError, ValueError, queue.Empty) as error:  # ValueError: the pipe was closed here.
            raise StoreUnavailable(f"node {self.node_id} did not answer {verb!r} within {timeout_s} s") from error
        if not line:
            raise StoreUnavailable(f"the process of node {self.node_id} ended")
        return json.loads(line)

    def begin_close(self) -> None:
        """Tell the process to end."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close(self) -> None:
        """End the process, by force if needed."""
        self.begin_close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
        self._reader.join(_END_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None, "made with a pipe"
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


@contextlib.contextmanager
def plain_nodes(config: StoreConfig, num_nodes: int = 2, timeout_s: float = 60.0) -> Iterator[list[PlainNode]]:
    """Run nodes "node-0", "node-1" and so on, and a directory; all end with the `with` block.

    Args:
        config: of every store.
        num_nodes: how many.
        timeout_s: limit for all of them to be ready.

    Raises:
        StoreUnavailable: a node was not ready in time; all were ended.
    """
    shards = [DirectoryServer(_HOST, settle_s=0.0) for _ in range(config.num_directory_shards)]
    nodes = list[PlainNode]()
    try:
        nodes += [PlainNode(f"node-{index}", config) for index in range(num_nodes)]
        deadline_s = time.monotonic() + timeout_s
        told = {node.node_id: node.ask("where", timeout_s) for node in nodes}
        addresses = {node_id: answer["address"] for node_id, answer in told.items()}
        for number, shard in enumerate(shards):
            address = shard.address()
            addresses[_shard_key(number)] = [address.host, address.port, address.token]
        for node in nodes:
            node.control_path = told[node.node_id]["control_path"]
            node.ask("know", timeout_s, addresses)
        for node in nodes:
            if not node.ask("ready", max(1.0, deadline_s - time.monotonic())):
                raise StoreUnavailable(f"node {node.node_id} had no mover and directory within {timeout_s} s")
        yield nodes
    finally:
        for node in nodes:
            node.begin_close()
        for node in nodes:
            node.close()
        for shard in shards:
            shard.stop()


def _shard_key(number: int) -> str:
    return f"/{number}"  # No id of a node has a slash.


class _ChildMover:
    """The process of a mover, used by `MoverKeeper`."""

    def __init__(self, core: NodeCore) -> None:
        name = f"raykv-{core.state.node_id}-{core.state.epoch.hex()}-{secrets.token_hex(3)}"
        command = _command("mover", core.control_path, core.state.config, name)
        self._core = core
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def wait_started(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._core.state.mover.wait_ready(0.05):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise PeerLost(f"wanted a mover that runs, got exit status {self._process.poll()}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_END_S)


def _command(role: str, where: str, config: StoreConfig, *more: str) -> list[str]:
    level = str(logging.getLogger().getEffectiveLevel())
    return [sys.executable, "-m", "kvstore.actors.plain_nodes", role, where, *more, level, config.to_json()]


def _run_store(node_id: str, config: StoreConfig) -> None:
    sys.setswitchinterval(1e-4)  # As the actor does.
    known: dict[str, list[Any]] = {}

    def find(name: str) -> PeerAddress:
        if name not in known:
            raise PeerLost(f"wanted one of {sorted(known)}, got {name!r}")
        return PeerAddress(*known[name])

    def find_shard(number: int = 0) -> PeerAddress:
        return find(_shard_key(number))

    core = NodeCore(node_id, config, _HOST, lambda name, _: find(name), find_shard, lambda: keeper.replace())
    keeper = MoverKeeper(node_id, lambda: _ChildMover(core), core.state.mover.wait_ready, config.call_timeout_s)
    keeper.start()
    where = core.peer_address()
    answers: dict[str, Callable[[Any], Any]] = {
        "where": lambda _: {"control_path": core.control_path, "address": [where.host, where.port, where.token]},
        "know": known.update,
        # Until it has met the directory, what is saved here may not be found elsewhere.
        "ready": lambda _: core.state.mover.wait_ready(60.0) and core.state.hints.has_met.wait(60.0),
        "stats": lambda _: core.stats(),
        "pids": lambda _: {"store": os.getpid(), "mover": core.state.mover.pid},
    }
    for line in sys.stdin:
        verb, value = json.loads(line)
        sys.stdout.write(json.dumps(answers[verb](value), default=str) + "\n")
        sys.stdout.flush()
    core.stop()  # First, so that the store does not report the mover's end as a loss.
    keeper.stop()


def _main(words: list[str]) -> None:
    logging.basicConfig(level=int(words[-2]), format=f"%(asctime)s {words[0]} %(process)d %(name)s: %(message)s")
    if words[0] == "store":
        _run_store(words[1], StoreConfig.from_json(words[-1]))
    else:
        from kvstore.actors.mover import Mover

        Mover(words[1], words[2], words[-1])
        threading.Event().wait()  # Its thread ends the process, with its store.


if __name__ == "__main__":
    _main(sys.argv[1:])

"""The client processes of the soak, from the driver's side: started, watched, killed and replaced."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.soak import worker
from tests.soak.plan import NUM_RANKS, SHAKEN_S
from tests.soak.settings import WorkerSettings

_START_S = 60.0
_POLL_S = 0.2


@dataclass(slots=True)
class _Client:
    process: BaseProcess
    pidfd: int
    driver: Connection
    life: int
    rank: int | None
    num_done: int = 0
    closed: bool = False
    expected_to_die: bool = False


class Fleet:
    """Client processes by index. One thread collects what they say and notices who dies unasked.

    Args:
        seed: of the soak.
        path_files: where clients read the sockets of the nodes' stores; client i is of node i modulo their number.
        weights_file: see Weights.
        folder: takes the clients' logs.
    """

    def __init__(self, seed: int, path_files: list[Path], weights_file: Path, folder: Path) -> None:
        self._seed, self._path_files, self._weights_file, self._folder = seed, path_files, weights_file, folder
        self._context = multiprocessing.get_context("forkserver")
        # Importing torch takes seconds: once for all clients.
        self._context.set_forkserver_preload([worker.__name__])
        self._lock = threading.Lock()
        self._clients: dict[int, _Client] = {}
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.slowest_s: dict[str, float] = {}
        self.findings: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="soak-fleet", daemon=True)
        self._thread.start()

    def start_ranks(self, first: int) -> list[int]:
        """Start the ranks of each node, as clients from the index `first` on; returns their indexes."""
        num_nodes = len(self._path_files)
        indexes = [first - first % num_nodes + num_nodes * (i + 1) for i in range(NUM_RANKS)]
        placed = [(index + node, rank) for rank, index in enumerate(indexes) for node in range(num_nodes)]
        for client, rank in placed:
            self.start(client, rank=rank)
        return [client for client, _ in placed]

    def start(self, client: int, life: int = 0, rank: int | None = None) -> None:
        """Start a client, or a rank of its node."""
        ours, theirs = self._context.Pipe()
        settings = WorkerSettings(
            seed=self._seed,
            client=client,
            life=life,
            node=client % len(self._path_files),
            path_files=tuple(self._path_files),
            mail=self._folder / "mail",
            weights_file=self._weights_file,
            log_file=self._folder / f"client-{client}.{life}.log",
            error_file=self._folder / f"client-{client}.{life}.err",
            rank=rank,
        )
        process = self._context.Process(target=worker.main, args=(settings, theirs), daemon=True)
        process.start()
        theirs.close()
        assert process.pid is not None
        entry = _Client(process, os.pidfd_open(process.pid), ours, life, rank)
        with self._lock:
            self._clients[client] = entry

    def pids(self) -> list[int]:
        """Return the process ids of the living clients."""
        with self._lock:
            return [client.process.pid for client in self._clients.values() if client.process.pid is not None]

    def kill(self, client: int) -> None:
        """Kill a client with SIGKILL, and start its next life once it is gone."""
        entry = self._clients[client]
        entry.expected_to_die = True
        _send(entry.pidfd, signal.SIGKILL)
        entry.process.join(_START_S)
        self._forget(client)
        self.start(client, entry.life + 1, entry.rank)

    def stop_for(self, client: int, seconds: float) -> None:
        """Stop a client and let it go on."""
        pidfd = self._clients[client].pidfd
        _send(pidfd, signal.SIGSTOP)
        time.sleep(seconds)
        _send(pidfd, signal.SIGCONT)

    def shake(self, client: int, seconds: float) -> None:
        """Stop a client and let it go on, again and again."""
        with contextlib.suppress(ProcessLookupError):
            shake(self._clients[client].pidfd, seconds)

    def num_done_by_all(self) -> int:
        """Return how many operations the present lives of all clients have ended."""
        return sum(client.num_done for client in list(self._clients.values()))

    def num_done(self, client: int) -> int:
        """Return how many operations the present life of a client has ended."""
        return self._clients[client].num_done

    def close_all(self, timeout_s: float) -> None:
        """Have every client close and stay; who does not in time is a finding."""
        for entry in self._clients.values():
            entry.driver.send("close")
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and not all(entry.closed for entry in self._clients.values()):
            time.sleep(_POLL_S)
        self.findings += [
            f"client {client} had not closed after {timeout_s} s; see {self._folder}"
            for client, entry in self._clients.items()
            if not entry.closed
        ]

    def end(self) -> None:
        """End every client and the collecting thread; may be called again."""
        for client, entry in list(self._clients.items()):
            entry.expected_to_die = True
            _send(entry.pidfd, signal.SIGKILL)
            entry.process.join(_START_S)
            self._forget(client)
        self._stopping.set()
        self._thread.join(5.0)

    def _forget(self, client: int) -> None:
        with self._lock:
            entry = self._clients.pop(client)
            self._drain(entry)
            entry.driver.close()
        os.close(entry.pidfd)
        entry.process.close()

    def _collect(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                by_connection = {e.driver: (i, e) for i, e in self._clients.items() if not e.driver.closed}
            if not by_connection:
                self._stopping.wait(_POLL_S)
                continue
            ready = wait(list(by_connection), _POLL_S)
            with self._lock:
                for connection in ready:
                    client, entry = by_connection[connection]  # type: ignore[index]
                    if self._clients.get(client) is entry and not self._drain(entry):
                        self._died(client, entry)

    def _died(self, client: int, entry: _Client) -> None:
        entry.driver.close()
        entry.closed = True
        if not entry.expected_to_die:
            entry.process.join(5.0)
            self.findings.append(
                f"client {client}, life {entry.life}, ended by itself with {entry.process.exitcode}; "
                f"see {self._folder}/client-{client}.{entry.life}.err"
            )

    def _drain(self, entry: _Client) -> bool:
        """Take what a client has said; False when it will say nothing more."""
        try:
            while not entry.driver.closed and entry.driver.poll():
                self._take(entry, *entry.driver.recv())
        except (EOFError, OSError):
            return False
        return True

    def _take(self, entry: _Client, what: str, value: Any) -> None:
        if what == "finding":
            self.findings.append(value)
        elif what == "closed":
            entry.closed = True
        else:
            counts, slowest_s, entry.num_done = value
            self.counts.update(counts)
            for verb, seconds in slowest_s.items():
                self.slowest_s[verb] = max(seconds, self.slowest_s.get(verb, 0.0))


def _send(pidfd: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended by itself: that is a finding, and the soak goes on."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def shake(pidfd: int, seconds: float) -> None:
    """Stop a process and let it go on for `seconds`, at moments that nothing decides but the scheduler."""
    rng, end_s = random.Random(), time.monotonic() + seconds
    while time.monotonic() < end_s:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            signal.pidfd_send_signal(pidfd, number)
            time.sleep(rng.uniform(*SHAKEN_S))

"""Publish which blocks a node store has. The sockets of ZeroMQ are in a process of their own (outlet.py).

The frames are those of vLLM's ZmqEventPublisher: topic, sequence number in 8 bytes, payload.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from msgspec import msgpack

from kvstore.errors import ConfigError
from kvstore.node.events.changes import PoolChanges
from kvstore.node.events.outlet import Limits, Outlet
from kvstore.node.events.schema import MOST_HASHES, AllBlocksCleared, Event, EventBatch
from kvstore.pool.pool import Pool
from kvstore.runtime.guard import Guard, LogLimit

logger = logging.getLogger(__name__)

MEMORY, DISK = "CPU", "STORAGE"
_LOOK_MS, _STOP_S = 5_000, 2.0


class EventPublisher:
    """The publisher of one node store, with a thread of its own. The store never waits for it.

    The first batch of each life has AllBlocksCleared, and so has the last one. If changes were lost because the thread
    was too slow, or with the process that has the sockets, it sends AllBlocksCleared and then all blocks. That process
    is started again when it is gone, after a pause that grows.

    Args:
        endpoint: where subscribers connect, "tcp://HOST:PORT" or "ipc://PATH"; `stats` has the port chosen for 0.
        replay_endpoint: where they ask for old batches; "" for nowhere.
        node_id: of this node.
        name: of the store.
        limits: of the process with the sockets.

    Raises:
        ConfigError: pyzmq is missing, or an endpoint cannot be used; nothing is left behind.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str, node_id: str, name: str, limits: Limits | None = None
    ) -> None:
        with contextlib.ExitStack() as undo:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake_fd)
            self._outlet = Outlet(endpoint, replay_endpoint, f"kv@{node_id}@{name}", limits or Limits())
            undo.pop_all()
        self._lock = threading.Lock()
        self._sources: tuple[PoolChanges, ...] = ()
        self._has_to_begin = True
        self._is_woken = False
        self._stopping = threading.Event()
        self._encoder = msgpack.Encoder()
        self._num_batches = self._num_resyncs = 0
        self._guard, self._lost_log = Guard(logger, "events: a round of publishing"), LogLimit()
        self._thread = threading.Thread(target=self._run, name="raykv-events", daemon=True)
        self._wake()
        self._thread.start()

    def follow(self, tiers: Sequence[tuple[Pool, str]]) -> None:
        """Publish the blocks of these pools, each with its medium, from now on; those of no other."""
        with self._lock:
            if self._stopping.is_set():
                return
            for source in self._sources:
                source.end()
            self._sources = tuple(PoolChanges(pool, medium, self._wake) for pool, medium in tiers)
            for source in self._sources:
                source.follow()
            self._has_to_begin = True
        self._wake()

    def stats(self) -> dict[str, Any]:
        """Return the addresses and counts."""
        endpoints = self._outlet.endpoints
        return {
            "endpoint": endpoints["events_endpoint"],
            "replay_endpoint": endpoints.get("events_replay_endpoint", ""),
            "num_batches": self._num_batches,
            "num_resyncs": self._num_resyncs,
            "num_failures": self._guard.num_failures,
            **self._outlet.counts(),
        }

    def stop(self) -> None:
        """Send the last batch and close the sockets; may be called again."""
        with self._lock:
            if self._stopping.is_set():
                return
            for source in self._sources:
                source.end()
            self._sources = ()
            self._stopping.set()
        self._wake()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            self._outlet.kill()  # It waits for that process.
            self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(OSError):  # A pool's lock may be held, and its step has to end.
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._wait()
                self._is_woken = False  # Before the changes are taken: the next one wakes again.
                self._round()
                self._guard.passed()
            except OSError as error:
                self._begin_again(error)
            except Exception as error:  # noqa: BLE001 - logged by the guard; nothing else publishes.
                self._has_to_begin = True
                self._stopping.wait(self._guard.failed(error))
        with contextlib.suppress(OSError):
            self._send([AllBlocksCleared()])
        self._outlet.close()

    def _wait(self) -> None:
        """Wait for changes; raise ConnectionError if the process with the sockets is gone."""
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        poller.register(self._outlet.fileno(), select.POLLIN)
        for fd, _ in poller.poll(_LOOK_MS):
            if fd != self._wake_fd:
                raise ConnectionError("the process with the sockets has ended")
            os.eventfd_read(self._wake_fd)

    def _begin_again(self, error: Exception) -> None:
        """Start another process with the sockets, after a pause; return when there is one, or when the store ends."""
        while True:
            status, pause_s = self._outlet.lost()
            if self._lost_log.passes():
                logger.warning(
                    "events: the process with the sockets is gone (exit status %s: %s), another starts in %.2f s "
                    "(%d more were not logged)",
                    status,
                    error,
                    pause_s,
                    self._lost_log.take_held_back(),
                )
            if self._stopping.wait(pause_s):
                return
            try:
                self._outlet.begin()
            except (OSError, ConfigError) as failure:
                error = failure
                continue
            self._has_to_begin = True
            self._wake()
            return

    def _round(self) -> None:
        with self._lock:
            sources, has_to_begin, self._has_to_begin = self._sources, self._has_to_begin, False
        taken = [source.take() for source in sources]
        if not has_to_begin and all(changes is not None for changes in taken):
            self._publish(chain.from_iterable(map(PoolChanges.events, sources, (each or [] for each in taken))))
            return
        self._num_resyncs += not has_to_begin
        self._send([AllBlocksCleared()])
        self._publish(chain.from_iterable(source.all_stored() for source in sources))

    def _publish(self, events: Iterable[Event]) -> None:
        batch, num_hashes = list[Event](), 0
        for event in events:
            count = 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
            if batch and num_hashes + count > MOST_HASHES:
                self._send(batch)
                batch, num_hashes = [], 0
            batch.append(event)
            num_hashes += count
        if batch:
            self._send(batch)

    def _send(self, events: list[Event]) -> None:
        payload = self._encoder.encode(EventBatch(time.time(), events, 0))
        self._num_batches += 1
        self._outlet.send(self._num_batches - 1, payload)

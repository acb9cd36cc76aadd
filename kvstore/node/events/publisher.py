"""Publish which blocks a node store has: a PUB socket of ZeroMQ, and a ROUTER socket that sends old batches again.

The frames are those of vLLM's ZmqEventPublisher: topic, sequence number in 8 bytes, payload.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from msgspec import msgpack

from kvstore.errors import ConfigError
from kvstore.node.events.changes import PoolChanges
from kvstore.node.events.schema import MOST_HASHES, AllBlocksCleared, Event, EventBatch
from kvstore.pool.pool import Pool
from kvstore.runtime.guard import Guard

logger = logging.getLogger(__name__)

MEMORY, DISK = "CPU", "STORAGE"
#: Sequence number of the message that ends a replay.
END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
#: Batches kept for replays, and their bytes.
_MOST_KEPT, _MOST_KEPT_BYTES = 10_000, 64 << 20
#: Batches that may wait for one subscriber; a slower one loses the next ones, and sees that by their numbers.
_MOST_UNREAD = 1_000
#: Longest message of a subscriber: a topic, or the number at which a replay begins.
_MOST_ASKED_BYTES = 1024
_LOOK_MS, _STOP_S = 5_000, 2.0
#: How long the last batch may be on its way when the store ends.
_LINGER_MS = 200


class EventPublisher:
    """The publisher of one node store, with a thread of its own. The store never waits for it.

    The first batch of each life has AllBlocksCleared, and so has the last one. If changes were lost because the thread
    was too slow, it sends AllBlocksCleared and then all blocks.

    Args:
        endpoint: where subscribers connect, "tcp://HOST:PORT" or "ipc://PATH"; `stats` has the port chosen for 0.
        replay_endpoint: where they ask for old batches; "" for nowhere.
        node_id: of this node.
        name: of the store.

    Raises:
        ConfigError: pyzmq is missing, or an endpoint cannot be used; nothing is left behind.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, node_id: str, name: str) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ConfigError(
                "events_endpoint: wanted the package pyzmq on every node, got none; install it there (raykv's extra "
                "`events`), or leave events_endpoint out"
            ) from error
        self._zmq: Any = zmq
        self._topic = f"kv@{node_id}@{name}".encode()
        self._context: Any = zmq.Context()
        self._router: Any = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            self._pub = self._bind("events_endpoint", zmq.PUB, endpoint, _MOST_UNREAD)
            if replay_endpoint:
                self._router = self._bind("events_replay_endpoint", zmq.ROUTER, replay_endpoint, _MOST_KEPT + 2)
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.pop_all()
        self._endpoints = [
            "" if each is None else str(each.getsockopt(zmq.LAST_ENDPOINT), "utf-8").rstrip("\0")
            for each in (self._pub, self._router)
        ]
        self._lock = threading.Lock()
        self._sources: tuple[PoolChanges, ...] = ()
        self._has_to_begin = True
        self._is_woken = self._is_stopping = False
        self._encoder = msgpack.Encoder()
        #: Payloads as frames of ZeroMQ: it copies bytes for each subscriber that they wait for, and shares frames.
        self._kept: deque[tuple[bytes, Any]] = deque()
        self._num_kept_bytes = self._num_batches = self._num_resyncs = self._num_replays = self._num_malformed = 0
        self._guard = Guard(logger, "events: a round of publishing")
        self._thread = threading.Thread(target=self._run, name="raykv-events", daemon=True)
        self._wake()
        self._thread.start()

    def _bind(self, setting: str, kind: int, endpoint: str, most_unread: int) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.SNDHWM, most_unread)
        made.setsockopt(self._zmq.MAXMSGSIZE, _MOST_ASKED_BYTES)
        made.setsockopt(self._zmq.TCP_KEEPALIVE, 1)
        try:
            made.bind(endpoint)
        except self._zmq.ZMQError as error:
            why = "another process has it" if error.errno == errno.EADDRINUSE else str(error)
            raise ConfigError(
                f"{setting}: wanted an address that is free on this node, got {endpoint!r}: {why}; choose another "
                "port, or port 0 where several nodes share a machine"
            ) from error
        return made

    def follow(self, tiers: Sequence[tuple[Pool, str]]) -> None:
        """Publish the blocks of these pools, each with its medium, from now on; those of no other."""
        with self._lock:
            if self._is_stopping:
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
        return {
            "endpoint": self._endpoints[0],
            "replay_endpoint": self._endpoints[1],
            "num_batches": self._num_batches,
            "num_kept": len(self._kept),
            "num_resyncs": self._num_resyncs,
            "num_replays": self._num_replays,
            "num_malformed": self._num_malformed,
            "num_failures": self._guard.num_failures,
        }

    def stop(self) -> None:
        """Send the last batch and close the sockets; may be called again."""
        with self._lock:
            if self._is_stopping:
                return
            for source in self._sources:
                source.end()
            self._sources, self._is_stopping = (), True
        self._wake()
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(OSError):  # A pool's lock may be held, and its step has to end.
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake_fd, self._zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, self._zmq.POLLIN)
        while not self._is_stopping:
            try:
                ready = dict(poller.poll(_LOOK_MS))
                if self._router in ready:
                    self._replay()
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                self._is_woken = False  # Before the changes are taken: the next one wakes again.
                self._round()
                self._guard.passed()
            except Exception as error:  # noqa: BLE001 - logged by the guard; nothing else publishes.
                self._has_to_begin = True
                time.sleep(self._guard.failed(error))
        with contextlib.suppress(self._zmq.ZMQError):
            self._send([AllBlocksCleared()])
        self._context.destroy(linger=_LINGER_MS)

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
        payload = self._zmq.Frame(self._encoder.encode(EventBatch(time.time(), events, 0)))
        sequence = self._num_batches.to_bytes(8, "big")
        self._num_batches += 1
        self._kept.append((sequence, payload))
        self._num_kept_bytes += len(payload)
        while len(self._kept) > _MOST_KEPT or self._num_kept_bytes > _MOST_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])
        # A PUB socket never waits: it drops what a slow subscriber has no room for.
        self._pub.send_multipart((self._topic, sequence, payload), copy=False)

    def _replay(self) -> None:
        """Answer one request for old batches; those that a slow reader has no room for are dropped."""
        frames = self._router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            self._num_malformed += 1
            return
        asker, _, first = frames
        self._num_replays += 1
        for sequence, payload in self._kept:
            if sequence >= first:
                self._router.send_multipart((asker, b"", self._topic, sequence, payload), copy=False)
        self._router.send_multipart((asker, b"", b"", END_SEQUENCE, b""))

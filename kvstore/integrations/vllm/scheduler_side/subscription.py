"""What this node's store publishes about its memory, read between the engine's steps (docs/events.md)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from msgspec import DecodeError, msgpack
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch

from kvstore.client.client import Client
from kvstore.errors import KVStoreError

logger = logging.getLogger(__name__)

#: Batches read between two steps, so that no step waits long; and batches that may wait, as an idle engine reads none.
_AT_ONCE, _MOST_WAITING = 64, 10_000


class Subscription:
    """A subscription to the store of this node, if that store publishes events. `opened` is called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The life of the store, and where it publishes; and whether the socket is of an earlier one.
        self._epoch = self._endpoint = ""
        self._is_anew = False
        self._socket: Any = None
        self._next: int | None = None
        self._decoder = msgpack.Decoder(KVEventBatch)

    def opened(self, client: Client) -> None:
        """Take in a new client of the store."""
        try:
            stats = client.stats()
        except KVStoreError as error:
            logger.info("evictions of the store cannot be heard of: %s", error)
            return
        with self._lock:
            if stats["epoch"] != self._epoch:
                self._epoch, self._endpoint = stats["epoch"], (stats["events"] or {}).get("endpoint", "")
                self._is_anew = True

    def changes(self) -> Iterator[tuple[bool, list[Any]] | None]:
        """Yield what changed since the last call, without a wait: (whether they are here now, hashes).

        None stands for: no block may be here any more, as far as this side knows.
        """
        with self._lock:
            is_anew, self._is_anew, endpoint = self._is_anew, False, self._endpoint
        if is_anew:
            self.close()
            self._socket = _subscribed(endpoint) if endpoint else None
            yield None
        for _ in range(_AT_ONCE if self._socket is not None else 0):
            if not self._socket.poll(0):
                return
            _, sequence, payload = self._socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if self._next not in (None, number):
                yield None  # Batches were lost, and with them evictions.
            self._next = number + 1
            try:
                events = self._decoder.decode(payload).events
            except DecodeError as error:
                logger.warning("a batch of the store's events cannot be read: %s", error)
                continue
            for event in events:
                if isinstance(event, AllBlocksCleared):
                    yield None
                elif event.medium == "CPU":
                    yield isinstance(event, BlockStored), event.block_hashes

    def close(self) -> None:
        """Close the socket; may be called again."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._next = None


def _subscribed(endpoint: str) -> Any:
    import zmq  # vLLM brings it.

    made = zmq.Context.instance().socket(zmq.SUB)
    made.setsockopt(zmq.RCVHWM, _MOST_WAITING)
    made.setsockopt(zmq.SUBSCRIBE, b"")
    made.connect(endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:"))
    return made

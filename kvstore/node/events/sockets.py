"""The process that has the sockets for subscribers of events. A node store starts it, and ends it.

What a stranger sends to these sockets costs memory and descriptors of the process that has them: libzmq keeps parts of
a message until the last one came, and prefixes that were subscribed to, without a bound. So they live in a process
with limits of its own, and the store goes on without it.

This file is run by its path, so it imports nothing of raykv. It reads batches from the store's socket until that is
closed, which the kernel does however the store ends.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import socket
import struct
import sys
from collections import deque
from typing import Any

#: In front of each batch: its sequence number, and the bytes of its payload.
HEADER = struct.Struct(">QI")
#: On the page that the store shares: batches kept, requests for old ones, messages that were no such request.
COUNTS = struct.Struct("=QQQ")
#: Sequence number of the message that ends a replay.
_END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
#: Longest frame of a subscriber: a topic, or the number at which a replay begins.
_MOST_ASKED_BYTES = 1024
#: Messages of replays that may wait for one asker: somewhat more than are kept.
_MOST_ANSWERS = 10_002
#: A connection that has not greeted by then is cut.
_HANDSHAKE_MS = 5_000
#: How long the last batch may be on its way when the store ends.
_LINGER_MS = 200
_LOOK_MS, _PIECE_BYTES = 60_000, 1 << 20
#: The store and the engines of the node come first.
_NICENESS = 10


def main() -> None:
    """Serve until the store closes its socket; the arguments are from `Outlet`."""
    settings = json.loads(sys.argv[1])
    _limit(settings["most_memory_bytes"], settings["num_descriptors"])
    sys.path[:] = settings["path"]
    with (
        socket.socket(fileno=settings["socket_fd"]) as store,
        mmap.mmap(settings["page_fd"], mmap.PAGESIZE) as page,
    ):
        _Sockets(store, page, settings).serve()


def _limit(most_memory_bytes: int, num_descriptors: int) -> None:
    for kind, most in (
        (resource.RLIMIT_DATA, most_memory_bytes),
        (resource.RLIMIT_NOFILE, num_descriptors),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


class _Sockets:
    """A PUB socket that sends each batch, and a ROUTER socket that sends old ones again."""

    def __init__(self, store: socket.socket, page: mmap.mmap, settings: dict[str, Any]) -> None:
        import zmq

        os.nice(_NICENESS)  # Before the context: its threads take it over.
        self._zmq: Any = zmq
        self._store, self._page, self._settings = store, page, settings
        self._topic = settings["topic"].encode()
        self._context: Any = zmq.Context()
        #: Payloads as frames of ZeroMQ: it copies bytes for each subscriber that they wait for, and shares frames.
        self._kept: deque[tuple[bytes, Any]] = deque()
        self._num_kept_bytes = 0
        self._pub: Any = None
        self._router: Any = None

    def serve(self) -> None:
        """Tell the store the addresses, or why there are none; then send what it sends, until its end."""
        try:
            if self._bind():
                self._send_all()
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _bind(self) -> bool:
        wanted, found = self._settings["endpoints"], dict[str, str]()
        for setting, endpoint in wanted.items():
            try:
                found[setting] = self._bound(setting, endpoint)
            except self._zmq.ZMQError as error:
                self._tell({"setting": setting, "errno": error.errno, "why": str(error)})
                return False
        self._tell({"endpoints": found})
        return True

    def _bound(self, setting: str, endpoint: str) -> str:
        is_pub = setting == "events_endpoint"
        made = self._context.socket(self._zmq.PUB if is_pub else self._zmq.ROUTER)
        made.setsockopt(self._zmq.SNDHWM, self._settings["num_unread"] if is_pub else _MOST_ANSWERS)
        made.setsockopt(self._zmq.MAXMSGSIZE, _MOST_ASKED_BYTES)
        made.setsockopt(self._zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        made.setsockopt(self._zmq.TCP_KEEPALIVE, 1)
        if is_pub:
            self._pub = made
        else:
            self._router = made
        made.bind(endpoint)
        return str(made.getsockopt(self._zmq.LAST_ENDPOINT), "utf-8").rstrip("\0")

    def _tell(self, what: dict[str, Any]) -> None:
        self._store.sendall(json.dumps(what).encode() + b"\n")

    def _send_all(self) -> None:
        poller, unread = self._zmq.Poller(), bytearray()
        poller.register(self._store.fileno(), self._zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, self._zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_LOOK_MS))
            if self._router in ready:
                self._replay()
            if self._store.fileno() in ready:
                piece = self._store.recv(_PIECE_BYTES)
                if not piece:
                    return
                unread += piece
                self._send(unread)

    def _send(self, unread: bytearray) -> None:
        """Send the batches that are there as a whole, and remove them."""
        at = 0
        while len(unread) >= at + HEADER.size:
            sequence, num_bytes = HEADER.unpack_from(unread, at)
            begin = at + HEADER.size
            if len(unread) < begin + num_bytes:
                break
            at = begin + num_bytes
            number, payload = sequence.to_bytes(8, "big"), self._zmq.Frame(bytes(unread[begin:at]))
            self._keep(number, payload)
            # A PUB socket never waits: it drops what a slow subscriber has no room for.
            self._pub.send_multipart((self._topic, number, payload), copy=False)
        del unread[:at]

    def _keep(self, number: bytes, payload: Any) -> None:
        self._kept.append((number, payload))
        self._num_kept_bytes += len(payload)
        most_bytes = self._settings["num_kept_bytes"]
        while len(self._kept) > self._settings["num_kept"] or self._num_kept_bytes > most_bytes:
            self._num_kept_bytes -= len(self._kept.popleft()[1])
        self._count(0, 0)

    def _replay(self) -> None:
        """Answer one request for old batches; those that a slow reader has no room for are dropped."""
        frames = self._router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            self._count(0, 1)
            return
        asker, _, first = frames
        self._count(1, 0)
        for number, payload in self._kept:
            if number >= first:
                self._router.send_multipart((asker, b"", self._topic, number, payload), copy=False)
        self._router.send_multipart((asker, b"", b"", _END_SEQUENCE, b""))

    def _count(self, num_replays: int, num_malformed: int) -> None:
        _, replays, malformed = COUNTS.unpack_from(self._page)
        COUNTS.pack_into(self._page, 0, len(self._kept), replays + num_replays, malformed + num_malformed)


if __name__ == "__main__":
    main()

"""The node store's view of its mover: what it was told, what is in flight, and what it left behind."""

from __future__ import annotations

import base64
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.control_server import Connection
from kvstore.errors import KVStoreError, PeerLost, ProtocolError, TransferTimeout
from kvstore.messages import (
    U64,
    MoverDone,
    MoverRead,
    pack_mover_read,
    unpack_mover_done,
)
from kvstore.transport import PeerDescription, ReadRequest
from kvstore.wire import Flag, Message, Op, pack_error, pack_json, unpack_error, unpack_json

logger = logging.getLogger(__name__)

#: Called on the control thread with each word on a READ; `error` is None while all goes well.
OnDone = Callable[[MoverDone, KVStoreError | None], None]


@dataclass(frozen=True, slots=True)
class OwnTransport:
    """What peers need to read this node's slab through its present mover."""

    generation: int
    agent: bytes
    address: int


class MoverLink:
    """One mover at a time; a new one is a new generation with no memory of the old one's peers.

    Args:
        on_terminal: called with a READ id when an abandoned READ can write no more: the engine said so, or
            its mover is gone.
    """

    def __init__(self, on_terminal: Callable[[int], None]) -> None:
        self._on_terminal = on_terminal
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._own: OwnTransport | None = None
        self._generation = 0
        self._callbacks: dict[int, OnDone] = {}
        self._fenced = False
        # Of its own: the control thread must not wait for who sends to the mover under the other one.
        self._abandoned_lock = threading.Lock()
        self._abandoned: dict[int, float] = {}
        self._waiting: list[tuple[set[int], Callable[[], None]]] = []
        self._known_peers: set[str] = set()
        self._ids = itertools.count(1)
        self._ready = threading.Event()
        self._stats_ready = threading.Event()
        self._stats: dict[str, int] = {}
        self._slots: tuple[int, int] | None = None

    @property
    def own(self) -> OwnTransport | None:
        """What to tell peers; None while there is no mover."""
        return self._own

    @property
    def num_abandoned(self) -> int:
        """READs that were given up and may still write."""
        return len(self._abandoned)

    def abandoned_since_s(self) -> float | None:
        """When the oldest READ that may still write was given up, on the monotonic clock; None without one."""
        with self._abandoned_lock:
            return min(self._abandoned.values(), default=None)

    def lost_touch(self) -> bool:
        """Whether the mover closed its connection while its process lives, so that it can report nothing."""
        connection = self._connection
        return connection is not None and connection.closed

    def fence(self) -> bool:
        """Kill the mover: once it is gone nothing that it posted can write. Again has no further effect.

        Only on the control thread. Nothing is granted to peers and nothing read from here on; `gone` ends the
        quarantine, and a new mover is a new generation.

        Returns:
            False when there is no process of its own to kill; nothing changed.
        """
        connection = self._connection
        if connection is None or not connection.kill():
            return False
        with self._lock:
            self._own, self._fenced = None, True
            self._ready.clear()
        return True

    def when_terminal(self, read_ids: set[int], then: Callable[[], None]) -> None:
        """Call `then` once none of these READs can write any more, at once if that is so already."""
        with self._abandoned_lock:
            left = read_ids & self._abandoned.keys()
            if left:
                self._waiting.append((left, then))
        if not left:
            then()

    def _ended(self, read_ids: set[int]) -> None:
        """READs that had been given up can write no more: their slots are free, and who waited for it hears."""
        with self._abandoned_lock:
            for read_id in read_ids:
                self._abandoned.pop(read_id, None)
            for left, _ in self._waiting:
                left -= read_ids
            ready = [then for left, then in self._waiting if not left]
            self._waiting = [(left, then) for left, then in self._waiting if left]
        for read_id in read_ids:
            self._on_terminal(read_id)
        for then in ready:
            then()

    def _give_up(self, read_id: int) -> None:
        with self._abandoned_lock:
            self._abandoned.setdefault(read_id, time.monotonic())

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until a mover has announced itself."""
        return self._ready.wait(timeout_s)

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Tell this mover and every later one how the slab is divided."""
        with self._lock:
            self._slots = (slot_bytes, num_slots)
            if self._connection is not None:
                self._tell_slots(self._connection)

    def _tell_slots(self, connection: Connection) -> None:
        if self._slots is not None:
            payload = pack_json({"slot_bytes": self._slots[0], "num_slots": self._slots[1]})
            connection.send(Op.ATTACH, Flag.ONE_WAY, 0, payload)

    def serve(self, connection: Connection, message: Message) -> None:
        """Take one message of the mover, on the control thread."""
        if message.op is Op.MOVER_READY:
            value = unpack_json(message.payload)
            with self._lock:
                if self._connection is not None:
                    connection.shut_down()
                    raise ProtocolError("this store has a mover; another comes only after that one is gone")
                self._generation += 1
                self._connection, self._known_peers, self._fenced = connection, set(), False
                self._tell_slots(connection)
                self._own = OwnTransport(self._generation, base64.b64decode(value["agent"]), int(value["address"]))
            self._ready.set()
        elif message.op is Op.MOVER_DONE:
            self._done(unpack_mover_done(message.payload))
        elif message.op is Op.MOVER_TERMINAL:
            self._ended({U64.unpack(message.payload)[0]})
        elif message.op is Op.MOVER_STATS:
            self._stats = unpack_json(message.payload)
            self._stats_ready.set()

    def _done(self, done: MoverDone) -> None:
        error = unpack_error(done.error) if done.error else None
        callback = self._callbacks.get(done.read_id)
        if done.last:
            # Noted first: `abandon` takes a READ that is in neither for one that can write no more.
            if not done.terminal:
                self._give_up(done.read_id)
            self._callbacks.pop(done.read_id, None)
        if callback is not None:
            callback(done, error)
        elif done.last and done.terminal and done.read_id in self._abandoned:
            self._ended({done.read_id})

    def gone(self, connection: Connection) -> bool:
        """The process behind a mover's connection is gone: nothing it posted writes any more."""
        with self._lock:
            if connection is not self._connection:
                return False
            self._connection, self._own, self._fenced = None, None, False
            self._ready.clear()
            callbacks, self._callbacks = self._callbacks, {}
        error = PeerLost("the mover of this node died; the load continues without it")
        for read_id, callback in callbacks.items():
            failed = MoverDone(
                read_id=read_id, num_blocks=0, last=True, terminal=True, seconds=0.0, num_descriptors=0,
                error=pack_error(error),
            )  # fmt: skip
            callback(failed, error)
        with self._abandoned_lock:
            abandoned = set(self._abandoned)
        self._ended(abandoned)
        return True

    def read(
        self,
        request: ReadRequest,
        peer: PeerDescription,
        on_done: OnDone,
        *,
        chunk_ends: npt.NDArray[np.int32],
        timeout_s: float,
    ) -> int:
        """Have the mover read; returns the READ's id. `on_done` hears of every chunk on the control thread.

        Raises:
            PeerLost: there is no mover now; nothing was started.
        """
        with self._lock:
            connection = self._connection
            if connection is None or self._fenced:
                raise PeerLost("this node's mover is not running; it is being replaced")
            read_id = next(self._ids)
            self._callbacks[read_id] = on_done
            if request.peer not in self._known_peers:
                self._known_peers.add(request.peer)
                description = {
                    "peer": request.peer,
                    "agent": base64.b64encode(peer.agent).decode(),
                    "address": peer.address,
                    "slot_bytes": peer.slot_bytes,
                    "num_slots": peer.num_slots,
                }
                connection.send(Op.MOVER_ADD_PEER, Flag.ONE_WAY, 0, pack_json(description))
            read = MoverRead(read_id=read_id, request=request, chunk_ends=chunk_ends, timeout_s=timeout_s)
            if not connection.send(Op.MOVER_READ, Flag.ONE_WAY, 0, pack_mover_read(read)):
                self._callbacks.pop(read_id, None)
                raise PeerLost("this node's mover does not read its socket; it is being replaced")
        return read_id

    def abandon(self, read_id: int) -> bool:
        """Stop waiting for a READ that did not report in time; True if it may still write."""
        with self._lock:
            if self._callbacks.pop(read_id, None) is None:
                return read_id in self._abandoned
            self._give_up(read_id)
            return True

    def expect_notifications(self, num_leases: int) -> None:
        """Tell the mover how many leases of remote readers are open; it polls only while there are any."""
        connection = self._connection
        if connection is not None:
            connection.send(Op.MOVER_EXPECT, Flag.ONE_WAY, 0, U64.pack(num_leases))

    def stats(self, timeout_s: float) -> dict[str, int]:
        """Return what the engine counted.

        Raises:
            PeerLost: there is no mover now.
            TransferTimeout: it does not answer.
        """
        connection = self._connection
        if connection is None:
            raise PeerLost("this node's mover is not running")
        self._stats_ready.clear()
        connection.send(Op.MOVER_STATS, Flag.REQUEST, 0, b"")
        if not self._stats_ready.wait(timeout_s):
            raise TransferTimeout(f"the mover did not answer within {timeout_s} s")
        return dict(self._stats)

    @property
    def pid(self) -> int:
        """Process id of the mover, 0 when there is none."""
        connection = self._connection
        return connection.pid if connection is not None else 0

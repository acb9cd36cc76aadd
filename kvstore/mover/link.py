"""The node store's side of its connection to the mover: its life, the peers that it knows, and requests to it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kvstore.blocks.codec import Record, decode_bytes, decode_counts, decode_id, encode
from kvstore.blocks.indexes import IndexArray
from kvstore.errors import PeerLost, ProtocolError, TransferTimeout
from kvstore.mover.messages import (
    AddPeer,
    MoverRead,
    MoverWake,
    OwnTransport,
    Slots,
    decode_mover_done,
    decode_mover_ready,
)
from kvstore.mover.transport import PeerDescription, ReadRequest
from kvstore.mover.unfinished import OnDone, Unfinished
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Flag, Message, Op, unpack_error

#: A mover keeps NIXL's data of at most this many slabs of peers.
_MAX_PEERS = 1024
_DEAF = "this node's mover does not read its socket; it is being replaced"


def _node_and_life(peer: str) -> tuple[str, list[str]]:
    """Return the node, and the epoch and mover's generation, in a peer's name: node/epoch/generation[/slabs]."""
    parts = peer.split("/")
    return parts[0], parts[1:3]


class MoverLink:
    """One mover at a time; a new mover is a new generation and knows none of the old one's peers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.connection: Connection | None = None
        #: The data that peers need to read through this mover; None while there is no mover.
        self.own: OwnTransport | None = None
        #: Why no mover can begin here, as the last one said; empty if it has not said so, or one is ready.
        self.problem = ""
        self._generation = 0
        self._fenced = False
        #: Has a lock of its own: the control thread must not wait for a thread that sends to the mover under `_lock`.
        self.unfinished = Unfinished()
        self.abandon, self.when_terminal = self.unfinished.abandon, self.unfinished.when_terminal
        self.abandoned_since_s = self.unfinished.abandoned_since_s
        #: Lives of peers that the mover knows, the last used last.
        self._known_peers: OrderedDict[str, None] = OrderedDict()
        self._ready = threading.Event()
        self._slots: Slots | None = None

    @property
    def num_abandoned(self) -> int:
        """Number of abandoned READs, which may still write."""
        return len(self.unfinished.abandoned)

    def lost_touch(self) -> bool:
        """Return whether the mover closed its connection while its process lives: then it can report nothing."""
        connection = self.connection
        return connection is not None and connection.closed

    def fence(self) -> bool:
        """Kill the mover: once it is gone, none of its READs can write. A second call has no further effect.

        Only on the control thread. From here on nothing is granted to peers and nothing is read. `gone` ends the
        quarantine. Returns False if there is no separate process to kill; nothing changed.
        """
        connection = self.connection
        if connection is None or not connection.kill():
            return False
        with self._lock:
            self.own, self._fenced = None, True
            self._ready.clear()
        return True

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until a mover has announced itself; return whether it has."""
        return self._ready.wait(timeout_s)

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Tell this mover and every later one how the slab is divided."""
        with self._lock:
            self._slots = Slots(slot_bytes, num_slots)
            self._send(Op.ATTACH, encode(self._slots))

    def serve(self, connection: Connection, message: Message, notified: Callable[[bytes], None]) -> None:
        """Take one message of a process that claims to be the mover, on the control thread.

        Calls `notified` with the notifications that peers sent.

        Raises:
            ProtocolError: the present mover of this store would not send this message; nothing changed.
        """
        op, payload = message.op, message.payload
        if op is Op.MOVER_READY:
            self._take(connection, payload)
        elif not self.is_present(connection):
            # Two movers may use the same READ ids, so reports of another process must not count.
            raise ProtocolError(f"{op.name}: wanted one from this store's present mover, got it from another process")
        elif op is Op.MOVER_DONE:
            self.unfinished.report(decode_mover_done(payload))
        elif op is Op.MOVER_TERMINAL:
            self.unfinished.end({decode_id(payload)})
        elif op is Op.MOVER_NOTIFICATIONS:
            notified(decode_bytes(payload))
        elif op in (Op.MOVER_STAGE, Op.MOVER_SPILL, Op.MOVER_STATS):
            if op is Op.MOVER_STATS:
                decode_counts(payload)  # Here too: a mover that sends invalid counts is ended.
            self.unfinished.answer(message)
        else:
            raise ProtocolError(f"{op.name}: no mover sends this")

    def is_present(self, connection: Connection) -> bool:
        """Return whether a connection is the present mover's."""
        return connection is self.connection

    def _take(self, connection: Connection, payload: bytes) -> None:
        ready = decode_mover_ready(payload)
        own = OwnTransport(self._generation + 1, ready.agent, ready.address)
        with self._lock:
            if self.connection is not None:
                raise ProtocolError("this store has a mover; another comes only after that one is gone")
            self._generation = own.generation
            self.connection, self._known_peers, self._fenced = connection, OrderedDict(), False
            if self._slots is not None:
                self._send(Op.ATTACH, encode(self._slots))
            self.own, self.problem = own, ""
        self._ready.set()

    def gone(self, connection: Connection) -> bool:
        """Fail all READs of a mover whose process is gone: none of them writes any more."""
        with self._lock:
            if connection is not self.connection:
                return False
            self.connection, self.own, self._fenced = None, None, False
            self._ready.clear()
        self.unfinished.fail(PeerLost("the mover of this node died; the load continues without it"))
        return True

    def _forget_peers(self, connection: Connection, newcomer: str) -> None:
        """Make the mover forget earlier lives of the newcomer's node, and the peers not used for longest."""
        node, life = _node_and_life(newcomer)
        lives = {peer: _node_and_life(peer) for peer in self._known_peers}
        gone = [peer for peer, (its_node, its_life) in lives.items() if its_node == node and its_life != life]
        kept = [peer for peer in lives if peer not in gone]
        gone += kept[: max(0, len(kept) + 1 - _MAX_PEERS)]
        for peer in gone:
            del self._known_peers[peer]
            connection.send(Op.MOVER_FORGET_PEER, Flag.ONE_WAY, 0, encode(peer))

    def read(
        self,
        request: ReadRequest,
        peer: PeerDescription,
        on_done: OnDone,
        *,
        chunk_ends: IndexArray,
        timeout_s: float,
        may_wait: bool = True,
        generation: int = 0,
    ) -> int:
        """Let the mover read; return the READ's id. `on_done` is called for every chunk on the control thread.

        A READ into a stage must be done by the mover of that stage's `generation`: the next mover's stages have the
        same numbers, but other blocks in their slots.

        Raises:
            PeerLost: there is no mover now, or it is of another life; nothing was started.
            TransferTimeout: another thread sends to the mover, and this thread may not wait for it (`may_wait`);
                nothing was started.
        """
        if not self._lock.acquire(blocking=may_wait):
            raise TransferTimeout("wanted to send to the mover at once, but another thread does; wait for it")
        try:
            connection = self._of_life(generation)
            read_id = next(self.unfinished.ids)
            read = encode(MoverRead(read_id=read_id, request=request, chunk_ends=chunk_ends, timeout_s=timeout_s))
            if request.peer in self._known_peers:
                self._known_peers.move_to_end(request.peer)
            else:
                self._forget_peers(connection, request.peer)
                self._known_peers[request.peer] = None
                connection.send(Op.MOVER_ADD_PEER, Flag.ONE_WAY, 0, encode(AddPeer(request.peer, peer)))
            self.unfinished.reads[read_id] = (on_done, len(request.local_slots))
            if not connection.send(Op.MOVER_READ, Flag.ONE_WAY, 0, read):
                self.unfinished.forget(read_id)
                raise PeerLost(_DEAF)
        finally:
            self._lock.release()
        return read_id

    def _of_life(self, generation: int) -> Connection:
        """Return the connection of the mover of a life, 0 for the present one; under the lock."""
        connection = self.connection
        if connection is None or self._fenced or generation not in (0, self._generation):
            why = f"; no mover can begin: {self.problem}" if self.problem else "; try again"
            raise PeerLost(f"this node's mover is not running, or another one is by now{why}")
        return connection

    def expect_notifications(self, num_leases: int) -> None:
        """Tell the mover how many leases of remote readers are open; it polls only while there are any."""
        self._send(Op.MOVER_EXPECT, encode(num_leases))

    def expect_read(self, word: bytes) -> None:
        """Keep the mover awake for a moment, because a short READ comes soon.

        It also wakes the lane that `word` names, if `wake_by` has told it how.
        """
        self._send(Op.MOVER_SOON, word)

    def _send(self, op: Op, payload: bytes) -> None:
        connection = self.connection
        if connection is not None:
            connection.send(op, Flag.ONE_WAY, 0, payload)

    def wake_by(self, word: bytes, request: ReadRequest, generation: int = 0) -> None:
        """Tell the mover which READ to do for a `word` of `expect_read`: slots without blocks, of a known peer.

        Only a mover of this `generation` is told; 0 means any, see `read`.
        The first READ after a pause is slow to post. This READ is not reported and not counted.
        """
        with self._lock:
            if generation in (0, self._generation):
                self._send(Op.MOVER_WAKE, encode(MoverWake(word, request)))

    def ask(
        self,
        op: Op,
        value: Record | None,
        timeout_s: float,
        on_terminal: Callable[[], None] | None = lambda: None,
        generation: int = 0,
    ) -> bytes:
        """Let the mover do a task other than a READ, and return its answer, encoded.

        Args:
            op: the task.
            value: its arguments.
            timeout_s: for the answer.
            on_terminal: called when a late task can no longer write: it has ended, or its mover has. The fence kills
                the mover for it, as for an abandoned READ. None for a task that writes nothing.
            generation: the life of the mover; 0 for the present one.

        Raises:
            PeerLost: there is no mover now, or it is of another life, or it died during the task.
            TransferTimeout: it did not answer in time; the task may still write until `on_terminal` is called.
            KVStoreError: the error that the mover answered.
        """
        payload = encode(value)
        unfinished = self.unfinished
        with self._lock:
            connection = self._of_life(generation)
            request = next(unfinished.ids)
            answer = unfinished.expect_answer(request)
        try:
            if not connection.send(op, Flag.REQUEST, request, payload):
                raise PeerLost(_DEAF)
            found = unfinished.wait(request, answer, timeout_s, may_write=on_terminal is not None)
        finally:
            unfinished.forget(request)
        if found is None:
            if on_terminal is not None:
                self.when_terminal({request}, on_terminal)
            raise TransferTimeout(f"the mover did not answer {op.name} within {timeout_s} s")
        flag, answered = found
        if flag is Flag.ERROR:
            raise unpack_error(answered)
        return answered

    def stats(self, timeout_s: float) -> dict[str, Any]:
        """Return NIXL's counts. Raises as `ask` does, but nothing writes after a timeout."""
        return decode_counts(self.ask(Op.MOVER_STATS, None, timeout_s, None))

    @property
    def pid(self) -> int:
        """Process id of the mover, 0 when there is none."""
        connection = self.connection
        return connection.pid if connection is not None else 0

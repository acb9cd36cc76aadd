"""The node store's view of its mover: the peers it knows, its READs in flight, and its abandoned READs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable

from kvstore.blocks.codec import Record, decode_bytes, decode_counts, decode_id, encode
from kvstore.blocks.indexes import IndexArray
from kvstore.errors import KVStoreError, PeerLost, ProtocolError, TransferTimeout
from kvstore.mover.messages import (
    AddPeer,
    MoverDone,
    MoverRead,
    MoverWake,
    OwnTransport,
    Slots,
    decode_mover_done,
    decode_mover_ready,
)
from kvstore.mover.transport import PeerDescription, ReadRequest
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Flag, Message, Op, pack_error, unpack_error
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: Called on the control thread with each report on a READ; `error` is None if the READ has not failed.
OnDone = Callable[[MoverDone, KVStoreError | None], None]


#: A mover keeps NIXL's data of at most this many slabs of peers.
_MAX_PEERS = 1024


def _node_and_life(peer: str) -> tuple[str, list[str]]:
    """Return the node, and the epoch and mover's generation, in a peer's name: node/epoch/generation[/slabs]."""
    parts = peer.split("/")
    return parts[0], parts[1:3]


class MoverLink:
    """One mover at a time; a new mover is a new generation and knows none of the old one's peers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.connection: Connection | None = None
        self._own: OwnTransport | None = None
        self._generation = 0
        self._fenced = False
        # Separate from `_lock`: the control thread must not wait for a thread that sends to the mover under `_lock`.
        self._reads_lock = threading.Lock()
        #: The callback of each READ, and its number of blocks.
        self.reads: dict[int, tuple[OnDone, int]] = {}
        self.abandoned: dict[int, float] = {}
        self._waiting: list[tuple[set[int], Callable[[], object]]] = []
        #: Lives of peers that the mover knows, the last used last.
        self._known_peers: OrderedDict[str, None] = OrderedDict()
        self._ids = itertools.count(1)
        self._ready = threading.Event()
        self._stats_ready = threading.Event()
        self._stats: dict[str, int] = {}
        self._slots: Slots | None = None
        self.questions: dict[int, queue.SimpleQueue[tuple[Flag, bytes]]] = {}

    @property
    def own(self) -> OwnTransport | None:
        """The data that peers need to read through this mover; None while there is no mover."""
        return self._own

    @property
    def num_abandoned(self) -> int:
        """Number of abandoned READs, which may still write."""
        return len(self.abandoned)

    def abandoned_since_s(self) -> float | None:
        """Return when the oldest abandoned READ was given up, on the monotonic clock; None without one."""
        with self._reads_lock:
            return min(self.abandoned.values(), default=None)

    def lost_touch(self) -> bool:
        """Return whether the mover closed its connection while its process lives: then it can report nothing."""
        connection = self.connection
        return connection is not None and connection.closed

    def fence(self) -> bool:
        """Kill the mover: once it is gone, none of its READs can write. A second call has no further effect.

        Only on the control thread. From here on nothing is granted to peers and nothing is read. `gone` ends the
        quarantine; a new mover is a new generation.

        Returns:
            False if there is no separate process to kill; nothing changed.
        """
        connection = self.connection
        if connection is None or not connection.kill():
            return False
        with self._lock:
            self._own, self._fenced = None, True
            self._ready.clear()
        return True

    def when_terminal(self, read_ids: set[int], then: Callable[[], object]) -> None:
        """Call `then` when none of these READs can write any more; at once if that is true now."""
        with self._reads_lock:
            left = read_ids & self.abandoned.keys()
            if left:
                self._waiting.append((left, then))
        if not left:
            then()

    def _ended(self, read_ids: set[int]) -> None:
        """Note that abandoned READs can no longer write, and call the callbacks that waited for it."""
        with self._reads_lock:
            for read_id in read_ids:
                self.abandoned.pop(read_id, None)
            for left, _ in self._waiting:
                left -= read_ids
            ready = [then for left, then in self._waiting if not left]
            self._waiting = [(left, then) for left, then in self._waiting if left]
        for then in ready:
            then()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until a mover has announced itself; return whether it has."""
        return self._ready.wait(timeout_s)

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Tell this mover and every later one how the slab is divided."""
        with self._lock:
            self._slots = Slots(slot_bytes, num_slots)
            if self.connection is not None:
                self._tell_slots(self.connection)

    def _tell_slots(self, connection: Connection) -> None:
        if self._slots is not None:
            connection.send(Op.ATTACH, Flag.ONE_WAY, 0, encode(self._slots))

    def serve(self, connection: Connection, message: Message, notified: Callable[[bytes], None]) -> None:
        """Take one message of the mover, on the control thread.

        Args:
            connection: of a process that claims to be a mover.
            message: of that process.
            notified: called with the notifications that its peers sent.

        Raises:
            ProtocolError: the present mover of this store would not send this message; nothing changed.
        """
        op, payload = message.op, message.payload
        if op is Op.MOVER_READY:
            self._take(connection, payload)
        elif not self.is_present(connection):
            # Two movers may use the same READ ids, so reports of another process must not count.
            raise ProtocolError(f"{op.name}: wanted a word of this store's present mover, got one of another process")
        elif op is Op.MOVER_DONE:
            self._done(decode_mover_done(payload))
        elif op is Op.MOVER_TERMINAL:
            self._ended({decode_id(payload)})
        elif op is Op.MOVER_NOTIFICATIONS:
            notified(decode_bytes(payload))
        elif op in (Op.MOVER_STAGE, Op.MOVER_SPILL):
            with self._reads_lock:  # `ask` decides under the same lock that the answer is late.
                question = self.questions.pop(message.request, None)
                if question is not None:
                    question.put((message.flag, payload))
            if question is None:
                self._ended({message.request})
        elif op is Op.MOVER_STATS:
            self._stats = decode_counts(payload)
            self._stats_ready.set()
        else:
            raise ProtocolError(f"{op.name}: no mover says this")

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
            self._tell_slots(connection)
            self._own = own
        self._ready.set()

    def _done(self, done: MoverDone) -> None:
        error = unpack_error(done.error) if done.error else None
        with self._reads_lock:
            on_done, num_blocks = self.reads.get(done.read_id, (None, done.num_blocks))
            if on_done is None:
                is_right = True  # No caller waits for this READ any more.
            elif error is not None:
                # An error must be the last report on a READ: otherwise nothing here would note how it ends.
                is_right = done.last and done.num_blocks <= num_blocks
            elif done.last:
                is_right = done.terminal and done.num_blocks == num_blocks
            else:
                is_right = 0 < done.num_blocks <= num_blocks
            if not is_right:
                raise ProtocolError(
                    f"READ {done.read_id}: wanted a report on 1 to {num_blocks} blocks in place, the last on all, "
                    f"got one on {done.num_blocks}, last: {done.last}, terminal: {done.terminal}, "
                    f"failed: {error is not None}"
                )
            if done.last and on_done is not None:
                del self.reads[done.read_id]
                if not done.terminal:
                    self.abandoned[done.read_id] = clock.now_s()
            is_late = on_done is None and done.last and done.terminal and done.read_id in self.abandoned
        if on_done is not None:
            on_done(done, error)
        elif is_late:
            self._ended({done.read_id})

    def gone(self, connection: Connection) -> bool:
        """Fail all READs of a mover whose process is gone: none of them writes any more."""
        error = PeerLost("the mover of this node died; the load continues without it")
        with self._lock:
            if connection is not self.connection:
                return False
            self.connection, self._own, self._fenced = None, None, False
            self._ready.clear()
        with self._reads_lock:
            reads, self.reads = self.reads, {}
            questions, self.questions = self.questions, {}
            for question in questions.values():
                question.put((Flag.ERROR, pack_error(error)))
        with contextlib.ExitStack() as parts:
            # ExitStack runs them from the last to the first, and each one even if others raise. Abandoned READs must
            # be ended in any case: otherwise the fence would kill the next mover for them.
            parts.callback(self._abandoned_ended)
            for read_id, (on_done, _) in reads.items():
                failed = MoverDone(
                    read_id=read_id, num_blocks=0, last=True, terminal=True, seconds=0.0, num_descriptors=0,
                    error=pack_error(error),
                )  # fmt: skip
                parts.callback(on_done, failed, error)
        return True

    def _abandoned_ended(self) -> None:
        with self._reads_lock:
            abandoned = set(self.abandoned)
        self._ended(abandoned)

    def _forget_peers(self, connection: Connection, newcomer: str) -> None:
        """Make the mover forget earlier lives of the newcomer's node, and the peers not used for longest."""
        node, life = _node_and_life(newcomer)
        known = [(peer, *_node_and_life(peer)) for peer in self._known_peers]
        gone = [peer for peer, its_node, its_life in known if its_node == node and its_life != life]
        kept = [peer for peer, its_node, its_life in known if its_node != node or its_life == life]
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
            raise TransferTimeout("wanted to speak to the mover at once, but somebody else does; wait for it")
        try:
            connection = self._of_life(generation)
            read_id = next(self._ids)
            read = encode(MoverRead(read_id=read_id, request=request, chunk_ends=chunk_ends, timeout_s=timeout_s))
            if request.peer in self._known_peers:
                self._known_peers.move_to_end(request.peer)
            else:
                self._forget_peers(connection, request.peer)
                self._known_peers[request.peer] = None
                connection.send(Op.MOVER_ADD_PEER, Flag.ONE_WAY, 0, encode(AddPeer(request.peer, peer)))
            self.reads[read_id] = (on_done, len(request.local_slots))
            if not connection.send(Op.MOVER_READ, Flag.ONE_WAY, 0, read):
                self.reads.pop(read_id, None)
                raise PeerLost("this node's mover does not read its socket; it is being replaced")
        finally:
            self._lock.release()
        return read_id

    def _of_life(self, generation: int) -> Connection:
        """Return the connection of the mover of a life, 0 for the present one; under the lock."""
        connection = self.connection
        if connection is None or self._fenced or generation not in (0, self._generation):
            raise PeerLost("this node's mover is not running, or another one is by now; try again")
        return connection

    def abandon(self, read_id: int) -> bool:
        """Stop waiting for a READ that did not report in time; return True if it may still write."""
        with self._reads_lock:
            if self.reads.pop(read_id, None) is not None:
                self.abandoned[read_id] = clock.now_s()
            return read_id in self.abandoned

    def expect_notifications(self, num_leases: int) -> None:
        """Tell the mover how many leases of remote readers are open; it polls only while there are any."""
        connection = self.connection
        if connection is not None:
            connection.send(Op.MOVER_EXPECT, Flag.ONE_WAY, 0, encode(num_leases))

    def expect_read(self, word: bytes) -> None:
        """Keep the mover awake for a moment, because a short READ comes soon.

        Args:
            word: names the lane of the READ; the mover wakes that lane, if `wake_by` has told it how.
        """
        connection = self.connection
        if connection is not None:
            connection.send(Op.MOVER_SOON, Flag.ONE_WAY, 0, word)

    def wake_by(self, word: bytes, request: ReadRequest, generation: int = 0) -> None:
        """Tell the mover which READ to do for a `word` of `expect_read`: slots without blocks, of a known peer.

        Only a mover of this `generation` is told; 0 means any, see `read`.
        The first READ after a pause is slow to post. This READ is not reported and not counted.
        """
        with self._lock:
            connection = self.connection
            if connection is not None and generation in (0, self._generation):
                connection.send(Op.MOVER_WAKE, Flag.ONE_WAY, 0, encode(MoverWake(word, request)))

    def ask(
        self,
        op: Op,
        value: Record,
        timeout_s: float,
        on_terminal: Callable[[], None] = lambda: None,
        generation: int = 0,
    ) -> bytes:
        """Let the mover do a task other than a READ, and return its answer, encoded.

        Args:
            op: the task.
            value: its arguments.
            timeout_s: for the answer.
            on_terminal: called when a late task can no longer write: it has ended, or its mover has. The fence kills
                the mover for it, as for an abandoned READ.
            generation: the life of the mover; 0 for the present one.

        Raises:
            PeerLost: there is no mover now, or it is of another life, or it died during the task.
            TransferTimeout: it did not answer in time; the task may still write until `on_terminal` is called.
            KVStoreError: the error that the mover answered.
        """
        request, answer, payload = next(self._ids), queue.SimpleQueue[tuple[Flag, bytes]](), encode(value)
        with self._lock:
            connection = self._of_life(generation)
            with self._reads_lock:
                self.questions[request] = answer
        try:
            if not connection.send(op, Flag.REQUEST, request, payload):
                raise PeerLost("this node's mover does not read its socket; it is being replaced")
            with contextlib.suppress(queue.Empty):
                return self._answered(*answer.get(timeout=timeout_s))
            with self._reads_lock:
                if is_late := self.questions.pop(request, None) is not None:
                    self.abandoned[request] = clock.now_s()
            if is_late:
                self.when_terminal({request}, on_terminal)
                raise TransferTimeout(f"the mover did not answer {op.name} within {timeout_s} s")
            return self._answered(*answer.get_nowait())  # It came at the last moment.
        finally:
            with self._reads_lock:
                self.questions.pop(request, None)

    @staticmethod
    def _answered(flag: Flag, payload: bytes) -> bytes:
        if flag is Flag.ERROR:
            raise unpack_error(payload)
        return payload

    def stats(self, timeout_s: float) -> dict[str, int]:
        """Return NIXL's counts.

        Raises:
            PeerLost: there is no mover now.
            TransferTimeout: it does not answer.
        """
        connection = self.connection
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
        connection = self.connection
        return connection.pid if connection is not None else 0

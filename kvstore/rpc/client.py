"""One side of a control connection that asks and waits: workers to their node store, stores to peers."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from kvstore.errors import NotAsked, PeerLost, StoreBusy, TransferTimeout
from kvstore.rpc.framing import (
    ERROR,
    FRAGMENT_BYTES,
    PROGRESS,
    RECEIVE_BYTES,
    REQUEST,
    Decoder,
    Flag,
    Message,
    Op,
    encode_short,
    packets_of,
    short_reply,
    unpack_error,
)
from kvstore.runtime import clock
from kvstore.runtime.forks import check_process, this_process
from kvstore.runtime.turns import Turn, Turns

#: Of its time a question that waited for others needs so much for its answer, or it is not asked.
_LEAST_S = 1e-3


class ControlClient:
    """A connection that carries one question at a time, safe to share between threads.

    A call that times out or meets a dead server closes the connection: a late answer can then never be
    taken for the answer to another question. So does a call that is interrupted, as by Ctrl-C; `unheard` says of which
    question on the store has to take back what it gave.

    An interrupt may come behind any call of a function, also behind the one that takes a lock. So no question holds a
    lock: it has a turn, which it can tell from the turns of others, and which it gives up whatever ends it.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        self.hello: dict[str, Any] = {}
        self.num_calls = 0
        self._sock = sock
        self._turns = Turns()
        self._decoder = Decoder()
        # Filled again and again: a new buffer for each answer would come from the kernel, page by page.
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._backlog: list[Message] = []
        self._request = 0
        self._timeout_s = -1.0  # Another one than any that is asked for, 0 included: the socket's is not known here.
        self._pid = this_process()
        #: The first question of which the whole answer was not taken; 0 while there is none.
        self.unheard = 0
        self._stream = sock.family != socket.AF_UNIX
        self.closed = False

    def call(
        self,
        op: Op,
        payload: bytes = b"",
        *,
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
        awake_s: float = 0.0,
        progress: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Ask and return the payload of the answer.

        Args:
            op: what is asked.
            payload: of the question.
            timeout_s: for the answer, the wait for the questions of other threads included.
            meanwhile: called while the answer is on its way, with the connection taken. What it raises closes the
                connection, for the answer stays unread.
            awake_s: for so long the answer is then waited for without sleeping, by who knows that it comes soon.
            progress: called when there is word that the answer will be there soon; must not raise.

        Raises:
            KVStoreError: what the other side raised, of the same class.
            PeerLost: the connection broke; it is closed.
            NotAsked: it was closed before this question.
            TransferTimeout: no answer in time; the connection is closed. Where the questions of others took all of it
                nothing was asked, and the connection goes on.
            StoreBusy: this thread is within another question, as in the handler of a signal; nothing was asked.
            ForkedClient: this is a child of the process that made it.
        """
        check_process(self._pid)
        turn, turns, asked = [threading.get_ident()], self._turns, 0
        try:
            with turns.lock:
                if turns.now is None and turns.first is None:
                    turns.now = turn
            if turns.now is not turn:
                timeout_s = self._wait_for_others(turn, op, timeout_s)
            if self.closed:
                raise NotAsked(f"{self.name}: the connection was closed before {op.name} could be asked")
            self.num_calls += 1
            asked = self._request + 1
            message = self._ask_and_wait(op, payload, timeout_s, meanwhile, awake_s, progress)
            if isinstance(message, bytes):
                answer, is_error = message, False
            else:
                answer, is_error = message.payload, message.flag is ERROR
            # From here on one function is called at most. An interrupt behind that comes before another thread can
            # ask, so that the answer, which nobody has, can still be given back.
            turns.now = None
            if (first := turns.first) is not None:
                first.put(None)
            if self.closed:
                self._let_go()
            if not is_error:
                return answer
        except BaseException:
            # Whatever that is, a signal's too: the next question would meet this one's answer.
            if asked and (turns.now is turn or self._request == asked):
                self.closed = True
                self.unheard = self.unheard or asked
            if turns.now is turn:
                turns.now = None
            self._end_turn(turn)
            raise
        raise unpack_error(answer)

    def _wait_for_others(self, turn: Turn, op: Op, timeout_s: float) -> float:
        """Wait for a turn while other threads have theirs; returns what is left of a time."""
        until_s = clock.now_s() + timeout_s
        # A question with no time left for its answer would only close the connection for those that wait behind it.
        if not self._turns.wait(turn, timeout_s, self._check_turn) or (left_s := until_s - clock.now_s()) < _LEAST_S:
            raise TransferTimeout(f"{self.name}: others' questions took all the time of {op.name}; it was not asked")
        return left_s

    def _check_turn(self, now: Turn) -> None:
        """Refuse to wait for a turn that does not end, or of which nothing is to be had."""
        if self.closed:
            raise NotAsked(f"{self.name}: the connection was closed meanwhile")
        if now[0] == threading.get_ident():
            raise StoreBusy(
                f"{self.name}: wanted one question at a time, got one from within another one of this thread; ask "
                "behind that, and not in the handler of a signal or in a finalizer"
            )

    def _take_turn(self, turn: Turn) -> None:
        if not self._turns.take(turn):
            self._turns.wait(turn, math.inf, self._check_turn)

    def _end_turn(self, turn: Turn) -> None:
        """Give a turn up, if it was taken, and close a connection that was closed meanwhile."""
        self._turns.end(turn)
        if self.closed:
            self.close()

    def _give_up(self, turn: Turn) -> None:
        """End a turn in which something else came than was meant to: the connection is of no use any more."""
        if self._turns.now is turn:
            self.closed = True
        self._end_turn(turn)

    def _ask_and_wait(
        self,
        op: Op,
        payload: bytes,
        timeout_s: float,
        meanwhile: Callable[[], None] | None,
        awake_s: float,
        progress: Callable[[], None],
    ) -> Message | bytes:
        """Return the answer, or the payload of a short one."""
        request = self._send(op, REQUEST, payload)
        if meanwhile is not None:
            meanwhile()
        asked_s = clock.now_s()
        data = self._wait(timeout_s, awake_s)
        if (answer := self._short(data, request)) is not None:
            self.unheard = 0
            return answer
        message = self._receive(request, asked_s + timeout_s - clock.now_s(), data)
        while message.flag is PROGRESS:
            if (left_s := asked_s + timeout_s - clock.now_s()) <= 0:
                raise TransferTimeout(f"{self.name}: no answer in time, but only word that it comes soon")
            progress()
            message = self._receive(request, left_s)
        self.unheard = 0
        return message

    def call_stream(self, op: Op, payload: bytes, *, timeout_s: float) -> Answers:
        """Ask once and return what yields (is last, payload) for each piece of the answer, in order.

        The connection is taken until that is closed, or has yielded the last piece.

        Args:
            op: what is asked.
            payload: of the question.
            timeout_s: bounds the wait for each piece.

        Raises:
            PeerLost: the connection broke; it is closed.
        """
        check_process(self._pid)
        turn = [0]
        try:
            self._take_turn(turn)
            self.num_calls += 1
            return Answers(self, turn, self._send(op, REQUEST, payload), timeout_s)
        except BaseException:
            self._give_up(turn)
            raise

    def ask(self, op: Op, payload: bytes, progress: Callable[[], None] = lambda: None) -> Question:
        """Ask, and leave it to the caller when to look for the answer.

        The connection is taken until what is returned is closed.

        Args:
            op: what is asked.
            payload: of the question.
            progress: called by who looks for the answer when there is word that it will be there soon.

        Raises:
            PeerLost: the connection broke; it is closed.
        """
        check_process(self._pid)
        turn = [0]
        try:
            self._take_turn(turn)
            self.num_calls += 1
            return Question(self, turn, self._send(op, REQUEST, payload), progress)
        except BaseException:
            self._give_up(turn)
            raise

    def send(self, op: Op, payload: bytes = b"") -> None:
        """Say something that has no answer."""
        check_process(self._pid)
        turn = [threading.get_ident()]
        try:
            self._take_turn(turn)
            self._send(op, Flag.ONE_WAY, payload)
            self._end_turn(turn)
        except BaseException:  # Part of it may be out.
            self._give_up(turn)
            raise

    def send_if_free(self, op: Op) -> bool:
        """Say something that has no answer, if no question is under way, one of this thread included; whether it was.

        Raises:
            PeerLost: the connection broke; it is closed.
        """
        turn = [threading.get_ident()]
        try:
            if self.closed or not self._turns.take(turn):
                return False
            self._send(op, Flag.ONE_WAY, b"")
            self._end_turn(turn)
        except BaseException:  # Part of it may be out.
            self._give_up(turn)
            raise
        return True

    def is_quiet(self) -> bool:
        """Whether this connection is open and nothing came on it; False while a call is under way."""
        turn = [threading.get_ident()]
        try:
            if not self.closed and self._turns.take(turn):
                self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            if self._turns.now is turn:
                self._turns.now = None  # At once: an interrupt may come where `_end_turn` begins.
            self._end_turn(turn)
        return False

    @property
    def next_question(self) -> int:
        """The number of the question that is asked next."""
        return self._request + 1

    def has_ended(self) -> bool:
        """Whether this connection is closed, or the other side is gone as far as the kernel knows; from any thread."""
        look = select.poll()
        try:
            look.register(self._sock.fileno(), select.POLLRDHUP)
        except (OSError, ValueError):
            return True
        return self.closed or bool(look.poll(0))

    def fileno(self) -> int:
        """Return the descriptor, which can be read when something came or the other side ended."""
        return self._sock.fileno()

    def duplicate(self) -> int:
        """Return a descriptor of the connection that is the caller's, to watch for something to read.

        Raises:
            OSError: the connection is closed.
        """
        turn = [threading.get_ident()]
        try:
            self._take_turn(turn)
            return os.dup(self._sock.fileno())
        finally:
            if self._turns.now is turn:
                self._turns.now = None  # At once: an interrupt may come where `_end_turn` begins.
            self._end_turn(turn)

    def is_to_this_host(self) -> bool:
        """Whether the other side is a process of this machine, as far as its address says."""
        return self._sock.family == socket.AF_UNIX or self._sock.getsockname()[0] == self._sock.getpeername()[0]

    def detach(self) -> socket.socket:
        """Hand the socket to the caller, without timeouts; this object must not be used afterwards."""
        self.closed = True
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
        return self._sock

    def close(self) -> None:
        """Close the connection from any thread: a call under way ends with PeerLost; may be called again."""
        self.closed = True
        if this_process() != self._pid:
            self._sock.close()  # A copy of the descriptor: the connection goes on for the process that made it.
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._let_go()

    def _let_go(self) -> None:
        # Not under a call: were the descriptor's number given to another file meanwhile, the call would speak
        # to a stranger. The end of the call comes here too.
        turn = [threading.get_ident()]
        try:
            with self._turns.lock:
                if self._turns.now is None:  # Also before threads that wait, which then see that it is closed.
                    self._turns.now = turn
            if self._turns.now is turn:
                self._sock.close()
        finally:
            if self._turns.now is turn:
                self._turns.now = None

    def _send(self, op: Op, flag: Flag, payload: bytes) -> int:
        self._request += 1
        if flag is REQUEST:
            self.unheard = self.unheard or self._request
        try:
            if len(payload) <= FRAGMENT_BYTES:
                self._sock.sendall(encode_short(op, flag, self._request, payload))
            else:
                for packet in packets_of(Message(op, flag, self._request, payload)):
                    self._sock.sendall(packet)
        except OSError as error:
            self.close()
            raise PeerLost(f"{self.name}: connection lost while sending {op.name}: {error}") from error
        return self._request

    def _receive(
        self, request: int, timeout_s: float, data: memoryview | None = None, *, awake_s: float = 0.0
    ) -> Message:
        """Return the next message of an answer; `data` came already."""
        deadline_s = clock.now_s() + timeout_s
        while (message := self._take(request, data)) is None:
            data = self._wait(deadline_s - clock.now_s(), awake_s)
        return message

    def _receive_soon(self, request: int, wait_s: float, awake_s: float) -> Message | None:
        """Return the next message of an answer if it comes soon: without sleeping for `awake_s`, then for `wait_s`."""
        until_s = clock.now_s() + awake_s if awake_s > 0 else 0.0
        while True:
            is_awake = bool(until_s) and clock.now_s() < until_s
            data = self._read(None if is_awake else wait_s)
            if data is None and not is_awake:
                return None
            if data is not None and (message := self._take(request, data)) is not None:
                return message

    def _short(self, data: memoryview, request: int) -> bytes | None:
        """Return the payload of what came if that is the whole answer and no more, as it nearly always is."""
        return short_reply(data, request) if self._decoder.is_between and not self._backlog else None

    def _take(self, request: int, data: memoryview | None) -> Message | None:
        """Return the next message of an answer out of what came, `data` last."""
        if data is not None:
            self._backlog += self._decoder.stream(data) if self._stream else self._decoder.packets(data)
        for i, message in enumerate(self._backlog):
            if message.request == request:
                return self._backlog.pop(i)
        return None

    def _wait(self, timeout_s: float, awake_s: float = 0.0) -> memoryview:
        """Return what comes next, until the next wait; for `awake_s` it is asked for without sleeping."""
        awake_s = min(awake_s, timeout_s)
        until_s = clock.now_s() + awake_s if awake_s > 0 else 0.0
        while until_s and clock.now_s() < until_s:
            if (data := self._read(None)) is not None:
                return data
        data = self._read(timeout_s - awake_s)
        if data is None:
            self.close()
            raise TransferTimeout(f"{self.name}: no answer in time; the connection was closed")
        return data

    def _read(self, timeout_s: float | None) -> memoryview | None:
        """Return what comes within a time, or is here if that is None; nothing if nothing does."""
        try:
            if timeout_s is not None and not timeout_s <= self._timeout_s <= 1.2 * timeout_s:
                self._set_timeout(timeout_s)
            flags = socket.MSG_DONTWAIT if timeout_s is None else 0
            data = self._received[: self._sock.recv_into(self._received, 0, flags)]
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            self.close()
            raise PeerLost(f"{self.name}: connection lost: {error}") from error
        if not data:
            self.close()
            raise PeerLost(f"{self.name}: closed the connection; is the node store still running?")
        return data

    def _set_timeout(self, left_s: float) -> None:
        # A kernel-side receive timeout saves a poll() per call against settimeout(). It is set a little longer
        # than wanted, so that a run of calls with one timeout sets it once.
        self._timeout_s = 1.1 * max(left_s, 1e-3)
        value = struct.pack("ll", int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)


class Question:
    """A question whose answer is taken when it is there; has to be closed, by who looks for the answer.

    One that is closed before its answer closes the connection, on which that would stay unread.
    """

    def __init__(self, client: ControlClient, turn: Turn, request: int, progress: Callable[[], None]) -> None:
        self._client, self._turn, self._request, self._progress = client, turn, request, progress
        self._is_answered = False

    def fileno(self) -> int:
        """Return the descriptor that can be read when something came; it is open until this is closed."""
        return self._client.fileno()

    def take(self, wait_s: float = 0.0) -> bytes | None:
        """Return the answer's payload; None while it is not all there.

        Args:
            wait_s: for so long the calling thread waits for more of it.

        Raises:
            KVStoreError: what the other side raised, of the same class.
            PeerLost: the connection broke.
        """
        client = self._client
        if (data := client._read(wait_s or None)) is None:
            return None
        if (answer := client._short(data, self._request)) is not None:
            self._is_answered, client.unheard = True, 0
            return answer
        message = client._take(self._request, data)
        while message is not None and message.flag is PROGRESS:
            self._progress()
            message = client._take(self._request, None)
        if message is None:
            return None
        self._is_answered, client.unheard = True, 0
        if message.flag is ERROR:
            raise unpack_error(message.payload)
        return message.payload

    def close(self) -> None:
        """Let the connection go; once."""
        if not self._is_answered:
            self._client.close()
        self._client._end_turn(self._turn)


class Answers:
    """The pieces of an answer, of which each is waited for when it is asked for; has to be closed.

    One that is closed before its last piece closes the connection, on which the rest would stay unread.
    """

    def __init__(self, client: ControlClient, turn: Turn, request: int, timeout_s: float) -> None:
        self._client, self._turn, self._request, self._timeout_s = client, turn, request, timeout_s
        self._finished = self._closed = False
        #: When the next piece is late.
        self.until_s = clock.now_s() + timeout_s
        #: For so long each next piece is asked for without sleeping; set by a reader that knows that it comes soon.
        self.awake_s = 0.0

    def __iter__(self) -> Answers:
        return self

    def __next__(self) -> tuple[bool, bytes]:
        """Return the next piece.

        Raises:
            KVStoreError: what the other side raised, of the same class; nothing follows.
            PeerLost, TransferTimeout: as for `ControlClient.call`.
        """
        if self._finished or self._closed:
            self.close()
            raise StopIteration
        try:
            message = self._client._receive(self._request, self._timeout_s, awake_s=self.awake_s)
        except BaseException:
            self.close()
            raise
        return self._piece(message)

    @property
    def is_finished(self) -> bool:
        """Whether the last piece was taken."""
        return self._finished

    def fileno(self) -> int:
        """Return the descriptor that can be read when something came; it is open until this is closed."""
        return self._client.fileno()

    def take(self, wait_s: float) -> tuple[bool, bytes] | None:
        """Return the next piece; None when it does not come within `wait_s`, which closes nothing.

        Raises:
            KVStoreError: what the other side raised, of the same class; nothing follows.
            PeerLost: the connection broke.
        """
        client = self._client
        try:
            message = client._take(self._request, None)
            if message is None:
                message = client._receive_soon(self._request, wait_s, self.awake_s)
        except BaseException:
            self.close()
            raise
        return None if message is None else self._piece(message)

    def _piece(self, message: Message) -> tuple[bool, bytes]:
        self._finished = message.flag in (Flag.REPLY, Flag.ERROR)
        if self._finished:
            self._client.unheard = 0
        self.until_s = clock.now_s() + self._timeout_s
        if message.flag is Flag.ERROR:
            self.close()
            raise unpack_error(message.payload)
        return self._finished, message.payload

    def close(self) -> None:
        """Let the connection go; may be called again."""
        if self._closed:
            return
        if not self._finished:
            self._client.close()
        self._client._end_turn(self._turn)
        self._closed = True

"""Ask over a control connection and wait: workers ask their node store, stores ask peers."""

from __future__ import annotations

import math
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from kvstore.errors import NotAsked, StoreBusy, TransferTimeout
from kvstore.rpc.channel import Channel, set_timeout
from kvstore.rpc.exchange import Exchange, Question
from kvstore.rpc.framing import ERROR, PROGRESS, REQUEST, Flag, Message, Op, unpack_error
from kvstore.runtime import clock
from kvstore.runtime.forks import check_process, this_process
from kvstore.runtime.turns import Turn, Turns

T = TypeVar("T")

#: A question that waited for its turn is sent only if at least this much of its time is left.
_LEAST_S = 1e-3


class ControlClient:
    """A connection that carries one question at a time, safe to share between threads.

    A call that times out or meets a dead server closes the connection, so that a late answer is never taken for the
    answer to another question. An interrupted call, as by Ctrl-C, closes it, too. The store must then take back all
    that it gave from question `unheard` on.

    An interrupt may come after any function call, even the one that takes a lock. So a question holds no lock. It has
    a turn, which it can distinguish from the turns of others, and gives it up however it ends.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        self.hello: dict[str, Any] = {}
        self.num_calls = 0
        self.channel, self.turns, self._pid = Channel(sock, name), Turns(), this_process()

    @property
    def closed(self) -> bool:
        """Whether this connection can send no more questions."""
        return self.channel.closed

    @property
    def unheard(self) -> int:
        """The first question whose whole answer was not taken; 0 while there is none."""
        return self.channel.unheard

    @property
    def next_question(self) -> int:
        """The number of the next question."""
        return self.channel.request + 1

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
            op: the kind of question.
            payload: of the question.
            timeout_s: for the answer, including the wait for the questions of other threads.
            meanwhile: called while the answer is on its way, with the turn held. If it raises, the connection is
                closed, because the answer stays unread.
            awake_s: wait this long without sleeping; for a caller that expects the answer soon.
            progress: called on a message that the answer comes soon; must not raise.

        Raises:
            KVStoreError: the error that the other side raised, of the same class.
            PeerLost: the connection broke; it is closed.
            NotAsked: the connection was closed before this question.
            TransferTimeout: no answer in time; the connection is closed. But if the questions of others took all the
                time, nothing was asked, and the connection stays open.
            StoreBusy: this thread is inside another question, as in a signal handler; nothing was asked.
            ForkedClient: this is a child of the process that made it.
        """
        check_process(self._pid)
        turn, turns, channel, asked = [threading.get_ident()], self.turns, self.channel, 0
        try:
            with turns.lock:
                if turns.now is None and turns.first is None:
                    turns.now = turn
            if turns.now is not turn:
                timeout_s = self._wait_for_others(turn, op, timeout_s)
            if channel.closed:
                raise NotAsked(f"{self.name}: the connection was closed before {op.name} could be asked")
            self.num_calls += 1
            asked = channel.request + 1
            message = self._ask_and_wait(op, payload, timeout_s, meanwhile, awake_s, progress)
            if isinstance(message, bytes):
                answer, is_error = message, False
            else:
                answer, is_error = message.payload, message.flag is ERROR
            # At most one function is called from here on. An interrupt after it comes before another thread can ask,
            # so the store can still take back an answer that no caller received.
            turns.now = None
            if (first := turns.first) is not None:
                first.put(None)
            if channel.closed:
                self._let_go()
            if not is_error:
                return answer
        except BaseException:
            # After any error, also from a signal handler, the next question could read this one's answer.
            if asked and (turns.now is turn or channel.request == asked):
                channel.closed = True
                channel.unheard = channel.unheard or asked
            if turns.now is turn:
                turns.now = None
            self._end_turn(turn)
            raise
        raise unpack_error(answer)

    def _wait_for_others(self, turn: Turn, op: Op, timeout_s: float) -> float:
        """Wait for a turn while other threads have theirs; return how much of the time is left."""
        until_s = clock.now_s() + timeout_s
        # A question with no time left for its answer would only close the connection for the next waiting threads.
        if not self.turns.wait(turn, timeout_s, self.check_turn) or (left_s := until_s - clock.now_s()) < _LEAST_S:
            raise TransferTimeout(f"{self.name}: others' questions took all the time of {op.name}; it was not asked")
        return left_s

    def check_turn(self, now: Turn) -> None:
        """Refuse to wait if the current turn cannot end, or the connection is closed."""
        if self.channel.closed:
            raise NotAsked(f"{self.name}: the connection was closed meanwhile")
        if now[0] == threading.get_ident():
            raise StoreBusy(
                f"{self.name}: wanted one question at a time, got one from within another one of this thread; ask "
                "behind that, and not in the handler of a signal or in a finalizer"
            )

    def _take_turn(self, turn: Turn) -> None:
        if not self.turns.take(turn):
            self.turns.wait(turn, math.inf, self.check_turn)

    def _end_turn(self, turn: Turn) -> None:
        """Give a turn up, if it was taken; then finish closing a connection that is marked closed."""
        self.turns.end(turn)
        if self.channel.closed:
            self.close()

    def _give_up(self, turn: Turn) -> None:
        """End a turn after a failure in it: the connection cannot be used any more."""
        if self.turns.now is turn:
            self.channel.closed = True
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
        channel = self.channel
        request = channel.send(op, REQUEST, payload)
        if meanwhile is not None:
            meanwhile()
        asked_s = clock.now_s()
        data = channel.wait(timeout_s, awake_s)
        if (answer := channel.short(data, request)) is not None:
            channel.unheard = 0
            return answer
        message = channel.receive(request, asked_s + timeout_s - clock.now_s(), data)
        while message.flag is PROGRESS:
            if (left_s := asked_s + timeout_s - clock.now_s()) <= 0:
                raise TransferTimeout(f"{self.name}: no answer in time, only messages that it comes soon")
            progress()
            message = channel.receive(request, left_s)
        channel.unheard = 0
        return message

    def call_stream(self, op: Op, payload: bytes, *, timeout_s: float) -> Exchange:
        """Ask once; return an iterator of (is last, payload) over the pieces of the answer, in order.

        The iterator holds the connection's turn until it is closed or has ended after the last piece. `timeout_s`
        bounds the wait for each piece.

        Raises:
            PeerLost: the connection broke; it is closed.
        """
        return self._begin(op, payload, timeout_s, lambda exchange: exchange)

    def ask(self, op: Op, payload: bytes, progress: Callable[[], None] = lambda: None) -> Question:
        """Ask, and return a `Question` with which the caller looks for the answer later.

        It holds the connection's turn until it is closed. Its `take` calls `progress` on a message that the answer
        comes soon.

        Raises:
            PeerLost: the connection broke; it is closed.
        """
        return self._begin(op, payload, math.inf, lambda exchange: Question(exchange, progress))

    def _begin(self, op: Op, payload: bytes, timeout_s: float, wrap: Callable[[Exchange], T]) -> T:
        """Ask with a turn that any thread may end; `wrap` runs where an interrupt still ends the turn."""
        check_process(self._pid)
        turn = [0]
        try:
            self._take_turn(turn)
            self.num_calls += 1
            channel = self.channel
            return wrap(Exchange(channel, turn, self._end_turn, channel.send(op, REQUEST, payload), timeout_s))
        except BaseException:
            self._give_up(turn)
            raise

    def send(self, op: Op, payload: bytes = b"") -> None:
        """Send a message that has no answer."""
        check_process(self._pid)
        self._say(op, payload, waits=True)

    def send_if_free(self, op: Op) -> bool:
        """Send a message that has no answer, unless it would have to wait; return whether it was sent.

        It would wait while a question is under way, also one of this thread, and while the socket is full.

        Raises:
            PeerLost: the connection broke; it is closed.
        """
        return self._say(op, b"", waits=False)

    def _say(self, op: Op, payload: bytes, *, waits: bool) -> bool:
        turn = [threading.get_ident()]
        try:
            if waits:
                self._take_turn(turn)
            elif self.channel.closed or not self.turns.take(turn):
                return False
            elif not self.channel.has_room():  # Under the turn, so that no other thread closes or fills the socket.
                self._end_turn(turn)
                return False
            self.channel.send(op, Flag.ONE_WAY, payload)
            self._end_turn(turn)
        except BaseException:  # Part of it may have been sent.
            self._give_up(turn)
            raise
        return True

    def is_quiet(self) -> bool:
        """Return whether this connection is open and has no unread bytes; False while a call is under way."""
        turn = [threading.get_ident()]
        try:
            if not self.channel.closed and self.turns.take(turn):
                self.channel.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            if self.turns.now is turn:
                self.turns.now = None  # At once: an interrupt may come where `_end_turn` begins.
            self._end_turn(turn)
        return False

    def has_ended(self) -> bool:
        """Return whether this connection is closed or the kernel saw its other side end; from any thread."""
        look = select.poll()
        try:
            look.register(self.channel.sock.fileno(), select.POLLRDHUP)
        except (OSError, ValueError):
            return True
        return self.channel.closed or bool(look.poll(0))

    def fileno(self) -> int:
        """Return the descriptor; it becomes readable when bytes come or the other side ends."""
        return self.channel.sock.fileno()

    def duplicate(self) -> int:
        """Return a new descriptor of the connection, owned by the caller, to watch for bytes.

        Raises:
            OSError: the connection is closed.
        """
        turn = [threading.get_ident()]
        try:
            self._take_turn(turn)
            return os.dup(self.channel.sock.fileno())
        finally:
            if self.turns.now is turn:
                self.turns.now = None  # At once: an interrupt may come where `_end_turn` begins.
            self._end_turn(turn)

    def is_to_this_host(self) -> bool:
        """Return whether the other side's address is of this machine."""
        sock = self.channel.sock
        return sock.family == socket.AF_UNIX or sock.getsockname()[0] == sock.getpeername()[0]

    def detach(self) -> socket.socket:
        """Give the socket to the caller, without timeouts; this object must not be used afterwards."""
        channel = self.channel
        channel.closed = True
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            set_timeout(channel.sock, option, 0.0)
        return channel.sock

    def close(self) -> None:
        """Close the connection from any thread: a call under way ends with PeerLost; may be called again."""
        if self.channel.shut_down():
            self._let_go()

    def _let_go(self) -> None:
        # Not during a call: the descriptor's number could be given to another file, and the call would send to that.
        # The end of the call runs this, too.
        turn = [threading.get_ident()]
        try:
            with self.turns.lock:
                if self.turns.now is None:  # Even before waiting threads, which then see that it is closed.
                    self.turns.now = turn
            if self.turns.now is turn:
                self.channel.sock.close()
        finally:
            if self.turns.now is turn:
                self.turns.now = None

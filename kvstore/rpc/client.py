"""One side of a control connection that asks and waits: workers to their node store, stores to peers."""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from kvstore.errors import NotAsked, StoreBusy, TransferTimeout
from kvstore.rpc.channel import Channel
from kvstore.rpc.exchange import Exchange, Question
from kvstore.rpc.framing import ERROR, PROGRESS, REQUEST, Flag, Message, Op, unpack_error
from kvstore.runtime import clock
from kvstore.runtime.forks import check_process, this_process
from kvstore.runtime.turns import Turn, Turns

T = TypeVar("T")

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
        self._channel, self._turns, self._pid = Channel(sock, name), Turns(), this_process()

    @property
    def closed(self) -> bool:
        """Whether this connection asks nothing any more."""
        return self._channel.closed

    @property
    def unheard(self) -> int:
        """The first question of which the whole answer was not taken; 0 while there is none."""
        return self._channel.unheard

    @property
    def next_question(self) -> int:
        """The number of the question that is asked next."""
        return self._channel.request + 1

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
        turn, turns, channel, asked = [threading.get_ident()], self._turns, self._channel, 0
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
            # From here on one function is called at most. An interrupt behind that comes before another thread can
            # ask, so that the answer, which nobody has, can still be given back.
            turns.now = None
            if (first := turns.first) is not None:
                first.put(None)
            if channel.closed:
                self._let_go()
            if not is_error:
                return answer
        except BaseException:
            # Whatever that is, a signal's too: the next question would meet this one's answer.
            if asked and (turns.now is turn or channel.request == asked):
                channel.closed = True
                channel.unheard = channel.unheard or asked
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
        if self._channel.closed:
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
        if self._channel.closed:
            self.close()

    def _give_up(self, turn: Turn) -> None:
        """End a turn in which something else came than was meant to: the connection is of no use any more."""
        if self._turns.now is turn:
            self._channel.closed = True
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
        channel = self._channel
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
                raise TransferTimeout(f"{self.name}: no answer in time, but only word that it comes soon")
            progress()
            message = channel.receive(request, left_s)
        channel.unheard = 0
        return message

    def call_stream(self, op: Op, payload: bytes, *, timeout_s: float) -> Exchange:
        """Ask once and return what yields (is last, payload) for each piece of the answer, in order.

        The connection is taken until that is closed, or has yielded the last piece.

        Args:
            op: what is asked.
            payload: of the question.
            timeout_s: bounds the wait for each piece.

        Raises:
            PeerLost: the connection broke; it is closed.
        """
        return self._begin(op, payload, timeout_s, lambda exchange: exchange)

    def ask(self, op: Op, payload: bytes, progress: Callable[[], None] = lambda: None) -> Question:
        """Ask, and leave it to the caller when to look for the answer.

        The connection is taken until what is returned is closed.

        Args:
            op: what is asked.
            payload: of the question.
            progress: called by the caller's `take` when there is word that the answer will be there soon.

        Raises:
            PeerLost: the connection broke; it is closed.
        """
        return self._begin(op, payload, math.inf, lambda exchange: Question(exchange, progress))

    def _begin(self, op: Op, payload: bytes, timeout_s: float, wrap: Callable[[Exchange], T]) -> T:
        """Ask, with a turn that any thread may end; `wrap` makes what is returned while an interrupt still ends it."""
        check_process(self._pid)
        turn = [0]
        try:
            self._take_turn(turn)
            self.num_calls += 1
            channel = self._channel
            return wrap(Exchange(channel, turn, self._end_turn, channel.send(op, REQUEST, payload), timeout_s))
        except BaseException:
            self._give_up(turn)
            raise

    def send(self, op: Op, payload: bytes = b"") -> None:
        """Say something that has no answer."""
        check_process(self._pid)
        self._say(op, payload, waits=True)

    def send_if_free(self, op: Op) -> bool:
        """Say something that has no answer, unless that has to wait for a question, one of this thread included.

        Returns:
            Whether it was said: no question is under way, and the store has read of what was sent before.

        Raises:
            PeerLost: the connection broke; it is closed.
        """
        return self._say(op, b"", waits=False)

    def _say(self, op: Op, payload: bytes, *, waits: bool) -> bool:
        turn = [threading.get_ident()]
        try:
            if waits:
                self._take_turn(turn)
            elif self._channel.closed or not self._channel.has_room() or not self._turns.take(turn):
                return False
            self._channel.send(op, Flag.ONE_WAY, payload)
            self._end_turn(turn)
        except BaseException:  # Part of it may be out.
            self._give_up(turn)
            raise
        return True

    def is_quiet(self) -> bool:
        """Whether this connection is open and nothing came on it; False while a call is under way."""
        turn = [threading.get_ident()]
        try:
            if not self._channel.closed and self._turns.take(turn):
                self._channel.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            if self._turns.now is turn:
                self._turns.now = None  # At once: an interrupt may come where `_end_turn` begins.
            self._end_turn(turn)
        return False

    def has_ended(self) -> bool:
        """Whether this connection is closed, or the other side is gone as far as the kernel knows; from any thread."""
        look = select.poll()
        try:
            look.register(self._channel.sock.fileno(), select.POLLRDHUP)
        except (OSError, ValueError):
            return True
        return self._channel.closed or bool(look.poll(0))

    def fileno(self) -> int:
        """Return the descriptor, which can be read when something came or the other side ended."""
        return self._channel.sock.fileno()

    def duplicate(self) -> int:
        """Return a descriptor of the connection that is the caller's, to watch for something to read.

        Raises:
            OSError: the connection is closed.
        """
        turn = [threading.get_ident()]
        try:
            self._take_turn(turn)
            return os.dup(self._channel.sock.fileno())
        finally:
            if self._turns.now is turn:
                self._turns.now = None  # At once: an interrupt may come where `_end_turn` begins.
            self._end_turn(turn)

    def is_to_this_host(self) -> bool:
        """Whether the other side is a process of this machine, as far as its address says."""
        sock = self._channel.sock
        return sock.family == socket.AF_UNIX or sock.getsockname()[0] == sock.getpeername()[0]

    def detach(self) -> socket.socket:
        """Hand the socket to the caller, without timeouts; this object must not be used afterwards."""
        channel = self._channel
        channel.closed = True
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            channel.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
        return channel.sock

    def close(self) -> None:
        """Close the connection from any thread: a call under way ends with PeerLost; may be called again."""
        if self._channel.shut_down():
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
                self._channel.sock.close()
        finally:
            if self._turns.now is turn:
                self._turns.now = None

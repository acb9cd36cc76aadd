"""Represent one question whose answer the caller reads later, whole or in pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kvstore.errors import PeerLost
from kvstore.rpc.channel import Channel
from kvstore.rpc.framing import ERROR, PROGRESS, Flag, Message, Op, unpack_error
from kvstore.runtime import clock
from kvstore.runtime.turns import Turn

#: Whether this is the last piece of an answer, and its payload.
Piece = tuple[bool, bytes]


class Exchange:
    """A question, and an iterator over the pieces of its answer that waits for each. The caller must close it.

    Closing it before the last piece closes the connection, because the rest would stay unread.

    Args:
        channel: the question was sent on it.
        turn: of the connection, held until `close`, which calls `end_turn` with it.
        end_turn: also closes a connection that was shut down.
        request: the number of the question.
        timeout_s: bounds the wait for each piece.

    Attributes:
        is_finished: whether the last piece was taken.
        until_s: when the next piece is late.
        awake_s: poll for each piece this long without sleeping; set by a reader that expects it soon.
    """

    def __init__(
        self, channel: Channel, turn: Turn, end_turn: Callable[[Turn], None], request: int, timeout_s: float
    ) -> None:
        self.channel, self.request = channel, request
        self._turn, self._end_turn, self._timeout_s = turn, end_turn, timeout_s
        self.is_finished = self._closed = False
        self.until_s, self.awake_s = clock.now_s() + timeout_s, 0.0

    def __iter__(self) -> Exchange:
        return self

    def __next__(self) -> Piece:
        """Return the next piece. Raises as `take` does, and TransferTimeout as `ControlClient.call` does."""
        if self.is_finished or self._closed:
            self.close()
            raise StopIteration
        try:
            return self.hear(self.channel.receive(self.request, self._timeout_s, awake_s=self.awake_s))
        except BaseException:
            self.close()
            raise

    def take(self, wait_s: float) -> Piece | None:
        """Return the next piece; None, with nothing closed, when it does not come within `wait_s`.

        Raises:
            KVStoreError: the error that the other side raised, of the same class; nothing follows.
            PeerLost: the connection broke.
        """
        try:
            message = self.channel.take(self.request, None)
            if message is None:
                message = self.channel.receive_soon(self.request, wait_s, self.awake_s)
            return None if message is None else self.hear(message)
        except BaseException:
            self.close()
            raise

    def hear(self, message: Message) -> Piece:
        """Note that a piece was taken, and return it or raise its error. This closes nothing."""
        self.is_finished = message.flag is not PROGRESS
        if self.is_finished:
            self.channel.unheard = 0
        self.until_s = clock.now_s() + self._timeout_s
        if message.flag is ERROR:
            raise unpack_error(message.payload)
        return self.is_finished, message.payload

    def fileno(self) -> int:
        """Return the descriptor, readable when bytes came; it is open until this is closed."""
        return self.channel.sock.fileno()

    def close(self) -> None:
        """Give up the connection's turn; may be called again."""
        if self._closed:
            return
        if not self.is_finished:
            self.channel.shut_down()
        self._end_turn(self._turn)
        self._closed = True


class Question:
    """An exchange whose answer is taken as a whole. The caller must close it, also after `take` raised.

    Args:
        exchange: new; no piece was taken.
        progress: called by `take`, on its thread, on a message that the answer comes soon.

    Attributes:
        number: of the question on its connection.
    """

    def __init__(self, exchange: Exchange, progress: Callable[[], None]) -> None:
        self._exchange, self._progress = exchange, progress
        self.fileno, self.close = exchange.fileno, exchange.close
        self.number = exchange.request

    def say(self, op: Op, payload: bytes) -> None:
        """Send a message without an answer behind the question; not if that would wait, or the connection broke."""
        channel = self._exchange.channel
        if not channel.closed and channel.has_room():
            with contextlib.suppress(PeerLost):
                channel.send(op, Flag.ONE_WAY, payload)

    def take(self, wait_s: float = 0.0) -> bytes | None:
        """Return the answer's payload; None while it is not complete. Raises as `Exchange.take` does.

        It waits once, for at most `wait_s`: a peer that keeps sending cannot hold a thread that serves others, too.
        """
        exchange, channel = self._exchange, self._exchange.channel
        if (data := channel.read(wait_s or None)) is None:
            return None
        if (answer := channel.short(data, exchange.request)) is not None:
            exchange.is_finished, channel.unheard = True, 0
            return answer
        message = channel.take(exchange.request, data)
        while message is not None:
            is_last, payload = exchange.hear(message)
            if is_last:
                return payload
            self._progress()
            message = channel.take(exchange.request, None)
        return None

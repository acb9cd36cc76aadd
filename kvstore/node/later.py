"""Answers that a thread of the store makes, because they wait for other processes. Each question gets an answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.blocks.codec import encode
from kvstore.errors import KVStoreError, StoreBusy
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Flag, Message, Op, pack_error
from kvstore.rpc.messages import LoadReport, Progress
from kvstore.runtime.threads.store_threads import Blocking, StoreThreads

logger = logging.getLogger(__name__)

#: A question that waits: its connection, op and number. The message is not kept: it may be long.
Asked = tuple[Connection, Op, int]
#: Most questions that may wait for one shared answer.
_MAX_SHARED = 1024


def answer_all(asked: Sequence[Asked], work: Callable[[], object]) -> None:
    """Answer each question with the result or the error of `work`; log unexpected errors too."""
    try:
        flag, answer = Flag.REPLY, encode(work())
    except KVStoreError as error:
        flag, answer = Flag.ERROR, pack_error(error)
    except Exception as error:
        logger.exception("%s failed", asked[0][1].name)
        flag, answer = Flag.ERROR, pack_error(error)
    for connection, op, request in asked:
        connection.send(op, flag, request, answer)


def send_piece(
    connection: Connection, op: Op, request: int, piece: Progress, *, counted: Callable[[LoadReport], None]
) -> None:
    """Send one piece of the answer to a load or a fetch. The piece with the report is the last, and is counted."""
    if piece.report is not None:
        counted(piece.report)
    connection.send(op, Flag.PROGRESS if piece.report is None else Flag.REPLY, request, encode(piece))


def answer_later(
    threads: StoreThreads, kind: Blocking, connection: Connection, message: Message, work: Callable[[], object]
) -> None:
    """Run `work` on a thread, and answer with its result or its error.

    Raises:
        StoreBusy: too much work of this kind waits; nothing was begun.
    """
    asked = (connection, message.op, message.request)
    if not threads.submit(kind, partial(answer_all, [asked], work)):
        raise _busy(message.op)


class SharedAnswer:
    """One answer for all questions that came before `work` began. Many cost other work no more than one.

    Args:
        threads: of the store.
        kind: what `work` waits for.
        work: makes the answer, on a thread.
    """

    def __init__(self, threads: StoreThreads, kind: Blocking, work: Callable[[], object]) -> None:
        self._threads, self._kind, self._work = threads, kind, work
        self._lock = threading.Lock()
        self._asked: list[Asked] = []

    def ask(self, connection: Connection, message: Message) -> None:
        """Queue a question for the next answer; on the control thread.

        Raises:
            StoreBusy: too much waits; this question is dropped.
        """
        with self._lock:
            if len(self._asked) >= _MAX_SHARED:
                raise _busy(message.op)
            self._asked.append((connection, message.op, message.request))
            if len(self._asked) > 1:
                return
        if not self._threads.submit(self._kind, self._run):
            self._take()
            raise _busy(message.op)

    def _run(self) -> None:
        answer_all(self._take(), self._work)

    def _take(self) -> list[Asked]:
        with self._lock:
            asked, self._asked = self._asked, []
        return asked


def _busy(op: Op) -> StoreBusy:
    return StoreBusy(f"{op.name}: too many of these wait for an answer already; try again soon")

"""Answers that a thread of the store makes, because they wait for others: each question gets one in any case."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.blocks.codec import encode
from kvstore.errors import KVStoreError, StoreBusy
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Flag, Message, Op, pack_error
from kvstore.runtime.store_threads import Blocking, StoreThreads

logger = logging.getLogger(__name__)

#: A question that waits: over which connection, its op and number. Not its message, which may be long.
Asked = tuple[Connection, Op, int]
#: Questions that wait for one answer.
_MAX_SHARED = 1024


def answer_all(asked: Sequence[Asked], work: Callable[[], object]) -> None:
    """Answer each question with what `work` returns, or raises; an error that nobody expected is logged, too."""
    try:
        flag, answer = Flag.REPLY, encode(work())
    except KVStoreError as error:
        flag, answer = Flag.ERROR, pack_error(error)
    except Exception as error:
        logger.exception("%s failed", asked[0][1].name)
        flag, answer = Flag.ERROR, pack_error(error)
    for connection, op, request in asked:
        connection.send(op, flag, request, answer)


def answer_later(
    threads: StoreThreads, kind: Blocking, connection: Connection, message: Message, work: Callable[[], object]
) -> None:
    """Answer with what `work` returns, or raises, on a thread.

    Raises:
        StoreBusy: too much of that kind waits; nothing was begun.
    """
    asked = (connection, message.op, message.request)
    if not threads.submit(kind, partial(answer_all, [asked], work)):
        raise _busy(message.op)


class SharedAnswer:
    """One answer for all that asked before it was begun, so that many questions cost the others no more than one.

    Args:
        threads: of the store.
        kind: of what `work` waits for.
        work: makes the answer, on a thread.
    """

    def __init__(self, threads: StoreThreads, kind: Blocking, work: Callable[[], object]) -> None:
        self._threads, self._kind, self._work = threads, kind, work
        self._lock = threading.Lock()
        self._asked: list[Asked] = []

    def ask(self, connection: Connection, message: Message) -> None:
        """Have a question answered; on the control thread.

        Raises:
            StoreBusy: too much waits; this question is forgotten.
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

"""READs and tasks of the mover whose end is not known yet, and their callbacks."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable

from kvstore.errors import KVStoreError, ProtocolError
from kvstore.mover.messages import MoverDone
from kvstore.rpc.framing import Flag, Message, pack_error, unpack_error
from kvstore.runtime import clock

#: Called on the control thread with each report on a READ; `error` is None if the READ has not failed.
OnDone = Callable[[MoverDone, KVStoreError | None], None]

#: Flag and payload of an answer.
Answer = tuple[Flag, bytes]


class Unfinished:
    """READs and tasks of one store's movers, for any thread. No callback is called under its lock.

    Attributes:
        reads: the callback of each READ, and its number of blocks.
        questions: where the answer to each task goes.
        abandoned: when each READ or task was given up that may still write.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reads: dict[int, tuple[OnDone, int]] = {}
        self.questions: dict[int, queue.SimpleQueue[Answer]] = {}
        self.abandoned: dict[int, float] = {}
        self._waiting: list[tuple[set[int], Callable[[], object]]] = []
        #: Of READs and tasks.
        self.ids = itertools.count(1)

    def abandoned_since_s(self) -> float | None:
        """Return when the oldest abandoned READ was given up, on the monotonic clock; None without one."""
        with self._lock:
            return min(self.abandoned.values(), default=None)

    def abandon(self, read_id: int) -> bool:
        """Stop waiting for a READ that did not report in time; return True if it may still write."""
        with self._lock:
            if self.reads.pop(read_id, None) is not None:
                self.abandoned[read_id] = clock.now_s()
            return read_id in self.abandoned

    def when_terminal(self, read_ids: set[int], then: Callable[[], object]) -> None:
        """Call `then` when none of these READs can write any more; at once if that is true now."""
        with self._lock:
            left = read_ids & self.abandoned.keys()
            if is_waiting := bool(left):  # Under the lock: `end` empties the set, and then calls `then` itself.
                self._waiting.append((left, then))
        if not is_waiting:
            then()

    def end(self, read_ids: set[int]) -> None:
        """Note that abandoned READs can no longer write, and call the callbacks that waited for it."""
        with self._lock:
            for read_id in read_ids:
                self.abandoned.pop(read_id, None)
            for left, _ in self._waiting:
                left -= read_ids
            ready = [then for left, then in self._waiting if not left]
            self._waiting = [(left, then) for left, then in self._waiting if left]
        for then in ready:
            then()

    def report(self, done: MoverDone) -> None:
        """Take the mover's report on a READ.

        Raises:
            ProtocolError: a mover would not send this report; nothing changed.
        """
        error = unpack_error(done.error) if done.error else None
        with self._lock:
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
            self.end({done.read_id})

    def expect_answer(self, request: int) -> queue.SimpleQueue[Answer]:
        """Note a task; return the queue of its answer."""
        answer = queue.SimpleQueue[Answer]()
        with self._lock:
            self.questions[request] = answer
        return answer

    def answer(self, message: Message) -> None:
        """Take the answer to a task; the end of one that was given up."""
        with self._lock:  # `wait` decides under the same lock that the answer is late.
            question = self.questions.pop(message.request, None)
            if question is not None:
                question.put((message.flag, message.payload))
        if question is None:
            self.end({message.request})

    def wait(
        self, request: int, answer: queue.SimpleQueue[Answer], timeout_s: float, *, may_write: bool
    ) -> Answer | None:
        """Wait for the answer to a task; None, and abandoned if it may still write, when it does not come in time."""
        with contextlib.suppress(queue.Empty):
            return answer.get(timeout=timeout_s)
        with self._lock:
            if self.questions.pop(request, None) is not None:
                if may_write:
                    self.abandoned[request] = clock.now_s()
                return None
        return answer.get_nowait()  # It came at the last moment.

    def forget(self, number: int) -> None:
        """Drop a READ that was not sent, or a task that nothing waits for. Under the lock: `fail` goes through all."""
        with self._lock:
            self.reads.pop(number, None)
            self.questions.pop(number, None)

    def fail(self, error: KVStoreError) -> None:
        """End all, because the process of the mover is gone: nothing of it writes any more."""
        packed = pack_error(error)
        with self._lock:
            reads, self.reads = self.reads, {}
            questions, self.questions = self.questions, {}
            for question in questions.values():
                question.put((Flag.ERROR, packed))
        with contextlib.ExitStack() as parts:
            # ExitStack runs them from the last to the first, and each one even if others raise. Abandoned READs must
            # be ended in any case: otherwise the fence would kill the next mover for them.
            parts.callback(lambda: self.end(set(self.abandoned)))
            for read_id, (on_done, _) in reads.items():
                failed = MoverDone(
                    read_id=read_id, num_blocks=0, last=True, terminal=True, seconds=0.0, num_descriptors=0,
                    error=packed,
                )  # fmt: skip
                parts.callback(on_done, failed, error)

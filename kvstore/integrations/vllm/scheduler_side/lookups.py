"""Lookups of prompts in the store: surely absent ones at once, others on a thread; the scheduler never waits."""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from dataclasses import dataclass, field

from kvstore.blocks.hashing import BlockHashes
from kvstore.client.client import Client
from kvstore.client.results import Match
from kvstore.errors import KVStoreError, PeerLost, TransferTimeout
from kvstore.integrations.vllm.link import StoreLink
from kvstore.integrations.vllm.options import Options
from kvstore.integrations.vllm.scheduler_side.keys import PromptHashes
from kvstore.integrations.vllm.stats import Stats

logger = logging.getLogger(__name__)

#: How long the directory is not asked after it gave no answer: each question would delay others.
_BACK_OFF_S = 5.0
_CLOSE_S = 5.0
#: Wait before hashes that only saves need: after an answer the engine's thread begins a step, and would wait for the
#: interpreter while this thread hashes. A step takes longer. New questions delay them by at most the second value.
_LATE_S, _OVERDUE_S = 0.002, 0.05
#: The pause between two tries to clear a store that could not be asked.
CLEAR_PAUSE_S = 1.0
#: Enough for the thread to wake up and begin its call to the store.
_YIELD_S = 2e-5


@dataclass(eq=False)
class Question:
    """One request's question, and what is known of the answer so far."""

    prompt: PromptHashes
    hashes: BlockHashes | None  # of all its full blocks; if nothing is stored, perhaps made only after the answer
    is_lookup: bool  # whether the store is to be asked too
    needs_hashes: bool = False  # whether the answer is useless without the hashes
    asked_s: float = field(default_factory=lambda: time.monotonic())
    num_blocks: int = 0  # usable prefix; grows while other nodes are asked
    num_local: int = 0  # of it in this node's memory
    num_here: int = 0  # and with those behind them on this node's disk
    done: bool = False  # whether the answer is final
    is_given: bool = False  # whether vLLM got the final answer, or it came at once, without a call to the store

    def found(self, match: Match, num_blocks: int) -> None:
        """Note what the store has, of which `num_blocks` are usable."""
        self.num_local, self.num_here, self.num_blocks = match.num_local, match.num_here, num_blocks

    def hash_all(self) -> BlockHashes:
        """Return the hashes of all full blocks; makes them if needed."""
        if self.hashes is None:
            self.hashes = self.prompt.all()
        return self.hashes


class Lookups:
    """A thread that answers one question after the other, and clears the store when the engine could not.

    Args:
        link: to the store.
        options: the user's.
        stats: gets times and counts.
        answered: set after each answer.
        work: brings it questions, and events to be set once the store is cleared; None ends it.
    """

    def __init__(
        self,
        link: StoreLink,
        options: Options,
        stats: Stats,
        answered: threading.Event,
        work: queue.SimpleQueue[Question | threading.Event | None],
    ) -> None:
        self._link, self._stats, self._answered = link, stats, answered
        self._is_remote, self._wait_s = options.remote, options.lookup_wait_s
        self._prefill_tokens_per_s = options.prefill_tokens_per_s
        self._questions = work
        #: Answered questions without all hashes, and when to make these; used by the thread only.
        self.late: collections.deque[tuple[float, Question]] = collections.deque()
        #: Questions answered at once, to be hashed when `hash_rest` is called; used by the caller only.
        self._unhashed: list[Question] = []
        self._not_before_s = 0.0
        self._begun_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="raykv-lookups", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> None:
        """Answer a question at once if no store call is needed, else give it to the thread."""
        if self._is_surely_nothing(question):
            question.done = question.is_given = True
            if question.hashes is None:
                self._unhashed.append(question)
            return
        is_first = self._begun_s is None and self._questions.empty()
        self._questions.put(question)
        if is_first:
            time.sleep(_YIELD_S)  # Else the thread would wait for the interpreter until a step has nothing to do.

    @property
    def num_unhashed_tokens(self) -> int:
        """Tokens of the prompts that wait for `hash_rest`."""
        return sum(question.prompt.num_tokens for question in self._unhashed)

    def hash_rest(self) -> None:
        """Have the thread hash the prompts that were answered at once, for their saves. Returns at once."""
        unhashed, self._unhashed = self._unhashed, []
        for question in unhashed:
            self._questions.put(question)

    def _is_surely_nothing(self, question: Question) -> bool:
        """Whether it is known without a wait that nothing is stored for a question."""
        if question.needs_hashes:
            return False
        client = self._link.client()
        if client is None or not (question.is_lookup and question.prompt.num_blocks):
            return True
        if not question.prompt.is_quick:
            return False
        try:
            first = question.prompt.first() if question.hashes is None else question.hashes[:1]
            return client.is_surely_absent(first, remote=self._is_remote)
        except Exception:  # noqa: BLE001 - the thread meets this error too, and logs it
            return False

    def is_held_up(self) -> bool:
        """Whether the store takes too long for an answer; the questions behind it then need not wait for theirs."""
        begun_s = self._begun_s
        return begun_s is not None and time.monotonic() > begun_s + self._wait_s

    def close(self) -> None:
        """End the thread after the queued questions; waits up to 5 s for it. May be called again."""
        self._questions.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (question := self.next_question()) is not None:
            is_late = question.done
            try:
                if is_late:
                    question.hash_all()
                else:
                    self._answer(question)
            except Exception:
                # A request that cannot be hashed must not end the thread that answers for all others.
                logger.exception("a lookup failed; the prompt is computed")
                self._stats.count("num_lookup_errors")
            finally:
                self._begun_s = None
                question.done = True
                if not is_late:
                    self._answered.set()

    def next_question(self) -> Question | None:
        """Wait for a question; hashes that only saves need are made when no question came for a while."""
        while True:
            left_s = self.late[0][0] - time.monotonic() if self.late else None
            if left_s is not None and left_s <= -_OVERDUE_S:
                return self.late.popleft()[1]
            try:
                question = self._questions.get(timeout=None if left_s is None else max(0.0, left_s))
            except queue.Empty:
                return self.late.popleft()[1]
            if isinstance(question, threading.Event):
                self._clear(question)
                continue
            if question is None or not question.done:
                return question
            self.late.append((time.monotonic(), question))

    def _clear(self, cleared: threading.Event) -> None:
        """Try until the store is cleared, or need not be: it was, or later weights came. No question waits for it."""
        while not cleared.is_set():
            if self._link.clear():
                cleared.wait(CLEAR_PAUSE_S)
            else:
                logger.warning("the store is cleared; this engine loads and saves again")
                cleared.set()

    def _answer(self, question: Question) -> None:
        self._begun_s = time.monotonic()
        with self._stats.timed("lookup"):
            if question.is_lookup and question.prompt.num_blocks:
                self._look_up(question)
        if question.needs_hashes or question.prompt.is_made:
            question.hash_all()
        elif question.hashes is None:
            self.late.append((time.monotonic() + _LATE_S, question))  # Requests that wait for an answer come first.

    def _worth(self, client: Client, match: Match) -> Match:
        rate = self._prefill_tokens_per_s
        return match.worth_loading(client.space.shape, rate) if rate else match

    def _look_up(self, question: Question) -> None:
        client = self._link.client()
        if client is None:
            return
        is_remote = self._is_remote and time.monotonic() >= self._not_before_s
        prompt, wait_s = question.prompt, self._wait_s
        try:
            if question.hashes is None:
                # Without its first block nothing of a prompt is usable, so one hash is enough for a new prompt.
                first = client.lookup(prompt.first(), remote=is_remote, timeout_s=wait_s, meanwhile=prompt.advance)
                if not first.num_blocks:
                    return
            hashes = question.hash_all()
            found = self._worth(client, client.lookup(hashes, remote=False, timeout_s=wait_s))
            question.found(found, found.num_here)
            if question.num_blocks == len(hashes) or not is_remote:
                return
            # What is being saved was waited for just now: other questions wait behind this one.
            found = self._worth(client, client.lookup(hashes, timeout_s=wait_s, save_wait_s=0.0))
            question.found(found, found.num_blocks)
        except KVStoreError as error:
            self._stats.count("num_lookup_errors")
            logger.info("a lookup failed: %s", error)
            if isinstance(error, TransferTimeout):
                self._not_before_s = time.monotonic() + _BACK_OFF_S
            elif isinstance(error, PeerLost):
                self._link.lost(client)
            else:
                self._link.failed(client, error)

"""What is stored of a request's prompt, found out on a thread of its own: the scheduler never waits for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from kvstore.errors import KVStoreError, PeerLost, TransferTimeout
from kvstore.hashing import BlockHashes
from kvstore.integrations.vllm.link import StoreLink
from kvstore.integrations.vllm.stats import Stats

logger = logging.getLogger(__name__)

#: The directory is not asked for this long after it gave no answer: each question would keep others waiting.
_BACK_OFF_S = 5.0
_CLOSE_S = 5.0


class Question:
    """One request's question, and what is known of the answer so far.

    Args:
        make_hashes: makes the hashes of the prompt's full blocks.
        is_lookup: whether the store is to be asked too.
    """

    def __init__(self, make_hashes: Callable[[], BlockHashes], is_lookup: bool) -> None:
        self.make_hashes, self.is_lookup = make_hashes, is_lookup
        self.asked_s = time.monotonic()
        self.hashes: BlockHashes | None = None
        #: Usable prefix in blocks; grows while other nodes are asked.
        self.num_blocks = 0
        #: Whether vLLM was told the answer.
        self.is_given = False
        #: Whether nothing more becomes known.
        self.done = False


class Lookups:
    """The thread that answers, one question after the other.

    Args:
        link: to the store.
        is_remote: whether what only other nodes have counts.
        wait_s: how long the store may take for an answer.
        stats: gets times and counts.
        answered: set after each answer.
    """

    def __init__(
        self, link: StoreLink, is_remote: bool, wait_s: float, stats: Stats, answered: threading.Event
    ) -> None:
        self._answered = answered
        self._link, self._is_remote, self._wait_s, self._stats = link, is_remote, wait_s, stats
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._not_before_s = 0.0
        self._begun_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="raykv-lookups", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> None:
        """Have a question answered; returns at once."""
        self._questions.put(question)

    def is_held_up(self) -> bool:
        """Whether the store takes too long for an answer: then the questions behind it need not wait for theirs."""
        begun_s = self._begun_s
        return begun_s is not None and time.monotonic() > begun_s + self._wait_s

    def close(self) -> None:
        """End the thread; questions that wait are answered with nothing. May be called again."""
        self._questions.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            begin_s = time.perf_counter()
            self._begun_s = time.monotonic()
            try:
                question.hashes = question.make_hashes()
                if question.is_lookup and len(question.hashes):
                    self._look_up(question, question.hashes)
            except Exception:
                # One request that cannot be hashed must not end the thread that answers for all others.
                logger.exception("a lookup failed; the prompt is computed")
                self._stats.count("num_lookup_errors")
            finally:
                self._begun_s = None
                self._stats.time("lookup", time.perf_counter() - begin_s)
                question.done = True
                self._answered.set()

    def _look_up(self, question: Question, hashes: BlockHashes) -> None:
        client = self._link.client()
        if client is None:
            return
        try:
            question.num_blocks = client.lookup(hashes, remote=False, timeout_s=self._wait_s).num_local
            if question.num_blocks == len(hashes) or not self._is_remote or time.monotonic() < self._not_before_s:
                return
            question.num_blocks = client.lookup(hashes, timeout_s=self._wait_s).num_blocks
        except TransferTimeout as error:
            self._not_before_s = time.monotonic() + _BACK_OFF_S
            self._stats.count("num_lookup_errors")
            logger.info("a lookup had no answer: %s", error)
        except PeerLost:
            self._link.lost(client)
            self._stats.count("num_lookup_errors")
        except KVStoreError as error:
            self._link.failed(client, error)
            self._stats.count("num_lookup_errors")
            logger.info("a lookup failed: %s", error)

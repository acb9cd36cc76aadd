"""A worker's half: the loads and saves under way on its cache."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import CancelledError
from contextlib import ExitStack
from typing import Any

from kvstore.blocks.part import Part
from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.client import Client
from kvstore.client.job import Job
from kvstore.client.results import LoadResult, MissReason, SaveResult
from kvstore.errors import CopyStuck, JobAbandoned, KVStoreError, LayoutMismatch
from kvstore.integrations.vllm.options import Options
from kvstore.integrations.vllm.plan import LoadPlan, Local, SavePlan, StepPlan, WorkerHello, WorkerReport
from kvstore.integrations.vllm.stats import Stats
from kvstore.integrations.vllm.worker_side.cache import Cache
from kvstore.integrations.vllm.worker_side.landing import Landing, Running, count_load, part_bytes
from kvstore.integrations.vllm.worker_side.publishing import Publishing
from kvstore.runtime.cores import num_idle_copy_threads

logger = logging.getLogger(__name__)

_SETTLE_S, _STUCK_S, _POLL_S = 1.0, 60.0, 0.0005
#: An engine with nothing to compute would step in a loop. It waits instead for a job's end, and leaves the cores to
#: copying threads. The wait is short, as new requests may have come. Workers in other processes get no answers.
_ANSWER_WAIT_S, _TOKEN_WAIT_S, LONGEST_WAIT_S = 0.0003, 0.15e-6, 0.005
#: For a load into a cache on the CPU: the shortest step that computes takes longer there, and most loads end in the
#: step that begins them.
LONGEST_LOAD_WAIT_S = 0.05


class WorkerSide:
    """The worker's half of one rank.

    Args:
        options: the user's.
        config: vLLM's.
        spec: of the one KV cache group.
        part: which part of every block this rank holds.
        rank: among all workers of the engine.
        is_saver: whether this rank saves its part; of several ranks with the same heads, one does.
        stats: gets times and counts.
    """

    def __init__(
        self, options: Options, config: Any, spec: Any, part: Part, rank: int, is_saver: bool, stats: Stats
    ) -> None:
        self._options, self._spec, self._part = options, spec, part
        self._is_saver, self.stats = is_saver, stats
        #: Hand-offs of this rank.
        self.publishing = Publishing(rank, part, options.handoff_ttl_s, options.handoff_staging)
        self.cache = Cache(options, config, spec, part, self.publishing)
        self.loads: dict[str, Running] = {}
        self.landing = Landing(stats)
        self.saves: dict[str, list[Running]] = {}
        self.unsent: set[str] = set()
        self.received: set[str] = set()
        self._has_news = self._has_said_hello = False
        self._failed_ids: set[int] = set()
        self._report = WorkerReport()
        self.job_ended = threading.Event()

    def hello(self) -> WorkerHello | None:
        """Return what the scheduler's half has to know before it can begin; None without a cache."""
        if self.cache.space is None:
            return None
        self._has_said_hello = True
        desks = self.publishing.news(self.cache.client())
        return WorkerHello(self.cache.space, desks, is_on_gpu=self.cache.is_on_gpu, copies=Local(self))

    def settle(self, plan: StepPlan) -> None:
        """End the copies of blocks that are overwritten in this step; may be called again."""
        self.end_saves(plan.settle)
        self.landing.settle(plan.settle, _STUCK_S)

    def end_saves(self, req_ids: Collection[str], wait_s: float = _SETTLE_S) -> None:
        """Wait a little for the saves of some requests, and give up those that take longer; see `Copies`."""
        with ExitStack() as steps:  # All are ended before an error is raised.
            for req_id in req_ids:
                steps.callback(self._end_saves_of, req_id, wait_s)

    def drop_saves(self) -> None:
        """End all saves; see `Copies`."""
        self.end_saves(self.saves, 0.0)

    def has_landed(self, req_id: str, wait_s: float) -> bool:
        """Return whether no load of a request is landing any more; see `Copies`."""
        return self.landing.has_landed(req_id, wait_s)

    def begin(self, plan: StepPlan) -> None:
        """Start the step's late saves and loads, before the step computes anything."""
        self.settle(plan)
        if plan.drop_saves:
            self.drop_saves()
            self._report.num_drops += 1
        if plan.withdrawn:
            self.stats.count("num_withdrawn", self.publishing.withdraw(plan.withdrawn))
        for save in plan.late_saves:
            if plan.drop_saves:
                self._report.saves_ended[save.req_id] += 1
            else:
                self.begin_save(save)
        # With nothing to compute, a thread that waits for a load may as well help to copy.
        num_threads = 0 if plan.is_computing else num_idle_copy_threads()
        for load in plan.loads:
            self._begin_load(load, num_threads)
        self.unsent |= plan.ending

    def save(self, plan: StepPlan) -> None:
        """Start the saves and publications of a step that was computed; nothing waits for their end here."""
        for save in (*plan.publications, *plan.saves):
            self.begin_save(save)
        if plan.launched.value is not None:
            plan.launched.value()

    def poll(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """Return ended requests whose blocks vLLM may free, and requests whose load is received or failed."""
        if not plan.is_computing and not self._has_news:  # vLLM acts on the last news only after this step.
            self._wait_idle(plan)
        self.landing.poll()
        for req_id in [req_id for req_id, load in self.loads.items() if load.job.done()]:
            self._end_load(self.loads.pop(req_id))
        if not plan.is_computing:  # Else the computing requests would wait for its copies too.
            for req_id in [req_id for req_id, load in self.loads.items() if load.queued.is_set()]:
                self.landing.begin(self.loads.pop(req_id))
                self.received.add(req_id)
        for save in [save for saves in self.saves.values() for save in saves if save.job.done()]:
            self._end_save(save)
        sent = {req_id for req_id in self.unsent if req_id not in self.saves and req_id not in self.landing.loads}
        self.unsent -= sent
        received, self.received = self.received, set()
        self._has_news = bool(sent or received)
        return sent, received

    def take_failed_block_ids(self) -> set[int]:
        """Return the blocks that loads left unfilled since the last call."""
        failed, self._failed_ids = self._failed_ids, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """Return this step's report to the scheduler's half; None if it is empty."""
        report, self._report = self._report, WorkerReport()
        if not self._has_said_hello and (hello := self.hello()) is not None:
            report.hellos = [hello]
        report.desks = self.publishing.news(self.cache.client())
        report.landing, self.landing.changes = self.landing.changes, Counter()
        return report or None

    def close(self) -> None:
        """Wait for running jobs and close the client; may be called again."""
        try:
            self.end_saves(self.saves)
        finally:
            if self.cache.space is not None:
                self.cache.link.close()

    def _wait_idle(self, plan: StepPlan) -> None:
        """Wait a little in a step with nothing to compute: for an answer of the store, or for a copy."""
        if plan.num_waiting:
            if plan.answered.value is not None:
                plan.answered.value.wait(LONGEST_WAIT_S)
            else:
                wait_s = plan.num_waiting * _ANSWER_WAIT_S + plan.num_unhashed_tokens * _TOKEN_WAIT_S
                time.sleep(min(wait_s, LONGEST_WAIT_S))
        elif self.loads or self.saves:
            longest_s = LONGEST_LOAD_WAIT_S if self.loads and not self.cache.is_on_gpu else LONGEST_WAIT_S
            deadline_s = time.monotonic() + longest_s
            while True:
                self.job_ended.clear()  # Before the jobs are checked, so that no end is missed.
                left_s = deadline_s - time.monotonic()
                if self._has_news_of_jobs() or left_s <= 0:
                    break
                self.job_ended.wait(left_s)

    def _has_news_of_jobs(self) -> bool:
        """Whether a load can be reported; if there is no load, whether a save can."""
        if self.loads:
            return any(load.queued.is_set() or load.job.done() for load in self.loads.values())
        return any(save.job.done() for its in self.saves.values() for save in its)

    def _begin_load(self, plan: LoadPlan, num_threads: int) -> None:
        client, num_own = self.cache.client(), plan.num_engine_tokens
        if client is None:
            self._fail(plan, num_own, MissReason.STORE_LOST.value)
            return
        queued = threading.Event()

        def on_queued() -> None:
            queued.set()
            self.job_ended.set()

        job: Job[Any]
        pages = self.cache.pages(plan.block_ids)
        limits: dict[str, Any] = {"timeout_s": self._options.load_timeout_s, "num_copy_threads": num_threads}
        try:
            if plan.tickets:
                job = client.fetch(plan.tickets[self.publishing.rank], pages, num_own, hashes=plan.prompt, **limits)
            else:
                limits |= {"on_queued": on_queued if self.cache.is_on_gpu else None, "priority": plan.priority}
                job = client.load(plan.hashes, pages, num_own, **limits)
        except KVStoreError as error:
            logger.warning("a load could not begin: %s", error)
            self._fail(plan, num_own, type(error).__name__)
            return
        self.loads[plan.req_id] = self._running(plan, client, job, queued)

    def _end_load(self, load: Running) -> None:
        assert self.cache.space is not None
        plan: LoadPlan = load.plan
        try:
            result: LoadResult = load.job.result(0)
            num_tokens = result.num_blocks * self.cache.space.shape.block_size
            if self.cache.rows is not None:
                size = int(self._spec.block_size)
                self.cache.rows.give(plan.block_ids[plan.num_engine_tokens // size : -(-num_tokens // size)])
        except CopyStuck:
            raise  # The device may still write, so no block may be used again.
        except KVStoreError as error:
            logger.warning("a load failed: %s", error)
            if not isinstance(error, LayoutMismatch):
                self.cache.link.lost(load.client)
            self._fail(plan, plan.num_engine_tokens, type(error).__name__)
            return
        count_load(self.stats, load, result, "fetch" if plan.tickets else "load")
        if result.num_blocks == len(plan.hashes):
            self.received.add(plan.req_id)
            return
        reason = result.failed[0].reason
        logger.info("a load brought %d of %d blocks: %s", result.num_blocks, len(plan.hashes), result.failed[0].detail)
        if reason is MissReason.STORE_LOST:
            self.cache.link.lost(load.client)
        self._fail(plan, max(num_tokens, plan.num_engine_tokens), reason.value)

    def _fail(self, plan: LoadPlan, num_right_tokens: int, reason: str) -> None:
        """Report the blocks behind the right tokens as failed. Blocks of the engine's own hit stay valid."""
        self._failed_ids.update(plan.block_ids[num_right_tokens // int(self._spec.block_size) :])
        self._report.failed_loads[plan.req_id] = num_right_tokens
        # vLLM waits until a request is reported as received, even if its load failed.
        self.received.add(plan.req_id)
        what = "fetches" if plan.tickets else "loads"
        self.stats.count(f"num_failed_{what}")
        self.stats.count(f"num_failed_{what}_{reason}")

    def begin_save(self, plan: SavePlan) -> None:
        """Begin to save or publish blocks; see `Copies`."""
        client = self.cache.client() if self._is_saver or plan.tickets else None
        if client is None:
            self._report.saves_ended[plan.req_id] += 1
            return
        pages = self.cache.pages(plan.block_ids)
        job: Job[Any]
        try:
            if self.cache.rows is not None:
                self.cache.rows.take(plan.block_ids)
            if plan.tickets:
                job = self.publishing.publish(client, plan, pages)
            else:
                job = client.save(plan.hashes, pages, priority=plan.priority, priority_s=plan.priority_s)
        except KVStoreError as error:
            self._count_failed_save(plan, client, error)
            self._report.saves_ended[plan.req_id] += 1
            return
        self.saves.setdefault(plan.req_id, []).append(self._running(plan, client, job))

    def _running(self, plan: Any, client: Client, job: Job[Any], queued: threading.Event | None = None) -> Running:
        job.add_done_callback(lambda _: self.job_ended.set())
        size = part_bytes(client.part, client.space.shape)
        return Running(plan, client, job, time.perf_counter(), queued or threading.Event(), size)

    def _end_save(self, save: Running) -> None:
        self._forget_save(save)
        try:
            result: SaveResult | HandoffTicket = save.job.result(0)
        except CopyStuck:
            raise
        except (CancelledError, JobAbandoned):  # Given up before it began, or by its client.
            self.stats.count("num_abandoned_saves")
            return
        except KVStoreError as error:
            self._count_failed_save(save.plan, save.client, error)
            return
        if isinstance(result, HandoffTicket):
            self.stats.time("publish", time.perf_counter() - save.begin_s)
            self.stats.count("num_published_blocks", result.num_blocks)
            self.stats.count("num_published_bytes", result.num_blocks * save.part_bytes)
            return
        self.stats.time("save", time.perf_counter() - save.begin_s)
        self.stats.count("num_saved_blocks", result.num_written)
        self.stats.count("num_saved_bytes", result.num_written * save.part_bytes)
        self.stats.count("num_refused_blocks", result.num_refused)
        if result.num_written and self._part.index == 0:
            self._report.stored.append((save.plan.req_id, result.num_blocks))

    def _forget_save(self, save: Running) -> None:
        """Report that a save has ended; call this before its result is read, so that each is reported once."""
        req_id = save.plan.req_id
        self._report.saves_ended[req_id] += 1
        self.saves[req_id] = [each for each in self.saves[req_id] if each is not save]
        if not self.saves[req_id]:
            del self.saves[req_id]

    def _end_saves_of(self, req_id: str, wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        with ExitStack() as steps:
            for save in self.saves.get(req_id, ()):
                steps.callback(self._end_save_by, save, deadline_s)

    def _end_save_by(self, save: Running, deadline_s: float) -> None:
        while not save.job.done() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if not save.job.done() and not save.job.abandon(_STUCK_S):
            # It stays among the saves: vLLM must not get its blocks.
            raise CopyStuck(
                f"wanted the copies of {save.job!r} to end within {_STUCK_S} s; the blocks they read are about to "
                "be overwritten; restart the engine"
            )
        if save.job.done():
            self._end_save(save)
        else:
            self._forget_save(save)
            self.stats.count("num_abandoned_saves")

    def _count_failed_save(self, plan: SavePlan, client: Client, error: KVStoreError) -> None:
        if plan.tickets:
            self.stats.count("num_failed_publications")
            self.stats.count(f"num_failed_publications_{type(error).__name__}")
            logger.warning("a request could not be handed off, so the decode engine computes it: %s", error)
        else:
            self.stats.count("num_failed_saves")
            self.stats.count(f"num_failed_saves_{type(error).__name__}")
            logger.info("a save failed: %s", error)
        self.cache.link.failed(client, error)

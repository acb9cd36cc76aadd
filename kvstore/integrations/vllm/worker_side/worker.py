"""A worker's half: the engine's tensors, and the loads and saves under way on them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack
from typing import Any

import torch

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.part import Part
from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.client import Client
from kvstore.client.job import Job
from kvstore.client.results import LoadResult, MissReason, SaveResult
from kvstore.config import num_idle_copy_threads
from kvstore.errors import CopyStuck, JobAbandoned, KVStoreError, LayoutMismatch
from kvstore.integrations.vllm.link import StoreLink
from kvstore.integrations.vllm.options import Options
from kvstore.integrations.vllm.plan import Door, LoadPlan, PublishPlan, SavePlan, StepPlan, WorkerHello, WorkerReport
from kvstore.integrations.vllm.space import in_order_of_layers, make_space
from kvstore.integrations.vllm.stats import Stats
from kvstore.integrations.vllm.worker_side.interior import TokenRows, axes_inside, order_inside
from kvstore.integrations.vllm.worker_side.landing import Landing, Running, count_load, wait_idle
from kvstore.integrations.vllm.worker_side.publishing import Publishing

logger = logging.getLogger(__name__)

_SETTLE_S, _STUCK_S, _POLL_S = 1.0, 60.0, 0.0005


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
        self._options, self._config, self._spec = options, config, spec
        self._part, self._is_saver, self.stats = part, is_saver, stats
        #: Hand-offs of this rank.
        self.publishing = Publishing(rank, part, options.handoff_ttl_s, options.handoff_staging)
        self._link: StoreLink | None = None
        self._pages_in_block = 1
        self._rows: TokenRows | None = None
        self.loads: dict[str, Running] = {}
        self.landing = Landing(stats)
        self.is_on_gpu = False
        self._has_news = False
        self.saves: dict[str, list[Running]] = {}
        self.unsent: set[str] = set()
        self.received: set[str] = set()
        self._failed_ids: set[int] = set()
        self._report = WorkerReport()
        self.job_ended = threading.Event()
        #: Namespace of this engine's blocks, once its tensors are known.
        self.space: Namespace | None = None

    def register(self, caches: Mapping[str, Any]) -> None:
        """Take the engine's tensors, derive the blocks' namespace from them, and connect to the store.

        Raises:
            StoreNotRunning: there is no store on this node.
            LayoutMismatch, ConfigError: the store cannot hold these tensors; the message says what to change.
        """
        if self._link is not None:  # After the engine slept, its tensors may be different.
            self._link.close()
        found = in_order_of_layers(caches)
        tensors, axes = list(found.values()), self._options.axes
        order = order_inside(self._config, next(iter(found)), tensors[0], self._spec)
        if order and self._options.portable:
            self._rows = TokenRows(tensors, order, int(self._spec.head_size))
            tensors, axes, order = self._rows.tensors, "BPHTD", ""
        elif order:
            axes = axes or axes_inside(tensors[0])
        space = make_space(self._config, self._spec, self._options, tensors, order)
        self._part.check(space.shape)

        def register(client: Client) -> None:
            try:
                layout = client.register_kv_caches(tensors, axes)
            except LayoutMismatch as error:
                raise LayoutMismatch(f"{error}. In vLLM, axes are kv_connector_extra_config['axes']") from error
            if int(self._spec.block_size) % layout.block_size:
                raise LayoutMismatch(
                    f"RaykvConnector: wanted tensors with pages that divide a block of {self._spec.block_size} tokens, "
                    f"got pages of {layout.block_size}; set kv_connector_extra_config['axes']"
                )
            self._pages_in_block = int(self._spec.block_size) // layout.block_size
            self.publishing.attach(client, layout.device)
            self.is_on_gpu = torch.device(layout.device).type == "cuda"
            logger.info(
                "%d pages of %d tokens, axes %s, on %s; stored blocks of %d tokens and %d bytes, namespace %s",
                layout.num_blocks, layout.block_size, layout.axes, layout.device,
                space.shape.block_size, space.shape.block_bytes, space.digest.hex()[:16],
            )  # fmt: skip

        self.space = space
        self._link = StoreLink(self._options, space, self._part, register)

    def hello(self) -> WorkerHello | None:
        """Return what the scheduler's half has to know before the first step; None before `register`."""
        if self.space is None:
            return None
        pid = os.getpid() if self.is_on_gpu else 0
        return WorkerHello(self.space, self.publishing.news(self.client()), launcher_pid=pid, door=Door(self))

    def settle(self, plan: StepPlan) -> None:
        """End the copies of blocks that are overwritten in this step; may be called again."""
        self.end_saves(plan.settle)
        self.landing.settle(plan.settle, _STUCK_S)

    def end_saves(self, req_ids: Collection[str]) -> None:
        """Wait a little for the saves of some requests, and give up those that take longer; see `Copies`."""
        self._end_saves(self.saves.keys() & set(req_ids), _SETTLE_S)

    def drop_saves(self) -> None:
        """End all saves; see `Copies`."""
        self._end_saves(list(self.saves), 0.0)

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
        begun: list[SavePlan | PublishPlan] = [*plan.publications, *plan.saves]
        for save in begun:
            self.begin_save(save)
        if plan.launched is not None:
            plan.launched()

    def poll(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """Return ended requests whose blocks vLLM may free, and requests whose load is received or failed."""
        if not plan.is_computing and not self._has_news:  # vLLM acts on the last news only after this step.
            wait_idle(plan, self.loads, self.saves, self.job_ended, is_on_gpu=self.is_on_gpu)
        self.landing.poll()
        for req_id in [req_id for req_id, load in self.loads.items() if load.job.done()]:
            self._end_load(self.loads.pop(req_id))
        if not plan.is_computing:  # Else the computing requests would wait for its copies too.
            for req_id in [req_id for req_id, load in self.loads.items() if load.queued.is_set()]:
                self.landing.begin(self.loads.pop(req_id))
                self.received.add(req_id)
        for save in [save for saves in self.saves.values() for save in saves if save.job.done()]:
            self._end_save(save)
        sent = {req_id for req_id in self.unsent if req_id not in self.saves and req_id not in self.landing}
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
        report.desks = self.publishing.news(self.client())
        report.landing = self.landing.take_changes()
        return report or None

    def close(self) -> None:
        """Wait for running jobs and close the client; may be called again."""
        with ExitStack() as steps:
            steps.callback(self.landing.clear)
            steps.callback(self.loads.clear)
            if self._link is not None:
                steps.callback(self._link.close)
            self._end_saves(list(self.saves), _SETTLE_S)

    def client(self) -> Client | None:
        """Return the client of this rank's node store; None while no store is reached."""
        return self._link.client() if self._link is not None else None

    def _begin_load(self, plan: LoadPlan, num_threads: int) -> None:
        client = self.client()
        if client is None:
            self._fail(plan, plan.num_engine_tokens, MissReason.STORE_LOST.value)
            return
        pages, timeout_s, queued = self._pages(plan.block_ids), self._options.load_timeout_s, threading.Event()

        def on_queued() -> None:
            queued.set()
            self.job_ended.set()

        job: Job[Any]
        try:
            if plan.tickets:
                job = self.publishing.fetch(client, plan, pages, timeout_s, num_threads)
            else:
                told = on_queued if self.is_on_gpu else None
                job = client.load(
                    plan.hashes,
                    pages,
                    plan.num_engine_tokens,
                    timeout_s=timeout_s,
                    on_queued=told,
                    num_copy_threads=num_threads,
                )
        except KVStoreError as error:
            logger.warning("a load could not begin: %s", error)
            self._fail(plan, plan.num_engine_tokens, type(error).__name__)
            return
        self.loads[plan.req_id] = self._running(plan, client, job, queued)

    def _end_load(self, load: Running) -> None:
        plan: LoadPlan = load.plan
        size = self._stored_block_size()
        try:
            result: LoadResult = load.job.result(0)
            if self._rows is not None:
                own, size_engine = plan.num_engine_tokens, int(self._spec.block_size)
                self._rows.give(plan.block_ids[own // size_engine : -(-result.num_blocks * size // size_engine)])
        except CopyStuck:
            raise  # The device may still write, so no block may be used again.
        except KVStoreError as error:
            logger.warning("a load failed: %s", error)
            if not isinstance(error, LayoutMismatch):
                self._lost(load.client)
            self._fail(plan, plan.num_engine_tokens, type(error).__name__)
            return
        count_load(self.stats, load, result, "fetch" if plan.tickets else "load")
        if result.num_blocks == len(plan.hashes):
            self.received.add(plan.req_id)
            return
        reason = result.failed[0].reason
        logger.info("a load brought %d of %d blocks: %s", result.num_blocks, len(plan.hashes), result.failed[0].detail)
        if reason is MissReason.STORE_LOST:
            self._lost(load.client)
        self._fail(plan, max(result.num_blocks * size, plan.num_engine_tokens), reason.value)

    def _fail(self, plan: LoadPlan, num_right_tokens: int, reason: str) -> None:
        """Report the blocks behind the right tokens as failed. Blocks of the engine's own hit stay valid."""
        self._failed_ids.update(plan.block_ids[num_right_tokens // int(self._spec.block_size) :])
        self._report.failed_loads[plan.req_id] = num_right_tokens
        # vLLM waits until a request is reported as received, even if its load failed.
        self.received.add(plan.req_id)
        what = "fetches" if plan.tickets else "loads"
        self.stats.count(f"num_failed_{what}")
        self.stats.count(f"num_failed_{what}_{reason}")

    def begin_save(self, plan: SavePlan | PublishPlan) -> None:
        """Begin to save or publish blocks; see `Copies`."""
        client = self.client() if self._is_saver or isinstance(plan, PublishPlan) else None
        if client is None:
            self._report.saves_ended[plan.req_id] += 1
            return
        pages = self._pages(plan.block_ids)
        job: Job[Any]
        try:
            if self._rows is not None:
                self._rows.take(plan.block_ids)
            if isinstance(plan, PublishPlan):
                job = self.publishing.publish(client, plan, pages)
            else:
                job = client.save(plan.hashes, pages)
        except KVStoreError as error:
            self._count_failed_save(plan, client, error)
            self._report.saves_ended[plan.req_id] += 1
            return
        self.saves.setdefault(plan.req_id, []).append(self._running(plan, client, job))

    def _running(
        self,
        plan: LoadPlan | SavePlan | PublishPlan,
        client: Client,
        job: Job[Any],
        queued: threading.Event | None = None,
    ) -> Running:
        job.add_done_callback(lambda _: self.job_ended.set())
        return Running(plan, client, job, time.perf_counter(), queued or threading.Event())

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
            return
        self.stats.time("save", time.perf_counter() - save.begin_s)
        self.stats.count("num_saved_blocks", result.num_written)
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

    def _end_saves(self, req_ids: Collection[str], wait_s: float) -> None:
        """Wait for the saves of each request a little, then abandon them; all, before an error is raised."""
        with ExitStack() as steps:
            for req_id in req_ids:
                steps.callback(self._end_saves_of, req_id, wait_s)

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

    def _count_failed_save(self, plan: SavePlan | PublishPlan, client: Client, error: KVStoreError) -> None:
        if isinstance(plan, PublishPlan):
            self.stats.count("num_failed_publications")
            logger.warning("a request could not be handed off, and is computed by who decodes it: %s", error)
        else:
            self.stats.count("num_failed_saves")
            logger.info("a save failed: %s", error)
        if self._link is not None:
            self._link.failed(client, error)

    def _lost(self, client: Client) -> None:
        if self._link is not None:
            self._link.lost(client)

    def _stored_block_size(self) -> int:
        assert self.space is not None
        return self.space.shape.block_size

    def _pages(self, block_ids: list[int]) -> list[int]:
        """Return the tensor pages that make up vLLM's blocks: an attention kernel may want smaller pages."""
        count = self._pages_in_block
        return block_ids if count == 1 else [block * count + page for block in block_ids for page in range(count)]

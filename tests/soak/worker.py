"""A client process of the soak: does what its choices say and checks every byte that it is given."""

from __future__ import annotations

import os
import random
import resource
import time
import traceback
from multiprocessing.connection import Connection

import torch

from kvstore.blocks.hashing import BlockHashes
from kvstore.client.job import Job
from kvstore.client.results import LoadResult, MissReason
from kvstore.errors import (
    ChainBroken,
    InvalidRequest,
    JobRunning,
    KVStoreError,
    LayoutMismatch,
    LeaseError,
    ProtocolError,
    StaleVersion,
    StoreUnavailable,
    TransferError,
    all_error_types,
)
from tests.soak.engine import LAYOUTS, MINE, POISON, Engine, wrong_in_lease
from tests.soak.forks import use_in_child
from tests.soak.handoffs import Handoffs
from tests.soak.mailbox import Mailbox
from tests.soak.plan import MAX_DESCRIPTORS, SETTINGS, SHAPE, Choice, Verb, chains, choices, space, weights_space
from tests.soak.ranks import RankWorker
from tests.soak.settings import OPERATION_S, REOPEN_S, WorkerSettings
from tests.soak.voice import Voice
from tests.soak.weights import Weights

_MOMENT_S = 10.0
#: Blocks of the engine: for operations, for jobs that were given up, and never named by anything.
_OWN, _GIVEN_UP, _CANARIES = range(0, 80), range(80, 120), range(120, 128)
_PUBLISHES = (Verb.PUBLISH, Verb.BEGIN_PUBLISH, Verb.PUBLISH_AND_LEAVE, Verb.WITHDRAW_AT_ONCE)
#: Errors that say that a client misused the store, which this one never does.
_NEVER = (InvalidRequest, LayoutMismatch, ProtocolError)


class Worker:
    """The operations, and what came of them."""

    def __init__(self, settings: WorkerSettings, driver: Connection) -> None:
        self._settings, self._driver = settings, driver
        self._voice = Voice(f"client {settings.client}, life {settings.life}", settings.log_file, driver)
        self._counts = self._voice.counts
        self._rng = random.Random(f"{settings.seed}/blocks/{settings.client}/{settings.life}")
        self._chains, self._weights_chains = chains(space()), chains(weights_space())
        self._weights = Weights(settings.weights_file)
        self._cleared = self._weights.newest, -_MOMENT_S
        self._handoffs = Handoffs(
            Mailbox(settings.mail), self._voice, self._chains, self._weights, settings.node, self._rng, _OWN, self._path
        )
        #: Blocks of jobs that were given up, and the value that they were filled with since.
        self._given_up: list[int] = []
        self._engine: Engine | None = None
        self._weights_engine: Engine | None = None
        #: Why the present client is of no use any more.
        self._lost = ""

    def run(self) -> None:
        """Work until the driver says that it is enough, or is gone."""
        self._open()
        for choice in choices(self._settings.seed, self._settings.client, self._settings.life):
            if self._driver.poll():
                break
            self._voice.note(choice)
            started_s = time.monotonic()
            try:
                self._do(choice)
            except KVStoreError as error:
                self._failed(choice, error)
            self._voice.timed(choice.verb.value, time.monotonic() - started_s)
            self._handoffs.check_claimed()
            if self._lost:
                self._reopen()
            self._voice.report()
        self._driver.recv()
        self._handoffs.check_claimed(now=True)
        self._check_quiet_blocks()
        self._close()
        self._voice.report(now=True)

    # What a choice means.

    def _do(self, choice: Choice) -> None:
        run = self._chains[choice.chain][choice.first : choice.first + choice.num_blocks]
        ids = self._rng.sample(_OWN, len(run))
        self._counts["operations", choice.verb.value] += 1
        match choice.verb:
            case Verb.SAVE:
                self._save(run, ids)
            case Verb.LOAD:
                self._check_load(choice, run, ids, self._load(run, ids, choice.skip_tokens))
            case Verb.LOAD_PAIR:
                ids = self._rng.sample(_OWN, 2 * len(run))
                halves = ids[: len(run)], ids[len(run) :]
                jobs = [self._load(run, half, choice.skip_tokens) for half in halves]
                for half, job in zip(halves, jobs, strict=True):
                    self._check_load(choice, run, half, job)
            case Verb.LOOKUP:
                found = self.engine.client.lookup(run).num_blocks
                if not 0 <= found <= len(run):
                    self._voice.finding(f"lookup of {len(run)} blocks found {found}")
            case Verb.LEASE:
                self._lease(run, choice.wait_s)
            case Verb.LAPSE:
                self.engine.client.lease(run, ttl_s=1.0)
            case Verb.PREFETCH:
                result = self.engine.client.prefetch(run).result(OPERATION_S)
                self._count_misses(result)
            case Verb.ABANDON_LOAD | Verb.ABANDON_SAVE | Verb.ABANDON_FETCH:
                self._abandon(choice, run)
            case Verb.FORK:
                self._fork(run)
            case Verb.PUBLISH | Verb.BEGIN_PUBLISH | Verb.WITHDRAW_AT_ONCE:
                self._handoffs.publish(self.engine, choice, run)
            case Verb.PUBLISH_AND_LEAVE:
                self._handoffs.publish_and_leave(self._path(self._settings.node), choice, run)
            case Verb.FETCH | Verb.FETCH_TWICE | Verb.FETCH_FORGED:
                self._lost = self._handoffs.fetch(self.engine, choice)
            case Verb.LOAD_WEIGHTS:
                self._load_weights(choice, ids)

    def _save(self, run: BlockHashes, ids: list[int]) -> None:
        self.engine.cache.write(run, ids)
        began_s = time.monotonic()
        result = self.engine.client.save(run, ids).result(OPERATION_S)
        waited_s = time.monotonic() - began_s
        self._counts["blocks", "written"] += result.num_written
        self._counts["blocks", "refused"] += result.num_refused
        num_told = result.num_blocks + result.num_refused
        if num_told < len(run) and (waited_s >= SETTINGS["transfer_timeout_s"] or self._was_cleared()):
            # Others were writing the rest: it waited for them all its time, or what they wrote was cleared.
            self._counts["blocks", "left to others"] += len(run) - num_told
        elif result.num_written + result.num_refused > len(run) or num_told != len(run):
            self._voice.finding(f"save of {len(run)} blocks says {result} after {waited_s:.3f} s")

    def _was_cleared(self) -> bool:
        """Whether the namespaces were cleared a moment ago."""
        now_s, newest = time.monotonic(), self._weights.newest
        if newest != self._cleared[0]:
            self._cleared = newest, now_s
        return now_s - self._cleared[1] < _MOMENT_S

    def _load(self, run: BlockHashes, ids: list[int], skip_tokens: int) -> Job[LoadResult]:
        self.engine.cache.fill(ids, POISON)
        return self.engine.client.load(run, ids, skip_tokens)

    def _check_load(self, choice: Choice, run: BlockHashes, ids: list[int], job: Job[LoadResult]) -> None:
        result = job.result(OPERATION_S)
        for wrong in self.engine.cache.wrong_blocks(run, ids, result.num_blocks, choice.skip_tokens):
            self._voice.finding(f"WRONG BYTES in a load, {wrong}; {result}")
        skipped = min(len(run), -(-choice.skip_tokens // SHAPE.block_size))
        verified = max(0, result.num_blocks - skipped)
        self._counts["blocks", "verified"] += verified
        self._counts["blocks", "from memory"] += result.num_local
        self._counts["blocks", "from disk"] += result.num_disk
        self._counts["blocks", "from peers"] += result.num_peer
        self._counts["loads", _kind(result)] += 1
        if [block_id for failure in result.failed for block_id in failure.block_ids] != ids[result.num_blocks :]:
            self._voice.finding(f"a load of {ids} names other failed blocks: {result}")
        self._count_misses(result)

    def _load_weights(self, choice: Choice, ids: list[int]) -> None:
        """Load KV of weights that change: all of one version, and of none that was cleared before."""
        engine, run = self._weights_engine, self._weights_chains[choice.chain][: len(ids)]
        assert engine is not None
        engine.cache.fill(ids, POISON)
        oldest = self._weights.oldest
        result = engine.client.load(run, ids).result(OPERATION_S)
        usable, ids = run[: result.num_blocks], ids[: result.num_blocks]
        self._counts["blocks", "verified"] += len(ids)
        if engine.cache.version_of(usable, ids, range(oldest, self._weights.newest + 1)) is None:
            known = range(self._weights.newest + 1)
            found = [engine.cache.version_of(usable[i : i + 1], ids[i : i + 1], known) for i in range(len(ids))]
            self._voice.finding(
                f"WRONG BYTES: wanted KV of one version from {oldest} on, got versions {found}; {result}"
            )
        self._count_misses(result)

    def _count_misses(self, result: LoadResult) -> None:
        if not result.failed:
            return
        reason, detail = result.failed[0].reason, result.failed[0].detail
        self._counts["misses", reason.value] += len(result.failed)
        if reason is MissReason.OTHER:
            name = detail.split(":", 1)[0]
            self._counts["other misses", detail[:80]] += 1
            if name not in all_error_types() and name != "disk":
                self._voice.finding(f"a load ended with an unexpected error: {detail}")
        if reason is MissReason.STORE_LOST:
            self._lost = detail

    def _lease(self, run: BlockHashes, wait_s: float) -> None:
        lease = self.engine.client.lease(run, ttl_s=2.0)
        try:
            for _ in range(2):
                for wrong in wrong_in_lease(lease):
                    self._voice.finding(f"WRONG BYTES in a lease, {wrong}")
                self._counts["blocks", "verified"] += len(lease)
                time.sleep(wait_s)
            if not lease.renew(1.0) and lease.held():
                self._voice.finding("a held lease could not be renewed")
        except LeaseError:
            self._counts["misses", MissReason.LEASE_EXPIRED.value] += len(lease)
        was_held = lease.held()
        if lease.release() is False and was_held and lease.held():
            self._voice.finding("a held lease could not be released")
        if lease.release():
            self._voice.finding("a lease could be released twice")

    def _abandon(self, choice: Choice, run: BlockHashes) -> None:
        """Give a job up half-way and use its blocks at once: it must neither read nor write them any more."""
        self._check_quiet_blocks()
        letter = self._handoffs.take() if choice.verb is Verb.ABANDON_FETCH else None
        if choice.verb is Verb.ABANDON_FETCH and letter is None:
            return
        num_blocks = len(run) if letter is None else letter.ticket.num_blocks
        self._given_up, ids = [], self._rng.sample(_GIVEN_UP, num_blocks)
        job: Job[object]
        if letter is not None:
            job = self._handoffs.begin_fetch(self.engine, letter, ids)
        elif choice.verb is Verb.ABANDON_LOAD:
            job = self._load(run, ids, 0)
        else:
            self.engine.cache.write(run, ids)
            job = self.engine.client.save(run, ids)
        try:
            job.result(choice.wait_s / 10)
        except JobRunning:
            self._counts["jobs", "abandoned"] += 1
            if not job.abandon(OPERATION_S):
                self._voice.finding(f"a {choice.verb.value} was still copying {OPERATION_S} s after it was given up")
                return
        self.engine.cache.fill(ids, MINE)
        self._given_up = ids

    def _fork(self, run: BlockHashes) -> None:
        """A child that uses its copy of this client is refused, and this client goes on as if there had been none."""
        lease = self.engine.client.lease(run)
        for problem in use_in_child(self.engine, run, lease):
            self._voice.finding(f"in a forked child, {problem}")
        for wrong in wrong_in_lease(lease):
            self._voice.finding(f"WRONG BYTES in a lease after a fork, {wrong}")
        was_held = lease.held()
        if not lease.release() and was_held and lease.held():
            self._voice.finding("a lease was lost by a fork")

    def _check_quiet_blocks(self) -> None:
        """Blocks that nothing may have touched since they were filled."""
        if not self.engine.cache.holds_only(self._given_up, MINE):
            self._voice.finding("WRONG BYTES: a job wrote to blocks after it was given up")
        if not self.engine.cache.holds_only(_CANARIES, POISON):
            self._voice.finding("WRONG BYTES: blocks were written that no load named")

    # What goes wrong, and what is made of it.

    def _failed(self, choice: Choice, error: KVStoreError) -> None:
        self._counts["errors", choice.verb.value, type(error).__name__] += 1
        if isinstance(error, ChainBroken) and choice.first > 0:
            return
        if isinstance(error, StaleVersion) and choice.verb in _PUBLISHES:
            return  # Its namespace was cleared since the blocks were written.
        if isinstance(error, (*_NEVER, JobRunning)):
            self._voice.finding(f"{choice.verb.value} raised {type(error).__name__}: {error}")
        elif isinstance(error, StoreUnavailable | TransferError):
            self._lost = str(error)

    def _reopen(self) -> None:
        """Close the client and make another: what a worker does whose store does not answer, or is another."""
        self._voice.note(f"reopen: {self._lost[:200]}")
        self._lost = ""
        self._counts["jobs", "reopened"] += 1
        self._check_quiet_blocks()
        self._close()
        self._open()

    def _open(self) -> None:
        deadline_s = time.monotonic() + REOPEN_S
        layout = LAYOUTS[(self._settings.client + self._settings.life) % len(LAYOUTS)]
        while True:
            try:
                path = self._path(self._settings.node)
                self._engine = Engine(path, space(), layout, len(_OWN) + len(_GIVEN_UP) + len(_CANARIES))
                self._weights_engine = Engine(path, weights_space(), layout, len(_OWN))
                self._given_up = []
                self._handoffs.opened(path)
                return
            except (StoreUnavailable, TransferError) as error:
                self._close()
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"no store to talk to for {REOPEN_S} s: {error}") from error
                time.sleep(0.1)

    def _path(self, node: int) -> str:
        return self._settings.path_files[node].read_text()

    def _close(self) -> None:
        self._handoffs.closing()
        for engine in (self._engine, self._weights_engine):
            if engine is not None:
                engine.close()
        self._engine = self._weights_engine = None

    @property
    def engine(self) -> Engine:
        """The engine, which is there between `_open` and `_close`."""
        assert self._engine is not None
        return self._engine


def _kind(result: LoadResult) -> str:
    counts = {"local": result.num_local, "disk": result.num_disk, "peer": result.num_peer}
    used = [name for name, count in counts.items() if count]
    if result.failed:
        return "partial" if used else "miss"
    return "mixed" if len(used) > 1 else "".join(used) or "local"


def main(settings: WorkerSettings, driver: Connection) -> None:
    """Run one life of a client; the process then waits to be ended, so that what it left behind can be seen."""
    error_fd = os.open(settings.error_file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(error_fd, 2)
    os.dup2(error_fd, 1)
    os.close(error_fd)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))
    worker = Worker(settings, driver) if settings.rank is None else RankWorker(settings, driver)
    try:
        worker.run()
        driver.send(("closed", None))
        driver.recv()
    except EOFError:
        return
    except Exception:
        worker._voice.finding(f"unexpected error: {traceback.format_exc()}")
        raise

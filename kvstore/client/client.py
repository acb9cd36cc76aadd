"""The client: what a worker process uses to save and load the blocks of its engine.

It talks to the store of its own node only. One control call a request in the common case; bytes go
through the arena that both map. Jobs run on threads of the client, and hold none while they wait; see
kvstore.client.work.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from kvstore.blocks.chain import HASH_BYTES, Chain
from kvstore.blocks.codec import decode_count, decode_counts, encode
from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.part import Part, as_part
from kvstore.bounds import MAX_CHAIN_BYTES, MAX_COPY_THREADS, check_count, check_seconds, check_ttl
from kvstore.client.connections import StoreConnections
from kvstore.client.fetch import HandoffVerbs
from kvstore.client.job_threads import JobThreads
from kvstore.client.lease import Lease
from kvstore.client.results import Job, LoadResult, Match, Pinned, SaveResult
from kvstore.client.save_load import TIMED_OUT_IN_QUEUE, CopyGuard, failed_load, run_load, run_save
from kvstore.client.work import Steps, Work
from kvstore.engine.copier import CopyOrder, EngineCopier, EnginePages, engine_pages, ordered
from kvstore.engine.cuda_copier import CopyPath
from kvstore.engine.detect import detect_layout
from kvstore.engine.layout import EngineLayout
from kvstore.engine.registration import make_copier
from kvstore.engine.side_tensors import check_skip, detect_sides
from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    NamespaceMismatch,
    StoreUnavailable,
    TransferError,
)
from kvstore.memory.mapping import ArenaMapping
from kvstore.memory.presence_view import PresenceView, map_clears
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import (
    Ask,
    AskPin,
    Attach,
    Renew,
    decode_found,
    decode_grant,
)
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

_LATE_S = 600.0
#: A copy that has begun is waited for in turns of so long.
_CALL_OFF_S = 5.0
#: Of a lookup's time the directory may take so much; the rest is for the answer without it.
_REMOTE_SHARE = 0.8


class Client(HandoffVerbs):
    """One engine's door to the store of its node.

    Args:
        control_path: the node store's socket, as `Store.control_path` returns it; `Store.client` knows it.
        space: what the blocks mean. Hashes of another namespace are refused.
        part: which part of each block this process holds, as `Part` or (tp_rank, tp_size, pp_rank, pp_size); None
            for all of it. A block can be found when all parts of it were saved.

    Raises:
        InvalidRequest: `control_path` is no path, or `space` no namespace.
        StoreNotRunning: nobody answers at `control_path`.
        IncompatibleStore: the store runs another protocol version.
        ConfigError: the store's slots are too small for this namespace's blocks, or `part` is no part.
        LayoutMismatch: heads, layer groups or a side tensor of the namespace's shape do not divide by the number of
            ranks.
    """

    def __init__(self, control_path: str, space: Namespace, part: Part | Sequence[int] | None = None) -> None:
        if not isinstance(control_path, str):
            raise InvalidRequest(
                f"control_path: wanted the path that Store.control_path() returns, got {type(control_path).__name__}"
            )
        if not isinstance(space, Namespace):
            raise InvalidRequest(f"space: wanted a kvstore.Namespace, got {type(space).__name__}")
        self.part = as_part(part)
        self.part.check(space.shape)
        self.space = space
        self._lost = self._unmapped = self._stuck = False
        #: Of the life of the store that has ended, and set when its memory is unmapped.
        self._jobs_of_lost: JobThreads | None = None
        self._unmapped_lost = threading.Event()
        # Of a kind that one thread may take twice: the handler of a signal may close this.
        self._lock = threading.RLock()
        lose = weakref.WeakMethod(self._lose)
        self._store = StoreConnections(control_path, lambda: (call := lose()) and call())
        self.node_id, self.epoch, self.config = self._store.node_id, self._store.epoch, self._store.config
        self._arena = self._store.arena
        self._mapping = ArenaMapping(self._arena)
        try:
            request = Attach(space.digest, space.shape.block_bytes)
            answer = decode_counts(self._store.call(Op.ATTACH, encode(request)))
            self._clears = map_clears(control_path, self.epoch, timeout_s=self._store.call_timeout_s)
        except KVStoreError:
            self._store.close(jobs_are_over=False)
            self._arena.close()
            raise
        self.slot_bytes, self.num_slots = int(answer["slot_bytes"]), int(answer["num_slots"])
        self._copier: EngineCopier | None = None
        self._presence: PresenceView | None = None
        with contextlib.suppress(RuntimeError):  # No thread can be started: pages come one by one, when they are used.
            threading.Thread(target=self._arena.populate, name="raykv-populate", daemon=True).start()
        self._jobs = JobThreads()
        # Not at the end of the process, which says all, and by which jobs may not be over.
        weakref.finalize(self, _end_collected, self._store, self._mapping).atexit = False

    def register_kv_caches(
        self,
        caches: Any,
        axes: str | None = None,
        *,
        side_caches: Mapping[str, Any] | None = None,
        side_axes: Mapping[str, str] | None = None,
        copy_path: CopyPath | str = CopyPath.AUTO,
    ) -> EngineLayout:
        """Say where this engine's cache is; its layout is found from shape and strides.

        Args:
            caches: list or dict of per-layer tensors, of per-layer (K, V) pairs, or one cross-layer tensor; the heads
                and layers of this client's part, in blocks of a multiple or a divisor of the stored size.
            axes: names the dimensions where shapes alone are ambiguous, see kvstore.engine.layout.
            side_caches: the tensors of every `SideTensor` of the namespace's shape, by its name: per layer one, in the
                order of the caches, or one for all layers. They are saved and loaded with the blocks.
            side_axes: `axes` of side tensors, by name, where needed.
            copy_path: how the bytes of a cache on a GPU go: "staged", "direct", or "auto", which is whichever is
                better for this layout (docs/gpu.md). A cache on the CPU has one path.

        Returns:
            The layout that was found. The client keeps references to the tensors until `close`. It copies to and from
            these alone: where one is replaced, or its `data` is, everything is refused until they are registered again.

        Raises:
            LayoutMismatch: the tensors do not fit the namespace's shape, or a side tensor is missing or not of it;
                nothing is registered.
            ConfigError: the tensors are on a GPU, and CuPy or the driver is missing.
            KernelError: the kernels could not be built, or the GPU has no memory left for their buffers.
            StoreUnavailable: this client was closed.
        """
        self._store.check_open()
        shape = self.space.shape
        found = detect_layout(caches, shape, axes, self.part)
        layout, sides = detect_sides(caches, side_caches, shape, found, side_axes)
        self._copier = make_copier(
            caches, layout, shape, self._mapping, self.slot_bytes, self.num_slots, copy_path, sides
        )
        self._caches = self._copier.cache
        if self._stage_link is not None:
            self._stage_link.use_caches(self._caches)
        return layout

    # Questions.

    def lookup(
        self,
        hashes: BlockHashes,
        *,
        remote: bool = True,
        timeout_s: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Match:
        """Return how much of a chain is stored where. No side effect.

        Args:
            hashes: a run of a chain.
            remote: also ask the directory when this node does not have everything.
            timeout_s: for the answer; the configured one when None. An engine's scheduler passes a small one and takes
                TransferTimeout for "nothing".
            meanwhile: called while the answer is on its way.

        Returns:
            What each node has by itself. A load can do better than the longest: it puts prefixes together.

        Raises:
            NamespaceMismatch: the hashes are of another namespace.
            InvalidRequest: an argument is wrong.
            PeerLost: the node store is gone.
            TransferTimeout: no answer in time; the next lookup may be made at once.
        """
        chain = self._chain(hashes)
        limit_s = self._store.call_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        self._store.check_open()
        op = Op.LOOKUP_ALL if remote else Op.LOOKUP
        payload = encode(Ask(chain, _REMOTE_SHARE * limit_s)) if remote else chain.encode()
        until_s = clock.now_s() + limit_s
        connection = self._store.for_lookups.take(limit_s)
        try:
            left_s = max(0.0, until_s - clock.now_s())
            answer = connection.call(op, payload, timeout_s=left_s, meanwhile=meanwhile)
        finally:
            self._store.for_lookups.keep(connection)
        if not remote:
            return Match(num_local=decode_count(answer))
        (_, num_local), *others = decode_found(answer).nodes
        return Match(num_local=num_local, nodes=tuple(others))

    def map_presence(self) -> None:
        """Map what `is_surely_absent` reads; that says no to everything before. May be called again.

        Raises:
            StoreUnavailable: the node store is gone, or was restarted.
        """
        self._store.check_open()
        if self._presence is None:
            self._presence = PresenceView(self._store.path, self.epoch, timeout_s=self._store.call_timeout_s)

    def is_surely_absent(self, hashes: BlockHashes, *, remote: bool = True) -> bool:
        """Whether nothing of a chain is stored, where that can be told without a question: this waits for nobody.

        Args:
            hashes: a chain from its root on; its first block decides.
            remote: whether what other nodes have counts; then nothing is sure while the store knows of any.

        Returns:
            True when a lookup that came now would find nothing. False says nothing: `lookup` knows.

        Raises:
            NamespaceMismatch: the hashes are of another namespace.
        """
        chain, presence = self._chain(hashes), self._presence
        if presence is None or self._store.has_ended or self._lost or chain.start or not len(chain):
            return False
        return presence.is_absent(chain.data[:HASH_BYTES], remote=remote)

    def lease(self, hashes: BlockHashes, ttl_s: float = 30.0) -> Lease:
        """Pin the prefix of a chain that is in this node's memory.

        Returns:
            A lease that may be shorter than asked for, even empty. Release it, or let its time run out.

        Raises:
            NamespaceMismatch: the hashes are of another namespace.
            InvalidRequest: `ttl_s` is no time above 0, or over a day.
            StoreDraining: the node grants nothing any more.
        """
        check_ttl("ttl_s", ttl_s)
        chain = self._chain(hashes)
        asked_s = clock.now_s()
        question, answer = encode(Ask(chain, ttl_s)), b""
        try:
            answer = self._store.call(Op.LEASE, question)
            grant = decode_grant(answer)
            slots = grant.slots
            return Lease(
                grant.lease_id,
                hashes[: len(slots)],
                slots,
                asked_s + ttl_s - self.config.lease_margin_s,
                self.config.lease_margin_s,
                lambda lease_id: bool(decode_count(self._store.call(Op.RELEASE, encode(lease_id)))),
                lambda lease_id, ttl: bool(decode_count(self._store.call(Op.RENEW, encode(Renew(lease_id, ttl))))),
                self._slot_view,
                lambda: not (self._lost or self._store.has_ended),
            )
        except BaseException:
            self._give_back(answer)
            raise

    def pin(self, hashes: BlockHashes, *, soft: bool = False, ttl_s: float | None = None) -> Pinned:
        """Keep the prefix of a chain that is in this node's memory there, until `unpin` or this client's end.

        Args:
            hashes: the blocks wanted.
            soft: a preference instead of a promise: evicted last, when nothing else is left, and not counted
                against the quota of hard pins.
            ttl_s: end by itself after this long.

        Returns:
            What is kept; it may be shorter than asked for, even empty.

        Raises:
            NamespaceMismatch: the hashes are of another namespace.
            InvalidRequest: `ttl_s` is no time above 0, or over a day.
            PoolExhausted: the blocks are here, but the quota has no room for even the first; nothing changed.
            StoreDraining: the node grants nothing any more.
        """
        if ttl_s is not None and ttl_s != math.inf:
            check_ttl("ttl_s", ttl_s)
        chain = self._chain(hashes)
        question, answer = encode(AskPin(chain, soft, math.inf if ttl_s is None else ttl_s)), b""
        try:
            answer = self._store.call(Op.PIN, question)
            grant = decode_grant(answer)
            return Pinned(pin_id=grant.lease_id, num_blocks=len(grant.slots), num_refused=grant.num_refused)
        except BaseException:
            self._give_back(answer)
            raise

    def unpin(self, pinned: Pinned) -> bool:
        """End a pin; whether it was still held. May be called again, and says False then.

        Raises:
            InvalidRequest: this is nothing that `pin` returned.
        """
        if not isinstance(pinned, Pinned):
            raise InvalidRequest(f"wanted what pin() returned, got {type(pinned).__name__}")
        return bool(decode_count(self._store.call(Op.RELEASE, encode(pinned.pin_id))))

    def stats(self) -> dict[str, Any]:
        """Return the node store's counts. It asks its mover for some of them, and no other call waits for that."""
        self._store.check_open()
        with self._store.for_lookups.taken() as connection:
            return decode_counts(connection.call(Op.STATS, timeout_s=self._store.call_timeout_s))

    # Jobs.

    def save(self, hashes: BlockHashes, block_ids: object) -> Job[SaveResult]:
        """Store engine blocks; those that the store has already are skipped.

        The engine must not overwrite the blocks before the job is done, or was abandoned. A block becomes
        findable only when all its bytes are in place, and when the job is done other nodes can find it too. With a
        part of several, all ranks save the same hashes, and each one's job is done when all parts are there. If the
        namespace is cleared after this call, nothing of it is stored, however late its copies begin.

        Args:
            hashes: a chain from its root, or from a block that is stored.
            block_ids: the engine's blocks that hold the tokens of the hashes, in order: one for each hash when the
                block sizes are alike. All tokens of the hashes are stored, and no others.

        Raises:
            NamespaceMismatch, ChainBroken, InvalidRequest: an argument is wrong; nothing changed. ChainBroken
                comes from the job when the parent turns out not to be stored.
            LayoutMismatch: the tensors are not those that were registered; nothing is stored. From the job when they
                were replaced meanwhile.
        """
        copier, chain = self._registered(), self._chain(hashes)
        num_clears = self._clears.get(chain.namespace)  # Of now: a clearing may come before a thread does.
        chain.check_unique()
        pages = self._pages(copier, block_ids, chain)
        copier.check_unchanged()
        guard, limit_s = CopyGuard(pages.order), self._store.call_timeout_s
        deadline_s = clock.now_s() + self.config.transfer_timeout_s

        def run() -> Steps[SaveResult]:
            with self._store.for_jobs.taken() as connection, self._noting_stuck():
                saving = run_save(connection, copier, chain, pages, self.part, guard, limit_s, deadline_s, num_clears)
                return (yield from saving)

        return self._submit(Work(run), f"save of {len(chain)} blocks", guard, pages.order)

    def load(
        self,
        hashes: BlockHashes,
        block_ids: object,
        skip_prefix_tokens: int = 0,
        *,
        timeout_s: float | None = None,
        on_queued: Callable[[], None] | None = None,
        num_copy_threads: int = 0,
    ) -> Job[LoadResult]:
        """Bring stored blocks into the engine's cache, from this node's memory or from other nodes.

        Args:
            hashes: the blocks wanted, a run of a chain.
            block_ids: the engine's blocks for their tokens, in order: one for each hash when the block sizes are
                alike. Tokens before and behind the run in the first and the last one are not written.
            skip_prefix_tokens: tokens at the front that the engine has already, all of them at most: not one byte of
                them is written, whether or not they end at a block. With side tensors of a row for a whole block they
                have to.
            timeout_s: give up fetching so long after this call; the configured transfer timeout when None. A load whose
                time ends before a thread is free for it is not begun.
            on_queued: called on a thread of the client, if every block is leased and the copies of all are queued.
                Work that comes after `Job.wait_on` may then be launched, and what it computes may be used: the load
                is no more refused, it ends well, unless the device fails or its copies outlast the lease.
            num_copy_threads: that share the copies into a cache in host memory, whose owner knows what else its cores
                have to do; 0 for a quarter of them, one to four.

        Returns:
            A job; its result names the usable prefix and each block that is not. Blocks after the usable
            prefix may hold anything.

        Raises:
            NamespaceMismatch, InvalidRequest: an argument is wrong; nothing changed.
            LayoutMismatch: the tensors are not those that were registered. From the job when they were replaced
                meanwhile: nothing counts as loaded.
        """
        copier, chain = self._registered(), self._chain(hashes)
        timeout = self.config.transfer_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        check_count("num_copy_threads", num_copy_threads, 0, MAX_COPY_THREADS)
        pages = self._pages(copier, block_ids, chain, num_copy_threads)
        copier.check_unchanged()
        check_skip(self.space.shape, skip_prefix_tokens, len(chain))
        chain.check_unique()
        return self._load(copier, chain, pages, skip_prefix_tokens, timeout, f"load of {len(chain)} blocks", on_queued)

    def prefetch(self, hashes: BlockHashes, *, timeout_s: float | None = None) -> Job[LoadResult]:
        """Bring blocks from other nodes into this node's memory, without an engine.

        Args:
            hashes: the blocks wanted, a run of a chain.
            timeout_s: see `load`.

        Raises:
            NamespaceMismatch, InvalidRequest: an argument is wrong; nothing changed.
        """
        chain = self._chain(hashes)
        chain.check_unique()
        timeout = self.config.transfer_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        return self._load(None, chain, None, 0, timeout, f"prefetch of {len(chain)} blocks")

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for running jobs, give everything back and unmap the arena; may be called again.

        In a forked child it only lets go of the child's copies of descriptors. What jobs hold that outlast the time is
        given back when they are over. One that was interrupted is to be called again, and goes on.

        Args:
            timeout_s: for the jobs; `math.inf` waits for as long as they take.

        Raises:
            InvalidRequest: `timeout_s` is no time; nothing was closed.
        """
        timeout_s = min(check_seconds("timeout_s", timeout_s, math.inf), threading.TIMEOUT_MAX)
        if self._store.is_inherited():
            self._store.close(jobs_are_over=False)
            if self._presence is not None:
                self._presence.close()
            return
        self._store.end()
        if self._store.was_closed:
            return
        # Each step may be done again, by a call after one that was interrupted.
        ended, deadline_s = threading.Event(), clock.now_s() + timeout_s
        try:
            threading.Thread(target=self._end_jobs, args=(ended,), name="raykv-ending", daemon=True).start()
        except RuntimeError:  # No thread can be started, as when Python ends.
            self._end_jobs(ended, timeout_s)
        ended.wait(max(0.0, deadline_s - clock.now_s()))
        for jobs in (self._jobs, self._jobs_of_lost):
            if jobs is not None:
                jobs.await_callbacks(max(0.0, deadline_s - clock.now_s()))
        if self._presence is not None:
            self._presence.close()
        if self._stage_link is not None:
            self._stage_link.close()
        self._clears.leave()
        if not (have_ended := ended.is_set()):
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._unmap_late, args=(ended,), name="raykv-unmap", daemon=True).start()
        self._unmap(copies_are_over=have_ended)
        self._store.close(jobs_are_over=have_ended and not self._stuck)  # Last: from then on nothing is done again.

    def _end_jobs(self, ended: threading.Event, timeout_s: float | None = None) -> None:
        if not self._jobs.shutdown(timeout_s):
            return
        if (lost := self._jobs_of_lost) is not None:
            if not lost.shutdown(timeout_s):
                return
            self._unmapped_lost.wait(_CALL_OFF_S if timeout_s is None else timeout_s)
        ended.set()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Helpers.

    def _lose(self) -> None:
        """That life of the store is over: unmap its memory, or the next life may find no room beside it."""

        def unmap(jobs: JobThreads) -> None:
            with contextlib.ExitStack() as steps:
                # From the last to the first; each is done whatever the others raise.
                steps.callback(self._unmapped_lost.set)
                steps.callback(self._unmap, copies_are_over=True)
                if self._stage_link is not None:
                    steps.callback(self._stage_link.close)
                steps.callback(jobs.shutdown)  # Those that run fail; the ones after them never reach the memory.
                steps.callback(self._clears.leave)
                if self._presence is not None:
                    steps.callback(self._presence.close)

        with self._lock:
            if self._lost:
                return
            self._lost = True
            jobs, self._jobs = self._jobs, JobThreads()
            self._jobs_of_lost = jobs
        # Not under the lock, which the thread takes.
        try:
            threading.Thread(target=unmap, args=(jobs,), name="raykv-unmap", daemon=True).start()
        except RuntimeError:  # No thread can be started: `close` unmaps it.
            self._unmapped_lost.set()

    def _unmap(self, *, copies_are_over: bool) -> None:
        with self._lock:
            if self._unmapped:
                return
            self._unmapped = True
            copier, self._copier = self._copier, self._copier if self._lost else None
        copies_are_over = copies_are_over and not self._stuck
        if copier is not None and copies_are_over:
            copier.close()
        self._mapping.close(copies_are_over=copies_are_over)

    def _unmap_late(self, ended: threading.Event) -> None:
        """Unmap and give back what jobs still copied from or to when this client was closed before they were over."""
        while not ended.wait(_LATE_S):
            logger.warning("jobs of a closed client still run; what they hold is given back when they end")
        if not self._stuck:
            self._mapping.close(copies_are_over=True)
            self._store.say_goodbye()

    def _load(
        self,
        copier: EngineCopier | None,
        chain: Chain,
        pages: EnginePages | None,
        skip_tokens: int,
        timeout_s: float,
        what: str,
        on_queued: Callable[[], None] | None = None,
    ) -> Job[LoadResult]:
        order = pages.order if pages is not None else None
        guard, num_skipped = CopyGuard(order), skip_tokens // self.space.shape.block_size
        deadline_s = clock.now_s() + timeout_s

        def run() -> Steps[LoadResult]:
            if num_skipped >= len(chain):
                return LoadResult(num_blocks=len(chain))
            if (left_s := deadline_s - clock.now_s()) <= 0:
                return failed_load(num_skipped, pages, len(chain), TIMED_OUT_IN_QUEUE)
            try:
                with self._store.for_jobs.taken() as connection, self._noting_stuck():
                    return (
                        yield from run_load(
                            connection, copier, chain, pages, skip_tokens, guard, self.config, left_s, on_queued
                        )
                    )
            except (StoreUnavailable, TransferError) as error:
                return failed_load(num_skipped, pages, len(chain), f"store_lost: {error}")

        return self._submit(Work(run), what, guard, order)

    def _submit(
        self,
        work: Work[Any],
        what: str,
        guard: CopyGuard,
        order: CopyOrder | None,
        start: Callable[[Work[Any]], None] | None = None,
    ) -> Job[Any]:
        jobs = self._jobs

        def abandon(timeout_s: float) -> bool:
            is_given_up = guard.abandon(timeout_s)
            jobs.wake(work)
            return is_given_up

        try:
            # Before it is started: an interrupt from then on has to end it.
            wait_on = order.wait_on if order is not None else None
            job: Job[Any] = Job(work.future, what, abandon, wait_on, work, jobs.call)
            if order is not None:
                work.future.add_done_callback(lambda _: order.end())
            self._store.check_open()
            (start or jobs.start)(work)
            return job
        except BaseException:
            self._call_off(work, guard, jobs)
            raise

    def _call_off(self, work: Work[Any], guard: CopyGuard, jobs: JobThreads | None = None) -> None:
        """Let nothing of work touch the engine's blocks any more, however far its start came, and have it end.

        What it holds it gives back by itself. That is not done here, for it may still use it.
        """
        jobs = self._jobs if jobs is None else jobs
        work.is_called_off = True
        work.future.cancel()
        is_given_up = guard.abandon(0.0)
        jobs.wake(work)
        jobs.settle(work)
        while not is_given_up and not work.future.done():  # A copy has to end before the caller goes on.
            is_given_up = guard.abandon(_CALL_OFF_S)

    def _give_back(self, answer: bytes) -> None:
        """Give back what an answer grants that an interrupt kept from the caller; empty where none was heard.

        What was granted in an answer that nobody heard the store takes back, see `ControlClient.unheard`.
        """
        if answer:
            with contextlib.suppress(KVStoreError):
                self._store.call(Op.RELEASE, encode(decode_grant(answer).lease_id))

    def _chain(self, hashes: BlockHashes) -> Chain:
        self._store.check_process()
        if not isinstance(hashes, BlockHashes):
            raise InvalidRequest(
                f"hashes: wanted BlockHashes of space.block_hashes() or space.wrap(), got {type(hashes).__name__}"
            )
        if hashes.namespace_digest != self.space.digest:
            raise NamespaceMismatch(
                f"wanted hashes of namespace {self.space.digest.hex()[:12]} ({self.space.model!r}), got some of "
                f"{hashes.namespace_digest.hex()[:12]}; make them with this client's space"
            )
        if len(hashes.data) > MAX_CHAIN_BYTES:
            raise InvalidRequest(
                f"hashes: wanted at most {MAX_CHAIN_BYTES // HASH_BYTES} in one call, got {len(hashes)}; "
                "pass them in shorter runs"
            )
        return hashes

    def _registered(self) -> EngineCopier:
        self._store.check_process()
        if self._copier is None:
            self._store.check_open()
            raise InvalidRequest("no cache is registered; call register_kv_caches(...) first")
        return self._copier

    def _pages(self, copier: EngineCopier, block_ids: object, chain: Chain, num_threads: int = 0) -> EnginePages:
        pages = engine_pages(block_ids, copier.layout, self.space.shape.block_size, chain.start, len(chain))
        return ordered(pages, copier, num_threads)

    def _slot_view(self, slot: int) -> memoryview:
        self._store.check_open()
        if self._lost:
            raise StoreUnavailable("the node store of this lease is gone; make a new client and take a new lease")
        start = slot * self.slot_bytes
        return self._arena.memory[start : start + self.space.shape.block_bytes].toreadonly()


def _end_collected(store: StoreConnections, mapping: ArenaMapping) -> None:
    """Give back what a client held that nobody has any more: no job of it runs, or its thread would have it."""
    if store.was_closed:
        return
    store.end()
    store.close(jobs_are_over=True, waits=False)  # A collection may come anywhere.
    if not store.is_inherited():
        mapping.close(copies_are_over=True)

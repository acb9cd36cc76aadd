"""A client's attachment to one epoch of its store: connections, mapped memory, threads."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from kvstore.blocks.chain import HASH_BYTES, BlockHashes
from kvstore.blocks.codec import decode_counts, encode
from kvstore.blocks.hashing import Namespace, space_of_tenant
from kvstore.blocks.part import Part
from kvstore.bounds import MAX_CHAIN_BYTES, check_count, check_node_id, check_seconds, clip, parse_bytes
from kvstore.client.connections import StoreConnections
from kvstore.client.handoff.stage_link import StageLink
from kvstore.client.job_threads import JobThreads
from kvstore.client.results import HandoffRoute
from kvstore.engine.copier import EngineCopier
from kvstore.errors import CopyStuck, InvalidRequest, KVStoreError, NamespaceMismatch, StoreUnavailable
from kvstore.memory.clears import ClearCounts
from kvstore.memory.mapping import ArenaMapping
from kvstore.memory.presence_view import PresenceView, map_clears
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Attach
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

_LATE_S = 600.0
_MOST_STAGE_BYTES = 1 << 62
#: Limit for a lost store's memory to be unmapped, where `close` waits on a thread of its own.
_UNMAP_S = 5.0
#: Kept until the process ends, which should be soon: collecting one would unmap memory that a device may still write
#: to, and give its slots back.
_with_stuck_copies: set[Attachment] = set()


class Attachment:
    """A client's attachment to one epoch of its store.

    Every job and every lease refers to it. So it is collected, and gives back what it holds, when nothing uses it.

    Attributes:
        clears: how often namespaces were cleared; reads the store's memory.
        stage: the link to the stage of the cache's GPU; nothing is attached before `StageLink.attach`.
        copier: copies to and from the registered cache; None without one, see `registered`.
        is_lost: whether that epoch of the store has ended.
        is_stuck: whether copies of a job did not end, so that nothing they may use is given back.

    Raises:
        StoreNotRunning, IncompatibleStore, ConfigError: see `Client`.
    """

    def __init__(self, control_path: str, space: Namespace, part: Part, tenant: str) -> None:
        self.part = part
        self.is_lost = self.is_unmapped = self.is_stuck = False
        # Reentrant: a signal handler may close this.
        self._lock = threading.RLock()
        #: Threads of the ended epoch, and an event that is set when its memory is unmapped.
        self._threads_of_lost: JobThreads | None = None
        self._unmapped_lost = threading.Event()
        self.copier: EngineCopier | None = None
        self._presence: PresenceView | None = None
        # The store may end during the first question: create everything that `lose` closes before it.
        self.threads, self.clears = JobThreads(), ClearCounts()
        lose = weakref.WeakMethod(self.lose)
        self.store = StoreConnections(control_path, lambda: (call := lose()) and call(), tenant)
        self.stage = StageLink(self.store.ask)
        self.arena = self.store.arena
        self.mapping = ArenaMapping(self.arena)
        try:
            #: The namespace of the blocks: that which was given, or the tenant's own where tenants are private.
            self.space = space_of_tenant(space, tenant, is_private=self.store.config.private_tenants)
            request = Attach(self.space.digest, space.shape.block_bytes)
            answer = decode_counts(self.store.call(Op.ATTACH, encode(request)))
            self.clears = map_clears(control_path, self.store.epoch, timeout_s=self.store.call_timeout_s)
        except BaseException as error:  # An interrupt as well; after one, do not wait for the store.
            self.store.close(jobs_are_over=False, waits=isinstance(error, KVStoreError))
            self.arena.close()
            raise
        self.slot_bytes, self.num_slots = int(answer["slot_bytes"]), int(answer["num_slots"])
        self.store.slot_bytes = self.slot_bytes
        with contextlib.suppress(RuntimeError):  # No thread: pages are mapped one by one, on first use.
            threading.Thread(target=self.arena.populate, name="raykv-populate", daemon=True).start()
        # Not at process exit: jobs may still run then, and the exit itself tells the store.
        weakref.finalize(self, _end_collected, self.store, self.mapping).atexit = False

    def register(self, copier: EngineCopier) -> None:
        """Copy to and from another cache from now on. Running jobs keep the cache they began with."""
        self.copier = copier
        self.stage.use_caches(copier.cache)

    def registered(self) -> EngineCopier:
        """Return the copier of the registered cache.

        Raises:
            InvalidRequest: there is none.
            StoreUnavailable: there is none, because the client was closed.
        """
        self.store.check_process()
        if (copier := self.copier) is None:
            self.store.check_open()
            raise InvalidRequest("no cache is registered; call register_kv_caches(...) first")
        return copier

    def attach_stage(self, staging: str | int, peers: Sequence[str]) -> HandoffRoute:
        """Attach a stage, which replaces the earlier one; see `Client.attach_handoff`."""
        caches = self.registered().cache
        num_bytes = check_count("staging", parse_bytes(staging), 1, _MOST_STAGE_BYTES)
        nodes = _checked_peers(peers)
        self.stage.close()
        self.stage = StageLink(self.store.ask, caches, num_bytes, nodes)
        return self.stage.attach()

    def chain(self, hashes: BlockHashes) -> BlockHashes:
        """Check hashes that a caller passed, and return them.

        Raises:
            InvalidRequest: they are not `BlockHashes`, or too many.
            NamespaceMismatch: they are of another namespace.
        """
        self.store.check_process()
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

    def transfer_s(self, timeout_s: float | None) -> float:
        """Return the timeout of a transfer: the configured one when None is given."""
        return self.store.config.transfer_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)

    def map_presence(self) -> None:
        """Map the memory that `is_absent` reads; see `Client.map_presence`."""
        self.store.check_open()
        if self._presence is None:
            self._presence = PresenceView(self.store.path, self.store.epoch, timeout_s=self.store.call_timeout_s)

    def is_absent(self, chain: BlockHashes, *, remote: bool) -> bool:
        """Return whether mapped memory shows that no block of a chain is stored; see `Client.is_surely_absent`."""
        presence = self._presence
        if presence is None or not self.is_open() or chain.start or not len(chain):
            return False
        return presence.is_absent(chain.data[:HASH_BYTES], remote=remote)

    def is_open(self) -> bool:
        """Return whether the client is open and that epoch of the store has not ended."""
        return not (self.is_lost or self.store.has_ended)

    def block_in(self, slot: int) -> memoryview:
        """Return the bytes of the block in a slot, read-only.

        Raises:
            StoreUnavailable: the client was closed, or that epoch of the store has ended.
        """
        self.store.check_open()
        if self.is_lost:
            raise StoreUnavailable("the node store of this lease is gone; make a new client and take a new lease")
        start = slot * self.slot_bytes
        return self.arena.memory[start : start + self.space.shape.block_bytes].toreadonly()

    @contextlib.contextmanager
    def noting_stuck(self) -> Iterator[None]:
        """If the body raises CopyStuck, keep this attachment until the process ends."""
        try:
            yield
        except CopyStuck:
            self.is_stuck = True
            _with_stuck_copies.add(self)
            raise

    def lose(self) -> None:
        """End this attachment after its store ended. Unmap the memory, which the next epoch may need."""

        def unmap(threads: JobThreads) -> None:
            with contextlib.ExitStack() as steps:
                # Run from the last to the first; each runs whatever the others raise.
                steps.callback(self._unmapped_lost.set)
                steps.callback(self.unmap, copies_are_over=True)
                steps.callback(self.stage.close)
                steps.callback(threads.shutdown)  # Running jobs fail; later ones never reach the memory.
                steps.callback(self.clears.leave)
                if self._presence is not None:
                    steps.callback(self._presence.close)

        with self._lock:
            if self.is_lost:
                return
            self.is_lost = True
            threads, self.threads = self.threads, JobThreads()
            self._threads_of_lost = threads
        # Not under the lock: the thread takes it.
        try:
            threading.Thread(target=unmap, args=(threads,), name="raykv-unmap", daemon=True).start()
        except RuntimeError:  # No thread can be started: `close` unmaps the memory.
            self._unmapped_lost.set()

    def close(self, timeout_s: float) -> None:
        """Wait for running jobs, give everything back and unmap the arena; see `Client.close`."""
        timeout_s = min(check_seconds("timeout_s", timeout_s, math.inf), threading.TIMEOUT_MAX)
        if self.store.is_inherited():
            self.store.close(jobs_are_over=False)
            if self._presence is not None:
                self._presence.close()
            return
        self.store.end()
        if self.store.was_closed:
            return
        # Each step may be repeated, by a call after an interrupted one.
        ended, deadline_s = threading.Event(), clock.now_s() + timeout_s
        try:
            threading.Thread(target=self.end_jobs, args=(ended,), name="raykv-ending", daemon=True).start()
        except RuntimeError:  # No thread can be started, for example at interpreter exit.
            self.end_jobs(ended, timeout_s)
        ended.wait(max(0.0, deadline_s - clock.now_s()))
        for threads in (self.threads, self._threads_of_lost):
            if threads is not None:
                threads.await_callbacks(max(0.0, deadline_s - clock.now_s()))
        if self._presence is not None:
            self._presence.close()
        self.stage.close()
        self.clears.leave()
        if not (have_ended := ended.is_set()):
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._unmap_late, args=(ended,), name="raykv-unmap", daemon=True).start()
        self.unmap(copies_are_over=have_ended)
        self.store.close(jobs_are_over=have_ended and not self.is_stuck)  # Last: after it no step is repeated.

    def end_jobs(self, ended: threading.Event, timeout_s: float | None = None) -> None:
        """Take no more jobs. Set `ended` when none runs and a lost store's memory is unmapped."""
        if not self.threads.shutdown(timeout_s):
            return
        if (lost := self._threads_of_lost) is not None:
            if not lost.shutdown(timeout_s):
                return
            self._unmapped_lost.wait(_UNMAP_S if timeout_s is None else timeout_s)
        ended.set()

    def unmap(self, *, copies_are_over: bool) -> None:
        """Unmap the arena, once; memory that copies may still use stays mapped."""
        with self._lock:
            if self.is_unmapped:
                return
            self.is_unmapped = True
            copier, self.copier = self.copier, self.copier if self.is_lost else None
        copies_are_over = copies_are_over and not self.is_stuck
        if copier is not None and copies_are_over:
            copier.close()
        self.mapping.close(copies_are_over=copies_are_over)

    def _unmap_late(self, ended: threading.Event) -> None:
        """After `close`, wait for jobs that outlasted it. Then unmap and give back what they used."""
        while not ended.wait(_LATE_S):
            logger.warning("jobs of a closed client still run; what they hold is given back when they end")
        if not self.is_stuck:
            self.mapping.close(copies_are_over=True)
            self.store.say_goodbye()


def _checked_peers(peers: object) -> tuple[str, ...]:
    try:
        nodes = tuple(cast(Iterable[object], peers)) if not isinstance(peers, str | bytes) else None
    except TypeError:
        nodes = None
    if nodes is None:
        raise InvalidRequest(f"peers: wanted a list of ids of nodes, got {clip(peers)}; put a single one in a list")
    return tuple(check_node_id("peers", peer) for peer in nodes)


def _end_collected(store: StoreConnections, mapping: ArenaMapping) -> None:
    """Give back what a collected client held. None of its jobs runs: a job's thread would refer to it."""
    if store.was_closed:
        return
    store.end()
    store.close(jobs_are_over=True, waits=False)  # A collection may run anywhere, so do not wait.
    if not store.is_inherited():
        mapping.close(copies_are_over=True)

"""Run a mover's READs: one queue per peer, in chunks, and the READs that were given up but may still write."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.blocks.codec import encode
from kvstore.errors import PeerLost, ProtocolError, TransferError, TransferTimeout
from kvstore.mover.messages import AddPeer, MoverDone, MoverRead, MoverWake
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState, ReadTotals, Transport
from kvstore.rpc.framing import Op, pack_error

logger = logging.getLogger(__name__)

_WINDOW = 3
#: How often, and for how long, one READ is polled before other work gets its turn.
_POLLS_PER_STEP, _STEP_S = 32, 5e-4


@dataclass(slots=True)
class _Job:
    read: MoverRead
    ends: list[int]
    received_s: float
    started_s: float
    next_chunk: int = 0
    done_blocks: int = 0
    num_descriptors: int = 0
    running: deque[tuple[int, int]] = field(default_factory=deque)


@dataclass(slots=True)
class _Waking:
    """A READ for which no caller waits, and its handle while it runs."""

    request: ReadRequest
    handle: int | None = None


class Reads:
    """The READs of one mover. A peer that stopped delays no other. Used on one thread.

    `tell` sends a report to the store.
    """

    def __init__(self, transport: Transport, tell: Callable[[Op, bytes], None]) -> None:
        self._transport, self._tell = transport, tell
        self.jobs: dict[str, deque[_Job]] = {}
        self.told_of: dict[str, PeerDescription] = {}
        #: Peers whose connection broke, until they are added again: their movers may still live.
        self._broken: set[str] = set()
        self._to_add: dict[str, PeerDescription] = {}
        #: Lives of peers to forget, once none of their READs runs any more.
        self.to_forget: set[str] = set()
        self._last_read_id = 0
        #: When a READ last came, or a chunk of one arrived.
        self.moved_s = 0.0
        #: Peer, and handles that still run, of each READ that was given up.
        self.abandoned: dict[int, tuple[str, list[int]]] = {}
        #: Wake-up READs by the message for which each is posted, and those that run now.
        self.waking: dict[bytes, _Waking] = {}
        self.woken: list[_Waking] = []
        self.woken_totals = ReadTotals()

    def add(self, read: MoverRead) -> None:
        """Queue a READ.

        Raises:
            ProtocolError: it came before, or its peer is not known.
        """
        peer = read.request.peer
        # A READ done twice would write to slots that are published, or have another owner by now.
        if read.read_id <= self._last_read_id or peer not in self.told_of:
            raise ProtocolError(
                f"READ {read.read_id} of {peer}: wanted one later than {self._last_read_id}, of a peer that was named "
                "before"
            )
        self._last_read_id = read.read_id
        self.moved_s = now_s = time.monotonic()
        self.jobs.setdefault(peer, deque()).append(_Job(read, read.chunk_ends.tolist(), now_s, now_s))

    def add_peer(self, added: AddPeer) -> None:
        """Note how to read from a peer; the transport is told before its first READ."""
        peer = added.peer
        self.told_of[peer] = added.description
        if peer in self.to_forget:
            self.to_forget.remove(peer)  # The transport still has it, because one of its READs runs.
        else:
            self._to_add[peer] = added.description

    def forget_peer(self, peer: str) -> None:
        """Forget a peer, once none of its READs runs any more."""
        self.told_of.pop(peer, None)
        self.to_forget.add(peer)
        self.waking = {word: it for word, it in self.waking.items() if it.request.peer != peer}

    def wake_by(self, wake: MoverWake) -> None:
        """Note which READ to do for a later `wake`."""
        self.waking[wake.word] = _Waking(wake.request)

    def wake(self, word: bytes) -> None:
        """Read slots that hold no blocks, so that this process and the lane are warm for the next READ."""
        waking = self.waking.get(word)
        if waking is None or waking.handle is not None or waking.request.peer in self._to_add:
            return
        try:
            waking.handle = self._transport.post(waking.request)
        except TransferError as error:
            logger.debug("mover: a lane was not woken: %s", error)  # The next READ fails too, and reports it.
        else:
            self.woken.append(waking)

    def _release_woken(self) -> None:
        for waking in list(self.woken):
            assert waking.handle is not None, "posted"
            before = self._transport.totals
            if self._is_terminal(waking.handle):
                self.woken.remove(waking)
                waking.handle = None
                self.woken_totals += self._transport.totals - before

    def advance(self, *, may_release: bool) -> None:
        """Do the next step of each READ; with `may_release`, also of wake-up READs that have ended."""
        for peer, jobs in list(self.jobs.items()):
            try:
                self._advance_job(jobs[0])
            except TransferError as error:
                self._fail(jobs[0], error)
            if not jobs:
                del self.jobs[peer]
        if self.woken and not self.jobs and may_release:
            self._release_woken()  # Not while a READ runs or comes soon: it would delay that READ.
        if self.abandoned:
            self._poll_abandoned()
        if self.to_forget:
            self._forget_peers()

    def _forget_peers(self) -> None:
        for peer in self.to_forget - self._busy_peers() - self.jobs.keys():
            self.to_forget.discard(peer)
            self._broken.discard(peer)
            if self._to_add.pop(peer, None) is None:
                try:
                    self._transport.forget_peer(peer)
                except TransferError as error:
                    logger.debug("mover: %s", error)

    def _busy_peers(self) -> set[str]:
        """Return the peers with abandoned READs or wake-up READs that still run."""
        return {peer for peer, _ in self.abandoned.values()} | {waking.request.peer for waking in self.woken}

    def _advance_job(self, job: _Job) -> None:
        request, peer = job.read.request, job.read.request.peer
        # Before anything is posted: a READ whose time ended while it was queued must not begin.
        if time.monotonic() - job.received_s > job.read.timeout_s:
            raise TransferTimeout(
                f"READ of {len(request.local_slots)} blocks from {peer}: not finished after {job.read.timeout_s} s, "
                f"{job.done_blocks} arrived"
            )
        if job.next_chunk == 0 and not job.running:
            job.started_s = time.monotonic()
            # Add the peer here, not when its message comes: then an error fails this READ, and the next tries again.
            if peer in self._to_add:
                self._transport.add_peer(peer, self._to_add[peer])
                del self._to_add[peer]
            elif peer in self._broken - self._busy_peers() and peer in self.told_of:
                self._transport.add_peer(peer, self.told_of[peer])
                self._broken.discard(peer)
        while job.next_chunk < len(job.ends) and len(job.running) < _WINDOW:
            last = job.next_chunk == len(job.ends) - 1
            if last and job.running and request.notification:
                break  # The notification must not overtake an earlier chunk.
            start = job.ends[job.next_chunk - 1] if job.next_chunk else 0
            end = job.ends[job.next_chunk]
            part = ReadRequest(
                peer=peer,
                block_bytes=request.block_bytes,
                local_slots=request.local_slots[start:end],
                remote_slots=request.remote_slots[start:end],
                notification=self._notification(request) if last else b"",
            )
            job.running.append((self._transport.post(part), end))
            job.next_chunk += 1
            # On a same-host lane the chunk is already there: report it at once, so that it is copied out meanwhile.
            self._collect(job)
        until_s = time.monotonic() + _STEP_S
        for _ in range(_POLLS_PER_STEP):
            self._collect(job)
            if len(job.running) < _WINDOW or time.monotonic() > until_s:
                break
        if not job.running and job.next_chunk == len(job.ends):
            self.jobs[peer].popleft()

    def _notification(self, request: ReadRequest) -> bytes:
        # The peer drops the pins of the whole lease on a notification, but an abandoned READ may still use them.
        return b"" if any(peer == request.peer for peer, _ in self.abandoned.values()) else request.notification

    def _collect(self, job: _Job) -> None:
        done: list[int] = []
        try:
            while job.running and (state := self._transport.poll(job.running[0][0])) is not ReadState.RUNNING:
                if state is ReadState.LOST:
                    raise TransferError(
                        f"READ from {job.read.request.peer} failed after a part of it was posted, which may still write"
                    )
                handle, job.done_blocks = job.running.popleft()
                done.append(handle)
        finally:
            # Chunks that were in place before another chunk failed are reported and released too.
            if done:
                self._finish(job, done)

    def _finish(self, job: _Job, done: list[int]) -> None:
        self.moved_s = time.monotonic()
        last = not job.running and job.next_chunk == len(job.ends)
        if not last:
            # Report first: the worker copies these blocks out while the next ones are read.
            self._report(job, last=False, terminal=False)
        for handle in done:
            before = self._transport.totals.num_descriptors
            self._transport.release(handle)
            job.num_descriptors += self._transport.totals.num_descriptors - before
        if last:
            self._report(job, last=True, terminal=True)

    def _report(self, job: _Job, *, last: bool, terminal: bool, error: bytes = b"") -> None:
        done = MoverDone(
            read_id=job.read.read_id,
            num_blocks=job.done_blocks,
            last=last,
            terminal=terminal,
            seconds=time.monotonic() - job.started_s,
            num_descriptors=job.num_descriptors,
            error=error,
        )
        self._tell(Op.MOVER_DONE, encode(done))

    def _fail(self, job: _Job, error: TransferError) -> None:
        peer = job.read.request.peer
        self.jobs[peer].remove(job)
        if isinstance(error, PeerLost):
            self._broken.add(peer)
        left = [handle for handle, _ in job.running if not self._is_terminal(handle)]
        self._report(job, last=True, terminal=not left, error=pack_error(error))
        if left:
            self.abandoned[job.read.read_id] = (peer, left)

    def _poll_abandoned(self) -> None:
        for read_id, (_, handles) in list(self.abandoned.items()):
            handles[:] = [handle for handle in handles if not self._is_terminal(handle)]
            if not handles:
                del self.abandoned[read_id]
                self._tell(Op.MOVER_TERMINAL, encode(read_id))

    def _is_terminal(self, handle: int) -> bool:
        """Return whether a READ is terminal; if so, release its handle."""
        try:
            if self._transport.poll(handle) is not ReadState.DONE:
                return False
        except TransferError as error:
            logger.debug("mover: a READ without a caller ended: %s", error)
        self._transport.release(handle)
        return True

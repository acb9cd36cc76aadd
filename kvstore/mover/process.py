"""The mover: the process of a node that owns NIXL's agent and moves bytes into the arena.

It holds no pool state. It is a separate process because NIXL can abort the process in which it runs, and because
killing that process is the only known way to stop an abandoned READ. The node store sends it requests over the
control socket. One thread drives NIXL; it sleeps in the kernel while nothing is in flight and no remote lease is open.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import deque
from dataclasses import asdict, dataclass, field

from kvstore.blocks.codec import decode_count, decode_text, encode
from kvstore.errors import PeerLost, ProtocolError, RegistrationFailed, TransferError, TransferTimeout
from kvstore.mover.messages import (
    MoverDone,
    MoverRead,
    MoverReady,
    decode_add_peer,
    decode_mover_read,
    decode_mover_wake,
    decode_new_stage,
    decode_slots,
    decode_spill,
)
from kvstore.mover.slabs import Slabs
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState, ReadTotals, Transport
from kvstore.rpc.framing import RECEIVE_BYTES, Decoder, Flag, Message, Op, pack_error, packets_of
from kvstore.rpc.messages import NOTIFICATION

logger = logging.getLogger(__name__)

_WINDOW = 3
#: How often, and for how long, one READ is polled before other work gets its turn.
_POLLS_PER_STEP, _STEP_S = 32, 5e-4
_ABANDONED_POLL_S = 0.02
_NOTIFICATION_POLL_S = 0.002
#: How long the mover stays awake for an announced READ: waking up takes a tenth of the time of such a READ.
_AWAKE_S = 0.003
#: If no chunk of any READ arrived for this long, the mover polls less often: a peer may have stopped.
_STALLED_AFTER_S, _STALLED_POLL_S = 0.1, 0.001


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


@dataclass(slots=True)
class _Abandoned:
    peer: str
    handles: list[int]


class Mover:
    """Runs READs for one node store. Each peer has its own queue, so that a peer that stopped delays no other.

    Args:
        sock: the SEQPACKET connection to the node store, owned by this object.
        transport: owned by this object; driven by `run`'s thread only.
        slabs: the same object, if it can make stages and copy out of them.
    """

    def __init__(self, sock: socket.socket, transport: Transport, slabs: Slabs | None = None) -> None:
        self._sock, self._transport, self.slabs = sock, transport, slabs
        self._decoder = Decoder()
        # Reused for each message: a new buffer would come from the kernel each time, page by page.
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.jobs: dict[str, deque[_Job]] = {}
        self.told_of: dict[str, PeerDescription] = {}
        #: Peers whose connection broke, until they are added again: their movers may still live.
        self._broken: set[str] = set()
        self._to_add: dict[str, PeerDescription] = {}
        #: Lives of peers to forget, once none of their READs runs any more.
        self.to_forget: set[str] = set()
        self._last_read_id = 0
        self._moved_s = 0.0
        self.abandoned: dict[int, _Abandoned] = {}
        #: Wake-up READs by the word for which each is posted, and those that run now.
        self.waking: dict[bytes, _Waking] = {}
        self.woken: list[_Waking] = []
        self._woken_totals = ReadTotals()
        self._num_remote_leases = 0
        self.awake_until_s = 0.0
        self._stopping = False

    def run(self, address: int) -> None:
        """Announce this mover to its store and serve until the store closes the connection.

        Raises:
            ProtocolError: the store sent an invalid message, so the two do not agree on the state of the arena.
                The caller must end this process, which ends its READs too.
        """
        self.send(Op.MOVER_READY, encode(MoverReady(self._transport.describe(), address)))
        try:
            while not self._stopping:
                self._receive(self.pause_s())
                self._advance()
        except (OSError, EOFError) as error:
            logger.info("mover: the node store closed the connection (%s)", error)
        finally:
            self._sock.close()

    def stop(self) -> None:
        """Make `run` return after its current step."""
        self._stopping = True

    def pause_s(self) -> float:
        """Return how long `run` may sleep for a message; 0 while a READ moves bytes."""
        if self.jobs:
            return 0.0 if time.monotonic() - self._moved_s < _STALLED_AFTER_S else _STALLED_POLL_S
        if self.awake_until_s:
            if time.monotonic() < self.awake_until_s:
                return 0.0
            self.awake_until_s = 0.0
        if self._num_remote_leases:
            return _NOTIFICATION_POLL_S
        return _ABANDONED_POLL_S if self.abandoned or self.woken else 5.0

    def _receive(self, timeout_s: float) -> None:
        # Not select(): it cannot take a file descriptor above 1023.
        if not self._poll.poll(timeout_s * 1000):
            return
        data = self._received[: self._sock.recv_into(self._received)]
        if not data:
            raise EOFError("closed")
        message = self._decoder.packet(data)
        if message is not None:
            self._serve(message)

    def _serve(self, message: Message) -> None:
        if message.op is Op.MOVER_READ:
            read = decode_mover_read(message.payload)
            # A READ done twice would write to slots that are published, or have another owner by now.
            if read.read_id <= self._last_read_id or read.request.peer not in self.told_of:
                raise ProtocolError(
                    f"READ {read.read_id} of {read.request.peer}: wanted one later than {self._last_read_id}, "
                    f"of a peer that was named before"
                )
            self._last_read_id = read.read_id
            ends = read.chunk_ends.tolist()
            self._moved_s = now_s = time.monotonic()
            self.jobs.setdefault(read.request.peer, deque()).append(_Job(read, ends, now_s, now_s))
        elif message.op is Op.MOVER_SOON:
            self.awake_until_s = time.monotonic() + _AWAKE_S
            self.wake(message.payload)
        elif message.op is Op.MOVER_WAKE:
            wake = decode_mover_wake(message.payload)
            self.waking[wake.word] = _Waking(wake.request)
        elif message.op is Op.MOVER_EXPECT:
            self._num_remote_leases = decode_count(message.payload)
        elif message.op is Op.ATTACH:
            slots = decode_slots(message.payload)
            self._transport.set_slots(slots.slot_bytes, slots.num_slots)
        elif message.op is Op.MOVER_ADD_PEER:
            self._add_peer(message)
        elif message.op is Op.MOVER_FORGET_PEER:
            self.told_of.pop(peer := decode_text(message.payload), None)
            self.to_forget.add(peer)
            self.waking = {word: it for word, it in self.waking.items() if it.request.peer != peer}
        elif message.op is Op.MOVER_STATS:
            answer = asdict(self._transport.totals - self._woken_totals)
            self.send(Op.MOVER_STATS, encode(answer), Flag.REPLY, message.request)
        elif message.op in (Op.MOVER_STAGE, Op.MOVER_SPILL):
            self._answer_of_slabs(message)

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
            try:
                if self._transport.poll(waking.handle) is not ReadState.DONE:
                    continue
            except TransferError as error:
                logger.debug("mover: a lane was not woken: %s", error)
            before = self._transport.totals
            self._transport.release(waking.handle)
            self.woken.remove(waking)
            waking.handle = None
            self._woken_totals += self._transport.totals - before

    def _answer_of_slabs(self, message: Message) -> None:
        try:
            if self.slabs is None:
                raise RegistrationFailed("wanted a mover that can stage blocks on a GPU, got one that cannot")
            if message.op is Op.MOVER_STAGE:
                answer = encode(self.slabs.stage(decode_new_stage(message.payload)))
            else:
                self.slabs.spill(decode_spill(message.payload))
                answer = b""
        except TransferError as error:
            self.send(message.op, pack_error(error), Flag.ERROR, message.request)
        else:
            self.send(message.op, answer, Flag.REPLY, message.request)

    def _add_peer(self, message: Message) -> None:
        added = decode_add_peer(message.payload)
        peer = added.peer
        self.told_of[peer] = added.description
        if peer in self.to_forget:
            self.to_forget.remove(peer)  # The transport still has it, because one of its READs runs.
            return
        self._to_add[peer] = added.description

    def _advance(self) -> None:
        for peer, jobs in list(self.jobs.items()):
            try:
                self._advance_job(jobs[0])
            except TransferError as error:
                self._fail(jobs[0], error)
            if not jobs:
                del self.jobs[peer]
        if self.woken and not self.jobs and not self.awake_until_s:
            self._release_woken()  # Not while a READ runs or comes soon: it would delay that READ.
        if self.abandoned:
            self._poll_abandoned()
        if self.to_forget:
            self._forget_peers()
        if self._num_remote_leases:
            notes = [n for n in self._transport.notifications() if len(n) == NOTIFICATION.size]
            if notes:
                self.send(Op.MOVER_NOTIFICATIONS, encode(b"".join(notes)))

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
        left = {left.peer for left in self.abandoned.values()}
        return left | {waking.request.peer for waking in self.woken}

    def _advance_job(self, job: _Job) -> None:
        read = job.read
        # Before anything is posted: a READ whose time ended while it was queued must not begin.
        if time.monotonic() - job.received_s > read.timeout_s:
            raise TransferTimeout(
                f"READ of {len(read.request.local_slots)} blocks from {read.request.peer}: not finished after "
                f"{read.timeout_s} s, {job.done_blocks} arrived"
            )
        if job.next_chunk == 0 and not job.running:
            job.started_s = time.monotonic()
            # Add the peer here, not when its message comes: then an error fails this READ, and the next tries again.
            if read.request.peer in self._to_add:
                self._transport.add_peer(read.request.peer, self._to_add[read.request.peer])
                del self._to_add[read.request.peer]
            elif read.request.peer in self._broken - self._busy_peers() and read.request.peer in self.told_of:
                self._transport.add_peer(read.request.peer, self.told_of[read.request.peer])
                self._broken.discard(read.request.peer)
        while job.next_chunk < len(job.ends) and len(job.running) < _WINDOW:
            last = job.next_chunk == len(job.ends) - 1
            if last and job.running and read.request.notification:
                break  # The notification must not overtake an earlier chunk.
            start = job.ends[job.next_chunk - 1] if job.next_chunk else 0
            end = job.ends[job.next_chunk]
            part = ReadRequest(
                peer=read.request.peer,
                block_bytes=read.request.block_bytes,
                local_slots=read.request.local_slots[start:end],
                remote_slots=read.request.remote_slots[start:end],
                notification=self._notification(job) if last else b"",
            )
            handle = self._transport.post(part)
            job.next_chunk += 1
            job.running.append((handle, end))
            # On a same-host lane the chunk is already there: report it at once, so that it is copied out meanwhile.
            self._collect(job)
        until_s = time.monotonic() + _STEP_S
        for _ in range(_POLLS_PER_STEP):
            self._collect(job)
            if len(job.running) < _WINDOW or time.monotonic() > until_s:
                break
        if not job.running and job.next_chunk == len(job.ends):
            self.jobs[read.request.peer].popleft()

    def _notification(self, job: _Job) -> bytes:
        # The peer drops the pins of the whole lease on a notification, but an abandoned READ may still use them.
        peer = job.read.request.peer
        return b"" if any(left.peer == peer for left in self.abandoned.values()) else job.read.request.notification

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
        self._moved_s = time.monotonic()
        last = not job.running and job.next_chunk == len(job.ends)
        if not last:
            # Report first: the worker copies these blocks out while the next ones are read.
            self._tell(job, last=False, terminal=False)
        for handle in done:
            before = self._transport.totals.num_descriptors
            self._transport.release(handle)
            job.num_descriptors += self._transport.totals.num_descriptors - before
        if last:
            self._tell(job, last=True, terminal=True)

    def _tell(self, job: _Job, *, last: bool, terminal: bool, error: bytes = b"") -> None:
        done = MoverDone(
            read_id=job.read.read_id,
            num_blocks=job.done_blocks,
            last=last,
            terminal=terminal,
            seconds=time.monotonic() - job.started_s,
            num_descriptors=job.num_descriptors,
            error=error,
        )
        self.send(Op.MOVER_DONE, encode(done))

    def _fail(self, job: _Job, error: TransferError) -> None:
        self.jobs[job.read.request.peer].remove(job)
        if isinstance(error, PeerLost):
            self._broken.add(job.read.request.peer)
        left = [handle for handle, _ in job.running if not self._is_terminal(handle)]
        self._tell(job, last=True, terminal=not left, error=pack_error(error))
        if left:
            self.abandoned[job.read.read_id] = _Abandoned(job.read.request.peer, left)

    def _poll_abandoned(self) -> None:
        for read_id, left in list(self.abandoned.items()):
            left.handles = [handle for handle in left.handles if not self._is_terminal(handle)]
            if not left.handles:
                del self.abandoned[read_id]
                self.send(Op.MOVER_TERMINAL, encode(read_id))

    def _is_terminal(self, handle: int) -> bool:
        """Return whether a READ is terminal; if so, release its handle."""
        try:
            if self._transport.poll(handle) is not ReadState.DONE:
                return False
        except TransferError as error:
            logger.debug("mover: abandoned READ ended: %s", error)
        self._transport.release(handle)
        return True

    def send(self, op: Op, payload: bytes, flag: Flag = Flag.ONE_WAY, request: int = 0) -> None:
        """Send one message to the node store, in as many packets as it needs."""
        for packet in packets_of(Message(op, flag, request, payload)):
            self._sock.sendall(packet)

"""READs that several readers share, each on a thread of its own."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import msgspec

from kvstore.blocks.codec import decoder, encode
from kvstore.errors import PeerLost, ProtocolError, TransferError
from kvstore.mover.nixl import NixlTransport
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState, ReadTotals, Transport

#: Less than this is not worth another thread.
_LEAST_BYTES_PER_PART = 1 << 20
#: How long one look at a READ waits for its end, so that who looks leaves the interpreter to the readers.
_LOOK_S = 2e-4
#: A reader to which nothing came for this long asks less often: its peer may have stopped.
_STALLED_AFTER_S, _STALLED_PAUSE_S = 0.1, 0.001
_STOP_TIMEOUT_S = 5.0
_decode_agents = decoder(list[bytes])


@dataclass(slots=True, eq=False)
class _Read:
    """A READ in parts: `left` of them may still write; `error` is of the first that failed.

    With one part that `is_lost` it never comes to its end, but all that is to be known of it is known.
    """

    left: int
    is_lost: bool = False
    totals: ReadTotals = field(default_factory=ReadTotals)
    error: TransferError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def end_part(self, error: TransferError | None, counted: ReadTotals) -> None:
        """Note that a part can write no more, and what the engine counted for it."""
        with self.lock:
            self.totals += counted
            self.error = self.error or error
            self.left -= 1
            if self.left == 0:
                self.ended.set()

    def lose_part(self) -> None:
        """Note that a part failed and may write for as long as this process lives."""
        self.is_lost = True
        self.ended.set()


class _Reader:
    """A transport and the thread that drives its READs; asleep while there is none."""

    def __init__(self, transport: Transport, name: str) -> None:
        self.transport = transport
        self._asked: SimpleQueue[tuple[ReadRequest, _Read] | None] = SimpleQueue()
        self._running: list[tuple[int, _Read]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def read(self, request: ReadRequest, read: _Read) -> None:
        """Do a part of a READ, after those that were asked for before."""
        self._asked.put((request, read))

    def stop(self) -> bool:
        """End the thread; READs that are under way stay with the transport.

        Returns:
            False when it is still inside the transport, which then must not be closed.
        """
        self._stopping = True
        self._asked.put(None)
        self._thread.join(_STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        moved_s = 0.0
        while not self._stopping:
            try:
                asked = self._asked.get(block=not self._running)
            except Empty:
                asked = None
            if asked is not None:
                self._post(*asked)
                moved_s = time.monotonic()
            # A copy: whatever ends leaves the list.
            for handle, read in list(self._running):
                if self._has_ended(handle, read):
                    self._running.remove((handle, read))
                    moved_s = time.monotonic()
            if self._running:
                time.sleep(0.0 if time.monotonic() - moved_s < _STALLED_AFTER_S else _STALLED_PAUSE_S)

    def _post(self, request: ReadRequest, read: _Read) -> None:
        try:
            self._running.append((self.transport.post(request), read))
        except TransferError as error:
            read.end_part(error, ReadTotals())

    def _has_ended(self, handle: int, read: _Read) -> bool:
        error = None
        try:
            state = self.transport.poll(handle)
            if state is ReadState.RUNNING:
                return False
            if state is ReadState.LOST:
                read.lose_part()
                return True  # Nothing more will be heard of it.
        except TransferError as failure:
            error = failure
        before = self.transport.totals
        self.transport.release(handle)
        read.end_part(error, self.transport.totals - before)
        return True


class ParallelTransport:
    """Transports of one slab, of which several share a READ: each, or only those from peers of this machine.

    Over TCP each has a connection of its own, with a sender of its own at the other end. Between processes of one
    machine a READ is a copy by the processor, and one core copies slower than memory can. Where a network card does
    the work more readers would only wait.

    A READ is over when all its parts are, well or not. One with a notification is not divided: the peer may free
    its blocks once it has that, and one reader does not know how far the others are.

    Args:
        usual: what peers read from and notify, and what reads from peers whose READs are not shared.
        make_readers: makes those that share READs, when the first peer is added for which they do.
        is_shared: whether READs from such a peer are shared.
        servers: more transports that peers read from, one for each reader of theirs.

    All transports are owned by this object.
    """

    def __init__(
        self,
        usual: Transport,
        make_readers: Callable[[], list[Transport]],
        is_shared: Callable[[PeerDescription], bool],
        servers: Sequence[Transport] = (),
    ) -> None:
        self._usual, self._make_readers, self._is_shared, self._servers = usual, make_readers, is_shared, servers
        self._readers: list[_Reader] = []
        self._slots: tuple[int, int] | None = None
        self._peers: dict[str, bool] = {}
        self._reads: dict[int, _Read | int] = {}
        self._next = itertools.count(1)
        self._shared_totals = ReadTotals()

    @property
    def totals(self) -> ReadTotals:
        """What the engine counted over all finished READs; each part is one."""
        return self._usual.totals + self._shared_totals

    def describe(self) -> bytes:
        """Return the metadata of all that peers read from."""
        agents = [server.describe() for server in (self._usual, *self._servers)]
        return encode(agents)

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Say how the slab is divided."""
        self._slots = (slot_bytes, num_slots)
        for transport in (self._usual, *self._servers, *(reader.transport for reader in self._readers)):
            transport.set_slots(slot_bytes, num_slots)

    def add_peer(self, peer: str, description: PeerDescription) -> None:
        """Make a peer readable, in the way for where it is."""
        self.forget_peer(peer)
        agents = _agents(peer, description)
        shared = self._is_shared(description)
        if not shared:
            self._usual.add_peer(peer, msgspec.structs.replace(description, agent=agents[0]))
        elif not self._readers:
            transports = self._make_readers()
            self._readers = [_Reader(transport, f"raykv-read-{i}") for i, transport in enumerate(transports)]
            if self._slots is not None:
                self.set_slots(*self._slots)
        for i, reader in enumerate(self._readers if shared else ()):
            reader.transport.add_peer(peer, msgspec.structs.replace(description, agent=agents[i % len(agents)]))
        self._peers[peer] = shared

    def forget_peer(self, peer: str) -> None:
        """Drop what is held for a peer; unknown names are ignored."""
        self._peers.pop(peer, None)
        for transport in (self._usual, *(reader.transport for reader in self._readers)):
            transport.forget_peer(peer)

    def post(self, request: ReadRequest) -> int:
        """Start a READ; see `Transport`. What goes wrong with one that is shared is said by `poll`."""
        shared = self._peers.get(request.peer)
        if shared is None:
            raise PeerLost(f"wanted a peer that was added, got {request.peer!r}")
        handle = next(self._next)
        if not shared:
            self._reads[handle] = self._usual.post(request)
            return handle
        count = len(request.local_slots)
        num_parts = 1 if request.notification else count * request.block_bytes // _LEAST_BYTES_PER_PART
        num_parts = max(1, min(num_parts, count, len(self._readers)))
        read = self._reads[handle] = _Read(num_parts)
        bounds = [count * i // num_parts for i in range(num_parts + 1)]
        for reader, (a, b) in zip(self._readers, itertools.pairwise(bounds), strict=False):
            part = msgspec.structs.replace(
                request, local_slots=request.local_slots[a:b], remote_slots=request.remote_slots[a:b]
            )
            reader.read(part, read)
        return handle

    def poll(self, handle: int) -> ReadState:
        """Return how a READ is doing; a failed one is terminal once none of its parts can write any more."""
        read = self._reads[handle]
        if isinstance(read, int):
            return self._usual.poll(read)
        if not read.ended.wait(_LOOK_S):
            return ReadState.RUNNING
        if read.is_lost:
            return ReadState.LOST
        if read.error is not None:
            raise read.error
        return ReadState.DONE

    def release(self, handle: int) -> None:
        """Drop a terminal READ and count it."""
        read = self._reads.pop(handle)
        if isinstance(read, int):
            self._usual.release(read)
        else:
            self._shared_totals += read.totals

    def notifications(self) -> list[bytes]:
        """Return notifications of peers' finished READs since the last call."""
        return self._usual.notifications()

    def close(self) -> None:
        """Close all, but for readers that do not come back: those end with the process."""
        stopped = [reader.transport for reader in self._readers if reader.stop()]
        for transport in (*stopped, *self._servers, self._usual):
            transport.close()


def node_transport(name: str, address: int, num_bytes: int, lane: str, num_readers: int) -> ParallelTransport:
    """Return what a node is read from and reads with, over NIXL.

    Args:
        name: unique for each life of the process.
        address: first byte of the slab in this process; its owner keeps it mapped.
        num_bytes: size of the slab.
        lane: as in StoreConfig. On the lane "tcp" all READs are shared, else those from peers of this machine: what
            UCX chooses for others may be a network card, which needs no help.
        num_readers: how many share a READ; with one nothing is shared.

    Raises:
        RegistrationFailed: a backend could not be made or the slab not be registered.
    """

    def readers() -> list[Transport]:
        return [
            NixlTransport(f"{name}-reader-{i}", address, num_bytes, progress_delay_us=None, separate_reader=False)
            for i in range(num_readers)
        ]

    servers = [
        NixlTransport(f"{name}-server-{i}", address, num_bytes, separate_reader=False)
        for i in range(1, num_readers if lane == "tcp" else 1)
    ]
    return ParallelTransport(
        NixlTransport(name, address, num_bytes),
        readers,
        lambda description: num_readers > 1 and (lane == "tcp" or description.same_host),
        servers,
    )


def _agents(peer: str, description: PeerDescription) -> list[bytes]:
    """Return the metadata that `describe` put together.

    Raises:
        PeerLost: it is something else.
    """
    try:
        agents = _decode_agents(description.agent)
    except ProtocolError as error:
        raise PeerLost(f"metadata of {peer}: {error}") from error
    if not agents:
        raise PeerLost(f"metadata of {peer}: wanted that of one or more agents, got none")
    return agents

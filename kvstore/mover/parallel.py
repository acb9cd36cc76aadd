"""READs that several readers share, each on its own thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Annotated

import msgspec

from kvstore.blocks.codec import decoder, encode
from kvstore.errors import PeerLost, ProtocolError, TransferError
from kvstore.mover.nixl import NixlTransport
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState, ReadTotals, Transport

#: A part smaller than this is not worth another thread.
_LEAST_BYTES_PER_PART = 1 << 20
#: How long one poll of a READ waits for its end: meanwhile the readers get the interpreter.
_LOOK_S = 2e-4
#: A reader polls less often if no READ ended for this long: its peer may have stopped.
_STALLED_AFTER_S, _STALLED_PAUSE_S = 0.1, 0.001
_STOP_TIMEOUT_S = 5.0
#: Of the agents of one or more servers.
_Agents = Annotated[list[bytes], msgspec.Meta(min_length=1)]
_decode_agents: Callable[[bytes], list[bytes]] = decoder(_Agents)


@dataclass(slots=True, eq=False)
class _Read:
    """A READ in parts: `left` of them may still write; `error` is of the first part that failed.

    If one part is lost (`is_lost`), it may write while this process lives: the READ never becomes terminal.
    """

    left: int
    is_lost: bool = False
    totals: ReadTotals = field(default_factory=ReadTotals)
    error: TransferError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def end_part(self, error: TransferError | None, counted: ReadTotals) -> None:
        """Note that a part can no longer write, and add NIXL's counts for it."""
        with self.lock:
            self.totals += counted
            self.error = self.error or error
            self.left -= 1
            if self.left == 0:
                self.ended.set()


class _Reader:
    """A transport and the thread that drives its READs; the thread sleeps while there is none."""

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
        """End the thread; running READs stay with the transport.

        Returns:
            False if the thread is still inside the transport, which then must not be closed.
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
            # Iterate over a copy: READs that end are removed from the list.
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
                read.is_lost = True
                read.ended.set()
                return True  # It will report nothing more.
        except TransferError as failure:
            error = failure
        before = self.transport.totals
        self.transport.release(handle)
        read.end_part(error, self.transport.totals - before)
        return True


class ParallelTransport:
    """Transports of one slab. Several of them share a READ: every READ, or only READs from peers of this machine.

    Over TCP each reader has its own connection, with its own sender at the other end. Between processes of one
    machine a READ is a copy by the processor, and one core copies slower than memory can. Where a network card does
    the work, more readers would only wait.

    A READ has ended when all its parts have ended or failed. A READ with a notification is not divided: the peer may
    free its blocks on the notification, and one reader does not know the progress of the others.

    Args (this object owns all transports):
        usual: peers read from it and notify it; it also runs the READs that are not shared.
        make_readers: makes the readers that share READs, when the first peer with shared READs is added.
        is_shared: returns whether READs from a peer are shared.
        servers: more transports that peers read from, one for each of their further readers.
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
        """NIXL's counts over all finished READs; each part counts as one READ."""
        return self._usual.totals + self._shared_totals

    def describe(self) -> bytes:
        """Return the metadata of all transports that peers read from."""
        agents = [server.describe() for server in (self._usual, *self._servers)]
        return encode(agents)

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Set the division of the slab into slots."""
        self._slots = (slot_bytes, num_slots)
        for transport in (self._usual, *self._servers, *(reader.transport for reader in self._readers)):
            transport.set_slots(slot_bytes, num_slots)

    def add_peer(self, peer: str, description: PeerDescription) -> None:
        """Make a peer readable, by the shared readers or by the usual transport."""
        self.forget_peer(peer)
        try:
            agents = _decode_agents(description.agent)
        except ProtocolError as error:
            raise PeerLost(f"metadata of {peer}: {error}") from error
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
        """Drop the data that is held for a peer; unknown names are ignored."""
        self._peers.pop(peer, None)
        for transport in (self._usual, *(reader.transport for reader in self._readers)):
            transport.forget_peer(peer)

    def post(self, request: ReadRequest) -> int:
        """Start a READ; see `Transport`. Errors of a shared READ are raised by `poll`."""
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
        """Return the state of a READ; a failed READ is terminal when none of its parts can write any more."""
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
        """Drop a terminal READ and add it to `totals`."""
        read = self._reads.pop(handle)
        if isinstance(read, int):
            self._usual.release(read)
        else:
            self._shared_totals += read.totals

    def notifications(self) -> list[bytes]:
        """Return notifications of peers' finished READs since the last call."""
        return self._usual.notifications()

    def close(self) -> None:
        """Close all transports, except those of readers whose threads hang: they end with the process."""
        stopped = [reader.transport for reader in self._readers if reader.stop()]
        for transport in (*stopped, *self._servers, self._usual):
            transport.close()


def node_transport(name: str, address: int, num_bytes: int, lane: str, num_readers: int) -> ParallelTransport:
    """Return the NIXL transport of a node, for its own READs and those of its peers.

    Args:
        name: unique for each life of the process.
        address: first byte of the slab in this process; its owner keeps it mapped.
        num_bytes: size of the slab.
        lane: as in StoreConfig. On the lane "tcp" all READs are shared, else only those from peers of this machine:
            for other peers UCX may choose a network card, which needs no help.
        num_readers: how many readers share a READ; with one, no READ is shared.

    Raises:
        RegistrationFailed: a backend could not be made, or the slab could not be registered.
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

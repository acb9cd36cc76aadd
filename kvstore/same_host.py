"""READs from peers of the same machine by several threads at once, all others as usual."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from kvstore.errors import PeerLost, TransferError
from kvstore.transport import PeerDescription, ReadRequest, ReadState, ReadTotals, Transport

#: Less than this is not worth waking a thread for.
_LEAST_BYTES_PER_PART = 1 << 20


@dataclass(slots=True)
class _Read:
    """The parts of a READ that may still write, and the first of them that failed."""

    running: list[tuple[Transport, int]]
    done: list[tuple[Transport, int]]
    error: TransferError | None = None


class SameHostTransport:
    """Several transports with one slab: `usual`, and readers that share the READs from this machine.

    Between processes of one machine a READ is a copy by the processor, inside `post`, and one core copies slower
    than memory can. So it is divided, and each part posted by a reader and thread of its own. Over a network the
    READ is done elsewhere and more readers would only wait. A READ with a notification is not divided: the peer
    may free its blocks once it has that, and one reader does not know how far the others are.

    Args:
        usual: what peers read from, and what reads from other machines. Owned by this object.
        make_reader: makes reader number so and so, when the first peer of this machine is added.
        num_readers: how many, at least 1.
    """

    def __init__(self, usual: Transport, make_reader: Callable[[int], Transport], num_readers: int) -> None:
        self._usual, self._make_reader, self._num_readers = usual, make_reader, num_readers
        self._readers: list[Transport] = []
        self._threads = ThreadPoolExecutor(max(1, num_readers - 1), thread_name_prefix="raykv-read")
        self._slots: tuple[int, int] | None = None
        self._of_peer: dict[str, list[Transport]] = {}
        self._reads: dict[int, _Read] = {}
        self._next = 0

    @property
    def totals(self) -> ReadTotals:
        """What the engine counted over all finished READs; each part is one."""
        counts = [transport.totals for transport in (self._usual, *self._readers)]
        return ReadTotals(
            num_reads=sum(count.num_reads for count in counts),
            num_descriptors=sum(count.num_descriptors for count in counts),
            num_bytes=sum(count.num_bytes for count in counts),
        )

    def describe(self) -> bytes:
        """Return the metadata of what peers read from."""
        return self._usual.describe()

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Say how the slab is divided."""
        self._slots = (slot_bytes, num_slots)
        for transport in (self._usual, *self._readers):
            transport.set_slots(slot_bytes, num_slots)

    def add_peer(self, peer: str, description: PeerDescription) -> None:
        """Make a peer readable, in the way for where it is."""
        self.forget_peer(peer)
        if description.same_host and not self._readers:
            self._readers = [self._make_reader(i) for i in range(self._num_readers)]
            if self._slots is not None:
                self.set_slots(*self._slots)
        self._of_peer[peer] = self._readers if description.same_host else [self._usual]
        for transport in self._of_peer[peer]:
            transport.add_peer(peer, description)

    def forget_peer(self, peer: str) -> None:
        """Drop what is held for a peer; unknown names are ignored."""
        for transport in self._of_peer.pop(peer, ()):
            transport.forget_peer(peer)

    def post(self, request: ReadRequest) -> int:
        """Start a READ; see `Transport`. What fails after a part was started is said by `poll`, at the end of all."""
        readers = self._of_peer.get(request.peer)
        if readers is None:
            raise PeerLost(f"wanted a peer that was added, got {request.peer!r}")
        count = len(request.local_slots)
        num_parts = 1 if request.notification else count * request.block_bytes // _LEAST_BYTES_PER_PART
        num_parts = max(1, min(num_parts, count, len(readers)))
        bounds = [count * i // num_parts for i in range(num_parts + 1)]
        parts = [
            replace(request, local_slots=request.local_slots[a:b], remote_slots=request.remote_slots[a:b])
            for a, b in itertools.pairwise(bounds)
        ]
        others = [self._threads.submit(reader.post, part) for reader, part in zip(readers[1:], parts[1:], strict=False)]
        posts: list[Callable[[], int]] = [lambda: readers[0].post(parts[0]), *(other.result for other in others)]
        read = _Read([], [])
        for reader, post in zip(readers, posts, strict=False):
            try:
                read.running.append((reader, post()))
            except TransferError as error:
                read.error = read.error or error
        if read.error is not None and not read.running:
            raise read.error
        self._next += 1
        self._reads[self._next] = read
        return self._next

    def poll(self, handle: int) -> ReadState:
        """Return how a READ is doing; a failed one is terminal once none of its parts can write any more."""
        read = self._reads[handle]
        for part in list(read.running):
            transport, theirs = part
            try:
                if transport.poll(theirs) is ReadState.RUNNING:
                    continue
            except TransferError as error:
                read.error = read.error or error
            read.running.remove(part)
            read.done.append(part)
        if read.running:
            return ReadState.RUNNING
        if read.error is not None:
            raise read.error
        return ReadState.DONE

    def release(self, handle: int) -> None:
        """Drop the handles of a terminal READ."""
        for transport, theirs in self._reads.pop(handle).done:
            transport.release(theirs)

    def notifications(self) -> list[bytes]:
        """Return notifications of peers' finished READs since the last call."""
        return self._usual.notifications()

    def close(self) -> None:
        """Close all; READs that are under way are dropped first."""
        self._threads.shutdown()
        for transport in (*self._readers, self._usual):
            transport.close()

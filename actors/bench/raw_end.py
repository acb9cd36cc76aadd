"""One end of a raw NIXL transfer, for benchmarks: the transport without a store."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvstore.config import UCX_DEFAULTS, set_ucx_lane
from kvstore.memory.arena import Arena, create_arena
from kvstore.mover.transport import PeerDescription, ReadRequest

_TIMEOUT_S = 120.0
#: Piece of a READ that is copied out meanwhile; a whole number of blocks of every size.
_PIECE_BYTES = 16 << 20
POISON = 0xA5


def random_bytes(num_bytes: int, seed: int) -> np.ndarray[Any, Any]:
    """Return the bytes of a seed."""
    return np.random.default_rng(seed).integers(0, 2**63, num_bytes // 8, dtype=np.int64).view(np.uint8)


class RawEnd:
    """One end of a raw NIXL transfer, in its own process: a slab, an agent, prepared lists.

    Args:
        huge_pages: whether the slab has huge pages, as our arena has if the kernel can.
        tuned: False builds the agent as NIXL's Python wrapper does, and leaves UCX's TCP segments alone.
    """

    def __init__(
        self, lane: str, name: str, num_bytes: int, block_bytes: int, tuned: bool, huge_pages: bool = False
    ) -> None:
        set_ucx_lane(lane)
        if not tuned:
            # The user's settings stay; only our own defaults are replaced.
            os.environ.update({key: "8256" for key in UCX_DEFAULTS if key not in os.environ})
        from kvstore.mover.nixl import PROGRESS_DELAY_US, NixlTransport

        self._arena: Arena = create_arena(num_bytes, huge_pages=huge_pages)
        self._slab = self._arena.bytes_view()
        self._block_bytes = block_bytes
        delay_us, address = PROGRESS_DELAY_US if tuned else 0, self._arena.address
        self._transport = NixlTransport(name, address, num_bytes, progress_delay_us=delay_us, separate_reader=False)
        self._transport.set_slots(block_bytes, num_bytes // block_bytes)

    def describe(self) -> PeerDescription:
        """Return the description of this end for the other end."""
        return PeerDescription(
            agent=self._transport.describe(),
            address=self._arena.address,
            slot_bytes=self._block_bytes,
            num_slots=self._arena.num_bytes // self._block_bytes,
        )

    def add_peer(self, description: PeerDescription) -> None:
        """Make the other end readable."""
        self._transport.add_peer("source", description)

    def fill(self, start: int, num_bytes: int, seed: int) -> None:
        """Write the data of a seed."""
        self._slab[start : start + num_bytes] = random_bytes(num_bytes, seed)

    def read(self, start: int, num_bytes: int, seed: int) -> float:
        """Read a region, compare it, and return the seconds that the READ took."""
        self._slab[start : start + num_bytes] = POISON
        started_s = time.perf_counter()
        self._transport.read_and_wait(self._request(start, num_bytes), _TIMEOUT_S)
        seconds = time.perf_counter() - started_s
        _compare(self._slab[start : start + num_bytes], seed)
        return seconds

    def read_and_copy(self, start: int, num_bytes: int, seed: int) -> float:
        """Do what `read` does, in pieces; a second thread copies each out while the next is on its way."""
        self._slab[start : start + num_bytes] = POISON
        out = np.full(num_bytes, POISON, np.uint8)
        pieces = [slice(at, min(at + _PIECE_BYTES, num_bytes)) for at in range(0, num_bytes, _PIECE_BYTES)]
        with ThreadPoolExecutor(1) as copier:
            copier.submit(int).result(_TIMEOUT_S)  # Its thread starts before the clock.
            started_s, copies = time.perf_counter(), []
            for piece in pieces:
                request = self._request(start + piece.start, piece.stop - piece.start)
                self._transport.read_and_wait(request, _TIMEOUT_S)
                copies.append(copier.submit(np.copyto, out[piece], self._slab[start:][piece]))
            for copy in copies:
                copy.result(_TIMEOUT_S)
            seconds = time.perf_counter() - started_s
        _compare(out, seed)
        return seconds

    def _request(self, start: int, num_bytes: int) -> ReadRequest:
        ids = np.arange(start // self._block_bytes, (start + num_bytes) // self._block_bytes, dtype=np.int32)
        return ReadRequest(
            peer="source", block_bytes=self._block_bytes, local_slots=ids, remote_slots=ids, notification=b"x"
        )

    def memcpy(self, num_bytes: int) -> float:
        """Copy one region of the slab to another by one thread; return the seconds."""
        half = self._arena.num_bytes // 2
        num_bytes = min(num_bytes, half)
        self._slab[half : half + num_bytes] = POISON
        started_s = time.perf_counter()
        self._slab[half : half + num_bytes] = self._slab[:num_bytes]
        return time.perf_counter() - started_s


def _compare(found: np.ndarray[Any, Any], seed: int) -> None:
    if not np.array_equal(found, random_bytes(len(found), seed)):
        raise AssertionError("raw NIXL delivered other bytes than were written")

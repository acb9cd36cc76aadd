"""Benchmark: NIXL alone between two GPUs, without a store, each end in its own process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.actors.bench.process import InProcess
from kvstore.blocks.shape import KVShape
from kvstore.errors import TransferTimeout
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState

_WINDOW = 3
_FRAGMENT_ROUNDS = 3


def raw_nixl(
    shape: KVShape, counts: Sequence[int], rounds: int, chunk_bytes: int, timeout_s: float
) -> Iterator[tuple[int, str, list[float]]]:
    """READ the bytes of blocks from GPU 0 to GPU 1, packed, and in an engine's fragments.

    Args:
        shape: of a block.
        counts: numbers of blocks.
        rounds: of the packed way; the other one is slow and has fewer.
        chunk_bytes: size of one request of the packed way; several run at once.
        timeout_s: limit for each step.

    Yields:
        (number of blocks, "nixl_packed" or "nixl_fragments", seconds of each round, of which the first is cold).

    Raises:
        StoreUnavailable: a process did not answer in time; both are gone.
    """
    name, most_bytes = f"bench-{secrets.token_hex(4)}", max(counts) * shape.block_bytes
    fragment_bytes = shape.block_bytes // shape.num_layers // shape.num_planes
    ends = [InProcess(Slab, f"{name}-{gpu}", gpu, most_bytes) for gpu in (0, 1)]
    try:
        for count in counts:
            num_bytes = count * shape.block_bytes
            for way, piece_bytes, chunk, mixed, turns in (
                ("nixl_packed", shape.block_bytes, chunk_bytes, False, rounds + 1),
                ("nixl_fragments", fragment_bytes, num_bytes, True, 1 + min(rounds, _FRAGMENT_ROUNDS)),
            ):
                peer = ends[0].ask("describe", timeout_s, piece_bytes, num_bytes // piece_bytes)
                yield count, way, ends[1].ask("read", timeout_s, peer, chunk, mixed, turns, timeout_s)
    finally:
        for end in ends:
            end.close()


class Slab:
    """Device memory of this process, and the NIXL agent that offers it and reads into it."""

    def __init__(self, name: str, gpu: int, num_bytes: int) -> None:
        from kvstore.kernels.vram import DeviceSlab
        from kvstore.mover.nixl import NixlTransport

        self._slab, self._gpu, self._num_bytes = DeviceSlab(gpu, num_bytes), gpu, num_bytes
        self._transport = NixlTransport(name, self._slab.address, num_bytes, gpu=gpu)

    def describe(self, piece_bytes: int, count: int) -> PeerDescription:
        """Cut the slab into pieces, and return its description for the other end."""
        self._transport.set_slots(piece_bytes, count)
        return PeerDescription(
            agent=self._transport.describe(), address=self._slab.address, slot_bytes=piece_bytes, num_slots=count,
            gpu=self._gpu,
        )  # fmt: skip

    def read(self, peer: PeerDescription, chunk_bytes: int, mixed: bool, rounds: int, timeout_s: float) -> list[float]:
        """READ all pieces of a peer, `chunk_bytes` a request; return the seconds of each round."""
        name = f"{peer.slot_bytes}x{peer.num_slots}"
        self._transport.set_slots(peer.slot_bytes, self._num_bytes // peer.slot_bytes)
        self._transport.add_peer(name, peer)
        order = np.arange(peer.num_slots, dtype=np.int32)
        remote = np.random.default_rng(0).permutation(order) if mixed else order
        per_chunk, seconds, until_s = max(1, chunk_bytes // peer.slot_bytes), [], time.monotonic() + timeout_s
        for _ in range(rounds):
            began_s, running = time.perf_counter(), list[int]()
            for first in range(0, len(order), per_chunk):
                part = slice(first, first + per_chunk)
                request = ReadRequest(
                    peer=name, block_bytes=peer.slot_bytes, local_slots=order[part], remote_slots=remote[part]
                )
                running.append(self._transport.post(request))
                self._wait(running, _WINDOW - 1, until_s)
            self._wait(running, 0, until_s)
            seconds.append(time.perf_counter() - began_s)
        self._transport.forget_peer(name)
        return seconds

    def _wait(self, running: list[int], most: int, until_s: float) -> None:
        while len(running) > most:
            if self._transport.poll(running[0]) is not ReadState.RUNNING:
                self._transport.release(running.pop(0))
            elif time.monotonic() > until_s:
                raise TransferTimeout("a READ between the two GPUs did not end in time")

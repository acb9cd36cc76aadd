"""One side of the benchmark of hand-offs: a cache with a tensor for each layer, and a client, in one process."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.client import Client
from kvstore.client.results import FetchResult, HandoffRoute
from kvstore.errors import TransferTimeout
from kvstore.kernels.reference import torch_dtype

_POISON = 0x5A
#: About 5 ms on a GPU of 1.8 GHz.
_FORWARD_CYCLES = 9_000_000


@dataclass(frozen=True, slots=True)
class Published:
    """The times of the call's begin and return, on this machine's monotonic clock.

    For blocks that were published while they were computed: the ends of computing and of packing.
    """

    began_s: float
    returned_s: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """The time when the last byte was in place, on this machine's monotonic clock; and the fetch's result."""

    ended_s: float
    result: FetchResult


class Engine:
    """An engine: caches [plane, block, token, head, dim] of each layer; it hands off half of the blocks.

    Args:
        control_path: of its node's store.
        space: of the blocks.
        device: where its cache is.
        num_blocks: most blocks that it hands off at once.
        seed: of the bytes, and of the order of blocks.
        tickets: pipe to or from the other engine.
        timeout_s: limit for every wait.
    """

    def __init__(
        self,
        control_path: str,
        space: Namespace,
        device: str,
        num_blocks: int,
        seed: int,
        tickets: Connection,
        timeout_s: float,
    ) -> None:
        shape, self._device, self._tickets, self._timeout_s = space.shape, torch.device(device), tickets, timeout_s
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        generator = torch.Generator(device).manual_seed(seed)
        dims = (shape.num_planes, 2 * num_blocks, shape.block_size, shape.num_kv_heads, shape.row_dim)
        self._bits = [
            torch.randint(-(2**15), 2**15, dims, dtype=torch.int16, generator=generator, device=device)
            for _ in range(shape.num_layers)
        ]
        self._block_ids = np.random.default_rng(seed).permutation(2 * num_blocks)[:num_blocks]
        self._client = Client(control_path, space)
        self._client.register_kv_caches([bits.view(torch_dtype(shape.dtype)) for bits in self._bits], axes="PBTHD")

    def attach(self, num_bytes: int, peers: tuple[str, ...]) -> HandoffRoute:
        """Attach to a stage."""
        return self._client.attach_handoff(num_bytes, peers)

    def poison(self, count: int) -> None:
        """Overwrite blocks."""
        ids = torch.from_numpy(self._block_ids[:count]).to(self._device)
        for bits in self._bits:
            bits.view(torch.uint8)[:, ids] = _POISON
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def digest(self, count: int) -> str:
        """Return a hash of the bytes of blocks."""
        ids, digest = torch.from_numpy(self._block_ids[:count]).to(self._device), hashlib.sha256()
        for bits in self._bits:
            digest.update(bits[:, ids].cpu().numpy().tobytes())
        return digest.hexdigest()

    def publish(self, count: int) -> Published:
        """Publish blocks and send their ticket to the other engine."""
        ids, began_s = self._block_ids[:count], time.monotonic()
        self._tickets.send_bytes(self._client.publish(ids).to_bytes())
        return Published(began_s, time.monotonic())

    def publish_begun(self, count: int) -> Published:
        """Send the ticket of blocks to the other engine while they are packed."""
        ids, began_s = self._block_ids[:count], time.monotonic()
        publication = self._client.begin_publish(ids)
        self._tickets.send_bytes(publication.ticket.to_bytes())
        returned_s = time.monotonic()
        publication.job.result(self._timeout_s)
        return Published(began_s, returned_s)

    def publish_early(self, count: int) -> Published:
        """Send a ticket to the other engine, and then publish the blocks under it."""
        ids, began_s = self._block_ids[:count], time.monotonic()
        ticket = self._client.prepare_ticket(count)
        self._tickets.send_bytes(ticket.to_bytes())
        self._client.publish(ids, ticket=ticket)
        return Published(began_s, time.monotonic())

    def publish_ahead(self, count: int) -> Published:
        """Publish blocks while they are still being computed, and send their ticket to the other engine.

        The forward pass is a kernel that takes some milliseconds and writes nothing. The publication counts as begun at
        its end, by the device's clock, because the blocks cannot be packed earlier.
        """
        ids = self._block_ids[:count]
        began, computed = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        began_s = time.monotonic()  # Before the event, so that the time between the two counts as well.
        began.record()
        torch.cuda._sleep(_FORWARD_CYCLES)  # type: ignore[no-untyped-call]
        computed.record()
        publication = self._client.begin_publish(ids)
        self._tickets.send_bytes(publication.ticket.to_bytes())
        publication.job.result(self._timeout_s)
        packed_s = time.monotonic()
        return Published(began_s + began.elapsed_time(computed) / 1e3, packed_s)

    def fetch(self, count: int) -> Fetched:
        """Fetch the blocks that the other engine publishes next."""
        if not self._tickets.poll(self._timeout_s):
            raise TransferTimeout(f"wanted a ticket within {self._timeout_s} s, got none")
        ticket = HandoffTicket.from_bytes(self._tickets.recv_bytes())
        result = self._client.fetch(ticket, self._block_ids[:count], timeout_s=self._timeout_s).result(self._timeout_s)
        return Fetched(time.monotonic(), result)

    def close(self) -> None:
        """Give everything back."""
        self._client.close()

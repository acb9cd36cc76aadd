"""Hold a trace: its requests, and each of their blocks under a number of its own; and what a replay of it gives.

A block is an id after all ids before it. So the same id after another predecessor is another block, whatever the format
of the file means by an id. The number of a block is larger than that of its predecessor.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import HASH_BYTES, BlockHashes

#: Root of all chains of a replay: no engine has this namespace.
NAMESPACE = blake2b(b"kvstore replay", digest_size=HASH_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: when it came, its tokens, and the numbers of its blocks from the root on."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: array[int]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their time.

    Args:
        name: of the file.
        format_name: of the file; see kvstore.replay.formats.
        block_tokens: how many tokens a block has.
        requests: in the order of their time.
        digests: the hash of each block, by its number; a row each.
    """

    name: str
    format_name: str
    block_tokens: int
    requests: Sequence[Request]
    digests: npt.NDArray[np.uint8]

    @property
    def num_blocks(self) -> int:
        """How many different blocks the requests name."""
        return len(self.digests)

    @property
    def num_references(self) -> int:
        """How many blocks the requests name, each as often as it is named."""
        return sum(len(request.blocks) for request in self.requests)

    def chain_of(self, request: Request) -> BlockHashes:
        """Return the blocks of a request as the store names them."""
        return BlockHashes(NAMESPACE, NAMESPACE, 0, self.digests[request.blocks].tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where the leading blocks of one request were: in this node's memory, on its disk, on other nodes."""

    memory: int = 0
    disk: int = 0
    peer: int = 0

    @property
    def num_blocks(self) -> int:
        """Hits of the request."""
        return self.memory + self.disk + self.peer


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOutcome:
    """What the tiers of all nodes did in one replay, simulated or real.

    Args:
        found: of each request.
        num_disk_evictions: blocks that were dropped from disks to make room.
        num_disk_written: blocks that were written to disks.
        num_disk_read: blocks that were read from disks, for requests of the same node and of others.
        dropped: blocks that were not written, by reason.
    """

    found: Sequence[Found]
    num_disk_evictions: int
    num_disk_written: int
    num_disk_read: int
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay of a trace.

    Args:
        hits: number of leading blocks that were there, of each request.
        num_evictions: blocks that were dropped from memory to make room.
        node_references: number of blocks in the requests that each node was given.
        tiers: what memory, disks and peers did; None where there is one cache, or none knows of another.
    """

    hits: array[int]
    num_evictions: int
    node_references: tuple[int, ...] = ()
    tiers: TierOutcome | None = None

    @property
    def num_hits(self) -> int:
        """Hits of all requests."""
        return sum(self.hits)


def first_requests(trace: Trace, count: int) -> Trace:
    """Return the trace of the first requests, with their blocks alone; all of it if it has no more."""
    requests = trace.requests[:count]
    # Numbers are given in the order of the file, so those of the first requests are the first ones.
    num_blocks = 1 + max((max(request.blocks, default=-1) for request in requests), default=-1)
    return replace(trace, requests=requests, digests=trace.digests[:num_blocks])


class Chains:
    """Gives blocks their numbers and hashes."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._roots: dict[str, tuple[int, bytes]] = {}
        self._digests: list[bytes] = []

    def blocks_of(self, ids: Sequence[Hashable], scope: str = "") -> array[int]:
        """Return the numbers of a request's blocks; ids of two scopes never name the same block."""
        numbers, digests = self._numbers, self._digests
        before, digest = self._root(scope)
        found = array("q")
        for each in ids:
            number = numbers.setdefault((before, each), len(digests))
            if number == len(digests):
                own = blake2b(str(each).encode(), key=digest, digest_size=HASH_BYTES)
                digests.append(own.digest())
            found.append(number)
            before, digest = number, digests[number]
        return found

    def digests(self) -> npt.NDArray[np.uint8]:
        """Return the hashes of all blocks so far, by number."""
        return np.frombuffer(b"".join(self._digests), np.uint8).reshape(-1, HASH_BYTES)

    def _root(self, scope: str) -> tuple[int, bytes]:
        if scope not in self._roots:
            digest = blake2b(scope.encode(), key=NAMESPACE, digest_size=HASH_BYTES).digest()
            self._roots[scope] = (-1 - len(self._roots), digest)
        return self._roots[scope]

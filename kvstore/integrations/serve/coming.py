"""Prompts whose replica is chosen, and which are not there yet: those that are ranked meanwhile have to know them."""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class _Coming(NamedTuple):
    replica: str
    blocks: Sequence[bytes]
    num_tokens: int
    since_s: float


class ComingPrompts:
    """What is on its way to each replica. Not thread-safe.

    A request that is given up on its way has no end here, so it counts for `ttl_s` at most.

    Args:
        ttl_s: how long a request counts.
        max_requests: that are remembered; the oldest is forgotten first.
    """

    def __init__(self, ttl_s: float = 5.0, max_requests: int = 10_000) -> None:
        self._ttl_s, self._max_requests = ttl_s, max_requests
        self._requests: OrderedDict[str, _Coming] = OrderedDict()
        #: For each replica how many prompts have each block. One block's parent is never in fewer.
        self._blocks: dict[str, Counter[bytes]] = {}
        self._num_tokens: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, request: str, replica: str, blocks: Sequence[bytes], num_tokens: int, now_s: float) -> None:
        """Note the replica that was chosen for a request; another choice for it takes the place of the first.

        Args:
            request: its id.
            replica: where it will go.
            blocks: hashes of its prompt, root first.
            num_tokens: what the replica will compute of it.
            now_s: the time.
        """
        self.end(request)
        self._requests[request] = _Coming(replica, blocks, num_tokens, now_s)
        self._blocks.setdefault(replica, Counter()).update(blocks)
        self._num_tokens[replica] += num_tokens
        if len(self._requests) > self._max_requests:
            self.end(next(iter(self._requests)))

    def end(self, request: str) -> None:
        """Note that a request is there, or that its choice is made again; no effect if it is not on its way."""
        if (coming := self._requests.pop(request, None)) is not None:
            counts = self._blocks[coming.replica]
            counts.subtract(coming.blocks)
            for block in coming.blocks:
                if not counts[block]:
                    del counts[block]
            self._num_tokens[coming.replica] -= coming.num_tokens

    def end_at(self, request: str, replica: str) -> None:
        """Note that a request ended at a replica; no effect if it is on its way to another one."""
        if request in self._requests and self._requests[request].replica == replica:
            self.end(request)

    def end_stale(self, now_s: float) -> None:
        """Forget requests that are on their way for too long."""
        while self._requests:
            request, coming = next(iter(self._requests.items()))
            if now_s - coming.since_s <= self._ttl_s:
                return
            self.end(request)

    def forget(self, replica: str) -> None:
        """Forget what goes to a replica that ended."""
        for request in [each for each, coming in self._requests.items() if coming.replica == replica]:
            self.end(request)
        self._blocks.pop(replica, None)
        self._num_tokens.pop(replica, None)

    def prefix(self, blocks: Sequence[bytes], replica: str) -> int:
        """Return how many leading blocks of a prompt are on their way to a replica."""
        counts = self._blocks.get(replica)
        return bisect.bisect_left(blocks, True, key=lambda block: block not in counts) if counts else 0

    def tokens_at(self, replica: str) -> int:
        """Return how many tokens a replica will have to compute of what is on its way."""
        return self._num_tokens[replica]

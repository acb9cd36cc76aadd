"""How many tokens of prompts a replica has still to compute, as far as one router knows."""

from __future__ import annotations

from collections import Counter, OrderedDict

_MEAN_OF = 32  # requests
_FIRST_MEAN_TOKENS = 512.0
#: How many ends without a begin are remembered, the latest ones.
_MOST_EARLY_ENDS = 1_000


class OpenWork:
    """Requests that this router sent and that have not ended. Not thread-safe.

    Args:
        max_requests: that are remembered; the oldest is forgotten first, whose end was perhaps never told.
    """

    def __init__(self, max_requests: int = 100_000) -> None:
        self._max_requests = max_requests
        self._open: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._num_open: Counter[str] = Counter()
        self._num_tokens: Counter[str] = Counter()
        #: Requests and replicas whose end was told before their begin.
        self._ended_early: OrderedDict[tuple[str, str], None] = OrderedDict()
        #: Tokens that a request has to compute, of the last ones.
        self.mean_tokens = _FIRST_MEAN_TOKENS

    def begin(self, request: str, replica: str, num_tokens: int) -> None:
        """Note that a request was sent, and how many tokens of its prompt the replica will compute.

        No effect if its end was told before: Ray Serve may learn of the end of a short request first.
        """
        self._drop(request)  # Ray Serve sent it again.
        if (request, replica) in self._ended_early:
            del self._ended_early[request, replica]
            return
        self._open[request] = replica, num_tokens
        self._num_open[replica] += 1
        self._num_tokens[replica] += num_tokens
        self.mean_tokens += (num_tokens - self.mean_tokens) / _MEAN_OF
        if len(self._open) > self._max_requests:
            self._drop(next(iter(self._open)))

    def end(self, request: str, replica: str) -> None:
        """Note that a request ended at a replica. It may be open at another one, which was asked after this one."""
        if request in self._open and self._open[request][0] == replica:
            self._drop(request)
            return
        self._ended_early[request, replica] = None
        if len(self._ended_early) > _MOST_EARLY_ENDS:
            self._ended_early.popitem(last=False)

    def _drop(self, request: str) -> None:
        if request in self._open:
            replica, num_tokens = self._open.pop(request)
            self._num_open[replica] -= 1
            self._num_tokens[replica] -= num_tokens
            if not self._num_open[replica]:
                del self._num_open[replica], self._num_tokens[replica]

    def tokens_at(self, replica: str, queue_len: int | None) -> int:
        """Return tokens that wait at a replica: those of this router, and a mean for each request of others.

        Args:
            replica: its name.
            queue_len: requests there, of all routers; None where that is not known.
        """
        others = max(0, (queue_len or 0) - self._num_open[replica])
        return self._num_tokens[replica] + int(others * self.mean_tokens)

    def forget(self, replica: str) -> None:
        """Forget the requests of a replica that ended."""
        for request in [each for each, (where, _) in self._open.items() if where == replica]:
            self._drop(request)

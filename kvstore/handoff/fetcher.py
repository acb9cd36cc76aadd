"""The fetches of one node that need a peer: owners, steps on threads, ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial

from kvstore.handoff.fetch import RemoteFetch
from kvstore.handoff.fetch_context import FetchContext
from kvstore.handoff.records import FetchSeen
from kvstore.rpc.handoff_messages import FetchRequest
from kvstore.rpc.messages import Progress

#: Most fetches of one node at once; each may hold a connection to its source.
_MOST_FETCHES = 4096


class HandoffFetcher:
    """The fetches of one node that need a peer. They hold no thread while they wait.

    Args:
        context: of this node.
    """

    def __init__(self, context: FetchContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._fetches: dict[int, RemoteFetch] = {}
        self._ids = itertools.count(1)

    def begin(
        self, request: FetchRequest, owner: str, block_bytes: int, send: Callable[[Progress], object], tenant: str = ""
    ) -> int:
        """Begin a fetch on the control thread; steps that block run on threads. The client always gets an answer.

        The slots of the arena that it fills are `tenant`'s.

        Returns:
            The id of the fetch, for `end`.
        """
        fetch_id = next(self._ids)
        forget = partial(self._forget, fetch_id)
        fetch = RemoteFetch(self._context, fetch_id, request, owner, block_bytes, send, forget, tenant)
        with self._lock:
            self._fetches[fetch_id] = fetch
        if len(self._fetches) > _MOST_FETCHES:
            fetch.end(f"busy: {_MOST_FETCHES} fetches of this node wait for others already; try again soon")
        elif not fetch.begin():
            self._context.submit(fetch.start)
        self._context.server.wake()
        return fetch_id

    def tick(self, now_s: float) -> None:
        """Give up what waits too long, and retry steps that found no thread. On the control thread."""
        left = self._context.left
        for _ in range(len(left)):
            self._context.submit(left.popleft())
        for fetch in self._of():
            fetch.tick(now_s)

    def _of(self, owner: str | None = None) -> list[RemoteFetch]:
        """Return the fetches of one client, or of all."""
        with self._lock:
            return [fetch for fetch in self._fetches.values() if owner in (None, fetch.owner)]

    def end(self, fetch_id: int, owner: str) -> None:
        """End a fetch whose client copies nothing more. Its slots are free once nothing writes to them."""
        with self._lock:
            fetch = self._fetches.get(fetch_id)
        if fetch is not None and fetch.owner == owner:
            fetch.client_left()

    def release_owner(self, owner: str) -> int:
        """End the fetches of a client that is gone; return their number."""
        theirs = self._of(owner)
        for fetch in theirs:
            fetch.client_left()
        return len(theirs)

    def holds(self, owner: str) -> bool:
        """Return whether an owner has a fetch under way."""
        return bool(self._of(owner))

    def users(self) -> list[tuple[str, str]]:
        """Return, of each fetch, (owner of its slots, the client that may copy out of them; "" if that has left)."""
        return [(fetch.slot_owner, "" if fetch.has_left else fetch.owner) for fetch in self._of()]

    def under_way(self) -> list[FetchSeen]:
        """Return what can be seen of all fetches, the oldest first. Any thread may call."""
        return [fetch.seen() for fetch in self._of()]

    def __len__(self) -> int:
        return len(self._fetches)

    def _forget(self, fetch_id: int) -> None:
        with self._lock:
            self._fetches.pop(fetch_id, None)

    def stop(self) -> None:
        """Close the connections of waiting fetches; call it after the control thread has ended."""
        for fetch in self._of():
            fetch.close()

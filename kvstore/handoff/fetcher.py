"""The fetches of one node that need a peer: their owners, their steps on threads, their ends."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from kvstore.config import StoreConfig
from kvstore.handoff.fetch import RemoteFetch, Send
from kvstore.handoff.fetch_context import FetchContext
from kvstore.handoff.lanes import StageLanes
from kvstore.handoff.stages import Stage, StageBook
from kvstore.mover.link import MoverLink
from kvstore.pool.pool import Pool
from kvstore.remote.peers import PeerBook
from kvstore.rpc.handoff_messages import FetchRequest, LaneFound
from kvstore.rpc.server import ControlServer
from kvstore.runtime.store_threads import Blocking, StoreThreads

#: Most fetches of one node at once; each may hold a connection to its source.
_MOST_FETCHES = 4096


class HandoffFetcher:
    """The fetches of one node that need a peer; they hold no thread while they wait.

    Args:
        config, pool, peers, mover, stages, version_of, adopt_version, server: as in FetchContext.
        threads: for steps that block.
    """

    def __init__(
        self,
        config: StoreConfig,
        pool: Callable[[], Pool],
        peers: PeerBook,
        mover: MoverLink,
        stages: StageBook,
        version_of: Callable[[bytes], int],
        adopt_version: Callable[[bytes, int], object],
        server: ControlServer,
        threads: StoreThreads,
    ) -> None:
        self.lanes = StageLanes(config, mover)
        self._context = FetchContext(
            config, pool, peers, mover, stages, self.lanes, version_of, adopt_version, server, self.submit
        )
        self._threads = threads
        self._lock = threading.Lock()
        self._fetches: dict[int, RemoteFetch] = {}
        self._ids = itertools.count(1)
        #: Steps for which no thread could be started.
        self._left: deque[Callable[[], object]] = deque()

    def warm_up(self, node_id: str, stage: Stage) -> list[LaneFound]:
        """Warm up and measure the lanes from every stage of a node; return the rate of each, or why it is not used.

        Raises:
            KVStoreError: the node cannot be reached.
        """
        context = self._context
        lanes = self.lanes.find_all(context.peers.get(node_id), stage, context.config.call_timeout_s)
        return [LaneFound(lane.gb_per_s, lane.why_not) for lane in lanes]

    def begin(self, request: FetchRequest, owner: str, block_bytes: int, send: Send) -> int:
        """Begin a fetch on the control thread; steps that block run on threads. The client always gets an answer.

        Returns:
            The id of the fetch, for `end`.
        """
        fetch_id = next(self._ids)
        fetch = RemoteFetch(self._context, fetch_id, request, owner, block_bytes, send, partial(self._forget, fetch_id))
        with self._lock:
            self._fetches[fetch_id] = fetch
        if len(self._fetches) > _MOST_FETCHES:
            fetch.refuse(f"busy: {_MOST_FETCHES} fetches of this node wait for others already; try again soon")
        elif not fetch.begin():
            self.submit(fetch.start)
        self._context.server.wake()
        return fetch_id

    def submit(self, step: Callable[[], object]) -> None:
        """Run a step of a fetch that has begun on a thread."""
        if not self._threads.submit(Blocking.FETCH, step, is_admitted=True):
            # No thread can be started. The next tick tries again: otherwise the fetch would hold its slots forever.
            self._left.append(step)

    def tick(self, now_s: float) -> None:
        """Give up what waits too long, and retry steps that found no thread; on the control thread."""
        for _ in range(len(self._left)):
            self.submit(self._left.popleft())
        with self._lock:
            fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.tick(now_s)

    def end(self, fetch_id: int, owner: str) -> None:
        """End a fetch, from which the client copies nothing more; its slots are free once nothing writes to them."""
        with self._lock:
            fetch = self._fetches.get(fetch_id)
        if fetch is not None and fetch.owner == owner:
            fetch.client_left()

    def release_owner(self, owner: str) -> int:
        """End the fetches of a client that is gone; return their number."""
        with self._lock:
            theirs = [fetch for fetch in self._fetches.values() if fetch.owner == owner]
        for fetch in theirs:
            fetch.client_left()
        return len(theirs)

    def holds(self, owner: str) -> bool:
        """Return whether an owner has a fetch under way."""
        with self._lock:
            return any(fetch.owner == owner for fetch in self._fetches.values())

    def __len__(self) -> int:
        return len(self._fetches)

    def _forget(self, fetch_id: int) -> None:
        with self._lock:
            self._fetches.pop(fetch_id, None)

    def stop(self) -> None:
        """Close the connections of waiting fetches; call it after the control thread has ended."""
        with self._lock:
            fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.close()

"""The fetches of one node that need a peer: who has begun them, what of them runs on threads, when they are over."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from kvstore.config import StoreConfig
from kvstore.handoff.fetch import RemoteFetch, Send
from kvstore.handoff.lanes import StageLanes
from kvstore.handoff.stages import Stage, StageBook
from kvstore.mover.link import MoverLink
from kvstore.pool.pool import Pool
from kvstore.remote.peers import PeerBook
from kvstore.rpc.handoff_messages import FetchRequest, LaneFound
from kvstore.rpc.server import ControlServer
from kvstore.runtime.store_threads import Blocking, StoreThreads

#: Of one node at once; each may hold a connection to its source.
_MOST_FETCHES = 4096


class HandoffFetcher:
    """The fetches of one node that need a peer; they hold no thread while they wait.

    Args:
        config: of the store.
        node_id: of this node.
        pool: of the arena; raises while there is none.
        peers: the stores of other nodes, and this one as its own peer.
        mover: that reads.
        stages: of this node.
        namespace_version: how often a namespace was cleared, as this node knows.
        adopt_version: called when a peer knows of a later clearing.
        server: of the control thread.
        threads: for what blocks.
    """

    def __init__(
        self,
        config: StoreConfig,
        node_id: str,
        pool: Callable[[], Pool],
        peers: PeerBook,
        mover: MoverLink,
        stages: StageBook,
        namespace_version: Callable[[bytes], int],
        adopt_version: Callable[[bytes, int], object],
        server: ControlServer,
        threads: StoreThreads,
    ) -> None:
        self.config, self.node_id, self.pool, self.peers, self.mover = config, node_id, pool, peers, mover
        self.stages, self.lanes = stages, StageLanes(config, mover)
        self.namespace_version, self.adopt_version = namespace_version, adopt_version
        self.server, self._threads = server, threads
        self._lock = threading.Lock()
        self._fetches: dict[int, RemoteFetch] = {}
        self._ids = itertools.count(1)
        #: Steps for which no thread could be started.
        self._left: deque[Callable[[], object]] = deque()

    def warm_up(self, node_id: str, stage: Stage) -> list[LaneFound]:
        """Warm up and measure the lanes from every stage of a node; returns the rate of each, and why not.

        Raises:
            KVStoreError: the node cannot be reached.
        """
        lanes = self.lanes.find_all(self.peers.get(node_id), stage, self.config.call_timeout_s)
        return [LaneFound(lane.gb_per_s, lane.why_not) for lane in lanes]

    def begin(self, request: FetchRequest, owner: str, block_bytes: int, send: Send) -> int:
        """Fetch, on the control thread as far as nobody has to be waited for; the client is answered in any case.

        Returns:
            What `end` takes.
        """
        fetch_id = next(self._ids)
        fetch = RemoteFetch(self, fetch_id, request, owner, block_bytes, send)
        with self._lock:
            self._fetches[fetch_id] = fetch
        if len(self._fetches) > _MOST_FETCHES:
            fetch.refuse(f"busy: {_MOST_FETCHES} fetches of this node wait for others already; try again soon")
        elif not fetch.begin():
            self.submit(fetch.start)
        self.server.wake()
        return fetch_id

    def submit(self, step: Callable[[], object]) -> None:
        """Have a thread do a step of a fetch that has begun."""
        if not self._threads.submit(Blocking.FETCH, step, is_admitted=True):
            self._left.append(
                step
            )  # No thread can be started: a fetch that stopped here would hold its slots for ever.

    def tick(self, now_s: float) -> None:
        """See which fetches wait too long; on the control thread."""
        for _ in range(len(self._left)):
            self.submit(self._left.popleft())
        with self._lock:
            fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.tick(now_s)

    def end(self, fetch_id: int, owner: str) -> None:
        """The client copies nothing more; the slots are free once nothing writes to them."""
        with self._lock:
            fetch = self._fetches.get(fetch_id)
        if fetch is not None and fetch.owner == owner:
            fetch.client_left()

    def release_owner(self, owner: str) -> int:
        """End the fetches of a client that is gone; returns how many those were."""
        with self._lock:
            theirs = [fetch for fetch in self._fetches.values() if fetch.owner == owner]
        for fetch in theirs:
            fetch.client_left()
        return len(theirs)

    def holds(self, owner: str) -> bool:
        """Whether an owner has a fetch under way."""
        with self._lock:
            return any(fetch.owner == owner for fetch in self._fetches.values())

    def __len__(self) -> int:
        return len(self._fetches)

    def forget(self, fetch_id: int) -> None:
        """A fetch is over for good."""
        with self._lock:
            self._fetches.pop(fetch_id, None)

    def stop(self) -> None:
        """Let go of the connections of fetches that wait, once the control thread has ended."""
        with self._lock:
            fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.close()

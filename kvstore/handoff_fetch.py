"""The fetches of one node that need a peer: who has begun them, on which threads they run, when they are over."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.config import StoreConfig
from kvstore.control_server import ControlServer
from kvstore.handoff_messages import FetchRequest
from kvstore.mover_link import MoverLink
from kvstore.peers import PeerBook
from kvstore.pool import Pool
from kvstore.remote_fetch import RemoteFetch, Send
from kvstore.stage_lanes import StageLanes
from kvstore.stages import Stage, StageBook

_NUM_THREADS = 32


class HandoffFetcher:
    """The fetches of one node that need a peer, a thread each while they ask and wait.

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
    ) -> None:
        self.config, self.node_id, self.pool, self.peers, self.mover = config, node_id, pool, peers, mover
        self.stages, self.lanes = stages, StageLanes(config, mover)
        self.namespace_version, self.adopt_version = namespace_version, adopt_version
        self.server = server
        self._threads = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="raykv-handoff")
        self._lock = threading.Lock()
        self._fetches: dict[int, RemoteFetch] = {}
        self._ids = itertools.count(1)

    def warm_up(self, node_id: str, stage: Stage) -> dict[str, Any]:
        """Warm up and measure the lanes from every stage of a node; returns the rate of each, and why not.

        Raises:
            KVStoreError: the node cannot be reached.
        """
        lanes = self.lanes.find_all(self.peers.get(node_id), stage, self.config.call_timeout_s)
        return {"lanes": [{"gb_per_s": lane.gb_per_s, "why_not": lane.why_not} for lane in lanes]}

    def begin(self, request: FetchRequest, owner: str, block_bytes: int, send: Send) -> int:
        """Fetch, what waits for others on a thread; the client gets a last message in any case.

        Returns:
            What `end` takes.
        """
        fetch_id = next(self._ids)
        fetch = RemoteFetch(self, fetch_id, request, owner, block_bytes, send)
        with self._lock:
            self._fetches[fetch_id] = fetch
        if request.from_slab and request.slab:
            fetch.begin()
        self._threads.submit(fetch.run)
        return fetch_id

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
        """Begin no more fetches."""
        self._threads.shutdown(wait=False, cancel_futures=True)

"""The parts that the fetches of one node share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.config import StoreConfig
from kvstore.handoff.lanes import StageLanes
from kvstore.handoff.stages import StageBook
from kvstore.mover.link import MoverLink
from kvstore.pool.pool import Pool
from kvstore.remote.peers import PeerBook
from kvstore.rpc.server import ControlServer
from kvstore.runtime.threads.store_threads import Blocking, StoreThreads


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchContext:
    """The parts that the fetches of one node share.

    Args:
        config: of the store.
        pool: returns the pool of the arena; raises while there is none.
        peers: the stores of other nodes, and this one as its own peer.
        mover: runs the READs.
        stages: of this node.
        lanes: into these stages.
        version_of: returns the last clearing of a namespace that this node knows.
        adopt_version: called when a peer knows of a later clearing.
        server: of the control thread.
        threads: for steps that block.
        left: the steps for which no thread could be started.
    """

    config: StoreConfig
    pool: Callable[[], Pool]
    peers: PeerBook
    mover: MoverLink
    stages: StageBook
    lanes: StageLanes
    version_of: Callable[[bytes], int]
    adopt_version: Callable[[bytes, int], object]
    server: ControlServer
    threads: StoreThreads
    left: deque[Callable[[], object]] = field(default_factory=deque)

    def submit(self, step: Callable[[], object]) -> None:
        """Run a step of a fetch that has begun on a thread."""
        if not self.threads.submit(Blocking.FETCH, step, is_admitted=True):
            # No thread can be started. The next tick tries again: otherwise the fetch would hold its slots forever.
            self.left.append(step)

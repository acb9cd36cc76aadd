"""What a client has that hands blocks off: connections, a registered cache, jobs, and perhaps a stage on its GPU."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.part import Part
from kvstore.client.connections import StoreConnections
from kvstore.client.job_threads import JobThreads
from kvstore.client.results import HandoffRoute, Job
from kvstore.client.save_load import CopyGuard
from kvstore.client.stage_link import StageLink
from kvstore.client.work import Work
from kvstore.config import StoreConfig, parse_bytes
from kvstore.engine.copier import CopyOrder, EngineCopier
from kvstore.engine.registered import RegisteredCache
from kvstore.errors import CopyStuck
from kvstore.memory.clears import ClearCounts

#: Of the whole process, which is to be ended: a client that was collected would unmap what a device may still write
#: to, and give its slots back.
_with_stuck_copies: set[StageVerbs] = set()


class StageVerbs(ABC):
    """Attaching to a stage; connections, jobs and the registered cache are the client's."""

    space: Namespace
    part: Part
    config: StoreConfig
    node_id: str
    epoch: str
    _store: StoreConnections
    _clears: ClearCounts
    _jobs: JobThreads
    _stuck: bool
    _caches: RegisteredCache | None = None
    _stage_link: StageLink | None = None

    def attach_handoff(self, staging: str | int = "1GiB", peers: Sequence[str] = ()) -> HandoffRoute:
        """Let hand-offs of this client go from GPU to GPU, past host memory, where that is faster.

        The blocks go through a stage: memory of the cache's GPU that this node's mover has and lets others read. It is
        shared by all clients of the GPU, and stays while the mover lives. Without this call, or where GPUs cannot reach
        each other, hand-offs go through host memory; either way with the same contract and the same bytes.

        Args:
            staging: size of the stage, such as "1GiB": blocks that are published and fetched at once have to fit.
                The first client of a GPU decides.
            peers: nodes whose stages this client will fetch from. Their lanes are warmed up and measured now, which
                the first fetch from any other does by itself; attach there first.

        Returns:
            Which way hand-offs go, and why.

        Raises:
            InvalidRequest: no cache is registered.
            StoreUnavailable, PeerLost, TransferTimeout: the store or its mover is gone, or does not answer.
        """
        self._registered()
        assert self._caches is not None, "kept with the copier"
        if self._stage_link is not None:
            self._stage_link.close()
        self._stage_link = StageLink(self._store.ask, self._caches, parse_bytes(staging), tuple(peers))
        return self._stage_link.attach()

    @property
    def handoff_slab(self) -> int:
        """Where `begin_publish` puts blocks, for a ticket that is made elsewhere: in this stage, or 0, the arena."""
        return self._stage_link.slab if self._stage_link is not None else 0

    @contextlib.contextmanager
    def _noting_stuck(self) -> Iterator[None]:
        try:
            yield
        except CopyStuck:
            self._stuck = True
            _with_stuck_copies.add(self)
            raise

    @abstractmethod
    def _registered(self) -> EngineCopier:
        """Return the copier of the registered cache, or refuse."""

    @abstractmethod
    def _submit(
        self,
        work: Work[Any],
        what: str,
        guard: CopyGuard,
        order: CopyOrder | None,
        start: Callable[[Work[Any]], None] | None = None,
    ) -> Job[Any]:
        """Have a job done; `start` says by which threads, where those that copy are not meant.

        Whatever is raised, nothing of the job touches the engine's blocks any more, and it gives back what it holds.
        """

    @abstractmethod
    def _call_off(self, work: Work[Any], guard: CopyGuard) -> None:
        """Have a job end that nobody gets, however far its start came; it may be called for one that has ended."""

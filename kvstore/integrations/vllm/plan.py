"""What the two halves of the connector tell each other: once a step down to the workers, once a step back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.ticket import HandoffTicket
from kvstore.integrations.vllm.handover import Desk


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Blocks to bring into the engine for one request.

    Args:
        req_id: the request, which vLLM holds back until it is reported as received.
        hashes: from the root of the chain on.
        block_ids: the engine's blocks for their tokens.
        num_engine_tokens: tokens at the front that the engine has already, in blocks that others may read.
        tickets: of a hand-off, one for each worker, in place of what the store has.
    """

    req_id: str
    hashes: BlockHashes
    block_ids: list[int]
    num_engine_tokens: int
    tickets: tuple[HandoffTicket, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Blocks to store for one request, whose last ones are computed in this step.

    Args:
        req_id: the request.
        hashes: from the root of the chain on: whatever was evicted meanwhile is stored again.
        block_ids: the engine's blocks for their tokens.
    """

    req_id: str
    hashes: BlockHashes
    block_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """Blocks of one prompt to hand off, whose last ones are computed in this step.

    Args:
        req_id: the request.
        tickets: under which each worker publishes, by rank.
        block_ids: the engine's blocks for their tokens.
    """

    req_id: str
    tickets: tuple[HandoffTicket, ...]
    block_ids: list[int]


class Wakeup(threading.Event):
    """Ends a worker's wait where it shares the scheduler's process; one that was sent to another is never set.

    Args:
        is_shared: whether whoever sets it has this very one.
    """

    def __init__(self, is_shared: bool = True) -> None:
        super().__init__()
        self.is_shared = is_shared

    def __reduce__(self) -> tuple[type[Wakeup], tuple[bool]]:
        return Wakeup, (False,)


class Hook:
    """Is called by a worker that shares the scheduler's process; one that was sent to another does nothing.

    Args:
        call: what it does.
    """

    def __init__(self, call: Callable[[], None] = lambda: None) -> None:
        self._call = call

    def __call__(self) -> None:
        """Do it."""
        self._call()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Copies(Protocol):
    """What a worker does at once about its copies, when the scheduler's half in its own process asks for it."""

    def end_saves(self, req_ids: Collection[str]) -> None:
        """Return when no save of some requests reads their blocks any more.

        Raises:
            CopyStuck: one still does.
        """

    def begin_save(self, plan: SavePlan) -> None:
        """Begin to save blocks that are computed, or about to be on the device."""

    def drop_saves(self) -> None:
        """End all saves; those that have not copied are not made."""

    def has_landed(self, req_id: str, wait_s: float) -> bool:
        """Whether no load of a request is under way any more; waits so long for it."""


class Door:
    """The way to a worker's copies; one that was sent to another process leads nowhere.

    Args:
        copies: of the worker.
    """

    def __init__(self, copies: Copies | None = None) -> None:
        self.copies = copies

    def __reduce__(self) -> tuple[type[Door], tuple[()]]:
        return Door, ()


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """What the scheduler's half tells the workers' in one step.

    Args:
        loads: to begin in this step.
        saves: to begin when this step is computed.
        publications: likewise.
        withdrawn: requests whose tickets nobody will get.
        late_saves: to begin at once: of what steps before this one computed.
        settle: requests whose blocks are overwritten in this step; none of their saves may still read them.
        ending: finished requests whose blocks vLLM keeps until they are reported as sent.
        is_computing: whether any token is computed in this step.
        num_waiting: requests that wait for an answer of the store.
        num_unhashed_tokens: of those whose prompts are still to be hashed for it.
        answered: set when there is such an answer.
        launched: called when all of the step is launched.
        drop_saves: the cache was cleared: what was computed before must not be stored any more.
    """

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    publications: list[PublishPlan] = field(default_factory=list)
    withdrawn: set[str] = field(default_factory=set)
    late_saves: list[SavePlan] = field(default_factory=list)
    settle: set[str] = field(default_factory=set)
    ending: set[str] = field(default_factory=set)
    is_computing: bool = False
    num_waiting: int = 0
    num_unhashed_tokens: int = 0
    answered: Wakeup | None = None
    launched: Hook | None = None
    drop_saves: bool = False


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler's half after a step; those of several workers are put together.

    Args:
        saves_ended: for each request, how many of its saves and publications came to an end on how many workers, well
            or badly.
        landing: for each request, how many more of its loads, on how many workers, go on although it was reported as
            received; negative when they have ended.
        failed_loads: for each request with a load that failed, the tokens that are right.
        stored: blocks that are in the store now, for each save that wrote some: (request, blocks from the root).
        num_drops: workers that have dropped their saves, as they were told.
        desks: where workers publish, by rank, if that is news.
    """

    saves_ended: Counter[str] = field(default_factory=Counter)
    landing: Counter[str] = field(default_factory=Counter)
    failed_loads: dict[str, int] = field(default_factory=dict)
    stored: list[tuple[str, int]] = field(default_factory=list)
    num_drops: int = 0
    desks: dict[int, Desk] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.saves_ended or self.landing or self.failed_loads or self.stored or self.num_drops or self.desks
        )

    def aggregate(self, other: Any) -> WorkerReport:
        """Put two reports of one step together."""
        failed = dict(self.failed_loads)
        for req_id, num_tokens in other.failed_loads.items():
            failed[req_id] = min(num_tokens, failed.get(req_id, num_tokens))
        landing = Counter(self.landing)
        landing.update(other.landing)  # Unlike +, which drops what is negative.
        return WorkerReport(
            saves_ended=self.saves_ended + other.saves_ended,
            landing=landing,
            failed_loads=failed,
            stored=self.stored + other.stored,
            num_drops=self.num_drops + other.num_drops,
            desks=self.desks | other.desks,
        )


@dataclass(slots=True)
class WorkerHello(KVConnectorHandshakeMetadata):
    """What a worker found when it registered its caches: only it sees the tensors.

    Args:
        space: what the blocks of this engine mean; all workers must have found the same.
        desks: where this worker publishes, by its rank.
        launcher_pid: the process that launches its steps on a GPU; 0 where they run on the CPU.
        door: to its copies, for a scheduler in its own process.
    """

    space: Namespace
    desks: dict[int, Desk] = field(default_factory=dict)
    launcher_pid: int = 0
    door: Door = field(default_factory=Door)

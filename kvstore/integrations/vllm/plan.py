"""Messages between the connector's two halves: in each step one to the workers, and one back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.priority import Priority
from kvstore.blocks.ticket import HandoffTicket
from kvstore.integrations.vllm.handover import Desk

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Blocks to bring into the engine for one request.

    Args:
        req_id: the request, which vLLM holds back until it is reported as received.
        hashes: from the root of the chain on.
        block_ids: the engine's blocks for their tokens.
        num_engine_tokens: tokens at the front that the engine has already, in blocks that other requests may read.
        tickets: of a hand-off, one for each worker; the load then fetches these blocks instead of stored ones.
        prompt: of a hand-off, a run whose last hash is that of the whole prompt, as this engine has it.
        priority: of the request; see `Client.load`.
    """

    req_id: str
    hashes: BlockHashes
    block_ids: list[int]
    num_engine_tokens: int
    tickets: tuple[HandoffTicket, ...] = ()
    prompt: BlockHashes | None = None
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Blocks to store for one request, whose last ones are computed in this step.

    Args:
        req_id: the request.
        hashes: from the root of the chain on, so that blocks evicted meanwhile are stored again.
        block_ids: the engine's blocks for their tokens.
        tickets: under which each worker publishes these blocks instead, by rank, to hand them off.
        prompt: as for `LoadPlan`.
        priority: of the stored blocks.
        priority_s: see `Client.save`.
    """

    req_id: str
    hashes: BlockHashes
    block_ids: list[int]
    tickets: tuple[HandoffTicket, ...] = ()
    prompt: BlockHashes | None = None
    priority: Priority = Priority.NORMAL
    priority_s: float | None = None


class Local(Generic[T]):
    """A value for code in the same process; a pickled copy has None."""

    def __init__(self, value: T | None = None) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type[Local[T]], tuple[()]]:
        return Local, ()


class Copies(Protocol):
    """Calls that act on a worker's copies at once, for a scheduler's half in the same process."""

    def end_saves(self, req_ids: Collection[str]) -> None:
        """End the saves of some requests; on return none of them reads its blocks any more.

        Raises:
            CopyStuck: a save still reads them.
        """

    def begin_save(self, plan: SavePlan) -> None:
        """Begin to save blocks that are computed, or that the device is about to compute."""

    def drop_saves(self) -> None:
        """End all saves; a save that has not copied yet is left out."""

    def has_landed(self, req_id: str, wait_s: float) -> bool:
        """Return whether no load of a request is landing any more; waits up to `wait_s` for that."""


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """The message of the scheduler's half to the workers for one step.

    Args:
        loads: to begin in this step.
        saves: to begin when this step is computed.
        publications: to begin when this step is computed, before the saves.
        withdrawn: requests whose tickets no engine will get.
        late_saves: to begin at once, as their blocks were computed in earlier steps.
        settle: requests whose blocks are overwritten in this step; none of their saves may still read them.
        ending: finished requests whose blocks vLLM keeps until they are reported as sent.
        is_computing: whether any token is computed in this step.
        num_waiting: requests that wait for an answer of the store.
        num_unhashed_tokens: prompt tokens of those waiting requests that have no hashes yet.
        answered: set when the store has answered; a worker that shares the scheduler's process can wait for it.
        launched: called when all of the step is launched, by a worker that shares the scheduler's process.
        drop_saves: the cache was cleared: blocks computed before that must not be stored any more.
    """

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    publications: list[SavePlan] = field(default_factory=list)
    withdrawn: set[str] = field(default_factory=set)
    late_saves: list[SavePlan] = field(default_factory=list)
    settle: set[str] = field(default_factory=set)
    ending: set[str] = field(default_factory=set)
    is_computing: bool = False
    num_waiting: int = 0
    num_unhashed_tokens: int = 0
    answered: Local[threading.Event] = field(default_factory=Local)
    launched: Local[Callable[[], None]] = field(default_factory=Local)
    drop_saves: bool = False


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """The workers' message to the scheduler's half after a step; reports of several workers are merged.

    Args:
        saves_ended: for each request, how many saves and publications ended, well or badly, summed over workers.
        landing: for each request, the change in its loads that still copy although they were reported as received,
            summed over workers; negative when such loads have ended.
        failed_loads: for each request whose load failed, the number of leading tokens that are right.
        stored: for each save that wrote blocks: (request, blocks from the root that are in the store now).
        num_drops: workers that have dropped their saves because of `StepPlan.drop_saves`.
        desks: where workers publish, by rank; only those that changed.
        hellos: findings of the workers whose first report this is, if the engine has other connectors beside this one.
    """

    saves_ended: Counter[str] = field(default_factory=Counter)
    landing: Counter[str] = field(default_factory=Counter)
    failed_loads: dict[str, int] = field(default_factory=dict)
    stored: list[tuple[str, int]] = field(default_factory=list)
    num_drops: int = 0
    desks: dict[int, Desk] = field(default_factory=dict)
    hellos: list[WorkerHello] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def aggregate(self, other: Any) -> WorkerReport:
        """Add another worker's report of the same step."""
        for req_id, num_tokens in other.failed_loads.items():
            self.failed_loads[req_id] = min(num_tokens, self.failed_loads.get(req_id, num_tokens))
        self.saves_ended.update(other.saves_ended)
        self.landing.update(other.landing)  # The operator += would drop negative counts.
        self.stored += other.stored
        self.num_drops += other.num_drops
        self.desks |= other.desks
        self.hellos += other.hellos
        return self


@dataclass(slots=True)
class WorkerHello(KVConnectorHandshakeMetadata):
    """A worker's findings when it registered its caches; only the worker sees the tensors.

    Args:
        space: namespace of this engine's blocks; all workers must have found the same.
        desks: where this worker publishes, by its rank.
        is_on_gpu: whether it launches its steps on a GPU.
        copies: its copies, for a scheduler in the same process.
    """

    space: Namespace
    desks: dict[int, Desk] = field(default_factory=dict)
    is_on_gpu: bool = False
    copies: Local[Copies] = field(default_factory=Local)

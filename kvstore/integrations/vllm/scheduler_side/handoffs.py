"""The scheduler's half of hand-offs: which blocks go to another engine, and which come from one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm.v1.request import RequestStatus

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.ticket import HandoffTicket, expiry_after
from kvstore.bounds import clip
from kvstore.errors import InvalidRequest
from kvstore.integrations.vllm.handover import DO_DECODE, DO_PREFILL, TICKET, Desk, Handover
from kvstore.integrations.vllm.plan import SavePlan, StepPlan
from kvstore.integrations.vllm.scheduler_side.priority import read_priority
from kvstore.integrations.vllm.scheduler_side.tracked import Tracked
from kvstore.integrations.vllm.stats import Stats

logger = logging.getLogger(__name__)

_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class HandoffSide:
    """The hand-offs of one engine.

    Args:
        space: namespace of the blocks.
        engine_block_size: tokens of vLLM's blocks.
        num_workers: of this engine; each publishes, and fetches, its part.
        publishes: whether the engine hands its blocks off when a request asks for it.
        ttl_s: how long published blocks are kept for the decode engine, in seconds.
        stats: gets counts.
        is_alone: whether the params of hand-offs are for this connector; beside others they are for one of those.
    """

    def __init__(
        self,
        space: Namespace,
        engine_block_size: int,
        num_workers: int,
        publishes: bool,
        ttl_s: float,
        stats: Stats,
        is_alone: bool = True,
    ) -> None:
        self._space, self._engine_block_size, self._num_workers = space, engine_block_size, num_workers
        self._publishes, self._ttl_s, self._stats, self._is_alone = publishes, ttl_s, stats, is_alone
        self._desks: dict[int, Desk] = {}

    def learn(self, desks: Mapping[int, Desk]) -> None:
        """Note where workers publish, by rank; they report it at the start and after a restart of their store."""
        self._desks.update(desks)

    def begin(self, tracked: Tracked) -> None:
        """Read the params of a new request; it goes on without params that are of no use."""
        params = getattr(tracked.request, "kv_transfer_params", None)
        if params is None:
            return
        if not isinstance(params, Mapping):  # vLLM does not check what came over HTTP.
            why = f"wanted a mapping, got {clip(params)}; pass the params of a prefill engine on as they are"
            self._drop(tracked, f"kv_transfer_params: {why}")
            return
        tracked.priority, tracked.priority_s = read_priority(params, tracked.request.request_id)
        if not self._is_alone:
            return
        tracked.may_publish = self._publishes and bool(params.get(DO_DECODE))
        if not params.get(DO_PREFILL) or not tracked.may_load:
            return
        try:
            tracked.arriving = Handover.from_params(params)
            self._check(tracked.arriving)
        except InvalidRequest as error:
            self._drop(tracked, f"ticket: {error}")

    def num_arriving(self, tracked: Tracked, hashes: BlockHashes) -> int:
        """Return how many blocks a request has tickets for; drops tickets that are for another prompt."""
        if tracked.arriving is not None and tracked.arriving.is_for(hashes):
            return tracked.arriving.num_blocks
        self._drop(tracked, "ticket, which is for another prompt")
        return 0

    def plan(self, plan: StepPlan, tracked: Tracked, begin: int, end: int) -> None:
        """Plan a prompt's hand-off in the step that computes its last token; tokens [begin, end).

        If vLLM sends a request back and computes the prompt again, it is handed off under new tickets.
        """
        num_tokens = tracked.request.num_prompt_tokens
        if not (tracked.may_publish and begin < num_tokens <= end) or tracked.hashes is None:
            return
        size = self._space.shape.block_size
        num_blocks = num_tokens // size
        hashes = tracked.hashes[:num_blocks]
        tracked.leaving = self._name(hashes)
        if tracked.leaving is None:
            return
        ids = tracked.block_ids[: -(-num_blocks * size // self._engine_block_size)]
        req_id, tickets = tracked.request.request_id, tracked.leaving.tickets
        plan.publications.append(SavePlan(req_id=req_id, hashes=hashes, block_ids=ids, tickets=tickets))
        tracked.num_saves_open += self._num_workers

    def end(self, plan: StepPlan, tracked: Tracked) -> dict[str, Any] | None:
        """Return the params of an ended request for the engine that decodes it; None when it is not handed off."""
        if tracked.leaving is None:
            return None
        if tracked.request.status in _ENDED_WELL:
            return tracked.leaving.to_params()
        plan.withdrawn.add(tracked.request.request_id)
        return None

    def _drop(self, tracked: Tracked, what: str) -> None:
        tracked.arriving = None
        self._stats.count("num_bad_tickets")
        logger.error("request %s goes on without its %s", tracked.request.request_id, what)

    def _name(self, hashes: BlockHashes) -> Handover | None:
        if len(self._desks) < self._num_workers or not len(hashes):
            return None
        tickets = tuple(
            HandoffTicket(
                node_id=desk.node_id,
                epoch=bytes.fromhex(desk.epoch),
                namespace=self._space.digest,
                num_blocks=len(hashes),
                block_bytes=self._space.shape.block_bytes,
                expires_s=expiry_after(self._ttl_s),
                part=desk.part,
                slab=desk.slab,
            )
            for _, desk in sorted(self._desks.items())
        )
        return Handover(tickets=tickets, last_hash=hashes[len(hashes) - 1])

    def _check(self, handover: Handover) -> None:
        if (theirs := handover.tickets[0].namespace) != self._space.digest:
            raise InvalidRequest(
                f"kv_transfer_params[{TICKET!r}]: wanted blocks of namespace {self._space.digest.hex()[:16]}, got "
                f"{theirs.hex()[:16]}; prefill and decode need the same model, dtype, stored block_size and salt"
            )
        here = [desk.part for _, desk in sorted(self._desks.items())]
        if (there := [ticket.part for ticket in handover.tickets]) != here:
            raise InvalidRequest(
                f"kv_transfer_params[{TICKET!r}]: wanted a ticket for each of the parts {here}, got "
                f"{clip(there)}; give both engines the same tensor- and pipeline-parallel sizes, or pass KV on through "
                "the store alone"
            )

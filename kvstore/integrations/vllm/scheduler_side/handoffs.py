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
from kvstore.integrations.vllm.handover import (
    DO_DECODE,
    DO_PREFILL,
    TICKET,
    Desk,
    from_params,
    read_priority,
    to_params,
)
from kvstore.integrations.vllm.plan import SavePlan, StepPlan
from kvstore.integrations.vllm.scheduler_side.keys import tail_digest
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
        if tracked.may_publish or params.get(DO_PREFILL):
            tracked.tail = tail_digest(self._space, tracked.request, tracked.media)
        if not params.get(DO_PREFILL) or not tracked.may_load:
            return
        try:
            tracked.arriving = self._usable(from_params(params), tracked.request.num_prompt_tokens)
        except InvalidRequest as error:
            self._drop(tracked, f"ticket: {error}")

    def prompt_of(self, tracked: Tracked) -> BlockHashes:
        """Return a run of one hash, of a handed-off prompt's full blocks and of what is behind them.

        Each engine makes it from the request that it has itself, so it does not matter what came along with a ticket.
        """
        assert tracked.hashes is not None, "vLLM gave blocks to what was matched"
        full = tracked.hashes[: tracked.request.num_prompt_tokens // self._space.shape.block_size]
        return self._space.wrap([full[-1] + tracked.tail], full)

    def plan(self, plan: StepPlan, tracked: Tracked, begin: int, end: int) -> None:
        """Plan a prompt's hand-off in the step that computes its last token; tokens [begin, end).

        If vLLM sends a request back and computes the prompt again, it is handed off under new tickets.
        """
        num_tokens = tracked.request.num_prompt_tokens
        if not (tracked.may_publish and begin < num_tokens <= end) or tracked.hashes is None:
            return
        size = self._space.shape.block_size
        num_blocks = num_tokens // size
        tracked.leaving = self._tickets(num_blocks)
        if not tracked.leaving:
            return
        ids = tracked.block_ids[: -(-num_blocks * size // self._engine_block_size)]
        publication = SavePlan(
            req_id=tracked.request.request_id,
            hashes=tracked.hashes[:num_blocks],
            block_ids=ids,
            tickets=tracked.leaving,
            prompt=self.prompt_of(tracked),
        )
        plan.publications.append(publication)
        tracked.num_saves_open += self._num_workers

    def end(self, plan: StepPlan, tracked: Tracked) -> dict[str, Any] | None:
        """Return the params of an ended request for the engine that decodes it; None when it is not handed off."""
        if not tracked.leaving:
            return None
        if tracked.request.status in _ENDED_WELL:
            return to_params(tracked.leaving)
        plan.withdrawn.add(tracked.request.request_id)
        return None

    def _drop(self, tracked: Tracked, what: str) -> None:
        self._stats.count("num_bad_tickets")
        logger.error("request %s goes on without its %s", tracked.request.request_id, what)

    def _tickets(self, num_blocks: int) -> tuple[HandoffTicket, ...]:
        if len(self._desks) < self._num_workers or not num_blocks:
            return ()
        return tuple(
            HandoffTicket(
                node_id=desk.node_id,
                epoch=bytes.fromhex(desk.epoch),
                namespace=self._space.digest,
                num_blocks=num_blocks,
                block_bytes=self._space.shape.block_bytes,
                expires_s=expiry_after(self._ttl_s),
                part=desk.part,
                slab=desk.slab,
            )
            for _, desk in sorted(self._desks.items())
        )

    def _usable(self, tickets: tuple[HandoffTicket, ...], num_prompt_tokens: int) -> tuple[HandoffTicket, ...]:
        """Return tickets; refuse those that are of no use to any prompt of this length here."""
        if (spaces := {ticket.namespace for ticket in tickets}) != {self._space.digest}:
            raise InvalidRequest(
                f"kv_transfer_params[{TICKET!r}]: wanted blocks of namespace {self._space.digest.hex()[:16]}, got "
                f"{clip(sorted(space.hex()[:16] for space in spaces))}; prefill and decode need the same model, dtype, "
                "stored block_size and salt"
            )
        here = [desk.part for _, desk in sorted(self._desks.items())]
        # Engines give out no early tickets, and a fetch of a forged one would wait until its timeout.
        if (there := [ticket.part for ticket in tickets if not ticket.is_early]) != here:
            raise InvalidRequest(
                f"kv_transfer_params[{TICKET!r}]: wanted a ticket for each of the parts {here}, got "
                f"{clip(there)}; give both engines the same tensor- and pipeline-parallel sizes, or pass KV on through "
                "the store alone"
            )
        num_blocks = num_prompt_tokens // self._space.shape.block_size
        if (theirs := {ticket.num_blocks for ticket in tickets}) != {num_blocks}:
            raise InvalidRequest(
                f"kv_transfer_params[{TICKET!r}]: wanted the {num_blocks} full blocks of this prompt, got tickets of "
                f"{clip(sorted(theirs))}; send the decode engine the prompt that the prefill engine got"
            )
        return tickets

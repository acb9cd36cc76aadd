"""The worker's half of hand-offs: it publishes its part of a prompt's blocks, and fetches it from another engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import Any

from kvstore.blocks.part import Part
from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.client import Client
from kvstore.client.job import Job
from kvstore.errors import ConfigError, KVStoreError
from kvstore.integrations.vllm.handover import Desk
from kvstore.integrations.vllm.plan import SavePlan

logger = logging.getLogger(__name__)


class Publishing:
    """The hand-offs of one rank.

    Args:
        rank: among all workers of the engine; also the index of this worker's ticket in a request.
        part: this worker's part of every block.
        ttl_s: how long blocks are kept for a decode engine.
        staging_bytes: of the GPU's memory, for hand-offs that go from GPU to GPU; 0 for none.
    """

    def __init__(self, rank: int, part: Part, ttl_s: float, staging_bytes: int) -> None:
        self.rank, self._part, self._ttl_s, self._staging_bytes = rank, part, ttl_s, staging_bytes
        self._told: Desk | None = None
        #: The last publication of each request that vLLM still knows.
        self.open: dict[str, tuple[Client, SavePlan, Job[HandoffTicket]]] = {}

    def attach(self, client: Client, device: str) -> None:
        """Let a new client's hand-offs go from GPU to GPU, if configured; where that fails, host memory serves.

        Args:
            client: with the engine's cache registered.
            device: of that cache.

        Raises:
            ConfigError: it is configured, and the cache is on no GPU.
        """
        if not self._staging_bytes:
            return
        if not device.startswith("cuda"):
            raise ConfigError(
                f"kv_connector_extra_config['handoff_staging']: wanted an engine on a GPU, got a cache on {device}; "
                "leave it out: hand-offs then go through host memory"
            )
        try:
            route = client.attach_handoff(self._staging_bytes)
        except KVStoreError as error:
            logger.warning("hand-offs go through host memory for now: %s", error)
        else:
            logger.info("hand-offs go by way of the %s %s", route.route, route.why_not)

    def news(self, client: Client | None) -> dict[int, Desk]:
        """Return where this worker publishes, by its rank, if that changed since the last call."""
        if client is None:
            return {}
        desk = Desk(node_id=client.node_id, epoch=client.epoch, part=self._part.ranks, slab=client.handoff_slab)
        if desk == self._told:
            return {}
        self._told = desk
        return {self.rank: desk}

    def publish(self, client: Client, plan: SavePlan, pages: list[int]) -> Job[HandoffTicket]:
        """Begin to publish; the blocks have to stay as they are until the job is done.

        On return, a fetch of the ticket waits for the blocks. A request that is computed again, after a preemption or a
        failed load, is published again, and its earlier blocks are withdrawn.

        Raises:
            KVStoreError: nothing is published; a fetch of the ticket fails.
        """
        self.withdraw([plan.req_id])
        ticket = plan.tickets[self.rank]
        publication = client.begin_publish(pages, hashes=plan.prompt, ttl_s=self._ttl_s, ticket=ticket)
        self.open[plan.req_id] = (client, plan, publication.job)
        return publication.job

    def withdraw(self, req_ids: Iterable[str]) -> int:
        """Withdraw the blocks of requests whose tickets no engine will get; returns the number of requests."""
        found = [self.open.pop(req_id) for req_id in list(req_ids) if req_id in self.open]
        for client, plan, job in found:

            def withdraw(_: Any, client: Client = client, plan: SavePlan = plan) -> None:
                with contextlib.suppress(KVStoreError):
                    client.withdraw(plan.tickets[self.rank], hashes=plan.prompt)

            job.add_done_callback(withdraw)  # Not before: the job still writes their slots.
        return len(found)

    def forget(self, req_ids: Iterable[str]) -> None:
        """Stop tracking ended requests; their blocks stay for the ticket holders until they expire."""
        for req_id in req_ids:
            self.open.pop(req_id, None)

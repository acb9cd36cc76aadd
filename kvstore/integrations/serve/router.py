"""A request router for Ray Serve that sends a prompt where its first token comes soonest.

`request_router_class="kvstore.integrations.serve.PrefixRouter"`; docs/serve.md has the settings.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ray import serve
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.shape import KVShape
from kvstore.integrations.prompt_keys import text_hashes
from kvstore.integrations.serve.choosing import ReplicaState, rank_replicas
from kvstore.integrations.serve.coming import ComingPrompts
from kvstore.integrations.serve.hints import RoutedHints
from kvstore.integrations.serve.open_work import OpenWork
from kvstore.integrations.serve.options import RouterOptions
from kvstore.integrations.serve.prompts import (
    NUM_THREADS,
    find_request,
    is_chat,
    is_long,
    load_renderer,
    load_tokenizer,
    salt_of,
    tokens_of,
)
from kvstore.integrations.serve.source import StoreSource, first_count, first_space
from kvstore.integrations.serve.waiting import Bounded, Learned
from kvstore.integrations.space_text import space_from_text

logger = logging.getLogger(__name__)

#: What is noted on a pending request, which lives as long as it is needed: hashes, and tokens to compute by replica.
_CHAIN, _COSTS = "_raykv_chain", "_raykv_costs"
#: Between two attempts to load the tokenizer, and to learn the namespace; and for a replica to say it.
_PAUSE_S, _SPACE_S = 5.0, 30.0
#: Between two attempts to load vLLM's renderer, which take seconds of a core.
_RENDERER_PAUSE_S = 60.0
_LOG_S = 60.0


class PrefixRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Ranks replicas by the expected time to the first token: what waits there, what is fetched, what is computed.

    What a replica has comes from the store's directory, by node, and from what this router sent it before. Where a
    prompt cannot be read, now or at all, the choice is Ray's: the shorter of two random queues.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the settings; Ray Serve calls this once.

        Raises:
            ConfigError, InvalidRequest: a setting cannot work; the message names the key.
        """
        self.options = options = RouterOptions.parse(kwargs)
        self.hints = RoutedHints(options.max_hints, options.hint_ttl_s)
        #: Requests by how they were routed.
        self.counts: Counter[str] = Counter()
        self.space = space_from_text(options.space) if options.space else _provisional(options)
        self._is_space_known = options.space is not None
        self._limit_hints(options.cache_tokens or 0)
        self._tokenizer = Learned("tokenizer", self._load_tokenizer, _PAUSE_S)
        self._renderer = Learned("renderer of chats", self._load_renderer, _RENDERER_PAUSE_S)
        self._learning = Learned("namespace", self._ask_replicas, _PAUSE_S)
        self._reading = Bounded("prompts", options.tokenize_wait_s, num_threads=NUM_THREADS, max_open=64)
        self._reading_long = Bounded("long prompts", options.tokenize_wait_s, max_open=4)
        self._asking = Bounded("store", options.store_wait_s, options.store_pause_s, num_threads=2, max_open=8)
        self._source = self._open_source()
        self._work, self._coming = OpenWork(), ComingPrompts()
        self._logged_s = time.monotonic()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas, each in a rank of its own, the best one first."""
        # First, as it also tells Ray Serve to pause before it asks again.
        shorter = PowerOfTwoChoicesRequestRouter.choose_replicas
        either: list[list[RunningReplica]] = await shorter(self, candidate_replicas, pending_request)
        if pending_request is None or pending_request.metadata.multiplexed_model_id or not either:
            return either
        try:
            ranked = await self._ranked(candidate_replicas, pending_request)
        except Exception:
            logger.exception("a request is routed by the length of queues")
            ranked = []
        if not ranked:
            self.counts["by_load"] += 1
        self._log_counts()
        return ranked or either

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note where the blocks of a prompt will be, and what is left to compute of it."""
        request = pending_request.metadata.internal_request_id
        self._coming.end(request)
        name, chain = replica_id.unique_id, getattr(pending_request, _CHAIN, None)
        if chain is None:
            return
        if chain.namespace_digest == self.space.digest:
            self.hints.note(chain, name, self._now_s())
        costs = getattr(pending_request, _COSTS, {})
        num_tokens = costs.get(name, len(chain) * self.space.shape.block_size)
        self._work.begin(request, name, num_tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a replica has less to compute."""
        self._work.end(internal_request_id, replica_id.unique_id)
        self._coming.end_at(internal_request_id, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that run now, and forget those that ended."""
        before, now = ({each.unique_id for each in ids} for ids in (self._replica_id_set, _ids(replicas)))
        super().update_replicas(replicas)
        for name in before - now:
            self._forget(name)
        if now - before:
            self._learning.renew()  # New replicas may have a new model.

    async def _ranked(self, replicas: list[RunningReplica], pending: PendingRequest) -> list[list[RunningReplica]]:
        chain, num_tokens = await self._read(pending)
        if not chain or len(replicas) < 2:
            return []
        on_nodes: list[tuple[str, int]] | None = None
        if self._source is not None and self._is_space_known:
            on_nodes = await self._asking.do(self._source.locate, chain)
        by_name = {each.replica_id.unique_id: each for each in random.sample(replicas, len(replicas))}
        # Nothing waits from here to the choice, so requests of one moment are ranked one after the other.
        now_s, request = self._now_s(), pending.metadata.internal_request_id
        self._coming.end(request)  # Ray Serve asks again where all were full.
        self._coming.end_stale(now_s)
        routed = self._routed(chain, by_name, now_s)
        self.counts["by_store" if on_nodes else "by_hints" if routed else "by_load"] += 1
        # What a store keeps is not lost when an engine's cache drops it.
        pressures = self.hints.pressures(by_name, now_s) if on_nodes is None else {}
        states = [self._state_of(name, each, pressures.get(name, 0.0)) for name, each in by_name.items()]
        ranks = rank_replicas(
            states, on_nodes or (), routed, shape=self.space.shape, num_tokens=num_tokens, options=self.options
        )
        speed = self.options.prefill_tokens_per_s
        costs = {rank.node_id: round(rank.compute_s * speed) for rank in ranks}
        setattr(pending, _COSTS, costs)
        best = ranks[0].node_id
        self._coming.begin(request, best, chain.hashes(), costs[best], now_s)
        return [[by_name[rank.node_id]] for rank in ranks]

    def _routed(self, chain: BlockHashes, replicas: Iterable[str], now_s: float) -> dict[str, int]:
        """Return how many leading blocks each replica was sent before, or will have been sent in a moment."""
        blocks, routed = chain.hashes(), self.hints.prefixes(chain, replicas, now_s)
        for name in replicas:
            if (coming := self._coming.prefix(blocks, name)) > routed.get(name, 0):
                routed[name] = coming
        return routed

    def _state_of(self, name: str, replica: RunningReplica, pressure: float) -> ReplicaState:
        queue_len = self.replica_queue_len_cache.get(replica.replica_id)
        return ReplicaState(
            replica=name,
            node_id=replica.node_id or "",
            num_waiting_tokens=self._work.tokens_at(name, queue_len) + self._coming.tokens_at(name),
            num_running=queue_len or 0,
            pressure=pressure,
        )

    def _forget(self, name: str) -> None:
        self.hints.forget(name)
        self._work.forget(name)
        self._coming.forget(name)

    async def _read(self, pending: PendingRequest) -> tuple[BlockHashes | None, int]:
        """Return the hashes of a prompt's blocks, and its number of tokens; no hashes where it cannot be read now."""
        request = find_request([*pending.args, *pending.kwargs.values()])
        if request is None:
            return None, 0
        if self.options.space is None:
            self._adopt(self._learning.get())
        reader = (self._renderer if is_chat(request) else self._tokenizer).get()
        lane = self._reading_long if is_long(request) else self._reading
        read = None if reader is None else await lane.do(self._hash, reader, request)
        if read is None:
            self.counts["unread"] += 1
            return None, 0
        chain, num_tokens = read
        setattr(pending, _CHAIN, chain)
        return chain, num_tokens

    def _hash(self, reader: Any, request: Any) -> tuple[BlockHashes, int] | None:
        tokens = tokens_of(request, reader)
        return None if not tokens else (text_hashes(self.space, tokens, salt_of(request)), len(tokens))

    def _adopt(self, said: tuple[Namespace, int] | None) -> None:
        if said is None:
            return
        space, cache_tokens = said
        if self._is_space_known and space.digest == self.space.digest:
            return
        logger.info("%s: blocks of %d tokens, namespace %s", self._deployment_id, space.shape.block_size,
                    space.digest.hex()[:16])  # fmt: skip
        self.space, self._is_space_known = space, True
        self.hints.clear()
        self._limit_hints(self.options.cache_tokens or cache_tokens)

    def _limit_hints(self, cache_tokens: int) -> None:
        self.hints.limit_blocks = max(1, cache_tokens // self.space.shape.block_size) if cache_tokens else None

    def _load_tokenizer(self) -> Any:
        return load_tokenizer(self.options.tokenizer)

    def _load_renderer(self) -> Any:
        return load_renderer(self.options.tokenizer, self.options.chat_template)

    def _open_source(self) -> StoreSource | None:
        return StoreSource(self.options.store, self.options.address) if self.options.store else None

    def _ask_replicas(self) -> tuple[Namespace, int] | None:
        """Ask one replica's engine for its namespace and its cache; blocks, for steps of the engine or longer."""
        handle = serve.get_deployment_handle(self._deployment_id.name, self._deployment_id.app_name)

        def ask(method: str) -> Any:
            return handle.collective_rpc.remote(method).result(timeout_s=_SPACE_S)

        space = first_space(ask("raykv_space"))
        if space is None:
            return None
        try:
            return space, first_count(ask("raykv_cache_tokens"))
        except Exception as error:  # noqa: BLE001 - an engine of another version; hints then have no other end than their age.
            logger.info("%s: how much an engine's cache holds is not known: %s", self._deployment_id, error)
            return space, 0

    def _now_s(self) -> float:
        return time.monotonic()

    def _log_counts(self) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_S:
            self._logged_s = now_s
            logger.info("%s: %s", self._deployment_id, dict(self.counts))


def _ids(replicas: list[RunningReplica]) -> list[ReplicaID]:
    return [each.replica_id for each in replicas]


def _provisional(options: RouterOptions) -> Namespace:
    """Return a namespace for hints alone, until that of the engines is known."""
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8", block_size=options.block_size)
    return Namespace(model="not known yet", shape=shape)

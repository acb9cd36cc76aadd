"""A thin vLLM KV connector on the raykv client: a check of the client's contract, not a product.

Synchronous, prompt blocks only, one KV cache group, one rank, packed K|V rows as vLLM's CPU build has them.
Give vLLM `kv_connector="RaykvConnector"` and `kv_connector_module_path="vllm_connector"`. Turn asynchronous
scheduling off: a step scheduled before a failed load is known of would save what it computed from bad blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

import kvstore

logger = logging.getLogger(__name__)

LOAD_S = 5.0  # a load that takes longer than this is slower than computing
JOB_S = 60.0  # far beyond every timeout inside a job


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is to be moved for one request in one step."""

    hashes: kvstore.BlockHashes
    block_ids: list[int]
    skip_tokens: int = 0


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """What the scheduler's half tells the worker's half, once a step."""

    loads: list[Blocks] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)


@dataclass(slots=True)
class Tracked:
    """What the scheduler's half knows of one request."""

    hashes: kvstore.BlockHashes
    block_ids: list[int] = field(default_factory=list)
    num_engine_tokens: int = 0  # in the engine's own prefix cache, when it was last admitted
    num_load_blocks: int = 0
    num_saved_blocks: int = 0


class RaykvConnector(KVConnectorBase_V1):
    """vLLM makes one for its scheduler and one for its worker; each has a client of its own."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        model, extra = vllm_config.model_config, self._kv_transfer_config.kv_connector_extra_config
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("RaykvConnector: wanted one KV cache group, got several; hybrid models do not work yet")
        if vllm_config.parallel_config.world_size != 1:
            raise ValueError("RaykvConnector: wanted one rank, got several; their parts of a block would share a hash")
        group = kv_cache_config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        shape = kvstore.KVShape(
            num_layers=len(group.layer_names),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            dtype=str(spec.dtype).removeprefix("torch."),
            block_size=spec.block_size,
            planes="packed",  # the scheduler's half must know, and never sees a tensor
        )
        self._space = kvstore.Namespace(
            model=model.model,
            revision=model.revision or "",
            quantization=vllm_config.cache_config.cache_dtype,
            shape=shape,
        )
        store = kvstore.connect(extra.get("store", "default"), address=extra.get("ray_address"))
        self._client = store.client(self._space)
        self._tracked: dict[str, Tracked] = {}
        self._failed_ids: set[int] = set()

    def shutdown(self) -> None:
        self._client.close()

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id not in self._tracked:
            self._tracked[request.request_id] = Tracked(self._hashes_of(request))
        tracked = self._tracked[request.request_id]
        tracked.num_engine_tokens = num_computed_tokens
        block_size = self._space.shape.block_size
        if request.skip_reading_prefix_cache or len(tracked.hashes) * block_size <= num_computed_tokens:
            return 0, False
        try:
            # This node only: asking others would make every waiting request wait for the slowest directory.
            matched = self._client.lookup(tracked.hashes, remote=False).num_local
        except kvstore.KVStoreError as error:
            logger.warning("lookup failed, the prompt is computed: %s", error)
            return 0, False
        # The engine needs the last token's logits, so that token is computed even when all is stored.
        usable = min(matched * block_size, request.num_tokens - 1)
        return max(0, usable - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tracked = self._tracked[request.request_id]
        end = tracked.num_engine_tokens + num_external_tokens
        tracked.num_load_blocks = -(-end // self._space.shape.block_size) if num_external_tokens else 0

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        plan, cached = StepPlan(), scheduler_output.scheduled_cached_reqs
        starts = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._tracked[new.req_id].block_ids = list(new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
        for req_id, ids, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                self._tracked[req_id].block_ids = []
            self._tracked[req_id].block_ids.extend(ids[0] if ids else ())
            starts[req_id] = start
        for req_id, start in starts.items():
            self._plan(plan, self._tracked[req_id], start, start + scheduler_output.num_scheduled_tokens[req_id])
        return plan

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._tracked.pop(request.request_id, None)
        return False, None

    def _plan(self, plan: StepPlan, tracked: Tracked, start: int, end: int) -> None:
        """Add one request that computes tokens [start, end) in this step."""
        block_size, hashes, ids = self._space.shape.block_size, tracked.hashes, tracked.block_ids
        if count := tracked.num_load_blocks:
            plan.loads.append(Blocks(hashes[:count], ids[:count], tracked.num_engine_tokens))
            tracked.num_saved_blocks, tracked.num_load_blocks = count, 0
        # A failed load or a preemption sends a request back: what follows is computed, and saved, once more.
        tracked.num_saved_blocks = min(tracked.num_saved_blocks, -(-start // block_size))
        num_full = min(len(hashes), end // block_size)
        if num_full > tracked.num_saved_blocks:
            # From the root: the store skips what it has, and may have evicted what it had.
            plan.saves.append(Blocks(hashes[:num_full], ids[:num_full]))
            tracked.num_saved_blocks = num_full

    def _hashes_of(self, request: Any) -> kvstore.BlockHashes:
        """Hash the prompt's full blocks, with all that vLLM itself counts as part of a block's content."""
        tokens, block_size = request.prompt_token_ids or [], self._space.shape.block_size
        lora = request.lora_request.lora_name if request.lora_request else ""
        extra, media = [], 0
        for start in range(0, len(tokens) - block_size + 1, block_size):
            keys, media = generate_block_hash_extra_keys(request, start, start + block_size, media)
            # The adapter goes in by name first, or one called like another tenant's salt would pass for it.
            extra.append([lora, *_flat(keys)] if keys else None)
        return self._space.block_hashes(tokens, extra)

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layout = self._client.register_kv_caches(kv_caches)
        logger.info(
            "raykv: %d blocks of %d bytes, axes %s", layout.num_blocks, self._space.shape.block_bytes, layout.axes
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._failed_ids = set()
        loads = self._get_connector_metadata().loads
        jobs = [self._client.load(part.hashes, part.block_ids, part.skip_tokens, timeout_s=LOAD_S) for part in loads]
        for part, job in zip(loads, jobs, strict=True):
            result = _finish(job)
            if result is None:
                self._failed_ids |= set(part.block_ids[part.skip_tokens // self._space.shape.block_size :])
            else:
                self._failed_ids |= result.failed_block_ids

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: all layers of a block arrive together."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: all layers of a block leave together."""

    def wait_for_save(self) -> None:
        # What was computed in this step from a block that did not arrive is wrong, whoever asked for the block.
        saves = [part for part in self._get_connector_metadata().saves if self._failed_ids.isdisjoint(part.block_ids)]
        for job in [self._client.save(part.hashes, part.block_ids) for part in saves]:
            _finish(job)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._failed_ids


def _finish(job: kvstore.Job[Any]) -> Any:
    """Wait for a job; None when it failed. One that still runs ends the step, for it still uses the blocks."""
    try:
        return job.result(JOB_S)
    except kvstore.KVStoreError as error:
        if not job.done():
            raise
        logger.warning("%r failed: %s", job, error)
        return None


def _flat(keys: Any) -> Iterator[Any]:
    for key in keys:
        if isinstance(key, tuple):
            yield from _flat(key)
        else:
            yield key

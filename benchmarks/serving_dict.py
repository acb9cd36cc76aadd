"""The least that a connector can cost: a dict of tensors in the engine's own process, copied when a step begins.

No hashing, no other process, no other node, nothing that could be evicted or fail: what a store is measured against.
It knows prompts that are computed in one step, and finds only a prompt that it has seen whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

Key = tuple[int, ...]
#: vLLM makes two connectors in one process, the scheduler's and the worker's; they meet here.
_stored: dict[Key, list[Tensor]] = {}


@dataclass
class Step(KVConnectorMetadata):
    """What to copy in one step: (tokens of the prompt's full blocks, the engine's blocks for them)."""

    loads: list[tuple[Key, list[int]]] = field(default_factory=list)
    saves: list[tuple[Key, list[int]]] = field(default_factory=list)


class DictConnector(KVConnectorBase_V1):
    """Both halves."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = int(vllm_config.cache_config.block_size)
        self._step = Step()
        self._caches: list[Tensor] = []

    def _key(self, tokens: list[int]) -> Key:
        # The last token is computed in any case: without it there is nothing to sample from.
        return tuple(tokens[: (len(tokens) - 1) // self._block_size * self._block_size])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        key = self._key(request.prompt_token_ids)
        cold = request.skip_reading_prefix_cache
        return (0 if cold or key not in _stored else max(0, len(key) - num_computed_tokens)), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            key = self._key(request.prompt_token_ids)
            self._step.loads.append((key, list(blocks.get_block_ids()[0])[: len(key) // self._block_size]))

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step, self._step = self._step, Step()
        loading = {key for key, _ in step.loads}
        for new in scheduler_output.scheduled_new_reqs:
            key = self._key(new.prompt_token_ids)
            if key and key not in loading:
                step.saves.append((key, list(new.block_ids[0])[: len(key) // self._block_size]))
        return step

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for key, ids in self._get_connector_metadata().loads:
            for cache, stored in zip(self._caches, _stored[key], strict=True):
                cache[ids] = stored

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: loads are made before anything is computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: see `wait_for_save`."""

    def wait_for_save(self) -> None:
        for key, ids in self._get_connector_metadata().saves:
            _stored[key] = [cache[ids] for cache in self._caches]

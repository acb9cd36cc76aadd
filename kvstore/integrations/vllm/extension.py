"""What a vLLM worker says about its store to those outside the engine, through vLLM's `collective_rpc`."""

from __future__ import annotations

from kvstore.integrations.space_text import space_to_text


class RaykvWorker:
    """A `worker_extension_cls` of vLLM: its methods become methods of every worker of an engine."""

    def raykv_space(self) -> str:
        """Return the namespace of this engine's blocks as text (`space_from_text`), "" if it has no RaykvConnector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return ""
        connector = get_kv_transfer_group()
        sides = [getattr(each, "worker_side", None) for each in getattr(connector, "_connectors", [connector])]
        spaces = [getattr(getattr(side, "cache", None), "space", None) for side in sides]
        return next((space_to_text(space) for space in spaces if space is not None), "")

    def raykv_cache_tokens(self) -> int:
        """Return how many tokens this engine's own cache holds; 0 if that is not known."""
        config = getattr(self, "cache_config", None)
        num_blocks, block_size = (getattr(config, name, None) or 0 for name in ("num_gpu_blocks", "block_size"))
        groups = getattr(getattr(getattr(self, "model_runner", None), "kv_cache_config", None), "kv_cache_groups", None)
        # Each group has blocks of its own for the same tokens.
        return int(num_blocks * block_size) // max(1, len(groups or ()))

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
        side = getattr(get_kv_transfer_group(), "worker_side", None)
        space = getattr(getattr(side, "cache", None), "space", None)
        return "" if space is None else space_to_text(space)

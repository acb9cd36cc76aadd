"""vLLM: `kv_connector="RaykvConnector"`, `kv_connector_module_path="kvstore.integrations.vllm"`; see docs/vllm.md."""

from __future__ import annotations

from kvstore.integrations.vllm.connector import RaykvConnector

__all__ = ["RaykvConnector"]

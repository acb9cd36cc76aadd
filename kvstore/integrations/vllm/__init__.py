"""vLLM: `kv_connector="RaykvConnector"`, `kv_connector_module_path="kvstore.integrations.vllm"`; see docs/vllm.md."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvstore.integrations.vllm.connector import RaykvConnector

__all__ = ["RaykvConnector"]

# MultiConnector looks for the class of a connector's counts by its name alone.
KVConnectorFactory.register_connector("RaykvConnector", __name__, "RaykvConnector")

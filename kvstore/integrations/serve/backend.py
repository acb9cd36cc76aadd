"""RaykvConnector in `ray.serve.llm`: how a request is shaped for prefill and decode, and a check before engines start.

Without it Ray Serve uses its default, which passes the ticket as well. But that one fails requests that have
`kv_transfer_params` of their own, and a store that does not run shows as an engine that dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    DefaultPDProtocolMixin,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

from kvstore.api import connect
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, KVStoreError
from kvstore.quotas import check_tenant
from kvstore.runtime.threads.own_thread import on_thread

CONNECTOR = "RaykvConnector"
_BACKEND = "kvstore.integrations.serve.backend:RaykvBackend"
_EXTENSION = "kvstore.integrations.vllm.extension.RaykvWorker"
_CONNECT_S = 20.0
#: What a client may say about its blocks; the other keys are those of a hand-off, which are made here.
_OF_CLIENTS = ("raykv_priority", "raykv_priority_s")


def register() -> None:
    """Make Ray Serve use RaykvBackend for engines with RaykvConnector; for the whole cluster, before `serve.run`."""
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        KVConnectorBackendFactory.register_backend(CONNECTOR, _BACKEND)


def _config_of(name: str, address: str | None) -> StoreConfig:
    with connect(name, address=address, timeout_s=_CONNECT_S) as store:
        return store.config


class RaykvBackend(DefaultPDProtocolMixin, BaseConnectorBackend):
    """What Ray Serve has to know about RaykvConnector."""

    def setup(self) -> None:
        """Check that the store runs and has the tenant; let routers ask the engine for its namespace.

        This is before the engine starts.

        Raises:
            ConfigError: the store cannot be used; the message says what to do. No engine was started.
        """
        extra = self.kv_transfer_config.get("kv_connector_extra_config") or {}
        name, address = extra.get("store", "default"), extra.get("address")
        try:
            # On a thread: a replica's constructor runs in an event loop, where Ray warns of calls that wait.
            config = on_thread("raykv-check", lambda: _config_of(name, address)).result(2 * _CONNECT_S)
        except (KVStoreError, TimeoutError) as error:
            raise ConfigError(
                # What to do comes first: Ray Serve shows the beginning of an error.
                f"wanted the store {name!r} to run before the app, got none: run `kvstore start --capacity 8GiB` in "
                "this Ray cluster and deploy again, or name another store in kv_connector_extra_config['store'] "
                f"({type(error).__name__}: {error})"
            ) from None  # The text has it, and Ray Serve shows all tracebacks before the text.
        check_tenant(config.tenants, extra.get("tenant", ""))  # Else the engine fails, without a reason.
        if not self.llm_config.engine_kwargs.get("worker_extension_cls"):
            self.llm_config.update_engine_kwargs(worker_extension_cls=_EXTENSION)

    def prepare_prefill_request(self, *, request: Any, peer: Mapping[str, Any] | None) -> Any:
        """Return the request for the prefill engine: one token, and a ticket for the prompt's blocks."""
        said = _of_client(request)
        plain = request.model_copy(update={"kv_transfer_params": None})
        shaped = super().prepare_prefill_request(request=plain, peer=peer)
        shaped.kv_transfer_params = {**shaped.kv_transfer_params, **said}
        return shaped

    def prepare_decode_request(self, *, request: Any, peer: Mapping[str, Any] | None, prefill_response: Any) -> Any:
        """Return the request for the decode engine, with the ticket that the prefill engine answered."""
        said = _of_client(request)
        shaped = super().prepare_decode_request(request=request, peer=peer, prefill_response=prefill_response)
        ticket = getattr(prefill_response, "kv_transfer_params", None)
        shaped.kv_transfer_params = {**(ticket or {}), **said} or None
        return shaped


def _of_client(request: Any) -> dict[str, Any]:
    """Return what a client says of its blocks. Its tickets are not taken: they would be for another engine."""
    params = getattr(request, "kv_transfer_params", None)
    return {key: params[key] for key in _OF_CLIENTS if key in params} if isinstance(params, Mapping) else {}

"""What Ray Serve is told about the connector: requests for prefill and decode, and a store that does not run."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="no Ray Serve and vLLM here; `make test-serve` has it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Ray Serve and vLLM
    from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest

    from kvstore.integrations.serve import backend as module
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, StoreNotRunning

TICKET = {"do_remote_prefill": True, "do_remote_decode": False, "raykv_ticket": {"parts": ["x"]}}


class Config(SimpleNamespace):
    """An LLMConfig, as far as a backend looks at it."""

    def update_engine_kwargs(self, **kwargs):
        self.engine_kwargs.update(kwargs)


@pytest.fixture
def backend():
    extra = {"store": "mine", "address": "host:1"}
    return module.RaykvBackend(Config(engine_kwargs={"kv_transfer_config": {"kv_connector_extra_config": extra}}))


def ask(**params):
    return CompletionRequest(model="m", prompt="x", max_tokens=9, stream=True, kv_transfer_params=params or None)


def test_prefill_makes_one_token_and_a_ticket_and_decode_gets_that(backend):
    request = ask()
    prefill = backend.prepare_prefill_request(request=request, peer=None)
    response = SimpleNamespace(kv_transfer_params=TICKET)
    decode = backend.prepare_decode_request(request=request, peer=None, prefill_response=response)

    assert (prefill.max_tokens, prefill.stream, prefill.kv_transfer_params["do_remote_decode"]) == (1, False, True)
    assert (decode.max_tokens, decode.stream, decode.kv_transfer_params) == (9, True, TICKET)
    assert (request.max_tokens, request.kv_transfer_params) == (9, None)


def test_a_prompt_without_a_ticket_is_decoded_without_params(backend):
    response = SimpleNamespace(kv_transfer_params=None)
    decode = backend.prepare_decode_request(request=ask(), peer=None, prefill_response=response)

    assert decode.kv_transfer_params is None


def test_a_client_may_name_a_priority_and_nothing_else(backend):
    request = ask(raykv_priority="low", raykv_priority_s=5, raykv_ticket="stolen", do_remote_prefill=True)
    prefill = backend.prepare_prefill_request(request=request, peer=None)
    response = SimpleNamespace(kv_transfer_params=TICKET)
    decode = backend.prepare_decode_request(request=request, peer=None, prefill_response=response)

    said = {"raykv_priority": "low", "raykv_priority_s": 5}
    assert prefill.kv_transfer_params == prefill.kv_transfer_params | said | {"do_remote_prefill": False}
    assert "raykv_ticket" not in prefill.kv_transfer_params
    assert decode.kv_transfer_params == TICKET | said


def test_a_store_that_does_not_run_is_named_before_an_engine_starts(backend, monkeypatch):
    def connect(name, *, address, timeout_s):
        assert (name, address) == ("mine", "host:1")
        raise StoreNotRunning("no actor of that name")

    monkeypatch.setattr(module, "connect", connect)
    with pytest.raises(ConfigError, match=r"the store 'mine' to run before the app.*kvstore start"):
        backend.setup()
    assert "worker_extension_cls" not in backend.llm_config.engine_kwargs


def runs(monkeypatch, **settings):
    """Have a store run with these settings."""
    store = SimpleNamespace(config=StoreConfig(**settings))
    monkeypatch.setattr(module, "connect", lambda name, **_: contextlib.nullcontext(store))


def test_a_tenant_that_the_store_lacks_is_named_before_an_engine_starts(backend, monkeypatch):
    extra = backend.kv_transfer_config["kv_connector_extra_config"]
    runs(monkeypatch, tenants={"chat": {}})
    extra["tenant"] = "batch"
    with pytest.raises(ConfigError, match=r"tenant: wanted a tenant of this store.*got 'batch'; it has chat"):
        backend.setup()
    assert "worker_extension_cls" not in backend.llm_config.engine_kwargs
    extra["tenant"] = "chat"
    backend.setup()


def test_engines_can_be_asked_for_their_namespace_unless_they_have_another_extension(backend, monkeypatch):
    runs(monkeypatch)
    backend.setup()
    assert backend.llm_config.engine_kwargs["worker_extension_cls"].endswith("RaykvWorker")
    backend.llm_config.engine_kwargs["worker_extension_cls"] = "mine.Own"
    backend.setup()
    assert backend.llm_config.engine_kwargs["worker_extension_cls"] == "mine.Own"

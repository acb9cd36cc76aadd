"""Serve config files of deploy/: Ray's own checks of the file and of the app that its builder makes."""

from __future__ import annotations

import pytest
import yaml

pytest.importorskip("vllm", reason="no Ray Serve and vLLM here; `make test-serve` has them")


@pytest.fixture(params=["deploy/serve-cpu.yaml", "deploy/serve-gpu.yaml"])
def application(request, repo_root):
    from ray.serve.schema import ServeDeploySchema

    read = ServeDeploySchema.model_validate(yaml.safe_load((repo_root / request.param).read_text(encoding="utf-8")))
    (found,) = read.applications
    return found


@pytest.fixture
def registered(monkeypatch):
    """Names that were registered, in place of the registry, which begins a Ray."""
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

    found = []
    monkeypatch.setattr(KVConnectorBackendFactory, "is_registered", lambda name: False)
    monkeypatch.setattr(KVConnectorBackendFactory, "register_backend", lambda name, path: found.append(name))
    return found


def build(application):
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    return call_user_app_builder_with_args_if_necessary(import_attr(application.import_path), application.args)


def test_ray_serve_builds_the_app_and_the_connector_is_registered(application, registered):
    from ray.serve import Application

    assert isinstance(build(application), Application)
    assert registered == ["RaykvConnector"]


def test_the_same_configs_make_an_app_of_engines_that_prefill_and_decode(application, registered):
    application.import_path = application.import_path.replace("build_pd_openai_app", "build_openai_app")
    config = application.args["decode_config"]
    application.args = {"llm_configs": [config], "ingress_cls_config": application.args["ingress_cls_config"]}
    build(application)
    assert registered == ["RaykvConnector"]


def test_arguments_that_ray_refuses_raise_its_own_error(application, registered):
    del application.args["decode_config"]
    with pytest.raises(ValueError, match="decode_config"):
        build(application)


def test_a_key_that_no_router_knows_fails_the_deployment_before_anything_is_registered(application, registered):
    from kvstore.errors import ConfigError

    for_router = application.args["prefill_config"]["deployment_config"]["request_router_config"]
    for_router["request_router_kwargs"] = {**for_router["request_router_kwargs"], "hint_ttl": 60}
    with pytest.raises(ConfigError, match="hint_ttl"):
        build(application)
    assert not registered

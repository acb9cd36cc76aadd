"""deploy/serve-*.yaml: Serve config files that say the same as the example's app; tests/serve asks Ray itself."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module

import pytest
import yaml

from kvstore.integrations.serve.options import RouterOptions

FILES = ["deploy/serve-cpu.yaml", "deploy/serve-gpu.yaml"]


@pytest.fixture
def application(repo_root):
    def read(path):
        (found,) = yaml.safe_load((repo_root / path).read_text(encoding="utf-8"))["applications"]
        return found

    return read


@pytest.mark.parametrize("path", FILES)
def test_the_builder_is_a_plain_function_of_one_argument(application, path):
    module, _, name = application(path)["import_path"].partition(":")
    builder = getattr(import_module(module), name)
    assert inspect.isfunction(builder)
    assert len(inspect.signature(builder).parameters) == 1


@pytest.mark.parametrize("path", FILES)
def test_both_roles_have_the_connector_and_a_router_that_reads_the_models_tokenizer(application, path):
    args = application(path)["args"]
    for role in ("prefill_config", "decode_config"):
        config = args[role]
        transfer = config["engine_kwargs"]["kv_transfer_config"]
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("RaykvConnector", "kv_both")
        import_module(transfer["kv_connector_module_path"].partition(".vllm")[0])
        router = config["deployment_config"]["request_router_config"]
        assert router["request_router_class"] == "kvstore.integrations.serve.PrefixRouter"
        options = RouterOptions.parse(router["request_router_kwargs"])
        assert options.tokenizer == config["model_loading_config"]["model_source"]


def test_the_cpu_file_has_the_engines_of_the_example(application, repo_root, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(repo_root / "examples"), *sys.path])
    serve_app = import_module("serve_app")
    args = application(FILES[0])["args"]
    folder = args["prefill_config"]["model_loading_config"]["model_source"]
    wanted = serve_app.llm_config(serve_app.AppOptions(folder=folder), "h:1")
    # One cluster on the machine: the file names no address. A failed constructor is tried as often as Ray likes.
    del wanted["engine_kwargs"]["kv_transfer_config"]["kv_connector_extra_config"]["address"]
    del wanted["deployment_config"]["max_constructor_retry_count"]
    router = wanted["deployment_config"]["request_router_config"]["request_router_kwargs"]
    assert router.pop("store") == "default"
    assert args["prefill_config"] == args["decode_config"] == wanted
    assert {name: args[name] for name in serve_app.INGRESS} == serve_app.INGRESS


def test_the_gpu_file_asks_for_gpus_and_says_that_it_was_not_run(application, repo_root):
    args = application(FILES[1])["args"]
    for role in ("prefill_config", "decode_config"):
        assert args[role]["accelerator_type"]
        assert "enforce_eager" not in args[role]["engine_kwargs"]
    assert "NOT RUN" in (repo_root / FILES[1]).read_text(encoding="utf-8")

"""The builders for Serve config files, with what stands for those of Ray."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from kvstore.errors import ConfigError
from kvstore.integrations.serve import builders


@pytest.fixture
def ray_builders(monkeypatch):
    """Stands for `ray.serve`; each builder returns its arguments."""

    def from_file(path):
        with open(path) as file:
            return yaml.safe_load(file)

    made = ModuleType("ray.serve")
    config = SimpleNamespace(from_file=from_file)
    made.llm = SimpleNamespace(
        LLMConfig=config, build_openai_app=lambda args: args, build_pd_openai_app=lambda args: args
    )
    monkeypatch.setitem(sys.modules, "ray.serve", made)
    monkeypatch.setattr(builders, "_register", lambda: None)


@pytest.mark.usefixtures("ray_builders")
def test_a_file_that_is_no_yaml_is_named(tmp_path):
    path = tmp_path / "decode.yaml"
    path.write_text("a: [1,\n")
    with pytest.raises(ConfigError, match=r"decode\.yaml"):
        builders.build_pd_openai_app({"decode_config": str(path)})
    with pytest.raises(ConfigError, match=r"decode\.yaml"):
        builders.build_openai_app({"llm_configs": [str(path)]})
    with pytest.raises(OSError, match="another"):
        builders.build_openai_app({"llm_configs": [str(tmp_path / "another")]})


@pytest.mark.usefixtures("ray_builders")
def test_ray_gets_all_configs_of_a_generator():
    configs = [{"model_loading_config": {"model_id": name}} for name in "ab"]
    assert builders.build_openai_app({"llm_configs": iter(configs)}) == {"llm_configs": configs}

"""cluster.yaml against the schema and the checks that `ray up` itself applies; no network, no ssh."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml


@pytest.fixture
def config(repo_root: Path) -> dict[str, Any]:
    return yaml.safe_load((repo_root / "cluster.yaml").read_text(encoding="utf-8"))


def validated(config: dict[str, Any]) -> dict[str, Any]:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_ray_accepts_it(config):
    prepared = validated(config)
    assert prepared["docker"]["container_name"] == "raykv"
    assert prepared["head_start_ray_commands"] == config["head_start_ray_commands"]
    assert prepared["worker_start_ray_commands"] == config["worker_start_ray_commands"]


@pytest.mark.parametrize(
    ("section", "right", "wrong"),
    [
        (None, "setup_commands", "setup_comands"),
        ("docker", "run_options", "run_option"),
        ("auth", "ssh_user", "ssh_usr"),
    ],
)
def test_a_misspelt_key_is_refused(config, section, right, wrong):
    part = config if section is None else config[section]
    part[wrong] = part.pop(right)
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError)):
        validated(config)


def test_addresses_are_documentation_ones(config):
    addresses = [config["provider"]["head_ip"], *config["provider"]["worker_ips"]]
    assert len(set(addresses)) == len(addresses)
    assert all(address.startswith("192.0.2.") for address in addresses)
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])


def test_the_image_carries_the_ray_of_the_constraints(config, repo_root):
    pins = (repo_root / "constraints.txt").read_text(encoding="utf-8").split()
    (ray_pin,) = (pin for pin in pins if pin.startswith("ray=="))
    assert f":{ray_pin.removeprefix('ray==')}-" in config["docker"]["image"]


def test_containers_may_register_memory_and_copy_from_each_other(config):
    options = " ".join(config["docker"]["run_options"])
    for option in ("--ulimit memlock=-1:-1", "--shm-size=", "--cap-add=SYS_PTRACE"):
        assert option in options

"""deploy/aws.yaml against the schema and the checks that `ray up` itself applies; no cloud is asked."""

from __future__ import annotations

import copy

import jsonschema
import pytest
import yaml


@pytest.fixture(scope="module")
def load(repo_root):
    return lambda path: yaml.safe_load((repo_root / path).read_text(encoding="utf-8"))


@pytest.fixture
def config(load):
    return load("deploy/aws.yaml")


@pytest.fixture(scope="module")
def on_premise(load):
    return load("cluster.yaml")


def validated(config):
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_ray_accepts_it(config):
    prepared = validated(config)
    assert prepared["provider"]["type"] == "aws"
    assert set(prepared["available_node_types"]) == {"head", "worker"}
    assert prepared["head_node_type"] == "head"
    assert prepared["worker_start_ray_commands"] == config["worker_start_ray_commands"]


@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        ((), "setup_commands", "setup_comands"),
        (("docker",), "run_options", "run_option"),
        (("available_node_types", "worker"), "min_workers", "min_worker"),
        (("available_node_types", "worker"), "node_config", "node_configs"),
    ],
)
def test_a_misspelt_key_is_refused(config, path, right, wrong):
    part = config
    for key in path:
        part = part[key]
    part[wrong] = part.pop(right)
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError)):
        validated(config)


def test_no_autoscaler_ends_a_worker_with_its_part_of_the_cache(config):
    worker = config["available_node_types"]["worker"]
    assert worker["min_workers"] == worker["max_workers"] == config["max_workers"]


@pytest.mark.parametrize(
    "key",
    [
        "docker", "file_mounts", "rsync_exclude", "setup_commands", "head_start_ray_commands",
        "worker_start_ray_commands",
    ],
)  # fmt: skip
def test_containers_are_set_up_and_started_as_on_machines_of_ones_own(config, on_premise, key):
    assert config[key] == on_premise[key]

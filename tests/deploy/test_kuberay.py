"""deploy/kuberay.yaml and deploy/rayjob.yaml: keys that KubeRay and Kubernetes know, and values that fit together."""

from __future__ import annotations

import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvstore.bounds import parse_bytes

SCHEMAS = yaml.safe_load(Path(__file__).with_name("kuberay_keys.yaml").read_text(encoding="utf-8"))
HEAD = ("spec", "headGroupSpec", "template", "spec")


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def check(resource):
    schema = {"$defs": SCHEMAS["$defs"], **SCHEMAS[resource["kind"]]}
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(resource, schema)


@pytest.fixture
def cluster(repo_root):
    return load(repo_root / "deploy/kuberay.yaml")


@pytest.fixture
def job(repo_root):
    return load(repo_root / "deploy/rayjob.yaml")


def groups(cluster):
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]


def pods(cluster):
    return [group["template"]["spec"] for group in groups(cluster)]


def containers(cluster):
    return [pod["containers"][0] for pod in pods(cluster)]


def num_bytes(quantity):
    return parse_bytes(f"{quantity}B")


def test_all_keys_are_known(cluster, job):
    check(cluster)
    check(job)


@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        (("spec",), "authOptions", "authOption"),
        (("spec", "headGroupSpec"), "rayStartParams", "rayStartParam"),
        (("spec", "workerGroupSpecs", 0), "minReplicas", "minReplica"),
        (("spec", "headGroupSpec", "template", "spec", "containers", 0), "volumeMounts", "volumeMount"),
        (
            ("spec", "headGroupSpec", "template", "spec", "containers", 0, "securityContext"),
            "capabilities",
            "capability",
        ),
    ],
)
def test_a_misspelt_key_is_refused(cluster, path, right, wrong):
    part = cluster
    for key in path:
        part = part[key]
    part[wrong] = part.pop(right)
    with pytest.raises(jsonschema.ValidationError):
        check(cluster)


def test_each_pod_may_register_memory_and_has_shared_memory(cluster):
    for pod, container in zip(pods(cluster), containers(cluster), strict=True):
        assert {"IPC_LOCK", "SYS_PTRACE"} <= set(container["securityContext"]["capabilities"]["add"])
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"


def test_the_cache_and_shared_memory_fit_into_each_pod(cluster):
    head = containers(cluster)[0]
    (capacity,) = [entry["value"] for entry in head["env"] if entry["name"] == "RAYKV_CAPACITY"]
    for pod, container in zip(pods(cluster), containers(cluster), strict=True):
        shm_bytes = sum(num_bytes(volume["emptyDir"]["sizeLimit"]) for volume in pod["volumes"])
        assert parse_bytes(capacity) + shm_bytes < num_bytes(container["resources"]["limits"]["memory"])


def test_the_head_starts_the_store_by_a_command_that_exists(cluster):
    from kvstore import cli

    words = containers(cluster)[0]["lifecycle"]["postStart"]["exec"]["command"]
    assert words[:2] == ["bash", "-lc"]
    script = shlex.split(words[2])[3]
    start = script.removeprefix("until ").partition(";")[0]
    context = cli.start.make_context("start", shlex.split(start.replace('"$RAYKV_CAPACITY"', "32GiB"))[2:])
    assert context.params["capacity"] == "32GiB"


def test_no_autoscaler_ends_a_worker_with_its_part_of_the_cache(cluster):
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]


def test_tokens_are_on_and_none_is_in_the_file(cluster):
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert "RAY_AUTH_TOKEN" not in str(cluster)


def test_it_runs_the_ray_of_the_constraints(cluster, repo_root):
    pins = (repo_root / "constraints.txt").read_text(encoding="utf-8").split()
    (ray_pin,) = (pin for pin in pins if pin.startswith("ray=="))
    version = ray_pin.removeprefix("ray==")
    assert cluster["spec"]["rayVersion"] == version
    assert f"FROM rayproject/ray:{version}-" in (repo_root / "deploy/Dockerfile").read_text(encoding="utf-8")


def test_the_job_runs_on_that_cluster_and_what_it_runs_is_in_the_image(cluster, job, repo_root):
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    interpreter, script = shlex.split(job["spec"]["entrypoint"])[:2]
    assert interpreter == "python"
    assert "COPY examples /home/ray/examples" in (repo_root / "deploy/Dockerfile").read_text(encoding="utf-8")
    assert (repo_root / script.removeprefix("/home/ray/")).is_file()
    assert isinstance(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"], dict)

"""The tests own their world: a private home, a private Ray folder, no cluster but their own.

The environment is changed before anything imports ray, so nothing at the top of this file may.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

_WORLD = pytest.StashKey[tuple[str, dict[str, str]]]()


def _environment(world: str) -> dict[str, str]:
    return {
        "HOME": f"{world}/h",
        "RAY_TMPDIR": world,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # tomorrow's default; otherwise ray.init warns
        "NIXL_LOG_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def pytest_configure(config: pytest.Config) -> None:
    # In /tmp whatever TMPDIR says: Ray's sockets lie deep below, and a socket's path ends at 107 bytes.
    world = tempfile.mkdtemp(prefix="rk", dir="/tmp")
    config.stash[_WORLD] = (world, dict(os.environ))
    os.environ.update(_environment(world))
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        os.environ.pop(name, None)
    Path(os.environ["HOME"]).mkdir()


def pytest_unconfigure(config: pytest.Config) -> None:
    world, before = config.stash[_WORLD]
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(world, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where two processes share the tests: one takes those that share clusters, the other the rest, file by file."""
    folder = Path(__file__).parent
    for item in items:
        top, *_ = item.path.relative_to(folder).parts
        has_cluster = top in ("actors", "examples") or item.get_closest_marker("ray") is not None
        item.add_marker(pytest.mark.xdist_group("clusters" if has_cluster else str(item.path)))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what this machine cannot run."""
    wanted_gpus = 1 if item.get_closest_marker("gpu") else 0
    multi_gpu = item.get_closest_marker("multi_gpu")
    if multi_gpu is not None:
        wanted_gpus = int(multi_gpu.args[0])
    if wanted_gpus and (found := _num_gpus()) < wanted_gpus:
        pytest.skip(f"needs {wanted_gpus} CUDA device(s), found {found}")
    if item.get_closest_marker("rdma") and not list(Path("/dev").glob("infiniband/uverbs*")):
        pytest.skip("needs an RDMA device, found none in /dev/infiniband")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent

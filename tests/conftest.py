"""The tests own their world: a private home, a private Ray folder, no cluster but their own.

The environment is changed before anything imports ray, so nothing at the top of this file may.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_WORLD = pytest.StashKey[tuple[str, dict[str, str]]]()
_CLUSTER = pytest.StashKey[Any]()
#: The modules with tests that share a cluster.
_SHARING = pytest.StashKey[set[Path]]()


def _environment(world: str) -> dict[str, str]:
    return {
        "HOME": f"{world}/h",
        "RAY_TMPDIR": world,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_prestart_worker_first_driver": "0",  # workers for tasks, of which there are none
        "RAY_worker_niceness": "0",  # Ray's 15 would have stores and movers wait for every other process of the machine
        "REPORTER_UPDATE_INTERVAL_MS": "60000",  # Ray's figures of each process, which take a part of a processor
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # tomorrow's default; otherwise ray.init warns
        "NIXL_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",  # torch's threads spin while they wait for work, here beside other processes
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def pytest_configure(config: pytest.Config) -> None:
    # In /tmp whatever TMPDIR says: Ray's sockets lie deep below, and a socket's path ends at 107 bytes.
    world = tempfile.mkdtemp(prefix="rk", dir="/tmp")
    config.stash[_WORLD] = (world, dict(os.environ))
    os.environ.update(_environment(world))
    # Bytecode is written: hundreds of processes import the same files.
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    Path(os.environ["HOME"]).mkdir()


def pytest_unconfigure(config: pytest.Config) -> None:
    world, before = config.stash[_WORLD]
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(world, ignore_errors=True)


def _rank(item: pytest.Item) -> int:
    if "ray_cluster" in getattr(item, "fixturenames", ()):
        return 1 if item.get_closest_marker("ruins_cluster") else 0
    if item.get_closest_marker("ray") is not None:
        return 2
    return 3 if item.path.parent.name in ("faults", "pool") else 4


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests: those that share a cluster first, of these last whose module ruins it; others by their length.

    Where two processes share the tests they take them file by file in this order, and end at about the same time.
    """
    items.sort(key=_rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the shared cluster before a module that does not use it: its processes work all the time, also for nobody."""
    yield
    cluster = item.config.stash.get(_CLUSTER, None)
    if cluster is not None and nextitem is not None and nextitem.path not in item.config.stash[_SHARING]:
        cluster.stop()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported until now out of collections of garbage: each would look through all of it again."""
    sharing = {item.path for item in session.items if "ray_cluster" in getattr(item, "fixturenames", ())}
    session.config.stash[_SHARING] = sharing
    gc.collect()
    gc.freeze()


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


@pytest.fixture(autouse=True)
def _nobodys_log() -> None:
    """Take back what actors do to the log of their process, when a test before made one in this process."""
    life = logging.getLogger("kvstore.life")
    life.filters.clear()
    life.handlers.clear()
    life.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def _two_nodes(pytestconfig: pytest.Config) -> Iterator[Any]:
    # Not at the top: what imports Ray has to come after the environment is set.
    import two_nodes

    cluster = pytestconfig.stash[_CLUSTER] = two_nodes.TwoNodes()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest, _two_nodes: Any) -> Iterator[Any]:
    """The `ray.cluster_utils.Cluster` of two nodes that this process is a driver of.

    Modules share it, one after the other. After one marked `ruins_cluster`, which adds nodes and loses them, it ends.
    """
    yield _two_nodes.start()
    if request.node.get_closest_marker("ruins_cluster"):
        _two_nodes.stop()


@pytest.fixture(scope="module")
def node_ids(ray_cluster: Any) -> list[str]:
    """The ids of the first two nodes, the driver's first."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return [own, *sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own)]


@pytest.fixture(scope="module")
def get() -> Callable[..., Any]:
    """`ray.get` that always has a timeout; errors of the project come as themselves."""
    import ray

    from kvstore.errors import KVStoreError

    def wait(ref: Any, timeout_s: float = 60.0) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, KVStoreError):
                raise error.cause from error
            raise

    return wait

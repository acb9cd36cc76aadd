"""Find the nodes of a cluster; find or make the named actors of its stores; ask the shards of their directories."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray._private.state import actors
from ray.core.generated import gcs_pb2

from kvstore import __version__
from kvstore.actors.calls import (
    FAILED_CONSTRUCTOR,
    RAY_NAMESPACE,
    actor_class,
    actor_name,
    answer,
    ask_all,
    begin,
    call,
    check_not_forked,
    find_actor,
    ray_failures,
    within,
)
from kvstore.blocks.chain import BlockHashes
from kvstore.bounds import check_node_id
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import ConfigError, KVStoreError, StoreNotRunning
from kvstore.remote.shards.placing import merged, shard_of

_NODES_S = 5.0
#: For the reason of an error, which is not worth a longer wait.
_WHY_S = 2.0
#: States of an actor, as Ray names them, before its constructor has returned.
_NOT_MADE = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


def own_version() -> str:
    """Return the version of raykv in this process, for errors."""
    return f"raykv {__version__} (protocol {PROTOCOL_VERSION})"


def has_constructor_failed(error: KVStoreError) -> bool:
    """Return whether an actor ended because its constructor raised; it would raise again."""
    return FAILED_CONSTRUCTOR in str(error)


def constructor_refusal(error: KVStoreError, kind: type[KVStoreError] = ConfigError) -> str:
    """Return the text of the error of that kind that an actor's constructor raised; empty if it ended otherwise."""
    # Ray passes a constructor's error on only as text.
    text, begins = str(error), f"{kind.__module__}.{kind.__name__}: "
    if not has_constructor_failed(error) or begins not in text:
        return ""
    return text.rpartition(begins)[2].lstrip(": ").strip()


def alive_nodes() -> dict[str, dict[str, float]]:
    """Return the resources of each living node by its Ray id.

    Raises:
        StoreUnavailable, TransferError: the cluster cannot be asked.
    """
    with ray_failures("nodes"):
        # ray.nodes() asks the same, but waits forever for a GCS that hangs.
        nodes = ray_worker.global_worker.gcs_client.get_all_node_info(timeout=_NODES_S)  # type: ignore[attr-defined]
    return {
        node_id.hex(): dict(node.resources_total)
        for node_id, node in nodes.items()
        if node.state == gcs_pb2.GcsNodeInfo.ALIVE  # type: ignore[attr-defined]
    }


def node_store(node_id: str | None = None, name: str = "default") -> Any:
    """Return the actor handle of a node's store; see kvstore.node_store."""
    check_not_forked()
    if not ray.is_initialized():
        raise StoreNotRunning("Ray is not initialised in this process; call kvstore.connect() first")
    if node_id is not None:
        check_node_id("node_id", node_id)
    wanted = node_id or ray.get_runtime_context().get_node_id()
    try:
        return find_actor(actor_name(name, "node", wanted))
    except StoreNotRunning as error:
        raise StoreNotRunning(
            f"node {wanted} has no store named {name!r}{_why_none(name, wanted)}; nodes of this cluster: "
            f"{sorted(alive_nodes())}"
        ) from error


def _why_none(name: str, node_id: str) -> str:
    """Return what the supervisor knows of a node without a store, to be put behind a text; "" for nothing."""
    with contextlib.suppress(KVStoreError):
        supervisor = find_actor(actor_name(name, "supervisor"), _WHY_S)
        problems = call("supervisor", supervisor.problems, timeout_s=_WHY_S)
        return f" ({problems[node_id]})" if node_id in problems else ""
    return ""


def node_stores(name: str) -> dict[str, Any]:
    """Return the handles of a store's node stores by node id."""
    found = {}
    for node in alive_nodes():
        with contextlib.suppress(StoreNotRunning):
            found[node] = find_actor(actor_name(name, "node", node))
    return found


def actors_of(name: str) -> list[str]:
    """Return the names of a store's actors in this process's cluster."""
    return sorted("/".join(path) for path in _paths() if path[1] == name)


def stores_here() -> list[str]:
    """Return the names of the stores in this process's cluster, including partly ended ones."""
    return sorted({path[1] for path in _paths()})


def _paths() -> list[list[str]]:
    """Return the names of all actors of stores, split into their parts."""
    with ray_failures("actors"):
        actors = ray.util.list_named_actors(all_namespaces=True)
    paths = [actor["name"].split("/") for actor in actors if actor["namespace"] == RAY_NAMESPACE]
    return [path for path in paths if path[0] == "raykv" and len(path) > 2]


def make_actor(name: str, cls: type, groups: dict[str, int], args: tuple[Any, ...], **options: Any) -> Any:
    """Make an actor that outlives this process, and return its handle, or that of the actor with this name.

    Args:
        name: of the actor.
        cls: its class.
        groups: number of threads of each concurrency group.
        args: of the constructor.
        options: more options of Ray's actors.
    """
    options |= {"name": name, "lifetime": "detached", "get_if_exists": True}
    with ray_failures(name):
        return actor_class(cls, groups, **options).remote(*args)


def make_answering(name: str, cls: type, groups: dict[str, int], args: tuple[Any, ...], **options: Any) -> Any:
    """Make a named actor unless it exists, and return it when it answers. Ray may first name a dead one."""
    last: KVStoreError = StoreNotRunning(f"{name} could not be made")
    for _ in range(4):
        try:
            handle = make_actor(name, cls, groups, args, **options)
            call(name, handle.ping, timeout_s=30.0)
            return handle
        except KVStoreError as error:
            last = error
            if has_constructor_failed(error):
                if text := constructor_refusal(error):
                    raise ConfigError(text) from error
                break
            time.sleep(0.2)
    raise last


def constructor_pid(handle: Any) -> int | None:
    """Return the process in which an actor's constructor runs now; 0 if Ray has begun none yet.

    None if the actor was made or has ended, or if Ray does not say.
    """

    def get() -> dict[str, Any]:
        with ray_failures("actor"):
            return dict(actors(handle._actor_id.hex()))

    with contextlib.suppress(KVStoreError):
        said = within("actor", _NODES_S, get)
        return int(said["Pid"]) if said.get("State") in _NOT_MADE else None
    return None


def shard_name(store: str, number: int) -> str:
    """Return the Ray name of a shard's actor; the first one is named as the only one of a store would be."""
    return actor_name(store, "directory", str(number) if number else "")


def find_shards(config: StoreConfig) -> list[Any]:
    """Return the handles of the shards that there are now.

    Raises:
        TransferTimeout, PeerLost: Ray cannot say which there are.
    """
    found = []
    for number in range(config.num_directory_shards):
        with contextlib.suppress(StoreNotRunning):
            found.append(find_actor(shard_name(config.name, number)))
    return found


def locate(config: StoreConfig, chain: BlockHashes, timeout_s: float) -> list[tuple[str, int]]:
    """Return (node id, usable prefix length), longest first, from the shard of a chain's root.

    Where the root is not known every shard is asked, one after the other.

    Raises:
        StoreNotRunning, PeerLost, TransferTimeout: a shard that has to be asked is away.
    """
    shard = shard_of(chain.root_key, config.num_directory_shards)
    numbers = range(config.num_directory_shards) if shard is None else (shard,)
    handles = [find_actor(shard_name(config.name, number)) for number in numbers]
    hashes = list(chain)
    return merged([call("directory", handle.locate, hashes, timeout_s=timeout_s) for handle in handles])


def ask_nodes(handles: dict[str, Any], method: str, *args: Any, timeout_s: float) -> dict[str, Any]:
    """Call a method of the stores of several nodes at once; return each one's answer, or {"error"}, by node id."""
    # None, which fails as the node's error: the store of another version may have no such method.
    methods = {node: getattr(handle, method, None) for node, handle in handles.items()}
    return _errors_as_text(ask_all(methods, *args, timeout_s=timeout_s))


def _errors_as_text(said: dict[str, Any]) -> dict[str, Any]:
    return {key: {"error": str(each)} if isinstance(each, KVStoreError) else each for key, each in said.items()}


def store_stats(config: StoreConfig, handles: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return what `Store.stats` does, from the stores of these nodes, the supervisor and the directory.

    All are asked at once, so some that hang cost the time of one.
    """
    of_supervisor = _begin_supervisor(config.name)
    found = dict[str, Any](_shards_or_errors(config, timeout_s))
    methods = {key: each.stats for key, each in found.items() if not isinstance(each, KVStoreError)}
    # None, which fails as the node's error: the store of another version may have no such method.
    methods |= {node: getattr(handle, "stats", None) for node, handle in handles.items()}
    deadline_s = time.monotonic() + timeout_s
    said = _errors_as_text(found | ask_all(methods, timeout_s=timeout_s))
    nodes = {node: said[node] for node in handles}
    stats: dict[str, Any] = {"name": config.name, "nodes": nodes, "problems": {}, "starting": {}}
    stats["directory"] = [said[f"/{number}"] for number in range(config.num_directory_shards)]
    try:
        # It restarts by itself, and nodes serve without it, so keep their answers if it fails.
        for name, ref in of_supervisor.items():
            if isinstance(ref, KVStoreError):
                raise ref
            # A second more where the others took all the time: it has had as long as they.
            stats[name] = answer("supervisor", ref, max(1.0, deadline_s - time.monotonic()))
    except KVStoreError as error:
        if all("error" in each for each in nodes.values()):
            raise  # No node answers, so this is more than a restart of the supervisor.
        stats["problems"] = {**stats["problems"], "supervisor": str(error)}
    return stats


def _begin_supervisor(name: str) -> dict[str, Any]:
    """Ask a store's supervisor; return the references of its answers, or errors, by their names in `store_stats`."""
    try:
        supervisor = find_actor(actor_name(name, "supervisor"))
        asked = {"problems": supervisor.problems, "starting": supervisor.unfinished}
        return {key: begin("supervisor", method) for key, method in asked.items()}
    except KVStoreError as error:
        return {"problems": error}


def _shards_or_errors(config: StoreConfig, timeout_s: float) -> dict[str, Any]:
    """Return each shard's handle by its key of `ask_all`, or why it cannot be found."""
    found = dict[str, Any]()
    for number in range(config.num_directory_shards):
        try:
            found[f"/{number}"] = find_actor(shard_name(config.name, number), timeout_s)
        except KVStoreError as error:
            found[f"/{number}"] = error
    return found

"""Ray calls with a timeout, whose every way to fail is one of our errors."""

from __future__ import annotations

from typing import Any

import ray
from ray import exceptions as ray_errors

from kvstore.errors import KVStoreError, PeerLost, StoreNotRunning, TransferTimeout

#: All actors of raykv live in this Ray namespace.
RAY_NAMESPACE = "raykv"


def actor_name(store: str, kind: str, node_id: str = "") -> str:
    """Return the Ray name of an actor of a store."""
    return f"raykv/{store}/{kind}/{node_id}" if node_id else f"raykv/{store}/{kind}"


def node_address() -> str:
    """Return the address of this actor's node, as other nodes reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def find_actor(name: str) -> Any:
    """Return the handle of a named actor.

    Raises:
        StoreNotRunning: there is none, or no Ray.
    """
    try:
        return ray.get_actor(name, namespace=RAY_NAMESPACE)
    except ValueError as error:
        raise StoreNotRunning(f"no actor {name!r} in this Ray cluster; start the store with kvstore.start()") from error
    except ray_errors.RaySystemError as error:
        raise StoreNotRunning(f"Ray is not running: {error}") from error


def call(what: str, ref: Any, timeout_s: float) -> Any:
    """Wait for the answer of an actor.

    Raises:
        KVStoreError: what the actor raised, if it is ours.
        TransferTimeout: no answer in time.
        PeerLost: the actor, its process or its node is gone.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray_errors.GetTimeoutError as error:
        raise TransferTimeout(f"{what}: no answer within {timeout_s} s") from error
    except ray_errors.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, KVStoreError):
            raise cause from error
        raise KVStoreError(f"{what}: {error}") from error
    except ray_errors.RayError as error:
        raise PeerLost(f"{what}: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise PeerLost(f"{what}: {error}") from error

"""Joining the Ray cluster that an address names, or that this process runs in; or starting one on this machine."""

from __future__ import annotations

import os
import random
import socket
from typing import Any

import ray
from ray import exceptions as ray_errors

from kvstore.actors.calls import RAY_NAMESPACE
from kvstore.errors import StoreNotRunning

_CONNECT_S = 10.0


def join_ray(address: str | None, *, may_start: bool) -> bool:
    """Connect this process to Ray; returns whether a local one was started, which the caller then owns.

    Raises:
        StoreNotRunning: no cluster answers.
    """
    if ray.is_initialized():
        return False
    wanted = address or os.environ.get("RAY_ADDRESS")
    if wanted:
        check_answers(wanted)
        try:
            _init_ray(address=wanted)
        except (ConnectionError, RuntimeError, ValueError, ray_errors.RayError) as error:
            raise StoreNotRunning(f"no Ray cluster answers at {wanted!r}: {error}") from error
        return False
    if not may_start:
        try:
            _init_ray(address="auto")
        except (ConnectionError, RuntimeError) as error:
            raise StoreNotRunning(
                "no Ray cluster runs here and none was named; pass address= or set RAY_ADDRESS"
            ) from error
        return False
    # "local" never joins somebody's leftover head, as ray.init() without an address would.
    _init_ray(address="local", include_dashboard=False)
    return True


def check_answers(address: str) -> None:
    """Refuse a host:port where nobody listens at once: ray.init would go on trying for a minute and more.

    Raises:
        StoreNotRunning: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise StoreNotRunning(
            f"no Ray cluster answers at {address!r}: {error}; pass the address that `ray start --head` printed"
        ) from error


def _init_ray(**options: Any) -> None:
    """Call ray.init with a generator of random numbers that nobody has seeded; the caller's goes on as before.

    Ray draws from it the id under which a driver listens to the cluster. Engines are seeded, as a rule with the same
    number (vLLM: 0), and drivers of one id end each other's polls: a thousand requests a second while both live.
    """
    seeded = random.getstate()
    random.seed()
    try:
        ray.init(log_to_driver=False, configure_logging=False, namespace=RAY_NAMESPACE, **options)
    finally:
        random.setstate(seeded)

"""Ray calls with a timeout, whose every way to fail is one of our errors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray import exceptions as ray_errors
from ray._private import auto_init_hook
from ray._private import worker as ray_worker

from kvstore.errors import ForkedClient, KVStoreError, PeerLost, StoreNotRunning, TransferTimeout

#: All actors of raykv live in this Ray namespace.
RAY_NAMESPACE = "raykv"
#: How long one looks for an actor by its name.
_FIND_S = 10.0

#: What Ray raises besides its own tree. ValueError: no such actor, or a reference of an earlier cluster. OSError,
#: with ConnectionError in it: statuses of its core that are I/O errors. RuntimeError, SystemError, AttributeError
#: and AssertionError: a process whose Ray has been shut down, or is being.
_OTHER_RAY_FAILURES = (ValueError, OSError, RuntimeError, SystemError, AttributeError, AssertionError)


def _has_rays_objects_only() -> bool:
    """Whether Ray is initialised here, but by a parent: a fork copies no thread of it."""
    if not ray.is_initialized():
        return False
    listener = getattr(ray_worker.global_worker, "listener_thread", None)  # Of drivers; workers have none.
    return (listener is not None and not listener.is_alive()) or len(os.listdir("/proc/self/task")) == 1


#: Of the whole process, as forks are. Asked now for those that load this module only after the fork.
_is_fork_of_connected = _has_rays_objects_only()


def _after_fork() -> None:
    global _is_fork_of_connected
    _is_fork_of_connected = _is_fork_of_connected or ray.is_initialized()


os.register_at_fork(after_in_child=_after_fork)


def check_not_forked() -> None:
    """Refuse to use Ray in a fork of a process that was connected to it: calls hang there, and harm the parent's.

    Raises:
        ForkedClient: this is one.
    """
    if _is_fork_of_connected:
        raise ForkedClient(
            f"wanted a process that can use Ray, got process {os.getpid()}, a fork of one that was connected to Ray, "
            "where Ray hangs; start processes with the method 'spawn' and connect there. A client of its own needs no "
            "Ray: kvstore.Client(path, space), with the path of Store.control_path() in the parent"
        )


def actor_name(store: str, kind: str, node_id: str = "") -> str:
    """Return the Ray name of an actor of a store."""
    return f"raykv/{store}/{kind}/{node_id}" if node_id else f"raykv/{store}/{kind}"


def node_address() -> str:
    """Return the address of this actor's node, as other nodes reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


class _OwnCalls(threading.local):
    """How many of our Ray calls this thread is inside."""

    depth = 0


_own_calls = _OwnCalls()


def _auto_init(auto_init: Callable[[], None] = auto_init_hook.auto_init_ray) -> None:
    """Have Ray connect a process at its first call, as it does, but never for a call of ours.

    Another thread may shut Ray down just before one, which then would go to whatever other Ray runs here.
    """
    if not _own_calls.depth:
        auto_init()
    elif not ray.is_initialized():
        raise StoreNotRunning("this process has just been disconnected from Ray; call kvstore.connect() again")


# RAY_ENABLE_AUTO_CONNECT=0 would change it for the program's own calls, too.
auto_init_hook.auto_init_ray = _auto_init


@contextlib.contextmanager
def ray_failures(what: str) -> Iterator[None]:
    """Raise one of our errors for whatever way a Ray call inside fails; the one place that knows these ways.

    Every use of Ray by a thread that must live is inside one. Errors of ours pass unchanged.

    Raises:
        ForkedClient: this is a fork of a process that was connected to Ray.
        StoreNotRunning: this process has no Ray (any more). Asked first, because most calls would start one.
        TransferTimeout: no answer in time; also of a GCS that hangs.
        PeerLost: the actor, its process, its node or the GCS is gone, or cannot be reached.
        KVStoreError: what the actor raised: that itself if it is ours.
    """
    check_not_forked()
    if not ray.is_initialized():
        raise StoreNotRunning(f"{what}: Ray is not initialised in this process; call kvstore.connect() first")
    _own_calls.depth += 1
    try:
        yield
    # First: what an actor raised comes as an error that is of Ray's class and of its own.
    except ray_errors.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, KVStoreError):
            raise cause from error
        raise KVStoreError(f"{what}: {error}") from error
    except KVStoreError:
        raise
    except (ray_errors.GetTimeoutError, TimeoutError) as error:
        raise TransferTimeout(f"{what}: no answer in time: {type(error).__name__}: {error}") from error
    except (ray_errors.RayError, *_OTHER_RAY_FAILURES) as error:
        raise PeerLost(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        _own_calls.depth -= 1


def within(what: str, timeout_s: float, do: Callable[[], Any]) -> Any:
    """Run something that may hang, as every question to a GCS that does; returns what it returns.

    Raises:
        TransferTimeout: it was not done in time. It goes on.
    """
    done = threading.Event()
    answer: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            answer.append(do())
        except Exception as error:  # noqa: BLE001 - raised below, in the caller.
            failed.append(error)
        done.set()

    try:
        threading.Thread(target=run, name="raykv-within", daemon=True).start()
    except RuntimeError:
        return do()  # Python starts no thread any more while it ends.
    if not done.wait(timeout_s):
        raise TransferTimeout(f"{what}: not done within {timeout_s:g} s; does its Ray still answer?")
    if failed:
        raise failed[0]
    return answer[0]


def find_actor(name: str, timeout_s: float | None = None) -> Any:
    """Return the handle of a named actor.

    Args:
        name: of the actor.
        timeout_s: how long the GCS has for its answer; `_FIND_S` when None.

    Raises:
        StoreNotRunning: there is none, or no Ray in this process.
        TransferTimeout: the cluster's GCS does not answer.
        PeerLost: it cannot be reached.
    """
    check_not_forked()
    # Ray itself asks a GCS that hangs for a minute and longer.
    return within(f"actor {name!r}", _FIND_S if timeout_s is None else timeout_s, lambda: _get_actor(name))


def _get_actor(name: str) -> Any:
    with ray_failures(f"actor {name!r}"):
        try:
            return ray.get_actor(name, namespace=RAY_NAMESPACE)
        except ValueError as error:
            raise StoreNotRunning(
                f"wanted the actor {name!r} of a store, got none in this Ray cluster; "
                f"kvstore.start(name={name.split('/')[1]!r}) starts that store, address= names another cluster"
            ) from error


def begin(what: str, method: Any, *args: Any) -> Any:
    """Call a method of an actor; returns the reference that `answer` waits for.

    Sending may fail, too, as when this process has just lost its Ray; hence no call goes out by another way.

    Raises:
        StoreNotRunning, PeerLost: it could not be sent.
    """
    with ray_failures(what):
        return method.remote(*args)


def is_answered(what: str, ref: Any, timeout_s: float) -> bool:
    """Whether `answer` would return, or raise, at once; waits for that for `timeout_s` at most."""
    with ray_failures(what):
        done, _ = ray.wait([ref], timeout=timeout_s)
        return bool(done)


def answer(what: str, ref: Any, timeout_s: float) -> Any:
    """Wait for the answer of an actor.

    Raises:
        KVStoreError: what the actor raised, if it is ours.
        TransferTimeout: no answer within `timeout_s`.
        PeerLost: the actor, its process or its node is gone.
    """
    with ray_failures(f"{what} (within {timeout_s:g} s)"):
        return ray.get(ref, timeout=timeout_s)


def call(what: str, method: Any, *args: Any, timeout_s: float) -> Any:
    """Call a method of an actor, and wait for its answer; raises what `begin` and `answer` do."""
    return answer(what, begin(what, method, *args), timeout_s)

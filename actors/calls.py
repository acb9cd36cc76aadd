"""Ray calls with a timeout; every failure is raised as one of our errors."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from typing import Any

import ray
from ray import exceptions as ray_errors
from ray._private import auto_init_hook
from ray._private import worker as ray_worker

from kvstore.errors import ForkedClient, KVStoreError, PeerLost, StoreNotRunning, TransferTimeout
from kvstore.runtime.threads.own_thread import on_thread

#: All actors of raykv live in this Ray namespace.
RAY_NAMESPACE = "raykv"

#: Errors that Ray raises besides its own classes. ValueError: no such actor, or a reference of an earlier cluster.
#: OSError, including ConnectionError: I/O errors of its core. RuntimeError, SystemError, AttributeError and
#: AssertionError: Ray has been shut down in this process, or is being shut down.
_OTHER_RAY_FAILURES = (ValueError, OSError, RuntimeError, SystemError, AttributeError, AssertionError)

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: The line of a traceback that says where; Ray also puts marks below what it leaves out.
_FRAME = re.compile(r"\s*(File \"|[\^~]+$)")
#: How Ray begins the text of an actor that ended because its constructor raised.
FAILED_CONSTRUCTOR = "The actor died because of an error raised in its creation task"


def _has_rays_objects_only() -> bool:
    """Return whether Ray was initialised here by a parent process: a fork copies none of its threads."""
    if not ray.is_initialized():
        return False
    listener = getattr(ray_worker.global_worker, "listener_thread", None)  # Drivers have one; workers do not.
    return (listener is not None and not listener.is_alive()) or len(os.listdir("/proc/self/task")) == 1


#: For the whole process. Checked now as well, for a process that loads this module only after the fork.
_is_fork_of_connected = _has_rays_objects_only()


def _after_fork() -> None:
    global _is_fork_of_connected
    _is_fork_of_connected = _is_fork_of_connected or ray.is_initialized()


os.register_at_fork(after_in_child=_after_fork)


def check_not_forked() -> None:
    """Refuse Ray in a fork of a connected process: calls hang there, and harm the parent's connection.

    Raises:
        ForkedClient: this is such a fork.
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


def start_call(store: str) -> str:
    """Return the call that starts a store of that name, for messages."""
    return "kvstore.start()" if store == "default" else f"kvstore.start(name={store!r})"


def node_address() -> str:
    """Return the address of this actor's node, as other nodes reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def actor_class(cls: type, groups: Mapping[str, int] | None = None, **options: Any) -> Any:
    """Return a class as a Ray actor class with these options; all actors of raykv are made by it.

    They need no CPU. And they name where they run: without a word, Ray makes an actor in the placement group of its
    caller, if that captures child tasks, as those of Ray Train and Tune do, and ends it with that group.

    Args:
        cls: the class.
        groups: number of threads of each concurrency group.
        options: more options of Ray's actors.
    """
    options = {"num_cpus": 0, "namespace": RAY_NAMESPACE, "scheduling_strategy": "DEFAULT"} | options
    made: Any = ray.remote(concurrency_groups=dict(groups or {}))(cls)  # type: ignore[call-overload]
    return made.options(**options)


class _OwnCalls(threading.local):
    depth = 0


#: The number of our Ray calls that a thread is inside.
_own_calls = _OwnCalls()


def _auto_init(auto_init: Callable[[], None] = auto_init_hook.auto_init_ray) -> None:
    """Let Ray connect a process at its first call, but never for a call of ours.

    Another thread may shut Ray down just before our call, which would then go to any other Ray that runs here.
    """
    if not _own_calls.depth:
        auto_init()
    elif not ray.is_initialized():
        raise StoreNotRunning("this process has just been disconnected from Ray; call kvstore.connect() again")


# RAY_ENABLE_AUTO_CONNECT=0 would also change the program's own calls.
auto_init_hook.auto_init_ray = _auto_init


@contextlib.contextmanager
def ray_failures(what: str) -> Iterator[None]:
    """Raise one of our errors for any failure of a Ray call in the body; our own errors pass unchanged.

    A thread that must survive uses Ray only inside it.

    Raises:
        ForkedClient: this is a fork of a process that was connected to Ray.
        StoreNotRunning: this process has no Ray (any more). Checked first, because most calls would start one.
        TransferTimeout: no answer in time; also if the GCS hangs.
        PeerLost: the actor, its process, its node or the GCS is gone, or cannot be reached.
        KVStoreError: the actor's error; the same class if it is one of ours.
    """
    check_not_forked()
    if not ray.is_initialized():
        raise StoreNotRunning(f"{what}: Ray is not initialised in this process; call kvstore.connect() first")
    _own_calls.depth += 1
    try:
        yield
    # First: an actor's error has both Ray's class and its own.
    except ray_errors.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, KVStoreError):
            raise cause from error
        raise KVStoreError(f"{what}: {_in_brief(error)}") from error
    except KVStoreError:
        raise
    except (ray_errors.GetTimeoutError, TimeoutError) as error:
        raise TransferTimeout(
            f"{what}: no answer in time ({type(error).__name__}): it hangs, or the machine is busy; try again"
        ) from error
    except (ray_errors.RayError, *_OTHER_RAY_FAILURES) as error:
        raise PeerLost(f"{what}: {type(error).__name__}: {_in_brief(error)}") from error
    finally:
        _own_calls.depth -= 1


def _in_brief(error: BaseException) -> str:
    """Return an error's text without colours, and of a traceback in it only the error at its end.

    The whole text stays in the `__cause__` of what is raised.
    """
    text = _COLOUR.sub("", str(error))
    lines = text.splitlines()
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return text
    end = next((number for number in range(frames[-1] + 1, len(lines)) if lines[number][:1].strip()), None)
    if end is None:
        return text
    begins = f"{FAILED_CONSTRUCTOR}: " if text.startswith(FAILED_CONSTRUCTOR) else ""
    return begins + "\n".join(lines[end:])


def is_silent(error: KVStoreError) -> bool:
    """Return whether a call failed because its actor says nothing, and not because the actor has ended.

    To Ray, an actor whose process is stopped is late at first, and unavailable after some ten seconds.
    """
    return isinstance(error, TransferTimeout) or isinstance(error.__cause__, ray_errors.ActorUnavailableError)


def within(what: str, timeout_s: float, do: Callable[[], Any]) -> Any:
    """Run a function that may hang, for example a question to a GCS, and return its result.

    Raises:
        TransferTimeout: it was not done in time. It keeps running.
    """
    try:
        future = on_thread("raykv-within", do)
    except RuntimeError:
        return do()  # At interpreter exit Python starts no thread.
    if not wait([future], timeout_s).done:
        raise TransferTimeout(f"{what}: not done within {timeout_s:g} s; does its Ray still answer?")
    return future.result()


def find_actor(name: str, timeout_s: float = 10.0) -> Any:
    """Return the handle of a named actor.

    Raises:
        StoreNotRunning: there is no such actor, or no Ray in this process.
        TransferTimeout: the cluster's GCS does not answer within `timeout_s`.
        PeerLost: the GCS cannot be reached.
    """
    check_not_forked()

    def get() -> Any:
        with ray_failures(f"actor {name!r}"):
            try:
                return ray.get_actor(name, namespace=RAY_NAMESPACE)
            except ValueError as error:
                raise StoreNotRunning(
                    f"wanted the actor {name!r} of a store, got none in this Ray cluster; "
                    f"{start_call(name.split('/')[1])} starts that store, address= names another cluster"
                ) from error

    # Ray itself waits a minute or longer for a GCS that hangs.
    return within(f"actor {name!r}", timeout_s, get)


def begin(what: str, method: Any, *args: Any) -> Any:
    """Call a method of an actor, and return the reference that `answer` waits for.

    Raises:
        StoreNotRunning, PeerLost: the call could not be sent.
    """
    with ray_failures(what):
        return method.remote(*args)


def is_answered(what: str, ref: Any, timeout_s: float) -> bool:
    """Wait at most `timeout_s`, and return whether `answer` would return or raise at once."""
    with ray_failures(what):
        done, _ = ray.wait([ref], timeout=max(0.0, timeout_s))  # A negative time ends the whole process in Ray's core.
        return bool(done)


def answer(what: str, ref: Any, timeout_s: float) -> Any:
    """Wait for the answer of an actor; with no time left, fail at once unless it is there.

    Raises:
        KVStoreError: the actor's error, if it is ours.
        TransferTimeout: no answer within `timeout_s`.
        PeerLost: the actor, its process or its node is gone.
    """
    timeout_s = max(0.0, timeout_s)  # A negative time ends the whole process in Ray's core.
    limit = f"(within {max(0.001, round(timeout_s, 3)):g} s)" if timeout_s else "(no time was left for it)"
    with ray_failures(f"{what} {limit}"):
        return ray.get(ref, timeout=timeout_s)


def call(what: str, method: Any, *args: Any, timeout_s: float) -> Any:
    """Call a method of an actor, and wait for its answer; raises what `begin` and `answer` raise."""
    return answer(what, begin(what, method, *args), timeout_s)


def stop_for(what: str, handle: Any, reason: str, timeout_s: float) -> None:
    """Call `stop` of an actor, which logs the reason; raises what `call` raises."""
    try:
        call(what, handle.stop, reason, timeout_s=timeout_s)
    except TypeError:  # It is of a version whose `stop` takes no reason.
        call(what, handle.stop, timeout_s=timeout_s)


def end_actor(what: str, handle: Any, reason: str, patience_s: float) -> None:
    """End an actor, which logs the reason; kill it if it does not stop in `patience_s`."""
    with contextlib.suppress(KVStoreError, AttributeError):  # AttributeError: it is of a version without `stop`.
        stop_for(what, handle, reason, patience_s)
    with contextlib.suppress(KVStoreError), ray_failures(what):
        ray.kill(handle)


def what_is(key: str) -> str:
    """Return what a key of `ask_all` names, for errors. No id of a node has a slash."""
    if not key:
        return "directory"
    return f"shard {key[1:]} of the directory" if key[0] == "/" else f"store of node {key}"


def ask_all(methods: Mapping[str, Any], *args: Any, timeout_s: float) -> dict[str, Any]:
    """Call a method of several actors at once; return each one's answer, or its KVStoreError.

    Args:
        methods: by the node of a store; "" is the directory, and "/" with a number one of its shards.
        args: of every method.
        timeout_s: limit for all answers together; an actor that is asked after that has 0.1 s.
    """
    names = {node: what_is(node) for node in methods}
    asked: dict[str, Any] = {}
    for node, method in methods.items():
        try:
            asked[node] = begin(names[node], method, *args)
        except KVStoreError as error:
            asked[node] = error
    deadline_s = time.monotonic() + timeout_s
    for node, ref in asked.items():
        if isinstance(ref, KVStoreError):
            continue
        try:
            left_s = deadline_s - time.monotonic()
            what = names[node] if left_s > 0.1 else f"{names[node]}, asked {timeout_s:g} s ago"
            asked[node] = answer(what, ref, max(0.1, left_s))
        except KVStoreError as error:
            asked[node] = error
    return asked

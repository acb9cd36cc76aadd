"""Let one restart of a store run at a time: it holds a name in Ray, which Ray frees when its process ends."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvstore.actors.calls import actor_class, actor_name, call, find_actor, ray_failures
from kvstore.actors.ending import end_left
from kvstore.errors import KVStoreError, StoreBusy, StoreNotRunning, StoreUnavailable
from kvstore.runtime.threads.own_thread import on_thread

#: How long a restart that was interrupted may take to end before another one is refused.
_ENDS_S = 10.0
_LOOK_S, _WHOSE_S, _FREED_S = 0.2, 2.0, 5.0
#: How long a stop may take to end what it has seen: more than it waits for actors that do not answer.
_SPARE_S = 20.0


class Turnstile:
    """The actor that has the name. It belongs to the process that restarts, and ends with it.

    Args:
        pid: of that process.
        host: of that process.
    """

    def __init__(self, pid: int, host: str) -> None:
        self._pid, self._host, self._began_s = pid, host, time.monotonic()

    def whose(self) -> str:
        """Return which process has the name, and since when."""
        return f"process {self._pid} on host {self._host}, since {time.monotonic() - self._began_s:.0f} s"


@contextlib.contextmanager
def one_restart(name: str, say: Callable[[str], object]) -> Iterator[Callable[[], str]]:
    """Run the body as the only restart of a store. One that was interrupted may be ending: it is waited for.

    Args:
        name: of the store.
        say: called before it waits.

    Yields:
        A function that returns the id of this restart. If the store was stopped meanwhile, which ends this actor, too,
        it ends the supervisor that this restart made, with all that has, and raises StoreNotRunning.

    Raises:
        StoreBusy: another restart of this store runs.
    """
    path = actor_name(name, "restart")
    own = _entered(name, path, say)
    try:
        yield partial(_check, name, path, own)
    finally:
        _leave(path, own)


def _entered(name: str, path: str, say: Callable[[str], object]) -> Any:
    deadline_s, has_said = time.monotonic() + _ENDS_S, False
    while (own := _made(path)) is None:
        if time.monotonic() > deadline_s:
            raise StoreBusy(
                f"another restart of store {name!r} is running{_whose(path)}; wait for its end, or end it, and run the "
                "command again"
            )
        if not has_said:
            say("waits for another restart of this store to end")
            has_said = True
        time.sleep(_LOOK_S)
    return own


def _made(path: str) -> Any:
    """Return an actor with the name, which ends with this process; None if another one has it."""
    # On a thread, where no Ctrl-C falls between the moment when Ray gives the name and the one when it is known here.
    try:
        making = on_thread("raykv-restart", partial(_asked_for, path))
    except RuntimeError as error:
        raise StoreUnavailable(f"no thread can be started for a restart: {error}") from error
    try:
        own = making.result()
    except BaseException:
        making.add_done_callback(partial(_undo, path))
        raise
    if own is None:
        return None
    is_own = False
    try:
        # Ray looks for the name before it makes the actor: two may have found it free.
        with contextlib.suppress(StoreNotRunning):
            is_own = bool(find_actor(path)._actor_id == own._actor_id)
        return own if is_own else None
    finally:
        if not is_own:
            _kill(path, own)


def _asked_for(path: str) -> Any:
    options: dict[str, Any] = {"name": path, "lifetime": "non_detached", "max_restarts": -1}
    with ray_failures(path):
        # On this node, which surely has this version of raykv: an actor that cannot begin loses its name.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        try:
            # Ray gives the name here. The process of the actor may begin much later.
            turnstile = actor_class(Turnstile, scheduling_strategy=here, **options)
            return turnstile.remote(os.getpid(), socket.gethostname())
        except ValueError:  # What Ray raises if there is such an actor.
            return None


def _undo(path: str, making: Future[Any]) -> None:
    if making.exception() is None and (own := making.result()) is not None:
        _kill(path, own)


def _check(name: str, path: str, own: Any) -> str:
    own_id = str(own._actor_id.hex())
    try:
        is_own = bool(find_actor(path)._actor_id == own._actor_id)
    except StoreNotRunning as error:
        if not isinstance(error.__cause__, ValueError):  # This process has left its Ray.
            raise
        is_own = False
    except KVStoreError:  # A cluster that says nothing has not said that the store was stopped.
        return own_id
    if not is_own:
        # The stop may not have seen a supervisor that was made just then.
        with contextlib.suppress(KVStoreError):
            end_left(name, own_id, spare_s=_SPARE_S)
        raise StoreNotRunning(f"store {name!r} was stopped while it was restarted; the restart ends here")
    return own_id


def _whose(path: str) -> str:
    with contextlib.suppress(KVStoreError, AttributeError):
        return f" ({call('restart', find_actor(path, _WHOSE_S).whose, timeout_s=_WHOSE_S)})"
    return ""


def _leave(path: str, own: Any) -> None:
    """Free the name; when this returns, the next restart gets it at once."""
    _kill(path, own)
    deadline_s = time.monotonic() + _FREED_S
    with contextlib.suppress(KVStoreError):
        while find_actor(path)._actor_id == own._actor_id and time.monotonic() < deadline_s:
            time.sleep(0.02)


def _kill(path: str, own: Any) -> None:
    with contextlib.suppress(KVStoreError), ray_failures(path):
        ray.kill(own)

"""The calls and handles of this process that use its Ray, so that none ends it while another uses it.

A process has only one Ray at a time for all its threads; so there is only one `USE`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import ray

from kvstore.actors.calls import within
from kvstore.actors.finding import stores_here
from kvstore.actors.session.joining import Joined, join_ray
from kvstore.actors.session.probing import check_answers
from kvstore.actors.session.rays import RaySession, current_session
from kvstore.errors import KVStoreError, StoreBusy

logger = logging.getLogger(__name__)

#: Limit for asking a Ray for its stores; without an answer the handles of this process decide.
_ASK_S = 5.0
#: How long a leaving thread waits for another one that joins or leaves.
_LEAVE_S = 60.0


class RayUse:
    """The uses of this process's Ray; any thread may call."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all uses and locks."""
        #: Held while Ray is joined, begun or left: Ray does not allow two of these at once.
        self._changing = threading.RLock()
        #: Reentrant: a signal handler may call on the thread that holds it.
        self._lock = threading.RLock()
        self._handles: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Running calls that may return a handle: session and store name of each.
        self._calls: dict[object, tuple[str, str]] = {}
        #: The session that a call of ours connected this process to, until a first call has succeeded in it.
        self._unused: str | None = None

    @contextlib.contextmanager
    def joined(self, address: str | None, name: str, deadline_s: float, *, may_start: bool) -> Iterator[Joined]:
        """Join Ray for the body, which must `hold` a handle. If the body fails, leave Ray again.

        This process stays for handles and calls of other threads, and in a Ray that it was connected to before.

        Raises:
            StoreBusy: another thread joins or leaves Ray, and is not done by `deadline_s`.
            KVStoreError: as for `join_ray`.
        """
        call, joined = object(), None
        try:
            with self._alone(deadline_s):
                joined = join_ray(address, may_start=may_start, deadline_s=deadline_s)
                with self._lock:
                    self._calls[call] = joined.session.name, name
                    if joined.connected:
                        self._unused = joined.session.name
            yield joined
        except BaseException:
            self._forget(call)
            if joined is not None:
                self._undo(joined.session)
            raise
        self._forget(call)

    def hold(self, handle: Any) -> None:
        """Count an open handle of a store."""
        with self._lock:
            self._handles.add(handle)
            self._unused = None

    def drop(self, handle: Any) -> None:
        """Stop counting a handle."""
        with self._lock:
            self._handles.discard(handle)

    def starts(self, name: str, session: RaySession) -> bool:
        """Return whether an open handle started this store in that Ray, or a running call may start it."""
        with self._lock:
            calls = (session.name, name) in self._calls.values()
            return calls or any(one._has_started(name, session) for one in self._handles)

    def leave(self, session: RaySession, name: str | None = None) -> list[str]:
        """Shut Ray down in this process if nothing uses it, else return the stores that still need it.

        If the cluster does not answer which stores it has, the open handles of this process count as stores, for a
        store without an answer may still run.

        Args:
            session: the Ray to leave; nothing happens if this process is connected to another one.
            name: a store that has ended.

        Raises:
            StoreBusy: another thread joins or leaves Ray, and is not done in time.
        """
        with self._alone(time.monotonic() + _LEAVE_S):
            if not is_connected(session):
                return []
            with self._lock:
                handles = {one.config.name for one in self._handles if one._is_of(session)}
                starting = {store for _, store in self._calls.values()}
            if session.is_own:
                try:
                    check_answers(session.address)
                    handles = set(within("the stores of this Ray", _ASK_S, stores_here))
                except KVStoreError as error:
                    if isinstance(error.__cause__, ConnectionRefusedError):
                        handles = set()  # Its head is on this machine: a refused connection means that it has ended.
                    logger.warning("which stores the Ray at %s has is not known: %s", session.address, error)
            others = sorted((handles - {name}) | starting)
            if not others:
                with self._lock:
                    self._unused = None
                ray.shutdown()
            return others

    def _undo(self, session: RaySession) -> None:
        """Leave the Ray of a failed call, if this process joined it only for calls that failed."""
        try:
            if session.is_own or self._unused == session.name:
                self.leave(session)
        except KVStoreError as error:
            logger.warning("this process stays connected to the Ray at %s: %s", session.address, error)

    def _forget(self, call: object) -> None:
        with self._lock:
            self._calls.pop(call, None)

    @contextlib.contextmanager
    def _alone(self, deadline_s: float) -> Iterator[None]:
        if not self._changing.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise StoreBusy("another thread of this process joins or leaves Ray, and was not done in time; try again")
        try:
            yield
        finally:
            self._changing.release()


def is_connected(session: RaySession) -> bool:
    """Return whether this process is connected to that Ray; never connects."""
    try:
        return current_session().name == session.name
    except KVStoreError:
        return False


#: One for the whole process, like Ray.
USE = RayUse()
# Another thread of the parent may hold the locks, and its handles are not the child's.
os.register_at_fork(after_in_child=USE.begin_anew)

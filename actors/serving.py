"""Whether stores and the directory serve: asked of each by the supervisor, which replaces one that does not.

An actor may answer Ray while the one thread that serves its sockets is stuck, so `ping` asks that thread. Pings have
a thread of their own in each actor: verbs that wait keep none from its answer.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from kvstore.actors.calls import call, ray_failures
from kvstore.errors import KVStoreError, TransferTimeout

logger = logging.getLogger(__name__)

HEALTH = "health"
#: Threads of an actor that only answer pings, as `ray.remote` takes it.
HEALTH_GROUP = {HEALTH: 1}
READY, DRAIN = "ready", "drain"
#: Threads of a node store for verbs that wait as long as their caller says, a day at most: however many are asked, the
#: others are answered, and a store can be found by its workers and peers.
WAITING_GROUPS = {READY: 8, DRAIN: 4}
#: How long the serving thread has for its answer, and what the call may take on top.
_SERVES_WITHIN_S, _CALL_S = 3.0, 2.0
#: From the first ping that says so, an actor whose serving thread is stuck is left this long.
STUCK_S = 10.0
#: One that does not answer Ray either may be suspended, and go on; but not for ever.
SILENT_S = 60.0


class ServingWatch:
    """Since when actors do not serve, by name; each is asked by one thread at a time."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def serves(self, name: str, what: str, handle: Any, *, may_restart: bool) -> bool:
        """Ask an actor whether it serves; one that has not for too long is ended.

        Args:
            name: of the actor.
            what: it is, for texts.
            handle: of the actor.
            may_restart: whether Ray makes it again by itself when it is ended.

        Returns:
            False when there is none any more, and another one may be made.

        Raises:
            TransferTimeout: it does not serve, but may yet.
        """
        asked_s = time.monotonic()
        try:
            ping = handle.ping.options(concurrency_group=HEALTH)
            if call(what, ping, _SERVES_WITHIN_S, timeout_s=_SERVES_WITHIN_S + _CALL_S):
                self._since_s.pop(name, None)
                return True
            patience_s, why = STUCK_S, "the thread that serves its sockets is stuck"
        except TransferTimeout:
            patience_s, why = SILENT_S, "its process answers nothing"
        except KVStoreError:
            self._since_s.pop(name, None)
            return False
        silent_s = time.monotonic() - self._since_s.setdefault(name, asked_s)
        if silent_s < patience_s:
            raise TransferTimeout(
                f"{what} does not serve ({why}) since {silent_s:.0f} s; it is replaced after {patience_s:.0f} s"
            )
        logger.error("%s does not serve (%s) since %.0f s: it is ended and replaced", what, why, silent_s)
        with ray_failures(what):
            ray.kill(handle, no_restart=not may_restart)
        self._since_s.pop(name, None)
        return may_restart

    def keep(self, names: set[str]) -> None:
        """Forget all other actors."""
        for name in list(self._since_s):  # A copy: threads that ask actors add to it and take from it meanwhile.
            if name not in names:
                self._since_s.pop(name, None)

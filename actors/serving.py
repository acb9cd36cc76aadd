"""Check that stores and the directory serve; the supervisor asks, replaces one that does not, and says what was lost.

An actor may answer Ray while the one thread that serves its sockets is stuck, so `ping` asks that thread. Pings have
their own thread in each actor: verbs that wait cannot delay the answer.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError

from kvstore.actors.calls import call, ray_failures
from kvstore.actors.finding import constructor_pid
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, IncompatibleStore, KVStoreError, TransferTimeout
from kvstore.runtime.life import log_life, tell_whose

logger = logging.getLogger(__name__)
_life = logging.getLogger("kvstore.life")

HEALTH = "health"
#: Threads of an actor that only answer pings, as `ray.remote` takes it.
HEALTH_GROUP = {HEALTH: 1}
READY, DRAIN = "ready", "drain"
#: Threads of a node store for verbs that wait as long as their caller says, at most a day, or that look through all
#: slots. Other calls are answered all the same, so workers and peers can still find the store.
WAITING_GROUPS = {READY: 8, DRAIN: 4}
#: How long the serving thread has for its answer, and how much longer the call may take.
_SERVES_WITHIN_S, _CALL_S = 3.0, 2.0
#: An actor with a stuck serving thread is ended this long after the first ping that shows it.
STUCK_S = 10.0
#: The same for an actor that does not answer Ray either: it may only be suspended, and continue.
SILENT_S = 60.0
#: The same for one whose constructor runs still. It may be taking over the memory of the store before, and its
#: supervisor may have been replaced meanwhile.
MADE_WITHIN_S = 180.0
#: Free bytes and times change with each try, and make no other reason.
_NUMBERS = re.compile(r"\d+(\.\d+)?")


def show_life(**whose: str) -> None:
    """Have this actor's process write the events of kvstore.runtime.life to stderr, which Ray keeps in its logs.

    Each line has `whose`, like store="default"; an actor has its process for itself.
    """
    tell_whose(**whose)
    _life.setLevel(logging.INFO)
    if not _life.hasHandlers():  # A user's own setup of the workers' logging has them already.
        _life.addHandler(logging.StreamHandler())


def check_settings(node_id: str, config: StoreConfig, said: str, *, is_of_restart: bool) -> None:
    """Check that a node's store has these settings.

    Args:
        node_id: of the node.
        config: what it should have.
        said: its settings, as JSON.
        is_of_restart: `config` is of a restart, which may not have reached this node.

    Raises:
        IncompatibleStore: it has others.
    """
    try:
        theirs = StoreConfig.from_json(said)
    except ConfigError as error:
        raise IncompatibleStore(f"node {node_id} has a store of another version of raykv: {error}") from error
    if text := config.differences(theirs):
        how = f"has a store of this name, left by one that is gone, with other settings ({text})"
        if is_of_restart:
            how = f"runs with its old settings ({text}); `kvstore restart` gives it the new ones"
        raise IncompatibleStore(f"node {node_id} {how}")


def is_passing(error: BaseException) -> bool:
    """Return whether a node may get a store though it has none, or one of other settings, for this reason."""
    return isinstance(error, IncompatibleStore) or not isinstance(error, ConfigError)


class ServingWatch:
    """The times since when actors do not serve, by name. One thread at a time asks each."""

    def __init__(self) -> None:
        self.since_s: dict[str, float] = {}

    def serves(self, name: str, what: str, handle: Any, *, may_restart: bool) -> bool:
        """Return whether an actor serves; end one that has not served for too long.

        Args:
            name: of the actor.
            what: names it in texts.
            handle: of the actor.
            may_restart: whether Ray makes it again after its end. If not, False says that another may be made.

        Raises:
            TransferTimeout: it does not serve now, but may serve again.
        """
        asked_s = time.monotonic()
        try:
            ping = handle.ping.options(concurrency_group=HEALTH)
            if call(what, ping, _SERVES_WITHIN_S, timeout_s=_SERVES_WITHIN_S + _CALL_S):
                self.since_s.pop(name, None)
                return True
            patience_s, why = STUCK_S, "the thread that serves its sockets is stuck"
        except TransferTimeout:
            patience_s, why = SILENT_S, "its process answers nothing"
            if constructor_pid(handle):
                patience_s, why = MADE_WITHIN_S, "it is still being made"
        except KVStoreError:
            self.since_s.pop(name, None)
            return False
        silent_s = time.monotonic() - self.since_s.setdefault(name, asked_s)
        if silent_s < patience_s:
            raise TransferTimeout(
                f"{what} does not serve ({why}) since {silent_s:.0f} s; it is replaced after {patience_s:.0f} s"
            )
        logger.error("%s does not serve (%s) since %.0f s: it is ended and replaced", what, why, silent_s)
        with ray_failures(what):
            ray.kill(handle, no_restart=not may_restart)
        self.since_s.pop(name, None)
        return may_restart

    def keep(self, names: set[str]) -> None:
        """Forget all other actors."""
        for name in list(self.since_s):  # A copy, because threads that ask actors change it meanwhile.
            if name not in names:
                self.since_s.pop(name, None)


class ServedNodes:
    """The nodes whose store served in the last round, and which ends of stores a restart has planned.

    One thread at a time logs; `plan_end` and `ended` come from others.

    Args:
        store: name of the store in the log.
    """

    def __init__(self, store: str) -> None:
        self._store, self._served = store, set[str]()
        #: Until when the end of a node's store is no loss.
        self._planned_until_s = dict[str, float]()
        #: Until when a node waits for its turn in a restart, or has it.
        self._in_turn_until_s = dict[str, float]()
        #: The logged reason why a node has no store, without its numbers, by node id.
        self._told = dict[str, str]()

    def plan_end(self, node_id: str, within_s: float) -> None:
        """Call it no loss if the store of a node ends within this time."""
        self._planned_until_s[node_id] = time.monotonic() + within_s

    def expect_restart(self, node_ids: Iterable[str], within_s: float) -> None:
        """Log of these nodes only what no restart ends by itself, for this time."""
        self._in_turn_until_s |= dict.fromkeys(node_ids, time.monotonic() + within_s)

    def failed(self, node_id: str, error: BaseException) -> None:
        """Note why a node has no store, or not one of the present settings; logged once for each reason."""
        in_turn = time.monotonic() < self._in_turn_until_s.get(node_id, 0.0)
        reason = _NUMBERS.sub("", str(error))
        if (in_turn and is_passing(error)) or self._told.get(node_id) == reason:
            return
        self._told[node_id] = reason
        log_life("node_without_store", level=logging.WARNING, store=self._store, node=node_id, reason=error)
        if isinstance(error.__cause__, RayError):  # The reason is its last line.
            logger.warning("node %s has no store; the whole error: %s", node_id, error.__cause__)

    def ended(self, node_id: str) -> None:
        """Note that the store of a node has ended, and that the next one is made."""
        if node_id in self._served and not self._is_planned(node_id):
            self._log_lost(node_id, "its store ended; another one is made")
        self._served.discard(node_id)  # The next one counts as joined.
        self._planned_until_s.pop(node_id, None)

    def note(self, served: set[str], alive: set[str], problems: dict[str, BaseException]) -> None:
        """Note a round, and log what has changed.

        Args:
            served: ids of the nodes whose store serves.
            alive: ids of all nodes of the cluster.
            problems: why a node has no store, by its id.
        """
        self._told = {node_id: said for node_id, said in self._told.items() if node_id in alive - served}
        for node_id in sorted(served - self._served):
            log_life("node_joined", store=self._store, node=node_id)
        for node_id in sorted(self._served - served):
            if node_id not in alive or not self._is_planned(node_id):
                gone = "its store is being made again" if node_id in alive else "left the cluster"
                self._log_lost(node_id, problems.get(node_id, gone))
        self._served = served

    def _is_planned(self, node_id: str) -> bool:
        return time.monotonic() < self._planned_until_s.get(node_id, 0.0)

    def _log_lost(self, node_id: str, reason: object) -> None:
        log_life("node_lost", level=logging.WARNING, store=self._store, node=node_id, reason=reason)

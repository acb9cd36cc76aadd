"""The supervisor: a stateless Ray actor that restarts, and keeps one store on every living node.

It knows only the configuration it was made with and reads everything else from the cluster each time, so it can die and
restart anywhere. Stores and directory serve without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvstore.actors.calls import actor_name, call, end_actor, find_actor, node_address, ray_failures
from kvstore.actors.directory import Directory
from kvstore.actors.finding import actors_of, alive_nodes, make_answering, own_version, shard_name
from kvstore.actors.node_store import NodeStore
from kvstore.actors.serving import (
    HEALTH_GROUP,
    WAITING_GROUPS,
    ServedNodes,
    ServingWatch,
    check_settings,
    is_passing,
    show_life,
)
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import ConfigError, KVStoreError, StoreNotRunning, TransferTimeout
from kvstore.runtime.guard import Guard
from kvstore.runtime.life import ASKED_TO_STOP, Whole, log_life
from kvstore.runtime.threads.own_thread import on_thread

logger = logging.getLogger(__name__)

_PERIOD_S, _CALL_S = 2.0, 5.0
#: Threads of the supervisor that only answer, so that rounds, in which callers wait, cannot delay answers.
ASKED = "asked"
ASKED_GROUP = {ASKED: 4}
#: A round returns after this long; slower nodes are reported and continue by themselves.
_ROUND_S = 15.0
#: How long other callers wait for a round: for the directory, the nodes, and the cluster's answers.
_SHARED_S = 2 * _ROUND_S + 15.0
#: A call of `start` that is silent for this long counts as gone: its process may have been killed.
_HEARD_S = 10.0


class Supervisor:
    """Keeps a directory and one node store per node alive.

    Args:
        config_json: settings of the store.
        starter: id of the call that made it; kept when Ray restarts it.
        watch: False makes rounds only when `reconcile` is called; for tests.
        of_restart: id of the restart that made it: stores with the settings before serve until that reaches them.
    """

    def __init__(self, config_json: str, starter: str = "", watch: bool = True, of_restart: str = "") -> None:
        self._config = StoreConfig.from_json(config_json)
        show_life(store=self._config.name)
        self._starter, self._of_restart, self._why_ends = starter, of_restart, ASKED_TO_STOP
        self._served = ServedNodes(self._config.name)
        self._lock, self._stopping = threading.Lock(), threading.Event()
        #: Set if what is being made at the end is not wanted any more. After `give_way` it is.
        self._ends_stores = threading.Event()
        #: By node, why it has no store.
        self._problems: dict[str, BaseException] = {}
        #: Time of the last message of each waiting call of `start`, in order of arrival; the starter's stays.
        self._heard_s: dict[str, float] = {}
        #: Whether a call has got a handle: from then on no failing call ends the store.
        self._is_had = False
        self._round: Future[list[str]] | None = None
        self._serving = ServingWatch()
        #: By node, the actor id of the store whose settings were checked.
        self._checked: dict[str, Any] = {}
        # At most one thread per node: a store that hangs or starts slowly delays no other.
        self._running: dict[str, Future[None]] = {}
        if watch:
            threading.Thread(target=self._watch, name="raykv-supervisor", daemon=True).start()
        log_life("supervisor_started", version=own_version(), settings=Whole(self._config.chosen()))

    @ray.method(concurrency_group=ASKED)
    def config(self) -> dict[str, Any]:
        """Return the settings that a connecting process must match, and whether the store is ending, or only this."""
        return self._describe()

    def _describe(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL_VERSION, "config": self._config.to_json(), "starter": self._starter,
            "is_ending": self._stopping.is_set(), "ends_stores": self._ends_stores.is_set(),
            "version": own_version(), "host": node_address(), "of_restart": self._of_restart,
        }  # fmt: skip

    @ray.method(concurrency_group=ASKED)
    def join(self, caller: str) -> dict[str, Any]:
        """Note that a call of `start` waits for this store, and return what `config` returns.

        A call repeats this every few seconds; else it counts as gone after `_HEARD_S`.
        """
        with self._lock:
            if not self._stopping.is_set():
                self._heard_s[caller] = time.monotonic()
                keep = {self._starter, *self._waiting()}
                self._heard_s = {other: heard_s for other, heard_s in self._heard_s.items() if other in keep}
        return self._describe()

    @ray.method(concurrency_group=ASKED)
    def have(self, caller: str) -> dict[str, Any]:
        """Note that a call of `start` has its handle and waits no more; return what `config` returns."""
        with self._lock:
            self._heard_s.pop(caller, None)
            self._is_had = True
        return self._describe()

    @ray.method(concurrency_group=ASKED)
    def leave(self, caller: str) -> bool:
        """Note that a call of `start` failed; return whether no call wants the store, so the caller must end it.

        If other calls wait, the first of them becomes the starter.
        """
        is_unwanted = self._leave(caller)
        log_life("start_gave_up", level=logging.WARNING, ends_store=is_unwanted)
        return is_unwanted

    def _leave(self, caller: str) -> bool:
        with self._lock:
            waiting = self._waiting()
            is_lost = self._starter in self._heard_s and self._starter not in waiting
            self._heard_s.pop(caller, None)
            if caller != self._starter and not is_lost:
                return False
            others = [other for other in waiting if other != caller]
            if others:
                self._starter = others[0]
            elif not self._is_had:
                self._ends_stores.set()
                self._stopping.set()
                return True
            return False

    def _waiting(self) -> list[str]:
        """Return the waiting calls of `start` that are not gone; the caller holds the lock."""
        since_s = time.monotonic() - _HEARD_S
        return [caller for caller, heard_s in self._heard_s.items() if heard_s >= since_s]

    @ray.method(concurrency_group=ASKED)
    def problems(self) -> dict[str, str]:
        """Return why nodes have no store, by node id."""
        return {node_id: str(error) for node_id, error in dict(self._problems).items()}

    @ray.method(concurrency_group=ASKED)
    def plan_end(self, node_id: str, within_s: float) -> None:
        """Call it no loss if the store of a node ends within this time: a restart ends it."""
        self._served.plan_end(node_id, within_s)

    @ray.method(concurrency_group=ASKED)
    def expect_restart(self, node_ids: list[str], within_s: float) -> None:
        """Log no warning of stores of these nodes that a restart is about to replace, for this time."""
        self._served.expect_restart(node_ids, within_s)

    @ray.method(concurrency_group=ASKED)
    def hopeless(self) -> dict[str, str]:
        """Return the `problems` that stay as long as the settings do, and a left store that has others."""
        problems = dict(self._problems).items()
        return {node_id: str(error) for node_id, error in problems if isinstance(error, ConfigError)}

    @ray.method(concurrency_group=ASKED)
    def unworkable(self) -> dict[str, str]:
        """Return the `problems` that stay as long as the settings do, whatever store a restart ends."""
        return {node_id: str(error) for node_id, error in dict(self._problems).items() if not is_passing(error)}

    @ray.method(concurrency_group=ASKED)
    def unfinished(self) -> dict[str, str]:
        """Return, by node id, what each store that is being made now may wait for."""
        with self._lock:
            made = [key for key, future in self._running.items() if not (future.done() or key.startswith("directory"))]
        if not made:
            return {}
        with ray_failures("nodes"):
            free = available_resources_per_node()  # type: ignore[no-untyped-call]
        text, lacks = "its store is still being made", "; it wants {} bytes of Ray memory, free there are {}"
        left, wanted = {node: int(free.get(node, {}).get("memory", 0)) for node in made}, self._config.capacity_bytes
        return {node: text + (lacks.format(wanted, left[node]) if left[node] < wanted else "") for node in made}

    @ray.method(concurrency_group=ASKED)
    def stop(self, reason: str = ASKED_TO_STOP) -> None:
        """Make no more actors, and log the reason; the caller ends the existing ones."""
        self._why_ends = reason
        self._ends_stores.set()
        self._make_no_more(reason)

    @ray.method(concurrency_group=ASKED)
    def give_way(self, reason: str) -> None:
        """Do what `stop` does, but leave also the stores that are being made; they may have taken old memory."""
        self._make_no_more(reason)

    def _make_no_more(self, reason: str) -> None:
        with self._lock:
            self._stopping.set()
            running = list(self._running.values())
        log_life("supervisor_stopped", reason=reason)
        wait(running, _CALL_S)

    def reconcile(self) -> list[str]:
        """Make missing actors, and return the ids of the nodes that have a living store.

        Each node has its own thread, and the round ends within `_ROUND_S` whatever a node does. Calls during a round
        share it.

        Raises:
            KVStoreError: the cluster cannot be asked, or the directory cannot be made; nodes were handled all the same.
        """
        with self._lock:
            under_way, own = self._round, Future[list[str]]()
            if under_way is None or under_way.done():
                under_way, self._round = None, own
        if under_way is not None:
            try:
                return list(under_way.result(_SHARED_S))
            except TimeoutError as error:
                raise TransferTimeout(f"a round is not done within {_SHARED_S:g} s") from error
        try:
            own.set_result(self._reconcile())
        except BaseException as error:  # noqa: BLE001 - raised below, and to those who share this round.
            own.set_exception(error)
        return own.result()

    def _reconcile(self) -> list[str]:
        if self._stopping.is_set():
            return []
        nodes = alive_nodes()
        self._problems = {node_id: error for node_id, error in self._problems.items() if node_id in nodes}
        # First, because a store that starts before the directory would publish a second later.
        shards = range(self._config.num_directory_shards)
        directory = [self._begin(f"directory/{number}", self._ensure_directory, number) for number in shards]
        wait(directory, _ROUND_S)
        ensured = {node_id: self._begin(node_id, self._ensure_node_store, node_id, nodes[node_id]) for node_id in nodes}
        wait(ensured.values(), _ROUND_S)
        if self._stopping.is_set():  # What it did not see to any more is not lost.
            return []
        self._checked = {node_id: own for node_id, own in self._checked.items() if node_id in nodes}
        self._serving.keep({*self._shards(), *(self._name("node", node_id) for node_id in nodes)})
        served = []
        for node_id, future in ensured.items():
            if not future.done():
                logger.warning("node %s: its store is still being made", node_id)
                continue
            if (error := future.exception()) is None:
                served.append(node_id)
                self._problems.pop(node_id, None)
                continue
            self._served.failed(node_id, error)
            self._problems[node_id] = error
        self._served.note(set(served), set(nodes), self._problems)
        for shard in directory:
            if shard.done():
                shard.result()
        return served

    def _shards(self) -> list[str]:
        return [shard_name(self._config.name, number) for number in range(self._config.num_directory_shards)]

    def _name(self, kind: str, node_id: str = "") -> str:
        return actor_name(self._config.name, kind, node_id)

    def _begin(self, key: str, ensure: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run `ensure` on a thread unless it already runs for this key; after `stop` it fails at once."""
        with self._lock:
            known = self._running.get(key)
            if known is not None and not known.done():
                return known
            future: Future[None] = Future()
            if self._stopping.is_set():
                future.set_exception(StoreNotRunning("this store is being stopped"))
                return future
            try:
                future = on_thread(f"raykv-ensure-{key[:8]}", lambda: ensure(*arguments))
            except (RuntimeError, MemoryError) as error:  # No thread can be started now: the next round tries again.
                future.set_exception(error)
            self._running = {k: f for k, f in self._running.items() if not f.done()} | {key: future}
            return future

    def _watch(self) -> None:
        guard, pause_s = Guard(logger, "supervisor: a round"), 0.0
        while not self._stopping.wait(_PERIOD_S + pause_s):
            try:
                self.reconcile()
                guard.passed()
                pause_s = 0.0
            except KVStoreError as error:
                # For example an actor that Ray is restarting: the next round handles it.
                if not self._stopping.is_set():
                    logger.warning("supervisor: could not reconcile (%s); will try again", error)
            except Exception as error:  # noqa: BLE001 - logged by the guard; only the supervisor makes stores.
                pause_s = guard.failed(error)

    def _ensure_directory(self, number: int = 0) -> None:
        name, is_split = shard_name(self._config.name, number), self._config.num_directory_shards > 1
        what = f"shard {number} of the directory" if is_split else "the directory"
        if self._serving_actor(name, what, may_restart=True) is None:
            # Ray restarts the directory; this makes the first one, and another one if Ray has given up.
            others = {self._name("supervisor"), self._name("restart"), *self._shards()}
            is_first = set(actors_of(self._config.name)) <= others
            options: dict[str, Any] = {"max_restarts": -1, "max_concurrency": 8}
            options |= {"scheduling_strategy": "SPREAD"} if is_split else {}
            make_answering(name, Directory, HEALTH_GROUP, (is_first, number, self._config.to_json()), **options)

    def _serving_actor(self, name: str, what: str, *, may_restart: bool) -> Any:
        """Return an actor that serves, or None; see `ServingWatch.serves`."""
        try:
            handle = find_actor(name)
        except StoreNotRunning:
            return None
        return handle if self._serving.serves(name, what, handle, may_restart=may_restart) else None

    def _ensure_node_store(self, node_id: str, resources: dict[str, float]) -> None:
        name = self._name("node", node_id)
        handle = self._serving_actor(name, f"store of node {node_id}", may_restart=False)
        if handle is not None:
            self._check_settings(node_id, handle)
            return
        self._served.ended(node_id)
        wanted, room = self._config.capacity_bytes, resources.get("memory", 0.0)
        if wanted > room:
            raise ConfigError(
                f"wanted {wanted} bytes of Ray memory on node {node_id}, it has {int(room)}; lower capacity= or "
                "start the node with more --memory"
            )
        args = (node_id, self._config.to_json(), PROTOCOL_VERSION)
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = {"max_restarts": 0, "max_concurrency": 16, "memory": wanted, "scheduling_strategy": on_node}
        made = make_answering(name, NodeStore, HEALTH_GROUP | WAITING_GROUPS, args, **options)
        if self._ends_stores.is_set():
            end_actor(name, made, self._why_ends, _CALL_S)

    def _check_settings(self, node_id: str, handle: Any) -> None:
        """Refuse a node's store that an earlier supervisor left with other settings; asked once per store."""
        actor_id = handle._actor_id
        if self._checked.get(node_id) == actor_id:
            return
        said = call(f"store of node {node_id}", handle.settings, timeout_s=_CALL_S)
        check_settings(node_id, self._config, said, is_of_restart=bool(self._of_restart))
        self._checked[node_id] = actor_id

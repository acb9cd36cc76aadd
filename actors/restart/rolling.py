"""Restart a store's nodes one after the other; each next store takes over the memory of the one before."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from kvstore.actors.calls import actor_name, answer, begin, call, end_actor, find_actor, is_answered, ray_failures
from kvstore.actors.finding import alive_nodes, constructor_pid
from kvstore.actors.restart.asked import named, unfailing
from kvstore.actors.restart.changing import check_node, replace_supervisor
from kvstore.actors.restart.holding import (
    HOLDER_S,
    STOPS_S,
    end_holder,
    has_nothing,
    holders_of,
    keep_longer,
    kept_s,
    make_holder,
    tell_why,
)
from kvstore.actors.restart.turnstile import one_restart
from kvstore.bounds import check_flag, check_seconds
from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError, StoreBusy, StoreNotRunning, StoreUnavailable

logger = logging.getLogger(__name__)

_CALL_S = 10.0
#: How long Ray may take to begin a process for a store that another restart makes, and how long a store to serve.
PLACED_WITHIN_S, SERVES_S = 10.0, 120.0
#: How long the end of the old store is no loss: it stops, and the supervisor sees that.
_PLANNED_S = 60.0
_ROUND_EVERY_S, _LOOK_S = 1.0, 0.1
_COLD = "cold was asked for"
_LOST = "the memory is lost: a store that had taken it, or was to take it, ended before it served"
_NONE, _RAN_OUT = "the node had no store", "the node had no store, and the memory that was kept for it was lost"


def restart_store(
    name: str,
    node_ids: Sequence[str] | None,
    changes: Mapping[str, Any],
    cold: bool,
    wait_s: float,
    on_step: Callable[[str, str], object] = lambda node_id, what: None,
) -> tuple[StoreConfig, dict[str, dict[str, Any]]]:
    """Restart node stores, as `Store.restart` says.

    `on_step` is called before each step, with the id of a node and what it does. Its errors are logged once, and end no
    restart: a node would be left in the middle of it.

    Returns:
        The settings from now on, and the result by node.

    Raises:
        StoreBusy: another restart of this store runs, and nothing changed; or a person put a node back.
        StoreNotRunning: there is no such store, or it was stopped meanwhile.
    """
    check_flag("cold", cold)
    wait_s = check_seconds("wait_s", wait_s)
    alive = sorted(alive_nodes())
    wanted = alive if node_ids is None else named(node_ids, alive)
    say = unfailing(on_step)
    with one_restart(name, lambda what: say(wanted[0] if wanted else "", what)) as check:
        return _restart(name, wanted, changes, cold, wait_s, say, check, is_alone=len(alive) < 2)


def _restart(
    name: str,
    wanted: list[str],
    changes: Mapping[str, Any],
    cold: bool,
    wait_s: float,
    say: Callable[[str, str], None],
    check: Callable[[], str],
    *,
    is_alone: bool,
) -> tuple[StoreConfig, dict[str, dict[str, Any]]]:
    """Restart these nodes, as `restart_store` says; no other restart runs."""
    if not cold:
        keep_longer(name, wanted)  # Before all that takes time.
    supervisor, config = replace_supervisor(name, changes, wanted, check)
    results: dict[str, dict[str, Any]] = {}
    for number, node_id in enumerate(wanted):
        check()
        turn = Turn(name, node_id, supervisor, config, wait_s, partial(say, node_id), check)
        _expect_restart(supervisor, wanted[number:], turn.longest_s)
        try:
            results[node_id] = turn.run(cold=cold)
        except KVStoreError as error:
            check()
            _expect_restart(supervisor, wanted, 0.0)
            others = "" if is_alone else "the others are as they were; "
            goes_on = "another restart goes on"
            if changes:
                goes_on = "the store has the new settings now: another restart goes on with them, or corrects them"
            kind = StoreBusy if isinstance(error, StoreBusy) else StoreUnavailable
            raise kind(
                f"{turn.outcome(error)}; restarted: {', '.join(results) or 'none'}; {others}{goes_on}"
            ) from error
        _expect_restart(supervisor, [node_id], 0.0)
    return config, results


def _expect_restart(supervisor: Any, node_ids: list[str], within_s: float) -> None:
    with contextlib.suppress(KVStoreError, AttributeError):  # It logs more then, and nothing else is different.
        call("supervisor", supervisor.expect_restart, node_ids, within_s, timeout_s=_CALL_S)


class Turn:
    """The restart of one node.

    Args:
        name: of the store.
        node_id: of the node.
        supervisor: makes the next store.
        config: that it will have.
        wait_s: for leases, writes and hand-offs to end.
        say: called before each step.
        check: raises StoreNotRunning if the store was stopped meanwhile: what runs then is not this restart's.
    """

    def __init__(
        self,
        name: str,
        node_id: str,
        supervisor: Any,
        config: StoreConfig,
        wait_s: float,
        say: Callable[[str], object],
        check: Callable[[], object],
    ) -> None:
        self._check = check
        self._name, self._node_id, self._supervisor, self._config = name, node_id, supervisor, config
        self._wait_s, self._say, self._path = wait_s, say, actor_name(name, "node", node_id)
        #: Whether the old store may have ended, and whether a holder may have its memory.
        self._has_ended, self.may_be_held = False, False
        self._again = ""
        self.longest_s = _CALL_S + HOLDER_S + wait_s + 3 * STOPS_S + 2 * SERVES_S

    def outcome(self, error: KVStoreError) -> str:
        """Return what an error of `run` leaves."""
        if not self._has_ended:
            why = str(error).removeprefix(f"node {self._node_id}: ")
            return f"node {self._node_id} was not restarted, and its store serves on: {why}"
        text = f"node {self._node_id} has no store{self._again}: {error}"
        if _has_left(self._node_id):
            return text
        if (left_s := kept_s(self._name, self._node_id)) > 0:
            return f"{text}; its memory is kept for {left_s:.0f} s, for a restart with settings that work"
        return f"{text}; its memory is lost" if self.may_be_held else text

    def run(self, *, cold: bool) -> dict[str, Any]:
        """Restart the node; return how its next store began."""
        holder, why_cold, is_done = None, _COLD if cold else "", False
        # The next store needs a part of the time for which an earlier restart said that the memory is kept.
        was_kept = not cold and keep_longer(self._name, [self._node_id])
        old = self.find_old()
        self._check()
        if old is not None:
            self._again = " again"
            check_node(self._node_id, old, self._config)  # Again: the nodes before it may have taken an address.
        try:
            if old is None:
                self._has_ended = True
            if cold:
                for each in holders_of(self._name, self._node_id):  # The next store would take what they have.
                    end_holder(each)
            elif old is not None:
                holder, where = make_holder(self._name, self._node_id, self._wait_s)
                if holder is None:
                    why_cold = f"no process can hold the memory: {where}"
                else:
                    self._say(f"drains, and waits up to {self._wait_s:g} s for leases, writes and hand-offs")
                    if why_cold := self.give(old, where):
                        tell_why(holder, why_cold)
            said = self._next(old)
            self.may_be_held, is_done = False, True
        finally:
            # The next store may have failed: then another restart, with settings that work, finds the memory there.
            # Only the holder knows whether it has it: what the store answered may be of another giving, or lost.
            if holder is not None and (is_done or (not self.may_be_held and has_nothing(holder))):
                end_holder(holder)
        otherwise = _LOST if old is not None else _RAN_OUT if was_kept else _NONE
        result = said if said["is_warm"] else {**said, "why_cold": why_cold or said["why_cold"] or otherwise}
        logger.info("node %s was restarted: %s", self._node_id, result)
        return result

    def find_old(self) -> Any:
        """Return the node's store, None if it has none. One that another restart is making is waited for.

        It may have taken the memory already, and can give it only when it is made. One for which Ray begins no process
        is ended: the next store takes what is kept for it.
        """
        began_s, has_said = time.monotonic(), False
        while True:
            try:
                old = find_actor(self._path)
            except StoreNotRunning:
                return None
            pid, waited_s = constructor_pid(old), time.monotonic() - began_s
            if pid is None or waited_s > SERVES_S:
                return old
            if not pid and waited_s > PLACED_WITHIN_S:  # It waits for room, and has taken nothing.
                with contextlib.suppress(KVStoreError), ray_failures(self._path):
                    ray.kill(old)
                return None
            if not has_said:
                self._say("waits for its store, which is being made")
                has_said = True
            time.sleep(_LOOK_S)

    def give(self, old: Any, where: str) -> str:
        """Have a store give its memory to the holder; return why it did not, "" if it did, now or before.

        Raises:
            StoreBusy: a person put the node back; its store has all blocks, and serves on.
        """
        # Until it is known that nothing was given: this process may be ended meanwhile.
        self.may_be_held = True
        if not where:
            return ""
        giving = None
        try:
            giving = begin("store", old.hand_over, where, self._wait_s)
            answer("store", giving, self._wait_s + STOPS_S)
        except StoreBusy:
            self.may_be_held = False
            raise
        except (KVStoreError, AttributeError) as error:  # AttributeError: it is of a version that cannot.
            self.may_be_held = False
            return f"the old store gave nothing: {error}"
        except BaseException:  # Ctrl-C or SIGTERM: nobody would wait for what it gives.
            if giving is not None and _take_back(old, giving):
                self.may_be_held = False
                self._say("serves again with the settings that it had: the restart was interrupted")
            raise
        return ""

    def _next(self, old: Any) -> dict[str, Any]:
        """End the old store, and wait for the next one."""
        # Where there was no old store the reason holds still, and nothing is worth waiting for.
        before = "" if old is None else _unworkable(self._supervisor, self._node_id)
        self._check()
        if old is not None:
            self._say("ends its store")
            with contextlib.suppress(KVStoreError):
                call("supervisor", self._supervisor.plan_end, self._node_id, _PLANNED_S, timeout_s=_CALL_S)
            self._has_ended = True
            end_actor(self._path, old, "a restart", STOPS_S)
        self._say("starts its next store")
        old_id = None if old is None else old._actor_id
        return _wait_for_next(self._path, self._node_id, old_id, self._supervisor, before, self._check)


def _take_back(old: Any, giving: Any) -> bool:
    """Have a store that was to give its memory serve again; return whether it surely gave nothing.

    More than once: the drain may begin only after the first call. Only the answer of `giving` counts: a store that
    refuses to be put back may be giving its memory just now.
    """
    deadline_s = time.monotonic() + _CALL_S
    try:
        while not is_answered("store", giving, _LOOK_S) and (left_s := deadline_s - time.monotonic()) > 0:
            with contextlib.suppress(KVStoreError):
                call("store", old.undrain, timeout_s=left_s)
        answer("store", giving, 0.0)
    except StoreBusy:
        return True
    except KVStoreError:
        return False
    return False


def _unworkable(supervisor: Any, node_id: str) -> str:
    """Return why a node can have no store with these settings; "" if nothing is known."""
    with contextlib.suppress(KVStoreError):
        return str(call("supervisor", supervisor.unworkable, timeout_s=_CALL_S).get(node_id, ""))
    return ""


def _has_ended(round_: Any) -> bool:
    with contextlib.suppress(KVStoreError):  # The supervisor logs it, and the next round tries again.
        if not is_answered("supervisor", round_, 0.0):
            return False
        answer("supervisor", round_, 0.0)
    return True


def _has_left(node_id: str) -> bool:
    with contextlib.suppress(KVStoreError):  # A cluster that says nothing has not said that the node left.
        return node_id not in alive_nodes()
    return False


def _wait_for_next(
    path: str, node_id: str, old_id: Any, supervisor: Any, before: str, check: Callable[[], object]
) -> dict[str, Any]:
    """Wait until the node has another store that serves and whose mover is ready; return how it began.

    `before` is why the node could have no other store as long as it had the old one. For `check` see `Turn`.
    """
    deadline_s, next_round_s, last, round_ = time.monotonic() + SERVES_S, 0.0, "not made yet", None
    while (now_s := time.monotonic()) < deadline_s:
        check()
        # One at a time, and each is heard: Ray prints the errors of calls that nobody waits for.
        if round_ is not None and _has_ended(round_):
            round_ = None
        if round_ is None and now_s > next_round_s:
            next_round_s = now_s + _ROUND_EVERY_S
            with contextlib.suppress(KVStoreError):
                round_ = begin("supervisor", supervisor.reconcile)
        try:
            handle = find_actor(path)
            if handle._actor_id != old_id:
                said: dict[str, Any] = call("store", handle.beginning, timeout_s=_CALL_S)
                if call("mover", handle.ready, _CALL_S, timeout_s=_CALL_S + 1):
                    return said
                last = "its mover is not ready"
        except KVStoreError as error:
            last = str(error)
        if (problem := _unworkable(supervisor, node_id)) not in ("", before):
            raise StoreUnavailable(problem)
        if _has_left(node_id):
            raise StoreUnavailable("it left the cluster while it was restarted")
        time.sleep(_LOOK_S)
    raise StoreUnavailable(f"no store in {SERVES_S:g} s: {last}")

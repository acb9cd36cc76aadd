"""One soak from start to end: clients work, faults happen, and at the end everything is counted."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import kvstore
from kvstore.actors.bench.cluster import two_nodes
from kvstore.errors import InvalidRequest, KVStoreError, StoreUnavailable, TransferError
from tests.soak import audit
from tests.soak.cluster import NotRecovered, StoreUnderTest, session_logs, still_there, until
from tests.soak.disk_faults import DiskFaults, environment
from tests.soak.engine import LAYOUTS, POISON, Engine, wrong_in_lease
from tests.soak.fleet import Fleet
from tests.soak.plan import (
    CAPACITY_BYTES,
    CHAIN_BLOCKS,
    GCS_STOPPED_S,
    REFUSING,
    SETTINGS,
    SPOILING,
    Fault,
    FaultChoice,
    chains,
    disk_settings,
    faults,
    space,
)

#: How long each kind of process may take until the store serves again, in both directions.
RECOVERY_S = {
    "client": 20.0,
    "rank": 20.0,
    "gcs": 60.0,
    "mover": 30.0,
    "store": 45.0,
    "directory": 30.0,
    "supervisor": 30.0,
    # After a fault it rests for 5 s, and for 10 s if another one follows.
    "disk": 30.0,
}
#: How long after the last client closed pins, writes and quarantine may last: a lease, a transfer, a tick each.
QUIET_S = SETTINGS["lease_ttl_s"] + 2 * SETTINGS["transfer_timeout_s"] + 6.0
_CLOSE_S = 60.0
_SAY_S = 1.0
_HELD_IN_POOL = ("num_pinned", "num_leases", "num_writing", "num_writes", "num_quarantined")
#: A thread of this name opens the disk tier, and ends when that is done.
_BEGINNER = "raykv-disk-begin"
#: A store that comes back must have this share of the blocks that were on its disk when it was killed.
_RESTORED = 0.9
#: How long a store takes to begin, about.
_BEGINNING_S = 3.0
#: How long clients meet what was spoilt, before the next fault.
_SPOILT_S = 1.5
_DISK_COUNTS = ("num_written", "num_read", "num_damaged", "num_failed", "num_late", "num_trips")
_HELD_BESIDE = ("num_handoffs", "num_handoff_slots", "num_handoff_fetches", "num_abandoned_reads")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a soak counted, and what it found wrong."""

    seed: int
    minutes: float
    num_clients: int
    lane: str
    folder: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    disk: Counter[str] = field(default_factory=Counter)
    num_verified_at_end: int = 0
    findings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; counts are nested by their words."""
        value = {item.name: getattr(self, item.name) for item in fields(self)}
        nested: dict[str, Any] = {}
        for words, count in sorted(self.counts.items()):
            at = nested
            for word in words[:-1]:
                at = at.setdefault(word, {})
            at[words[-1]] = count
        plain = {name: dict(value[name]) for name in ("faults", "recovery_s", "disk")}
        return {**value, "counts": nested, **plain}


def soak(
    *,
    seed: int,
    minutes: float,
    num_clients: int,
    lane: str,
    keep_logs: bool,
    say: Callable[[str], None],
    only_disk: bool = False,
    num_faults: int = 0,
) -> Outcome:
    """Run a soak; what is wrong is in the outcome's findings.

    Args:
        seed: of all choices.
        minutes: how long clients work.
        num_clients: client processes, in turn on one node and the other.
        lane: of the store.
        keep_logs: also when nothing is wrong.
        say: is told now and then what goes on.
        only_disk: have only the faults of the disk, and what may cross them.
        num_faults: clients work longer than `minutes` until so many faults have happened.
    """
    outcome = Outcome(seed=seed, minutes=minutes, num_clients=num_clients, lane=lane)
    folder = Path(tempfile.mkdtemp(prefix="raykv-soak-", dir="/tmp"))
    outcome.folder = str(folder)
    mark = f"RAYKV_SOAK_MARK={secrets.token_hex(8)}"
    before = dict(os.environ)
    os.environ.update([mark.split("=")], HOME=str(folder), RAYKV_SOCKET_DIR=str(folder / "raykv"))
    os.environ.update(environment(folder, before))
    disk_root = folder / "disk"
    shared_before = audit.unheld_shared_memory()
    try:
        say("starting two Ray nodes")
        with two_nodes() as node_ids:
            say("starting the store")
            store = kvstore.start(
                CAPACITY_BYTES, name="soak", lane=lane, disk_path=str(disk_root), **disk_settings(seed), **SETTINGS
            )
            disks = DiskFaults(disk_root, folder / "disk-control", random.Random(f"{seed}/disk"))
            try:
                target = StoreUnderTest(store, node_ids, folder, mark)
                _Soak(outcome, target, disks, folder, mark, say).run(only_disk, num_faults)
            finally:
                say("stopping the store")
                store.stop()
                shutil.copytree(session_logs(), folder / "ray", ignore_dangling_symlinks=True)
            _check_stopped(outcome, folder, mark)
        left = still_there(list(audit.processes_with(mark)), 20.0)
        outcome.findings += [f"process {pid} is left: {audit.processes_with(mark).get(pid)}" for pid in left]
        shared_left = sorted(audit.unheld_shared_memory() - shared_before)
        outcome.findings += [f"/dev/shm/{name} is left" for name in shared_left]
    finally:
        os.environ.clear()
        os.environ.update(before)
    for source, pattern in ((folder, "client-*.err"), (folder / "ray", "worker-*.err")):
        outcome.findings += [f"traceback in {line}" for line in audit.tracebacks(source, pattern)]
    if not outcome.findings and not keep_logs:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def still_held(stats: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts of a node that are 0 when nobody uses it, and are not."""
    counts = {key: stats["pool"][key] for key in _HELD_IN_POOL} | {key: stats[key] for key in _HELD_BESIDE}
    disk = stats.get("disk") or {}
    counts |= {f"disk: {key}": count for key, count in disk.get("pool", {}).items() if key in _HELD_IN_POOL}
    counts["disk: num_queued"] = disk.get("num_queued", 0)
    return {key: count for key, count in counts.items() if count}


def _check_stopped(outcome: Outcome, folder: Path, mark: str) -> None:
    """After Store.stop, with Ray still running: no actor, arena or socket of the store's is left."""

    def holders() -> list[str]:
        found = []
        for pid, command in audit.processes_with(mark).items():
            with contextlib.suppress(OSError):
                if audit.held_by(pid).arenas:
                    found.append(f"process {pid} still has an arena after the store was stopped: {command}")
        return found

    deadline_s = time.monotonic() + 10.0
    while (found := holders()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    outcome.findings += found
    sockets = sorted(path.name for path in (folder / "raykv").glob("*.sock"))
    outcome.findings += [f"socket {name} is left after the store was stopped" for name in sockets]


class _Soak:
    """The part of a soak in which the store runs."""

    def __init__(
        self,
        outcome: Outcome,
        target: StoreUnderTest,
        disks: DiskFaults,
        folder: Path,
        mark: str,
        say: Callable[[str], None],
    ) -> None:
        self._outcome, self._target, self._disks, self._mark, self._say = outcome, target, disks, mark, say
        #: Folders whose files were spoilt since a store opened them.
        self._spoilt: set[str] = set()
        #: What each life of each disk tier has counted so far.
        self._lives: dict[tuple[int, int], dict[str, Any]] = {}
        self._fleet = Fleet(outcome.seed, target.path_files, target.weights_file, folder)
        self._began_s = time.monotonic()
        self._said_s = 0.0
        self._ranks: list[int] = []
        self._disk_threads: list[str] = []
        self._log = (folder / "faults.log").open("w", buffering=1)

    def run(self, only_disk: bool, num_faults: int) -> None:
        try:
            self._run(only_disk, num_faults)
        except NotRecovered as error:
            self._finding(str(error))
        finally:
            self._fleet.end()
            self._target.close_probes()
            self._outcome.findings += self._fleet.findings
            self._outcome.counts, self._outcome.slowest_s = self._fleet.counts, self._fleet.slowest_s
            self._log.close()

    def _run(self, only_disk: bool, num_faults: int) -> None:
        before, driver_before = self._at_rest(), audit.held_by(os.getpid())
        self._target.wait_disks_on(RECOVERY_S["disk"])
        self._disk_threads = self._target.disk_threads(0)
        self._say("starting clients")
        num_clients = self._outcome.num_clients
        for client in range(num_clients):
            self._fleet.start(client)
        self._ranks = self._fleet.start_ranks(num_clients)
        for client in (*range(num_clients), *self._ranks):
            until(lambda client=client: self._fleet.num_done(client), 60.0, f"first operations of client {client}")
        self._began_s = time.monotonic()
        end_s = self._began_s + 60.0 * self._outcome.minutes
        for choice in faults(self._outcome.seed, only_disk):
            has_enough = self._outcome.faults.total() >= num_faults
            self._wait(min(choice.pause_s, end_s - time.monotonic()) if has_enough else choice.pause_s)
            if has_enough and time.monotonic() >= end_s:
                break
            self._suffer(choice)
            if choice.alone:
                # A store killed just before may be another by now: where it is, its clients learn from this, and its
                # disk begins with the first of them.
                self._target.wait_serving(RECOVERY_S["store"])
                self._target.wait_disks_on(RECOVERY_S["disk"])
                self._check_pools()
                self._target.save_weights()
        self._target.wait_serving(RECOVERY_S["store"])
        self._target.wait_disks_on(RECOVERY_S["disk"])
        self._say("closing clients")
        self._fleet.close_all(_CLOSE_S)
        self._check_quiet()
        self._compare(before, self._at_rest())
        self._verify_everything()
        self._fleet.end()
        self._compare_one("driver", driver_before, audit.held_by(os.getpid()))

    # While clients work.

    def _wait(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.2))
            self._progress()

    def _progress(self) -> None:
        if time.monotonic() < self._said_s + _SAY_S:
            return
        self._said_s = time.monotonic()
        counts = self._fleet.counts.copy()
        done = sum(count for words, count in counts.items() if words[0] == "operations")
        missed = sum(count for words, count in counts.items() if words[0] == "misses")
        self._say(
            f"{(time.monotonic() - self._began_s) / 60:.1f} of {self._outcome.minutes:g} min: {done:,} operations, "
            f"{counts['blocks', 'verified']:,} blocks verified, {missed:,} missed, "
            f"{self._outcome.faults.total()} faults, {len(self._fleet.findings) + len(self._outcome.findings)} findings"
        )

    def _suffer(self, choice: FaultChoice) -> None:
        """Let one fault happen, wait until the store serves again, and note how long that took."""
        verb, _, what = choice.fault.value.partition(" ")
        client = choice.victim % self._outcome.num_clients
        node = choice.victim % len(self._target.node_ids)
        part = f"{what} {node}" if what in ("store", "mover") else what
        self._look_at_disks()
        self._disks.remember()
        self._note(f"{choice.fault.value} {client if what == 'client' else part} {choice.stopped_s}")
        self._outcome.faults[choice.fault.value] += 1
        began_s = time.monotonic()
        if choice.fault in SPOILING:
            self._spoil(choice)
            self._target.wait_serving(RECOVERY_S["store"])
        elif choice.fault in REFUSING:
            self._refuse(choice, node)
            began_s = time.monotonic()
            self._target.wait_serving(RECOVERY_S["store"])
            self._target.wait_disks_on(RECOVERY_S["disk"])
        elif choice.fault is Fault.CLEAR:
            self._target.change_weights()
            self._target.clear()
        elif choice.fault in (Fault.KILL_CLIENT, Fault.KILL_RANK):
            if what == "rank":
                client = self._ranks[choice.victim % len(self._ranks)]
            self._fleet.kill(client)
            # A store killed just before may be another by now: where it is, its clients learn from this.
            self._target.wait_serving(RECOVERY_S["store"])
            limit_s = RECOVERY_S[what]
            until(lambda: self._fleet.num_done(client), limit_s, f"operations of client {client} after it was killed")
        elif choice.fault is Fault.STOP_CLIENT:
            self._fleet.stop_for(client, choice.stopped_s)
        elif choice.fault is Fault.SHAKE_CLIENT:
            self._fleet.shake(client, choice.stopped_s)
        elif choice.fault is Fault.STOP_GCS:
            self._stop_gcs()
            began_s = time.monotonic()
            self._target.wait_serving(RECOVERY_S[what])
        elif verb == "crowd":
            self._note(f"{self._target.crowd(node, choice.stopped_s)} connections")
            began_s = time.monotonic()
            self._target.wait_serving(RECOVERY_S[what])
        elif verb == "kill":
            disk = self._disk_before(node) if what == "store" and choice.alone else None
            old_pid = self._target.kill(part)
            began_s = time.monotonic()
            if not choice.alone:
                self._note("the next fault comes at once")
                return
            self._target.wait_replaced(part, old_pid, RECOVERY_S[what])
            self._target.wait_serving(RECOVERY_S[what])
            if disk is not None:
                self._check_restored(node, disk)
        else:
            act = self._target.shake if verb == "shake" else self._target.stop_for
            act(part, choice.stopped_s)
            began_s = time.monotonic()
            self._target.wait_serving(RECOVERY_S[what])
        recovery_s = round(time.monotonic() - began_s, 3)
        self._outcome.recovery_s[choice.fault.value].append(recovery_s)
        self._note(f"recovered after {recovery_s} s")
        self._progress()

    # The disk.

    def _refuse(self, choice: FaultChoice, node: int) -> None:
        """Have the disk of a node refuse or hang for a while; clients of both nodes have to go on meanwhile."""
        folder = self._disks.folders()[node]
        if choice.is_between and (owner := self._node_with(folder)) is not None:
            self._refuse_a_beginning(choice, folder, owner)
            return
        before = self._fleet.num_done_by_all()
        with self._disks.refusing(choice.fault, folder, choice.stopped_s):
            self._wait(choice.stopped_s)
        if choice.stopped_s > 2.0 and self._fleet.num_done_by_all() <= before:
            self._finding(f"no client did anything in the {choice.stopped_s:g} s of {choice.fault.value}")

    def _refuse_a_beginning(self, choice: FaultChoice, folder: Path, node: int) -> None:
        """Have the disk refuse or hang while a store begins; at the latest the next one has the tier again."""
        self._outcome.faults[f"{choice.fault.value}, between two lives"] += 1
        part = f"store {node}"
        with self._disks.refusing(choice.fault, folder, _BEGINNING_S + choice.stopped_s):
            old_pid = self._target.kill(part)
            self._wait(_BEGINNING_S + choice.stopped_s)
        self._target.wait_replaced(part, old_pid, RECOVERY_S["store"])
        self._target.wait_serving(RECOVERY_S["store"])
        disk = self._target.disk(node)
        if "pool" not in disk:
            self._note(f"the tier did not begin: {disk}")
            self._outcome.disk["stores that began without their tier"] += 1
            old_pid = self._target.kill(part)
            self._target.wait_replaced(part, old_pid, RECOVERY_S["store"])
            self._target.wait_serving(RECOVERY_S["store"])

    def _spoil(self, choice: FaultChoice) -> None:
        """Change files of a disk, while a store has them open or between two lives of it."""
        folder = self._disks.folders()[choice.victim % len(self._disks.folders())]
        node = self._node_with(folder) if choice.is_between else None
        self._spoilt.add(str(folder))
        if node is None:
            self._note(f"{folder.name}: {self._disks.spoil(choice.fault, folder)}")
            self._wait(_SPOILT_S)
            return
        self._outcome.faults[f"{choice.fault.value}, between two lives"] += 1
        old_pid = self._target.kill(f"store {node}")
        self._note(f"{folder.name}, between two lives: {self._disks.spoil(choice.fault, folder)}")
        self._target.wait_replaced(f"store {node}", old_pid, RECOVERY_S["store"])
        self._target.wait_serving(RECOVERY_S["store"])
        self._target.wait_disks_on(RECOVERY_S["disk"])
        self._count_restored(node)

    def _node_with(self, folder: Path) -> int | None:
        for node in range(len(self._target.node_ids)):
            with contextlib.suppress(KVStoreError):
                if self._target.disk(node)["path"] == str(folder):
                    return node
        return None

    def _disk_before(self, node: int) -> dict[str, Any] | None:
        with contextlib.suppress(KVStoreError):
            disk = self._target.disk(node)
            return disk if "pool" in disk and not disk["is_off"] else None
        return None

    def _check_restored(self, node: int, before: Mapping[str, Any]) -> None:
        """A store that was killed has its blocks on disk again, if nothing else happened to its files."""
        self._target.wait_disks_on(RECOVERY_S["disk"])
        after, pool = self._count_restored(node), before["pool"]
        wanted = int(_RESTORED * (pool["num_idle"] + pool["num_pinned"])) - 40
        if after["path"] == before["path"] and before["path"] not in self._spoilt and after["num_restored"] < wanted:
            self._finding(f"node {node} has too few blocks of its disk again: before {before}, after {after}")
        self._spoilt.discard(after["path"])

    def _count_restored(self, node: int) -> dict[str, Any]:
        disk = self._target.disk(node)
        self._outcome.disk["blocks restored after kills"] += disk["num_restored"]
        self._note(f"{disk['num_restored']} blocks restored: {disk}")
        return disk

    def _look_at_disks(self) -> None:
        """Note what the disk tiers have counted; a store that is killed takes its counts along."""
        for node in range(len(self._target.node_ids)):
            with contextlib.suppress(KVStoreError):
                stats = self._target.ask(node, "stats")
                self._lives[node, stats["pid"]] = stats["disk"]

    def _check_disks(self) -> None:
        """At rest, each disk tier has the threads that it began with, and there is one folder for each store."""
        for node in range(len(self._target.node_ids)):
            threads, disk = self._target.disk_threads(node), self._target.disk(node)
            if threads != self._disk_threads or _BEGINNER in threads:
                self._finding(f"node {node} has other threads of its disk than {self._disk_threads}: {threads}")
            self._note(f"disk of node {node} at the end: {disk}")
        folders = self._disks.folders()
        if len(folders) != len(self._target.node_ids):
            self._finding(f"{[folder.name for folder in folders]} for {len(self._target.node_ids)} stores")
        for kind, count in self._disks.num_refused().items():
            self._outcome.disk[f"calls that met {kind!r}"] = count

    def _stop_gcs(self) -> None:
        """Stop Ray's control store for a while; clients have to go on meanwhile."""
        before = self._fleet.num_done_by_all()
        self._target.stop_gcs_for(GCS_STOPPED_S)
        if self._fleet.num_done_by_all() <= before:
            self._finding(f"no client did anything in the {GCS_STOPPED_S:g} s for which the GCS was stopped")

    def _check_pools(self) -> None:
        self._look_at_disks()
        for node in range(len(self._target.node_ids)):
            try:
                self._target.ask(node, "check_integrity")
            except (StoreUnavailable, TransferError, InvalidRequest):
                continue  # Not there, or so new that it has no pool: after a fault that the next one followed at once.
            except KVStoreError as error:
                self._finding(f"pool of node {node}: {error}")

    # When they are done.

    def _check_quiet(self) -> None:
        """All that clients held comes back within the documented times, while their processes still live."""
        self._say("waiting until nothing is held any more")
        deadline_s = time.monotonic() + QUIET_S
        for node in range(len(self._target.node_ids)):
            while True:
                held = still_held(self._target.ask(node, "stats"))
                if not held or time.monotonic() > deadline_s:
                    break
                time.sleep(0.2)
            if held:
                self._finding(f"node {node} still holds {held} {QUIET_S:g} s after the last client closed")
        self._check_pools()
        self._check_disks()

    def _at_rest(self) -> dict[str, audit.Held]:
        """Return what each part holds when nobody uses the store, after everybody has spoken to everybody."""
        self._target.wait_serving(RECOVERY_S["store"])
        self._target.close_probes()
        time.sleep(1.0)
        return {part: audit.held_by(pid) for part, pid in self._target.pids().items()}

    def _compare(self, before: dict[str, audit.Held], after: dict[str, audit.Held]) -> None:
        for part, held in after.items():
            self._compare_one(part, before[part], held)
        for pid in self._fleet.pids():
            arenas = audit.held_by(pid).arenas
            if arenas:
                self._finding(f"client process {pid} still has {len(arenas)} arenas after its client was closed")
        arenas = set().union(*(held.arenas for held in after.values()))
        if len(arenas) != len(self._target.node_ids):
            self._finding(f"{len(arenas)} arenas for {len(self._target.node_ids)} stores")

    def _compare_one(self, part: str, before: audit.Held, after: audit.Held) -> None:
        for leak in audit.leaks(part, before, after):
            self._finding(leak)

    def _verify_everything(self) -> None:
        """Compare every block that is left on any node."""
        self._say("verifying all that is stored")
        for node in range(len(self._target.node_ids)):
            engine = Engine(str(self._target.ask(node, "control_path")), space(), LAYOUTS[0], 1)
            for chain in chains(space()):
                with engine.client.lease(chain) as lease:
                    self._outcome.num_verified_at_end += len(lease)
                    for wrong in wrong_in_lease(lease):
                        self._finding(f"WRONG BYTES left on node {node}, {wrong}")
            engine.close()
        for node in range(len(self._target.node_ids)):
            self._verify_disk(node)
        self._check_pools()
        for disk in self._lives.values():
            for name in _DISK_COUNTS:
                self._outcome.disk[name] += disk.get(name, 0)

    def _verify_disk(self, node: int) -> None:
        """Load every chain on a node: what its memory lacks comes from its disk, then from the other node."""
        ids, counts = list(range(CHAIN_BLOCKS)), self._outcome.disk
        engine = Engine(str(self._target.ask(node, "control_path")), space(), LAYOUTS[0], CHAIN_BLOCKS)
        for chain in chains(space()):
            engine.cache.fill(ids, POISON)
            result = engine.client.load(chain, ids).result(30.0)
            counts["blocks compared at the end, from disk"] += result.num_disk
            counts["blocks compared at the end, others"] += result.num_blocks - result.num_disk
            for wrong in engine.cache.wrong_blocks(chain, ids, result.num_blocks):
                self._finding(f"WRONG BYTES on node {node} after its disk was read, {wrong}; {result}")
        engine.close()

    def _note(self, text: str) -> None:
        self._log.write(f"{time.monotonic():.3f} {text}\n")

    def _finding(self, text: str) -> None:
        self._note(f"finding: {text}")
        self._outcome.findings.append(text)

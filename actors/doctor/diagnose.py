"""Checks of `kvstore doctor` on Ray and on the cost of an idle store, each in a child process.

A process can be connected to one Ray only, and an address that does not answer can block for long. So a child
(`python -m kvstore.actors.doctor.diagnose`) asks each question, and answers with one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvstore  # only for where it lies
from kvstore.actors.doctor.own_folder import own_folder
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, KVStoreError, StoreUnavailable, TransferTimeout
from kvstore.tools.doctor import Check, Look, Status
from kvstore.tools.provenance import package_version

_CLUSTER_S = 30.0
_IDLE_SETUP_S = 90.0
_SETTLE_S = 2.0
_IDLE_LIMIT_PERCENT = 3.0
_CAPACITY_BYTES = 64 << 20
_ROUND_S = 200.0
#: Blocks that a disk tier has written; when so many were written and none was read, something is wrong.
_MANY_BLOCKS = 1000


def ray_checks(address: str | None) -> list[Look]:
    """Return the checks that concern Ray.

    Args:
        address: of the cluster; None takes RAY_ADDRESS, then the Ray that runs on this machine.
    """
    return [
        ("Ray", check_version),
        ("a Ray cluster to join", lambda: check_cluster(address)),
        ("Ray's authentication", check_auth),
    ]


def check_version() -> Check:
    """Compare Ray's version with the supported ones."""
    version = package_version("ray") or "none"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    known = (2, 60) <= numbers < (2, 61)
    return Check(
        name="Ray", status=Status.OK if known else Status.WARN, found=version, values={"version": version},
        fix="" if known else "pip install 'ray[default]>=2.60,<2.61'",
    )  # fmt: skip


def check_cluster(address: str | None) -> Check:
    """Try to join a cluster, and list the stores in it."""
    name, named = "Ray cluster", address or os.environ.get("RAY_ADDRESS")
    try:
        seen = _ask(["cluster", named or "auto"], {}, _CLUSTER_S)
    except KVStoreError as error:
        if named:
            fix = "check the address, that its head runs, and that both sides have the same RAY_AUTH_MODE"
            return Check(name=name, status=Status.FAIL, found=f"{named}: {error}", fix=fix)
        found = "none runs on this machine" if "no Ray cluster runs here" in str(error) else f"none to join: {error}"
        fix = "kvstore.start() in Python runs one for its process; for others: `ray start --head`"
        if "wanted the Ray of this machine" in str(error):  # Several run, so one more would not help.
            fix = "name one of them with --address or RAY_ADDRESS"
        return Check(name=name, status=Status.OK, found=found, fix=fix)
    return judge_cluster(seen)


def judge_cluster(seen: dict[str, Any]) -> Check:
    """Return the finding for a cluster that was joined."""
    name, stores = "Ray cluster", ", ".join(seen["stores"]) or "none"
    found = f"{seen['address']}: {seen['num_nodes']} node(s); stores: {stores}"
    if unread := ", ".join(seen["unread_disks"]):
        fix = "is it worth its writes? Let more memory or more prompts pass, or set disk_min_uses=2"
        found += f"; disk tiers that were written and never read: {unread}"
        return Check(name=name, status=Status.WARN, found=found, fix=fix, values=seen)
    return Check(name=name, status=Status.OK, found=found, values=seen)


def check_auth() -> Check:
    """Find Ray's authentication mode, and whether a token is where Ray looks; never reads the token."""
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    in_environment = bool(os.environ.get("RAY_AUTH_TOKEN"))
    present = in_environment or path.is_file()
    where = "RAY_AUTH_TOKEN" if in_environment else str(path)
    values = {"mode": mode or None, "token_present": present}
    status, fix = Status.OK, ""
    if mode == "disabled":
        status, found = Status.WARN, "off (RAY_AUTH_MODE=disabled): any process that reaches Ray may join it"
        fix = "set RAY_AUTH_MODE=token everywhere, unless nobody else reaches this network"
    elif mode == "token":
        found = f"token, from {where}" if present else f"token, but there is none in {where}"
        if not present:
            status, fix = Status.FAIL, "ray get-auth-token --generate, and the same token on every node"
    else:
        found = f"RAY_AUTH_MODE is not set; {f'a token is there ({where})' if present else 'no token yet'}"
        fix = "Ray asks for a token only with RAY_AUTH_MODE=token: set it everywhere where others reach this network"
    if status is Status.OK and mode != "disabled" and present and not in_environment and path.stat().st_mode & 0o077:
        status, fix = Status.WARN, f"others on this machine can read the token: chmod 600 {path}"
    return Check(name="Ray authentication", status=status, found=found, fix=fix, values=values)


def check_idle(seconds: float) -> Check:
    """Measure an idle store of 64 MiB, its mover and one client, in a private Ray.

    Args:
        seconds: how long to measure, after two seconds of settling.
    """
    name = "Idle cost"
    try:
        with _private_ray() as (private, _):
            seen = _ask(["idle", str(seconds)], private, _IDLE_SETUP_S + seconds)
    except KVStoreError as error:
        found = f"could not run a store of 64 MiB: {error}"
        fix = "see the rows NIXL, Memory and Lane on this host; or the machine is busy: try again"
        return Check(name=name, status=Status.FAIL, found=found, fix=fix)
    total = round(sum(seen.values()), 2)
    each = ", ".join(f"{what} {percent:.1f} %" for what, percent in seen.items())
    found = f"{total:.1f} % of a core over {seconds:g} s ({each})"
    values = {**seen, "total": total, "seconds": seconds}
    status, fix = Status.OK, ""
    if total >= _IDLE_LIMIT_PERCENT:
        status = Status.WARN
        fix = f"wanted less than {_IDLE_LIMIT_PERCENT:g} %: measure again on a quiet machine; then please report it"
    return Check(name=name, status=status, found=found, fix=fix, values=values)


def check_roundtrip(disk_path: str | None) -> Check:
    """Take blocks through memory and disk of a small store in a private Ray, with a restart, and compare every byte.

    Args:
        disk_path: below it the disk tier has a folder, which is removed afterwards; None for a temporary path.
    """
    name = "Round trip"
    try:
        with _private_ray() as (private, folder), own_folder(disk_path or f"{folder}/disk") as disk:
            seen = _ask(["roundtrip", disk], private, _ROUND_S)
    except ConfigError as error:
        fix = "give a --disk-path that this user can make or write"
        return Check(name=name, status=Status.FAIL, found=f"not done: {error}", fix=fix)
    except KVStoreError as error:
        fix = "see the rows NIXL, Memory and Lane on this host; docs/disk.md says what a disk tier needs"
        return Check(name=name, status=Status.FAIL, found=f"not done: {error}", fix=fix)
    tiers = {"memory": "memory", "disk": "disk", "restart": "disk after a restart"}
    found = ", ".join(f"{seen[key]} of {seen['num_blocks']} blocks from {what}" for key, what in tiers.items())
    if all(seen[key] == seen["num_blocks"] for key in tiers):
        return Check(name=name, found=f"{found}, every byte right", values=seen)
    fix = "blocks that did not come back are computed anew, never wrong; look at the log of the store, and report it"
    return Check(name=name, status=Status.FAIL, found=found, fix=fix, values=seen)


@contextlib.contextmanager
def _private_ray() -> Iterator[tuple[dict[str, str], str]]:
    """Yield the environment of a Ray that no other process joins, and a folder; the folder is removed afterwards."""
    folder = tempfile.mkdtemp(prefix="rk", dir="/tmp")
    private = {"RAY_TMPDIR": folder, "RAYKV_SOCKET_DIR": f"{folder}/raykv", "RAY_USAGE_STATS_ENABLED": "0"}
    # A private token: no other process may join, and the user's token is not sent.
    private |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        yield private, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ask(words: list[str], environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
    root = str(Path(kvstore.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "kvstore.actors.doctor.diagnose", *words]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C reaches only this process, which then ends the child and its Ray in order.
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
    ) as child:
        try:
            with _ending_in_order():
                output = child.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired as error:
            raise TransferTimeout(f"no answer within {timeout_s:.0f} s") from error
        finally:
            child.terminate()  # Not if it has ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            child.kill()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise StoreUnavailable(f"the process that asked ended with status {child.returncode} and no answer")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise StoreUnavailable(str(answer["error"]))
    return answer


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Make SIGTERM end the child and its Ray before this process; only on the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


# Run in the child processes.


class _IdleClient:
    """A worker that holds an idle client."""

    def __init__(self, store: Any) -> None:
        import torch

        shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype="float16", block_size=16)
        self._client = store.client(Namespace(model="doctor", shape=shape))
        self._client.register_kv_caches([torch.zeros(2, 8, 16, 1, 16, dtype=torch.float16) for _ in range(2)])

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()


def _measure_idle(seconds: float) -> dict[str, float]:
    from kvstore.actors.calls import actor_class, call
    from kvstore.actors.finding import node_store
    from kvstore.actors.starting import start

    config = StoreConfig(name="doctor", capacity_bytes=_CAPACITY_BYTES)
    store = start(config, "local", _IDLE_SETUP_S - 10)
    try:
        worker = actor_class(_IdleClient).remote(store)
        client_pid = call("idle client", worker.pid, timeout_s=30.0)
        pids = call("node store", node_store(None, "doctor").pids, timeout_s=10.0) | {"client": client_pid}
        time.sleep(_SETTLE_S)
        before, started_s = {what: _cpu_s(pid) for what, pid in pids.items()}, time.monotonic()
        time.sleep(seconds)
        elapsed_s = time.monotonic() - started_s
        return {what: round(100 * (_cpu_s(pid) - before[what]) / elapsed_s, 2) for what, pid in pids.items()}
    finally:
        store.stop()


def _cpu_s(pid: int) -> float:
    """Return a process's seconds of processor time: all threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _look_at_cluster(address: str) -> dict[str, Any]:
    import ray

    from kvstore.actors.finding import alive_nodes, stores_here
    from kvstore.actors.session.joining import join_ray

    joined = join_ray(address, may_start=False)
    try:
        stores = stores_here()
        unread = [where for name in stores for where in _unread_disks(name)]
        return {
            "address": joined.session.address, "num_nodes": len(alive_nodes()), "stores": stores,
            "unread_disks": unread,
        }  # fmt: skip
    finally:
        ray.shutdown()


def _unread_disks(name: str) -> list[str]:
    """Return the nodes of a store whose disk tier has written many blocks, and read none."""
    from kvstore.actors.starting import connect

    try:
        nodes = connect(name, None, 10.0).stats()["nodes"]
    except KVStoreError:
        return []  # A store of another version, or one that is ending: not asked here.
    disks = {node: stats.get("disk") or {} for node, stats in nodes.items()}
    return [
        f"{name} on node {node[:8]} ({disk['num_written']:,} blocks)"
        for node, disk in disks.items()
        if disk.get("num_written", 0) >= _MANY_BLOCKS and not disk["num_read"]
    ]


def _main(words: list[str]) -> dict[str, Any]:
    from ray.exceptions import RayError

    try:
        if words[0] == "roundtrip":
            from kvstore.actors.doctor.roundtrip import take_round

            return take_round(words[1])
        return _measure_idle(float(words[1])) if words[0] == "idle" else _look_at_cluster(words[1])
    except (KVStoreError, RayError, RuntimeError, ValueError, OSError) as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_main(sys.argv[1:])) + "\n")

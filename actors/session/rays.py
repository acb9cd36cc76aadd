"""Ray sessions: of this process, and of this machine. Starts none."""

from __future__ import annotations

import itertools
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._common.utils import get_ray_address_file

from kvstore.actors.calls import ray_failures

#: The Ray namespace of this process in a Ray that kvstore.start began. Processes that join it have another one.
OWN_RAY_NAMESPACE = "raykv-own"
_MAX_ADDRESS_BYTES = 1000


@dataclass(frozen=True, slots=True)
class RaySession:
    """One session of a Ray cluster.

    Args:
        address: host:port at which other processes join it; a later session may have the same.
        name: Ray's unique name of this session.
        is_own: kvstore.start began it, in this process and for it alone.
    """

    address: str
    name: str
    is_own: bool = False


def current_session() -> RaySession:
    """Return the session that this process is connected to.

    Raises:
        StoreNotRunning: this process is not connected to Ray.
    """
    with ray_failures("Ray"):
        context = ray.get_runtime_context()
        name = context.get_session_name()
        # A session is named after the process that began it.
        is_own = name.endswith(f"_{os.getpid()}") and context.namespace == OWN_RAY_NAMESPACE
        return RaySession(str(context.gcs_address), name, is_own)


@dataclass(frozen=True, slots=True)
class LocalRay:
    """A Ray with a node on this machine, of this user.

    Args:
        address: host:port at which processes join it.
        folder: for its temporary files.
        outlives_starter: whether `ray start` began it; any other Ray ends with the process that began it.
    """

    address: str
    folder: str
    outlives_starter: bool


def rays_here() -> list[LocalRay]:
    """Return the Rays on this machine, one for each address."""
    processes = (process for process in Path("/proc").iterdir() if process.name.isdigit())
    found = {local.address: local for process in processes if (local := _of_raylet(process)) is not None}
    return [found[address] for address in sorted(found)]


def _of_raylet(process: Path) -> LocalRay | None:
    try:
        if process.stat().st_uid != os.geteuid() or not _shares_network(process):
            return None
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None  # It ended meanwhile, or is another user's.
    if os.path.basename(words[0]) != "raylet":
        return None
    # Some options are inside others, for example in the command that starts workers.
    options = dict(word.split("=", 1) for words_ in words for word in words_.split(" ") if "=" in word)
    address, session = options.get("--gcs-address"), options.get("--session-name", "")
    if not address:
        return None
    return LocalRay(address, options.get("--temp-dir", ""), not _lives_for_itself(session.rpartition("_")[2]))


def _shares_network(process: Path) -> bool:
    """Return whether a process shares this one's network; else its address means another host here.

    Raises:
        OSError: it has ended, or this user may not look.
    """
    theirs, own = os.stat(process / "ns" / "net"), os.stat("/proc/self/ns/net")
    return (theirs.st_dev, theirs.st_ino) == (own.st_dev, own.st_ino)


def _lives_for_itself(starter: str) -> bool:
    """Return whether the process that began a session still runs, and is not `ray start`."""
    try:
        words = Path(f"/proc/{starter}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return ("ray", "start") not in ((os.path.basename(one), other) for one, other in itertools.pairwise(words))


def recorded_address() -> tuple[str, Path] | None:
    """Return the address that `ray start --head` recorded last in Ray's folder, and the file; None without one.

    Ray removes the file only with `ray stop`, so that Ray may have ended. A file of another user is ignored.
    """
    file = Path(get_ray_address_file(None))
    try:
        # Any user may make files in /tmp: ignore a link, a pipe, or another user's file.
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            info = os.fstat(opened.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                return None
            address = opened.read(_MAX_ADDRESS_BYTES).decode(errors="replace").strip()
    except OSError:
        return None
    return (address, file) if address else None

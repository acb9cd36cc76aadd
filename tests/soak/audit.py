"""What processes hold, as the kernel tells it: descriptors by kind, arenas, threads; who is left of a run.

Everything is read from /proc. A run is recognised by a mark in the environment that all its processes inherit.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.soak.disk_faults import INDEX, SLOTS

_ARENA = "memfd:raykv-arena"
#: Kinds of descriptors that are raykv's own, or anybody's who forgot to close: not one more is allowed.
_EXACT = ("arena", "disk file", "pidfd", "eventpoll", "raykv socket", "tcp closing")
#: The slots and the index of the one size of slots: a store opens them with its first write.
_FIRST_WRITE = {"disk file": 2}
#: Ray opens connections to actors and its own services when it likes.
_RAY_SLACK = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one process holds.

    Args:
        fds: number of descriptors by kind.
        arenas: inodes of the arenas that it has open or mapped.
        num_threads: of the process.
    """

    fds: Mapping[str, int]
    arenas: frozenset[int]
    num_threads: int


def held_by(pid: int) -> Held:
    """Return what a living process holds."""
    sockets = _sockets(pid)
    fds: Counter[str] = Counter()
    arenas: set[int] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
            if target.startswith(f"/{_ARENA}"):
                arenas.add(entry.stat().st_ino)
        except FileNotFoundError:
            continue  # Closed since.
        fds[_kind(target, sockets)] += 1
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if _ARENA in line:
            arenas.add(int(line.split()[4]))
    return Held(fds=fds, arenas=frozenset(arenas), num_threads=len(list(Path(f"/proc/{pid}/task").iterdir())))


def _kind(target: str, sockets: Mapping[str, str]) -> str:
    if target.startswith(f"/{_ARENA}"):
        return "arena"
    if target.endswith((f"/{SLOTS}", f"/{INDEX}")):
        return "disk file"
    if target.startswith("socket:["):
        return sockets.get(target[8:-1], "other socket")
    if target.startswith("anon_inode:"):
        return target.removeprefix("anon_inode:").strip("[]")
    return target.split(":", 1)[0] if ":" in target else "file"


def _sockets(pid: int) -> dict[str, str]:
    """Return the kind of each socket of a process's network, by inode."""
    kinds = {}
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        ours = len(fields) > 7 and fields[7].endswith(".sock") and "raykv" in fields[7]
        kinds[fields[6]] = "raykv socket" if ours else "unix socket"
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            # 08 is CLOSE_WAIT: the other side is gone and this one did not close.
            kinds[fields[9]] = {"08": "tcp closing", "0A": "tcp listening"}.get(fields[3], "tcp")
    return kinds


def leaks(name: str, before: Held, after: Held) -> list[str]:
    """Compare a process at rest with what one of its kind held when the run began; returns what is too much."""
    found = [
        f"{name}: {after.fds.get(kind, 0)} descriptors of kind {kind!r}, {before.fds.get(kind, 0)} at the beginning"
        for kind in _EXACT
        if after.fds.get(kind, 0) > max(before.fds.get(kind, 0), _FIRST_WRITE.get(kind, 0))
    ]
    more = sum(after.fds.values()) - sum(before.fds.values())
    if more > _RAY_SLACK:
        found.append(f"{name}: {more} descriptors more than at the beginning: {dict(before.fds)} -> {dict(after.fds)}")
    if len(after.arenas) > len(before.arenas):
        found.append(f"{name}: maps {len(after.arenas)} arenas, {len(before.arenas)} at the beginning")
    return found


def processes_with(mark: str) -> dict[int, str]:
    """Return the command lines of the living processes that carry a mark in their environment, but for this one."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) == os.getpid() or mark.encode() not in (entry / "environ").read_bytes():
                continue
            found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # Gone meanwhile, or somebody else's.
    return {pid: command[:200] for pid, command in found.items() if "multiprocessing." not in command}


def carries(pid: int, mark: str) -> bool:
    """Whether a process carries the mark of a run."""
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def unheld_shared_memory() -> set[str]:
    """Return the names in /dev/shm that no living process has mapped or open: files of a process that is gone."""
    folder = "/dev/shm/"
    names, held = {entry.name for entry in Path(folder).iterdir()}, set[str]()
    for process in Path("/proc").glob("[0-9]*") if names else ():
        with contextlib.suppress(OSError):  # Gone meanwhile, or somebody else's.
            held |= {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # Closed meanwhile.
                    held.add(os.readlink(fd))
    return {name for name in names if folder + name not in held and Path(folder, name).exists()}


def tracebacks(folder: Path, pattern: str) -> list[str]:
    """Return the last line of each Python traceback in the files of a folder, with the file's name."""
    found = []
    for path in sorted(folder.glob(pattern)):
        lines = path.read_text(errors="replace").splitlines()
        inside = False
        for line in lines:
            if line.startswith("Traceback (most recent call last)"):
                inside = True
            elif inside and line and not line[0].isspace():
                found.append(f"{path.name}: {line[:300]}")
                inside = False
    return found

"""Find how much memory a store may still take on this node, within the limits of the kernel and of Ray.

Ray's memory monitor ends processes of a node, stores and their neighbours alike, long before the kernel would. So a
store must leave free what the monitor wants free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError

#: A store of at most this size makes no difference to Ray's monitor: near its threshold it starts all the same.
SMALL_BYTES = 256 << 20
_CGROUP_ROOT = Path("/sys/fs/cgroup")
#: The variables of Ray's monitor, and what Ray takes without them.
_THRESHOLD, _MIN_FREE, _REFRESH = (
    "RAY_memory_usage_threshold",
    "RAY_min_memory_free_bytes",
    "RAY_memory_monitor_refresh_ms",
)
_DEFAULTS = {_THRESHOLD: 0.95, _MIN_FREE: -1.0, _REFRESH: 250.0}


@dataclass(frozen=True, slots=True)
class Room:
    """What the tightest limit leaves.

    Args:
        free_bytes: of memory.
        source: the name of the limit.
        kept_bytes: of these, what Ray's monitor wants free.
        kept_by: the variable that says so, with its value.
    """

    free_bytes: int
    source: str
    kept_bytes: int = 0
    kept_by: str = ""

    @property
    def room_bytes(self) -> int:
        """What processes of this node may take together."""
        return max(self.free_bytes - self.kept_bytes, 0)


def find_room(num_bytes: int | None = None) -> Room:
    """Return what this process may still take, by the environment that it has from its raylet.

    Args:
        num_bytes: of the store that wants to know; a small one leaves nothing for Ray's monitor.
    """
    meminfo = Path("/proc/meminfo").read_text()
    fields = {line.split(":")[0]: int(line.split()[1]) << 10 for line in meminfo.splitlines() if ":" in line}
    total = fields["MemTotal"]
    limits = [(total, fields.get("MemAvailable", fields["MemFree"]), "free memory of this machine")]
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    watched = 0
    for folder in _cgroup_folders():
        for limit_name, used_name in names:
            try:
                limit = (folder / limit_name).read_text().strip()
                used = max(int((folder / used_name).read_text()) - _cached_bytes(folder), 0)
            except (OSError, ValueError):
                continue
            if not limit.isdigit():
                continue
            # Ray looks at the outermost group alone, and there in place of the machine if it is the smaller one.
            if folder in (_CGROUP_ROOT, _CGROUP_ROOT / "memory") and int(limit) < total:
                watched = len(limits)
            limits.append((int(limit), int(limit) - used, f"cgroup limit {folder / limit_name}"))
    kept_bytes, kept_by = ray_kept_bytes(os.environ, limits[watched][0])
    if num_bytes is not None and num_bytes <= SMALL_BYTES:
        kept_bytes = 0
    rooms = [Room(max(free, 0), source) for _, free, source in limits]
    rooms[watched] = Room(rooms[watched].free_bytes, rooms[watched].source, kept_bytes, kept_by)
    return min(rooms, key=lambda room: room.free_bytes - room.kept_bytes)


def ray_kept_bytes(environment: Mapping[str, str], total_bytes: int) -> tuple[int, str]:
    """Return how much of a node's memory must stay free lest Ray end processes there, and the variable that says so.

    Args:
        environment: of the raylet; its workers inherit it.
        total_bytes: memory of the node.
    """
    if _number(environment, _REFRESH) <= 0:
        return 0, ""
    threshold, min_free = _number(environment, _THRESHOLD), int(_number(environment, _MIN_FREE))
    kept_bytes, kept_by = total_bytes - int(total_bytes * threshold), f"{_THRESHOLD}={threshold:g}"
    if 0 <= min_free < kept_bytes:  # Ray takes the higher one of both limits of what is used.
        kept_bytes, kept_by = min_free, f"{_MIN_FREE}={min_free}"
    return max(kept_bytes, 0), kept_by


def _number(environment: Mapping[str, str], name: str) -> float:
    try:
        return float(environment.get(name, _DEFAULTS[name]))
    except ValueError:
        return _DEFAULTS[name]  # A raylet with such a value does not start.


def _cached_bytes(folder: Path) -> int:
    """Return how much of what a cgroup uses is pages of files, which the kernel takes back; Ray counts them as free."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        found = {name: int(value) for name, value in (line.split() for line in lines)}
    except (OSError, ValueError):
        return 0
    # The first version of cgroups has those of the groups within by other names.
    return sum(found.get(f"total_{name}", found.get(name, 0)) for name in ("inactive_file", "active_file"))


def _cgroup_folders() -> list[Path]:
    root = _CGROUP_ROOT
    folders = [root, root / "memory"]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = root / "memory" if "memory" in controllers.split(",") else root
            own = base / path.lstrip("/")
            folders += [own, *[p for p in own.parents if p.is_relative_to(root)]]
    except (OSError, ValueError):
        pass
    return list(dict.fromkeys(folders))


def check_room(num_bytes: int, freed_bytes: int = 0) -> None:
    """Check that there is memory for a slab.

    Args:
        num_bytes: size of the slab.
        freed_bytes: of another slab that is freed before.

    Raises:
        ConfigError: this machine or container does not have that much memory left.
    """
    room = find_room(num_bytes)
    free_bytes, kept_bytes = room.free_bytes + freed_bytes, room.kept_bytes
    if num_bytes + kept_bytes > free_bytes:
        left = f"; {kept_bytes} of them stay free, or Ray ends processes of this node ({room.kept_by})"
        raise ConfigError(
            f"wanted {num_bytes} bytes of memory for the capacity, got {free_bytes} bytes that are free "
            f"({room.source}){left if kept_bytes else ''}; lower capacity= or free memory"
        )

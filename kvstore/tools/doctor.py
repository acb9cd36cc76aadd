"""Checks of what this machine can do for a store, by trying; each finding has its remedy.

Nothing here needs Ray; checks that do are in kvstore.actors.doctor.diagnose. Nothing is changed on the machine.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.memory.room import SMALL_BYTES, find_room
from kvstore.tools.lane_probe import LaneReport, probe_lane, probe_plugins
from kvstore.tools.provenance import package_version

_MIB, _GIB = 1 << 20, 1 << 30
_MIN_PYTHON = (3, 11)
_ENOUGH_FILES = 4096
#: Docker gives 64 MiB, which is too little for Ray's object store.
_ENOUGH_SHM_BYTES = 1 << 30


class Status(Enum):
    """The status of a finding; FAIL means that a store cannot run on this machine now."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding.

    Args:
        name: the thing that was checked.
        status: its status.
        found: the result, in words.
        fix: the remedy; empty when none is needed.
        values: the same figures in machine-readable form.
    """

    name: str
    status: Status = Status.OK
    found: str
    fix: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def as_row(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "status": self.status.value}


#: A check's title, and the call that makes it.
Look = tuple[str, Callable[[], Check]]


def machine_checks() -> list[Look]:
    """Return all checks that need no Ray. Together they take about six seconds."""
    return [
        ("the interpreter", check_python),
        ("NIXL and its plugins", check_nixl),
        ("a READ between two processes", lambda: check_lane("default")),
        ("a READ between two processes over TCP", lambda: check_lane("tcp")),
        ("the GPU path", check_cuda),
        ("memory", check_memory),
        ("/dev/shm", check_shm),
        ("huge pages", check_huge_pages),
        ("reading another process's memory", check_ptrace),
        ("RDMA devices", check_rdma),
        ("locked memory", check_memlock),
        ("open files", check_files),
    ]


def check_python() -> Check:
    """Compare the interpreter with what the package needs."""
    check = Check(name="Python", found=f"{platform.python_version()} ({sys.executable})")
    if sys.version_info[:2] < _MIN_PYTHON:
        return replace(check, status=Status.FAIL, fix="use Python 3.11 or newer")
    return check


def check_nixl() -> Check:
    """Load NIXL and each of its plugins in a separate process."""
    name = "NIXL"
    wheels = [f"{p} {v}" for p in ("nixl-cu12", "nixl-cu13") if (v := package_version(p)) is not None]
    if not wheels:
        fix = "pip install nixl-cu12 (or nixl-cu13 beside CUDA 13)"
        return Check(name=name, status=Status.FAIL, found="no wheel is installed", fix=fix)
    try:
        plugins = probe_plugins()
    except KVStoreError as error:
        return Check(name=name, status=Status.FAIL, found=f"{', '.join(wheels)}: {error}", fix="reinstall the wheel")
    loaded = {plugin: kinds for plugin, kinds in plugins.items() if kinds}
    listed = ", ".join(
        f"{plugin} ({'+'.join(kind.removesuffix('_SEG') for kind in kinds)})" for plugin, kinds in loaded.items()
    )
    rest = ", ".join(plugin for plugin, kinds in plugins.items() if not kinds)
    found = f"{', '.join(wheels)}; loads {listed or 'no plugin'}" + (f"; not: {rest}" if rest else "")
    check = Check(name=name, found=found, values={"plugins": plugins})
    if "DRAM_SEG" not in loaded.get("UCX", []):
        fix = "the UCX plugin is needed: reinstall the wheel, and unset NIXL_PLUGIN_DIR and LD_LIBRARY_PATH"
        return replace(check, status=Status.FAIL, fix=fix)
    return check


def check_lane(lane: str) -> Check:
    """Read between two processes of this machine and report what UCX used."""
    name = "Lane on this host" if lane == "default" else f"Lane {lane!r}"
    try:
        report = probe_lane(lane)
    except KVStoreError as error:
        fix = "see the rows NIXL, Memory and Attaching (CMA); unset UCX_* variables that you do not need"
        found = f"a READ between two local processes failed: {error}"
        return Check(name=name, status=Status.FAIL, found=found, fix=fix)
    return judge_lane(name, lane, report)


def judge_lane(name: str, lane: str, report: LaneReport) -> Check:
    """Return the finding for a lane report."""
    used = " + ".join(report.transports) or "unknown transports"
    found = f"{used}, {report.gb_per_s:.1f} GB/s (UCX {report.ucx or 'of unknown version'})"
    chosen = {key: value for key, value in report.settings.items() if lane == "default" or key != "UCX_TLS"}
    if chosen:
        found += " with " + " ".join(f"{key}={value}" for key, value in sorted(chosen.items()))
    check = Check(name=name, found=found, values={**asdict(report), "lane": lane})
    if lane == "default" and all(used.startswith("tcp/") for used in report.transports):
        fix = "two stores on one host talk over TCP; for shared memory see the row Attaching (CMA)"
        if "UCX_TLS" in report.settings:
            fix = "UCX_TLS keeps UCX from shared memory on one host; unset it unless you mean it"
        return replace(check, status=Status.WARN, fix=fix)
    return check


def check_cuda() -> Check:
    """Look for a driver, a torch built for CUDA, and CuPy."""
    name = "CUDA"
    driver = _first_line(Path("/proc/driver/nvidia/version"))
    if importlib.util.find_spec("torch") is None:
        return Check(name=name, status=Status.FAIL, found="torch is not installed", fix="pip install torch")
    import torch

    cupy = next((f"{p} {v}" for p in ("cupy-cuda12x", "cupy-cuda13x") if (v := package_version(p))), "")
    built = (
        f"torch {torch.__version__}, built {f'for CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"
    )
    values = {"driver": driver, "torch_cuda": torch.version.cuda, "cupy": cupy}
    if not driver:
        found = f"no NVIDIA driver; {built}; {cupy or 'no CuPy'}: CPU tensors only"
        return Check(name=name, found=found, values=values)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"{num_devices} device(s); {built}; {cupy or 'no CuPy'}; {driver}"
    missing = []
    if not num_devices:
        missing.append("a torch built for CUDA that sees a device")
    if not cupy:
        extra = "cuda13" if str(torch.version.cuda or "").startswith("13") else "cuda12"
        missing.append(f"CuPy (pip install '.[{extra}]' in a checkout of raykv)")
    check = Check(name=name, found=found, values=values)
    return replace(check, status=Status.WARN, fix=f"for GPU tensors: {' and '.join(missing)}") if missing else check


def check_memory() -> Check:
    """Check how large an arena may be, and which limit decides."""
    found_room = find_room()
    room, kept = found_room.room_bytes, found_room.kept_bytes
    found = f"{human_bytes(room)} for stores and engines, limited by the {found_room.source}"
    if kept:
        found += f"; {human_bytes(kept)} more must stay free for Ray ({found_room.kept_by})"
    values = {"room_bytes": room, "source": found_room.source, "kept_bytes": kept}
    check = Check(name="Memory", found=found, values=values)
    if room <= SMALL_BYTES:
        fix = f"free memory or raise the limit: stores of more than {human_bytes(SMALL_BYTES)} are refused here"
        return replace(check, status=Status.FAIL, fix=fix)
    if room < 2 * _GIB:
        fix = "a store of the default capacity of 1 GiB leaves little to the engine; raise the limit"
        return replace(check, status=Status.WARN, fix=fix)
    return check


def check_shm() -> Check:
    """Look at /dev/shm, which Ray's object store and UCX's shared-memory transports use; the arena does not."""
    try:
        info = os.statvfs("/dev/shm")
    except OSError as error:
        return Check(name="/dev/shm", status=Status.WARN, found=str(error), fix="mount a tmpfs there; Ray wants one")
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    found = f"{human_bytes(free)} free of {human_bytes(total)} (for Ray's object store; the arena needs none)"
    check = Check(name="/dev/shm", found=found, values={"total_bytes": total, "free_bytes": free})
    if total < _ENOUGH_SHM_BYTES:
        fix = "Ray's object store falls back to disk; in a container give --shm-size=4g or more"
        return replace(check, status=Status.WARN, fix=fix)
    return check


def check_huge_pages() -> Check:
    """Check whether the kernel may use huge pages for shared memory."""
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    text = _first_line(path)
    chosen = text.partition("[")[2].partition("]")[0]
    if not chosen:
        return Check(name="Huge pages", found="this kernel has none for shared memory")
    release = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if chosen == "deny":
        found, fix = "denied for shared memory: the arena gets small pages", f"optional: echo never > {path}"
    elif release >= (6, 1) or chosen in ("always", "within_size", "force"):
        found, fix = f"yes: the arena asks for them itself (the setting of the system, {chosen!r}, is for others)", ""
    else:
        found, fix = f"for shared memory: {chosen}", f"optional: echo within_size > {path}"
    return Check(name="Huge pages", found=found, fix=fix, values={"shmem_enabled": chosen})


def check_ptrace() -> Check:
    """Check whether a process may read another's memory (CMA), the fastest lane between stores of one host."""
    name = "Attaching (CMA)"
    text = _first_line(Path("/proc/sys/kernel/yama/ptrace_scope"))
    if not text:
        return Check(name=name, found="no Yama: processes of one user may read each other")
    check = Check(name=name, found=f"yama ptrace_scope is {text}", values={"ptrace_scope": int(text)})
    if int(text) <= 1:  # With 1 the target process must allow it; UCX does that for its processes.
        return check
    fix = "sysctl kernel.yama.ptrace_scope=1, or in a container --cap-add=SYS_PTRACE"
    return replace(check, status=Status.WARN, fix=f"matters only for several stores on one host: {fix}")


def check_rdma() -> Check:
    """Look for RDMA devices, and check whether this process may open them."""
    devices = _names_in(Path("/sys/class/infiniband"))
    verbs = [name for name in _names_in(Path("/dev/infiniband")) if name.startswith("uverbs")]
    values = {"devices": devices, "uverbs": verbs}
    found = ", ".join(devices) or "no device: stores on different hosts talk over TCP"
    if devices and not verbs:
        fix = "in a container: --device=/dev/infiniband --ulimit memlock=-1"
        found += ", but no /dev/infiniband/uverbs*"
        return Check(name="RDMA", status=Status.WARN, found=found, fix=fix, values=values)
    return Check(name="RDMA", found=found, values=values)


def check_memlock() -> Check:
    """Check the limit of locked memory, which registration with an RDMA device needs."""
    name, (soft, _) = "memlock limit", resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check(name=name, found="unlimited", values={"soft_bytes": None})
    if _names_in(Path("/sys/class/infiniband")):
        fix = "ulimit -l unlimited where Ray is started (container: --ulimit memlock=-1)"
        found = f"{human_bytes(soft)}, with an RDMA device"
        return Check(name=name, status=Status.FAIL, found=found, fix=fix, values={"soft_bytes": soft})
    return Check(name=name, found=f"{human_bytes(soft)} (only RDMA needs more)", values={"soft_bytes": soft})


def check_files() -> Check:
    """Check how many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    check = Check(name="Open files limit", found=f"{soft} (at most {hard})", values={"soft": soft, "hard": hard})
    if soft < _ENOUGH_FILES:
        fix = "ulimit -n 65536 where Ray is started: Ray and every worker's connections need them"
        return replace(check, status=Status.WARN, fix=fix)
    return check


def human_bytes(num_bytes: float) -> str:
    """Return a size with a binary unit, such as "1.5 GiB"."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value == int(value) else f"{value:.1f} {units[0]}"


def _first_line(path: Path) -> str:
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return ""


def _names_in(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []

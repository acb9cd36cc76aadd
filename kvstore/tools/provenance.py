"""The origin of a measurement: machine, versions, commit. Written with every figure."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "raykv",
    "ray",
    "nixl-cu12",
    "nixl-cu13",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "torch",
    "numpy",
    "msgspec",
    "xxhash",
)
_GIT_S = 10.0


def provenance() -> dict[str, Any]:
    """Return {"hardware", "versions", "commit"}, all of them plain JSON values."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def hardware() -> dict[str, Any]:
    """Return {"cpu", "num_cores", "memory_bytes", "kernel", "gpus"}.

    Only cores that this process may use count. GPUs are named if it has used torch for them.
    """
    torch = sys.modules.get("torch")
    num_gpus = torch.cuda.device_count() if torch is not None and torch.cuda.is_initialized() else 0
    return {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(num_gpus)] if torch else [],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages in `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        if (number := package_version(package)) is not None:
            found[package] = number
    if "raykv" not in found:  # An uninstalled checkout.
        from kvstore import __version__

        found["raykv"] = __version__
    return found


def package_version(package: str) -> str | None:
    """Return the version of an installed distribution, None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit(root: Path | None = None) -> dict[str, Any] | None:
    """Return {"id", "dirty"} of the checkout that this package runs from.

    Args:
        root: the folder that holds the package.

    Returns:
        The commit that a file COMMIT names, as in an archive of a commit. Else git's answer, or None when the folder is
        not the root of a git checkout, for example a wheel installed inside another project.
    """
    folder = root or Path(__file__).resolve().parents[2]
    if (archived := folder / "COMMIT").is_file():
        return {"id": archived.read_text().strip(), "dirty": False}
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != folder.resolve():
        return None
    commit_id, status = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain")
    if commit_id is None:
        return None
    return {"id": commit_id, "dirty": status != ""}


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _first_value(path: Path, key: str) -> str:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return ""

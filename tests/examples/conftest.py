from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def processes_with(mark: str) -> list[str]:
    """Command lines of living processes that carry a mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return found


@pytest.fixture
def tmp_ray() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture
def run_example(repo_root, tmp_ray) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command at the root of the checkout to its end, and see that no process of it stays behind."""

    def run(*command: str, timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
        mark = f"RAYKV_TEST_MARK={secrets.token_hex(8)}"
        name, value = mark.split("=")
        # A folder where `ray start` has begun nothing that an example would join; short, for Ray's sockets.
        env = {"RAY_TMPDIR": tmp_ray, **env}
        process = subprocess.Popen(
            command,
            cwd=repo_root,
            env={**os.environ, "PYTHONPATH": f"{repo_root}:{os.environ.get('PYTHONPATH', '')}", name: value, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.send_signal(signal.SIGTERM)  # so that it can end the Ray that it started
            try:
                process.wait(30)
            finally:
                process.kill()
            raise
        deadline_s = time.monotonic() + 20
        while (left := processes_with(mark)) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert left == []
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return run

"""Probe of a lane: the transport and speed of bytes between two processes of this machine, measured.

NIXL is loaded only in short-lived child processes: it reads its settings once per process, prints by itself, and can
abort its process.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.config import UCX_DEFAULTS, set_ucx_lane
from kvstore.errors import KVStoreError, TransferError, TransferTimeout

_NUM_BYTES = 64 << 20
_BLOCK_BYTES = 512 << 10
_ROUNDS = 7
_CHILD_S = 30.0
_OWN_SETTINGS = {"UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_PROTO_INFO", *UCX_DEFAULTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """The result of a probe.

    Args:
        transports: UCX's names of those that carried the bytes, such as "cma/memory" or "tcp/lo".
        gb_per_s: median of several READs of 64 MiB in blocks of 512 KiB, after one that connects.
        ucx: version of UCX.
        settings: the user's UCX variables, as UCX read them from the environment.
    """

    transports: tuple[str, ...]
    gb_per_s: float
    ucx: str
    settings: dict[str, str]


def probe_lane(lane: str = "default") -> LaneReport:
    """Read between two processes over a lane, and return the transports that UCX used.

    Args:
        lane: as in StoreConfig; "default" obeys UCX_TLS.

    Raises:
        TransferError: NIXL does not load, or bytes did not arrive as written.
        TransferTimeout: a child took longer than half a minute.
    """
    with tempfile.TemporaryDirectory(prefix="raykv-lane-") as folder:
        log = Path(folder, "ucx.log")
        watched = {"UCX_LOG_FILE": str(log), "UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "used"}
        with _child("source", lane) as source:
            description = _line(source, "source")
            with _child("reader", lane, watched) as reader:
                answer = json.loads(_finish(reader, "reader", description))
        text = log.read_text(errors="replace") if log.exists() else ""
    seconds = statistics.median(answer["seconds"])
    return LaneReport(
        transports=read_transports(text),
        gb_per_s=round(_NUM_BYTES / seconds / 1e9, 2),
        ucx=ucx_version(text),
        settings={key: value for key, value in ucx_settings(text).items() if key not in _OWN_SETTINGS},
    )


def probe_plugins() -> dict[str, list[str]]:
    """Return the memory types of each NIXL plugin; none for a plugin that does not load.

    Raises:
        TransferError: NIXL itself does not load.
        TransferTimeout: it took longer than half a minute.
    """
    with _child("plugins", "default") as child:
        found: dict[str, list[str]] = json.loads(_finish(child, "plugins", ""))
    return found


def read_transports(log: str) -> tuple[str, ...]:
    """Return the transports that UCX's own report counts for READs ("remote memory read by ucp_get").

    The report is a set of tables, each with a title, and rows of count, range, description, configuration. Without
    tables, the line that lists a connection's lanes is used.
    """
    found: list[str] = []
    in_reads = False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1 and " by ucp_" in cells[0]:
            in_reads = "ucp_get" in cells[0]
        elif in_reads and len(cells) == 4 and cells[0].isdigit() and int(cells[0]) > 0:
            found += _names(cells[3])
    if not found:
        for match in re.finditer(r"(?:intra|inter)-node cfg#\d+ +(.*)", log):
            found += _names(match.group(1))
    return tuple(dict.fromkeys(found))


def _names(text: str) -> list[str]:
    return re.findall(r"\b[a-z][a-z0-9_]*/[A-Za-z0-9_.:-]+", text)


def ucx_version(log: str) -> str:
    """Return the version that UCX logs when it starts, or "" if there is none."""
    match = re.search(r"UCX +INFO +Version ([0-9.]+)", log)
    return match[1] if match else ""


def ucx_settings(log: str) -> dict[str, str]:
    """Return the UCX variables of the environment that UCX logs when it starts."""
    match = re.search(r"UCX_\* env variables?: (.*)", log)
    words = match.group(1).split() if match else []
    return dict(word.split("=", 1) for word in words if "=" in word)


@contextlib.contextmanager
def _child(mode: str, lane: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a child in the body, and kill it at the end."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore.tools.lane_probe", mode, lane],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def _line(child: subprocess.Popen[str], what: str) -> str:
    assert child.stdout is not None
    deadline_s = time.monotonic() + _CHILD_S
    while time.monotonic() < deadline_s:
        if select.select([child.stdout], [], [], 0.2)[0]:
            line = child.stdout.readline()
            if not line:
                raise TransferError(f"the {what} process ended early, exit status {child.wait(_CHILD_S)}")
            if line.startswith("{"):
                return _checked(line)
    raise TransferTimeout(f"the {what} process said nothing within {_CHILD_S:.0f} s")


def _finish(child: subprocess.Popen[str], what: str, text: str) -> str:
    """Send a child its input, wait for its end, and return its last line of JSON."""
    try:
        output = child.communicate(text, timeout=_CHILD_S)[0]
    except subprocess.TimeoutExpired as error:
        raise TransferTimeout(f"the {what} process was not through after {_CHILD_S:.0f} s") from error
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise TransferError("the process died without an answer; the transfer backend aborted it")
    return _checked(lines[-1])


def _checked(line: str) -> str:
    if "error" in (answer := json.loads(line)):
        raise TransferError(str(answer["error"]))
    return line


def _main(mode: str, lane: str) -> dict[str, Any]:
    set_ucx_lane(lane)
    from kvstore.mover.nixl import NixlTransport, plugin_memory_types

    if mode == "plugins":
        return dict(plugin_memory_types())

    import numpy as np

    from kvstore.memory.arena import create_arena
    from kvstore.mover.transport import PeerDescription, ReadRequest

    num_slots = _NUM_BYTES // _BLOCK_BYTES
    arena = create_arena(_NUM_BYTES)
    arena.populate()
    slab = arena.bytes_view().view(np.uint64)
    transport = NixlTransport(f"raykv-probe-{mode}-{os.getpid()}", arena.address, _NUM_BYTES)
    transport.set_slots(_BLOCK_BYTES, num_slots)
    content = np.arange(slab.size, dtype=np.uint64)
    if mode == "source":
        slab[:] = content
        agent = base64.b64encode(transport.describe()).decode()
        _say({"agent": agent, "address": arena.address})
        sys.stdin.read()  # Until the parent has its result and ends this process.
        return {}
    peer = json.loads(sys.stdin.readline())
    transport.add_peer(
        "source",
        PeerDescription(
            agent=base64.b64decode(peer["agent"]),
            address=int(peer["address"]),
            slot_bytes=_BLOCK_BYTES,
            num_slots=num_slots,
        ),
    )
    ids = np.arange(num_slots, dtype=np.int32)
    request = ReadRequest(
        peer="source", block_bytes=_BLOCK_BYTES, local_slots=ids, remote_slots=ids, notification=b"probe"
    )
    seconds = []
    for _ in range(_ROUNDS + 1):
        slab[:] = 0
        started_s = time.perf_counter()
        transport.read_and_wait(request, _CHILD_S / 2)
        seconds.append(time.perf_counter() - started_s)
        if not np.array_equal(slab, content):
            raise TransferError("a READ ended well and delivered other bytes than were written")
    transport.close()  # UCX reports what it used when the connection ends.
    return {"seconds": seconds[1:]}


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        _say(_main(sys.argv[1], sys.argv[2]))
    except KVStoreError as problem:
        _say({"error": f"{type(problem).__name__}: {problem}"})

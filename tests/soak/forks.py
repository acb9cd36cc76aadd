"""A fork of a client process: the child has the parent's client, and must not be able to use it."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

from kvstore.blocks.hashing import BlockHashes
from kvstore.client.lease import Lease
from kvstore.errors import KVStoreError
from tests.soak.engine import Engine

_CHILD_S = 20.0


def use_in_child(engine: Engine, run: BlockHashes, lease: Lease) -> list[str]:
    """Fork, and use a client and a lease of the parent in the child; returns what was not refused.

    Args:
        engine: of the parent.
        run: a chain.
        lease: of the parent.
    """
    client, ids = engine.client, list(range(len(run)))
    uses: dict[str, Callable[[], object]] = {
        "lookup": lambda: client.lookup(run),
        "lease": lambda: client.lease(run),
        "save": lambda: client.save(run, ids).result(5.0),
        "load": lambda: client.load(run, ids).result(5.0),
        "publish": lambda: client.publish(ids),
        "stats": client.stats,
    }
    if lease.held():  # Else there is nothing to release.
        uses["release"] = lease.release
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing of this process's own ends here: no atexit, no flush of what the parent has buffered.
        try:
            os.write(write_end, "\n".join(filter(None, (_try(*use) for use in uses.items()))).encode() + b".")
            client.close()
        finally:
            os._exit(0)
    os.close(write_end)
    told = b""
    pidfd = os.pidfd_open(child)
    try:
        while select.select([read_end], [], [], _CHILD_S)[0] and (piece := os.read(read_end, 1 << 16)):
            told += piece
        if not select.select([pidfd], [], [], _CHILD_S)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            told += b"it did not end by itself"
        os.waitpid(child, 0)
    finally:
        os.close(pidfd)
        os.close(read_end)
    return (
        [line for line in told.decode().removesuffix(".").split("\n") if line]
        if told.endswith(b".")
        else [f"it ended before it had said what was refused: {told.decode()!r}"]
    )


def _try(verb: str, use: Callable[[], object]) -> str:
    """Return "" where a use is refused with an error of ours, and else what happened."""
    try:
        answer = use()
    except KVStoreError:
        return ""
    except BaseException as error:  # noqa: BLE001 - the child says all, and never goes on as its parent.
        return f"{verb} raised {type(error).__name__}: {error}"
    return f"{verb} was not refused: {answer!r}"

"""What a client process of the soak is told when it starts, and the times that bind each of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Longer than any one operation may take, its process not being stopped: all its timeouts one after the other.
OPERATION_S = 30.0
#: How long a client may find no store to talk to, after which something did not come back: longer than `RECOVERY_S` in
#: tests/soak/run.py, which tells what.
REOPEN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One life of a client.

    Args:
        seed: of the soak.
        client: index of the client.
        life: how many lives it had before.
        node: index of its node.
        path_files: name the sockets of the nodes' stores, rewritten when there are others.
        mail: folder of the clients' tickets.
        weights_file: says which weights are used, see Weights.
        log_file: takes a line for each operation before it begins.
        error_file: takes what is written to stderr.
        rank: which of its node's ranks it is; None for a client that saves whole blocks.
    """

    seed: int
    client: int
    life: int
    node: int
    path_files: tuple[Path, ...]
    mail: Path
    weights_file: Path
    log_file: Path
    error_file: Path
    rank: int | None = None

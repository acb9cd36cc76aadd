"""The counts of one node store; docs/api.md says what each is."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import Any

from kvstore.errors import TransferError
from kvstore.node.dispatch import NodeControl
from kvstore.node.state import NodeState

logger = logging.getLogger(__name__)


def stats_of(state: NodeState, control: NodeControl, host: str) -> dict[str, Any]:
    """Return counts of the pool, the mover and the calls served. Waits for the mover, less than a call may take."""
    service, server = state.pool_service, control.server
    watermarks = dict(zip(("low_watermark", "high_watermark"), state.config.watermarks, strict=True))
    result: dict[str, Any] = {
        "node_id": state.node_id,
        "epoch": state.epoch.hex(),
        "pid": os.getpid(),
        "mover_pid": state.mover.pid,
        "host": host,
        "capacity_bytes": state.config.capacity_bytes,
        "slot_bytes": service.slot_bytes,
        "draining": service.is_draining,
        "num_abandoned_reads": state.mover.num_abandoned,
        "num_fenced_movers": control.fence.num_fenced,
        "calls": control.num_calls,
        "ports": {
            "num_malformed": server.num_malformed,
            "num_strangers_cut": server.strangers.num_cut,
            "num_unread_cut": server.unread.num_cut,
            "num_failures": server.loop.num_failures,
        },
        "pool": asdict(service.current.stats()) if service.is_attached else None,
        "reclaim": None if service.reclaimer is None else {**service.reclaimer.stats(), **watermarks},
        **control.handoffs.stats(),
        "disk": None if state.disk is None else {"disk_write": state.config.disk_write, **state.disk.stats()},
        "events": None if state.events is None else state.events.stats(),
        "nixl": None,
    }
    if state.mover.own is not None:
        try:
            # A third of the caller's own time limit, so that this answer still reaches it in time.
            result["nixl"] = state.mover.stats(state.config.call_timeout_s / 3)
        except TransferError as error:
            logger.debug("no mover statistics: %s", error)
    return result

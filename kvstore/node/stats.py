"""Put together what a node store says of itself: counts since it began, and what it holds now."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from kvstore.disk.records import place_bytes
from kvstore.handoff.table import HandoffTable
from kvstore.node.dispatch import NodeControl
from kvstore.node.state import NodeState
from kvstore.pool.tenants.limits import TenantStats
from kvstore.runtime import clock


def counts_of(state: NodeState, control: NodeControl, host: str) -> dict[str, Any]:
    """Return the counts that this process has, so without those of its mover. Any thread may call; it takes no time.

    Args:
        state: of the node store.
        control: its connections.
        host: the address at which peers reach it.
    """
    service, server, table = state.pool_service, control.server, control.handoffs.table
    watermarks = dict(zip(("low_watermark", "high_watermark"), state.config.watermarks, strict=True))
    traffic, disk = service.traffic.counts(), None if state.disk is None else state.disk.stats()
    handed_over = table.num_handed_over()
    traffic["out_bytes"]["handoff"] = sum(n * service.block_bytes.get(space, 0) for space, n in handed_over.items())
    traffic["out_bytes"]["disk"] = 0 if disk is None else disk.get("num_written_bytes", 0)
    return {
        "node_id": state.node_id,
        "epoch": state.epoch.hex(),
        "now_s": clock.now_s(),
        "pid": os.getpid(),
        "mover_pid": state.mover.pid,
        "mover_problem": state.mover.problem,
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
        "pins": service.current.pins(clock.now_s()),
        "tenants": _tenants(state, control),
        "traffic": traffic,
        "queues": {"loads": state.fetcher.num_loads, "threads": sum(state.threads.num_pending.values())},
        "reclaim": None if service.reclaimer is None else {**service.reclaimer.stats(), **watermarks},
        **control.handoffs.stats(),
        "disk": None if disk is None else {"disk_write": state.config.disk_write, **disk},
        "events": None if state.events is None else state.events.stats(),
        "nixl": None,
    }


def left_of(state: NodeState, handoffs: HandoffTable) -> dict[str, int]:
    """Return what a drain still waits for: {"num_leases", "num_writes", "num_handoffs"}."""
    num_handoffs, num_handoff_writes = len(handoffs), handoffs.num_arena_writes
    stats, disk = state.pool_service.current.stats(), state.disk
    return {
        "num_leases": max(0, stats.num_leases - stats.num_soft_pins - (disk.num_held() if disk else 0)),
        "num_writes": max(0, stats.num_writes - num_handoff_writes),  # One may have ended between the two counts.
        "num_handoffs": num_handoffs,
    }


def _tenants(state: NodeState, control: NodeControl) -> dict[str, dict[str, int | None]]:
    """Return what each tenant has, its quotas, and what they refused, by name; the shared tenant has no quotas."""
    service, handoffs, found = state.pool_service, control.handoffs, dict[str, dict[str, int | None]]()
    memory = service.current.tenants()
    disk = {} if state.disk is None else state.disk.pool.tenants()
    for quota in state.config.tenants:
        name, here, there = quota.name, memory.get(quota.name, TenantStats()), disk.get(quota.name, TenantStats())
        found[name] = {
            "num_bytes": here.num_slots * service.slot_bytes,
            "num_pinned_bytes": here.num_pinned * service.slot_bytes,
            "num_disk_bytes": there.num_slots * place_bytes(service.slot_bytes),
            "num_handoffs": handoffs.num_of(name),
            "num_evicted": here.num_evicted,
            "num_evicted_by_quota": here.num_evicted_by_quota,
            "num_refused_bytes": here.num_refused_bytes,
            "num_refused_pins": here.num_refused_pins,
            "num_refused_handoffs": handoffs.num_refused[name],
            "num_refused_disk": there.num_refused_bytes,
            "max_bytes": quota.max_bytes,
            "max_pinned_bytes": quota.max_pinned_bytes,
            "max_handoffs": quota.max_handoffs,
            "max_disk_bytes": quota.max_disk_bytes,
        }
    return found

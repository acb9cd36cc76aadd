"""Namespaces, chains, leases and pins of one node, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kvstore.blocks.chain import BlockHashes
from kvstore.node.inspection.owners import OwnerPlace, ends_with, places_of, shown_owner
from kvstore.node.state import NodeState
from kvstore.pool.inspection.chains import path_to, runs_of
from kvstore.pool.inspection.holders import held_runs, holders_of
from kvstore.pool.inspection.namespaces import NamespaceCounts, count_namespaces, details_of, num_cleared
from kvstore.pool.pool import Pool
from kvstore.rpc.server import ControlServer
from kvstore.runtime import clock


def tiers_of(state: NodeState) -> dict[str, Pool]:
    """Return the pools of a node by tier; one that is not divided yet has no slots."""
    tiers = {"memory": state.pool_service.current}
    return tiers if state.disk is None else {**tiers, "disk": state.disk.pool}


def namespaces(state: NodeState, prefix: str, limit: int) -> dict[str, Any]:
    """Return what the namespaces have here whose digest begins with `prefix` in hexadecimal, the largest first.

    A single one has details, too.
    """
    tiers = tiers_of(state)
    counts = {tier: count_namespaces(pool) for tier, pool in tiers.items()}
    sizes, no_blocks = state.pool_service.block_bytes, NamespaceCounts()
    known = {*list(sizes), *(name for found in counts.values() for name in found)}
    wanted = [name for name in known if name.hex().startswith(prefix)]

    def weight(name: bytes) -> tuple[int, bytes]:
        num_blocks = sum(found.get(name, no_blocks).num_blocks for found in counts.values())
        return -num_blocks * sizes.get(name, 0), name

    rows = []
    for name in sorted(wanted, key=weight)[:limit]:
        block_bytes = sizes.get(name, 0)
        by_tier = {}
        for tier, found in counts.items():
            here = found.get(name, no_blocks)
            by_tier[tier] = {**asdict(here), "num_bytes": here.num_blocks * block_bytes}
        version = state.versions.get(name)
        rows.append({"namespace": name.hex(), "block_bytes": block_bytes, "version": version, "tiers": by_tier})
    if len(wanted) == 1:
        for tier, pool in tiers.items():
            details = asdict(details_of(pool, wanted)[wanted[0]])
            last_use_s = details.pop("last_use_s")
            rows[0]["tiers"][tier] |= {**details, "last_use_age_s": _age_s(last_use_s)}  # type: ignore[index]
    cleared = {tier: num_cleared(pool) for tier, pool in tiers.items()}
    return {"namespaces": rows, "num_all": len(wanted), "num_cleared": cleared}


def path(state: NodeState, block_hashes: list[bytes]) -> BlockHashes | None:
    """Return the run that ends in the last of these blocks that is here, from its root on; None if none is here."""
    for block_hash in reversed(block_hashes):
        for pool in tiers_of(state).values():
            if (found := path_to(pool, block_hash)) is not None:
                return found
    return None


def chain(state: NodeState, wanted: BlockHashes, limit: int) -> dict[str, Any]:
    """Return the runs of a chain that are here, on every tier."""
    runs = list(_runs(state, wanted))
    return {"runs": runs[:limit], "num_all": len(runs)}


def _runs(state: NodeState, wanted: BlockHashes) -> Iterator[dict[str, Any]]:
    for tier, pool in tiers_of(state).items():
        for run in runs_of(pool, wanted):
            ages = {"last_use_age_s": _age_s(run.last_use_s), "first_use_age_s": _age_s(run.first_use_s)}
            yield {"tier": tier, "start": run.start, "num_blocks": run.num_blocks, **asdict(run.state), **ages}


def leases(state: NodeState, server: ControlServer, lease_id: int | None, limit: int) -> dict[str, Any]:
    """Return the leases and pins of memory, the oldest first; of a single one also the blocks that it holds."""
    pool, places, slot_bytes = state.pool_service.current, places_of(server), state.pool_service.slot_bytes
    found = [
        {
            "id": each.lease_id,
            "kind": each.kind,
            "owner": shown_owner(each.owner),
            **asdict(places.get(each.owner, OwnerPlace())),
            "tenant": each.tenant,
            "namespace": None if each.namespace is None else each.namespace.hex(),
            "num_blocks": each.num_blocks,
            "num_bytes": each.num_blocks * slot_bytes,
            "age_s": round(each.age_s, 3),
            "left_s": None if each.left_s is None else round(each.left_s, 3),
            "ends_with": ends_with(each.owner, has_deadline=each.left_s is not None, is_of_tier=each.is_of_tier),
        }
        for each in holders_of(pool, limit, lease_id)
    ]
    if lease_id is None:
        return {"leases": found, "num_all": pool.num_leases()}
    runs = [
        {**asdict(run), "namespace": None if run.namespace is None else run.namespace.hex()}
        for run in held_runs(pool, lease_id)
    ]
    return {"leases": found, "num_all": len(found), "runs": runs[:limit], "num_all_runs": len(runs)}


def _age_s(since_s: float | None) -> float | None:
    return None if since_s is None else round(max(0.0, clock.now_s() - since_s), 3)

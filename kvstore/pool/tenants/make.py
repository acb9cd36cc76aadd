"""Make the tenants of a pool from the settings of a store."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.pool.tenants.limits import TenantLimits
from kvstore.pool.tenants.table import NewPolicy, TenantTable
from kvstore.quotas import TenantQuota


def memory_tenants(
    quotas: Sequence[TenantQuota], num_slots: int, slot_bytes: int, new_policy: NewPolicy
) -> TenantTable | None:
    """Return the tenants of a node's memory, divided into so many slots; None for a store without tenants.

    Args:
        quotas: of each tenant.
        num_slots: of the pool.
        slot_bytes: of a slot.
        new_policy: as for `TenantTable`.
    """
    limits = {
        quota.name: TenantLimits(
            max_slots=slots_in(quota.max_bytes, slot_bytes, num_slots),
            max_pinned=slots_in(quota.max_pinned_bytes, slot_bytes, num_slots),
        )
        for quota in quotas
    }
    return TenantTable(num_slots, limits, new_policy) if limits else None


def disk_tenants(quotas: Sequence[TenantQuota], num_slots: int, place_bytes: int) -> TenantTable | None:
    """Return the tenants of a node's disk, of which a block takes so many bytes; as `memory_tenants`.

    Nothing pins there for long.
    """
    limits = {
        quota.name: TenantLimits(max_slots=slots_in(quota.max_disk_bytes, place_bytes, num_slots)) for quota in quotas
    }
    return TenantTable(num_slots, limits) if limits else None


def slots_in(num_bytes: int | None, slot_bytes: int, num_slots: int) -> int | None:
    """Return how many whole slots a quota has room for; None for no limit."""
    return None if num_bytes is None else min(num_bytes // slot_bytes, num_slots)

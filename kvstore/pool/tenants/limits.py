"""Define the limits of a tenant in one pool, and what is counted of it."""

from __future__ import annotations

from dataclasses import dataclass

#: Of clients that name no tenant, and of tenants that a pool does not know: nothing bounds them.
SHARED = ""
#: Numbers of tenants are bytes, and 0 is the shared one.
MOST_TENANTS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a tenant may have of a pool; None for all of it.

    Args:
        max_slots: slots of blocks that it stored or reserved, also while others read them.
        max_pinned: slots that its leases and hard pins hold, also of blocks that others stored, and slots of
            others that its saves keep; soft pins are not counted.
    """

    max_slots: int | None = None
    max_pinned: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """Counts of one tenant in one pool.

    Args:
        num_slots: slots that are its own now: of its blocks, and of its unfinished writes and reservations.
        num_pinned: slots that its leases, hard pins and saves hold now.
        num_evicted: blocks of its own that were evicted, for any reason.
        num_evicted_by_quota: those of them that went for its own new blocks, because it was at its quota.
        num_refused_bytes: blocks that it could not store or reserve because of its quota of bytes.
        num_refused_pins: blocks that it could not lease, pin or keep for a save because of its quota of pins.
    """

    num_slots: int = 0
    num_pinned: int = 0
    num_evicted: int = 0
    num_evicted_by_quota: int = 0
    num_refused_bytes: int = 0
    num_refused_pins: int = 0

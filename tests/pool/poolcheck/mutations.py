"""The bugs that block pools, and what is let into them, have had: one small change each, and the tests for it."""

from __future__ import annotations

from poolcheck.mutant import Mutant
from poolcheck.mutations_blocks import BLOCKS
from poolcheck.mutations_clearing import CLEARINGS
from poolcheck.mutations_entry import ENTRY
from poolcheck.mutations_eviction import EVICTION_POLICIES
from poolcheck.mutations_handoffs import HANDOFFS
from poolcheck.mutations_handover import HANDOVER
from poolcheck.mutations_holders import HOLDERS
from poolcheck.mutations_priorities import PRIORITY_ORDER
from poolcheck.mutations_tenants import TENANT_QUOTAS

MUTANTS: tuple[Mutant, ...] = (
    *BLOCKS, *HOLDERS, *CLEARINGS, *ENTRY, *HANDOFFS, *HANDOVER, *EVICTION_POLICIES, *PRIORITY_ORDER,
    *TENANT_QUOTAS,
)  # fmt: skip

"""What a mutant is: one bug that block pools have had, as a small change of text, and the tests that have to see it."""

from __future__ import annotations

from dataclasses import dataclass

from poolcheck.patch import Patch

POOL, SLOTS, LEASES, WRITES = "kvstore.pool.pool", "kvstore.pool.slots", "kvstore.pool.leases", "kvstore.pool.writes"
INDEX, COLUMNS = "kvstore.pool.block_index", "kvstore.pool.slot_columns"
READERS, TENANTS = "kvstore.pool.tenants.readers", "kvstore.pool.tenants.table"
TENANT_ORDER = "kvstore.pool.tenants.order"
EVICTION = "kvstore.pool.eviction"
LRU, TOUCH_LOG, SOFT_PINS = f"{EVICTION}.lru", f"{EVICTION}.touch_log", f"{EVICTION}.soft_pins"
PRIORITIES = f"{EVICTION}.priorities"
LEARNED, BLOCK_USES, GHOSTS = f"{EVICTION}.learned", f"{EVICTION}.block_uses", f"{EVICTION}.ghosts"
AGES, REUSE = f"{EVICTION}.ages", f"{EVICTION}.reuse"
PART_RUNS, OWNED = "kvstore.pool.part_runs", "kvstore.pool.owners"
RUNS, PRESENCE, VERSIONS = "kvstore.pool.runs", "kvstore.memory.presence", "kvstore.remote.versions"
EXPLORER = "tests/pool/test_explorer.py::test_every_schedule_up_to_three_preemptions"
LINES = "tests/pool/test_explorer.py::test_a_preemption_at_every_line_of_the_pool"
MODEL = "tests/pool/test_model.py::TestPoolMachine::runTest"
PRIORITY_MODEL = "tests/pool/test_model.py::TestPriorityMachine::runTest"
LEARNED_MODEL = "tests/pool/test_model.py::TestLearnedMachine::runTest"
POLICY_RULES = "tests/kvstore/pool/eviction"
LEARNED_RULES = f"{POLICY_RULES}/test_learned.py"
PRIORITY_RULES = f"{POLICY_RULES}/test_priorities.py"
FAULTS = "tests/pool/test_faults.py::test_a_fault_at_every_step"
STALE = "tests/pool/test_stale.py"
WIRE = "tests/pool/test_mover_wire.py"
POOL_RULES = "tests/kvstore/pool/test_pool.py"
POOL_PINS, POOL_WRITES = "tests/kvstore/pool/test_pool_pins.py", "tests/kvstore/pool/test_pool_writes.py"
PEERS, RUN_RULES = "tests/kvstore/node/test_peer_service.py", "tests/kvstore/pool/test_slot_lists.py"
PRESENCE_RULES, CLEARING = "tests/kvstore/memory/test_presence.py", "tests/kvstore/client/test_clearing.py"
SWEEPING, ANEW = "tests/kvstore/pool/test_sweeping.py", "tests/kvstore/pool/test_parts_claimed_anew.py"

#: Lets a mutant give the lock away in the middle of a step, as code does that takes it twice.
GAP = Patch(
    POOL,
    "        self.table = SlotTable(num_slots, presence, eviction, now_s, has_roots=has_roots, tenants=tenants)\n",
    "        self.table = SlotTable(num_slots, presence, eviction, now_s, has_roots=has_roots, tenants=tenants)\n"
    "        self.table.gap = self.table.columns.gap = lambda: (self._lock.release(), self._lock.acquire())\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One bug.

    Args:
        name: in a few words.
        source: where it was seen.
        patches: put it back.
        tests: must catch it, one of them at least.
    """

    name: str
    source: str
    patches: tuple[Patch, ...]
    tests: tuple[str, ...]


def bug(name: str, source: str, module: str, old: str, new: str, *tests: str) -> Mutant:
    """Return a mutant that is one change of one text."""
    return Mutant(name=name, source=source, patches=(Patch(module, old, new),), tests=tests)

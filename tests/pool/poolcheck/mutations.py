"""The bugs that block pools have had, one small change each, and the tests that have to see it."""

from __future__ import annotations

from dataclasses import dataclass

from poolcheck.patch import Patch

_POOL, _SLOTS, _WRITES, _LEASES = "kvstore.pool", "kvstore.slots", "kvstore.writes", "kvstore.leases"
_EXPLORER = "tests/pool/test_explorer.py::test_every_schedule_up_to_three_preemptions"
_LINES = "tests/pool/test_explorer.py::test_a_preemption_at_every_line_of_the_pool"
_MODEL = "tests/pool/test_model.py::TestPoolMachine::runTest"


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


MUTANTS = (
    Mutant(
        name="no lock",
        source="TensorRT-LLM: LRU lists shared by two threads",
        patches=(Patch(_POOL, "with self._lock:", "if True:", everywhere=True),),
        tests=(f"{_LINES}[claim_pin_evict]",),
    ),
    Mutant(
        name="free on cancel",
        source="NIXL: a released handle still writes",
        patches=(
            Patch(_WRITES, "aside=bool(quarantine)", "aside=False"),
            Patch(_WRITES, "        if quarantine and pending:\n", "        if False:\n"),
        ),
        tests=(f"{_EXPLORER}[cancelled_transfer]",),
    ),
    Mutant(
        name="lease shortened by renew",
        source="Mooncake: leases lost under readers",
        patches=(
            Patch(
                _LEASES,
                "            return False\n        lease.deadline_s = max(lease.deadline_s, deadline_s)",
                "            return False\n        lease.deadline_s = deadline_s",
            ),
        ),
        tests=(_MODEL,),
    ),
)

"""Bugs in what is let into the store: bytes that are not what their key says."""

from __future__ import annotations

from poolcheck.mutant import Mutant, bug

REGISTERED = "tests/kvstore/test_registered.py"

ENTRY: tuple[Mutant, ...] = (
    bug(
        "a replaced tensor passes",
        "ours: noticed, compared by its shape alone, and accepted",
        "kvstore.registered",
        "                same_layout(given, found)\n",
        "                same_layout(given, found)\n            return\n",
        f"{REGISTERED}::test_other_tensors_are_refused_until_they_are_registered",
    ),
    bug(
        "moved memory passes",
        "ours: torch has one storage object before and after",
        "kvstore.registered",
        "                and list(map(Tensor.data_ptr, now)) == self._addresses\n",
        "",
        f"{REGISTERED}::test_other_tensors_are_refused_until_they_are_registered",
    ),
    bug(
        "tensors are looked at before the copy alone",
        "ours: a tensor is replaced between the call and its copy",
        "kvstore.jobs",
        "                        copier.check_unchanged()\n                    answer",
        "                    answer",
        f"{REGISTERED}::test_tensors_that_are_replaced_while_a_job_copies_are_refused_too",
    ),
)

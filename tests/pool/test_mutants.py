"""The checks catch what they are there for: a few mutants here, all in `make mutants`; what is none does not count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from poolcheck.mutations import MUTANTS
from poolcheck.patch import DoesNotApply, Patch, check

ROOT = Path(__file__).parents[2]
#: One for each kind of check: schedules, a preemption at any line, a model, rules, faults, hand-offs. `make mutants`
#: has them all, and CI runs it after these tests.
FEW = [
    "peek, then claim", "no lock", "lookup that pins", "part counted twice", "leak on a fault in a shutdown",
    "withdraw frees at once",
]  # fmt: skip


def run(*arguments):
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{ROOT}"}
    command = [sys.executable, "-m", "poolcheck.mutants", "--json", "--only-mutants", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=110, check=False)
    return done.returncode, json.loads(done.stdout)


def test_a_few_mutants_are_caught():
    code, report = run(*FEW)
    assert [(row["name"], row["error"]) for row in report["mutants"] if row["error"] or not row["caught_by"]] == []
    assert (code, report["num_caught"]) == (0, len(FEW))


def test_every_mutant_applies_to_the_code_as_it_is():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 18
    for mutant in MUTANTS:
        assert mutant.tests
        check(mutant.patches, ROOT)


@pytest.mark.parametrize("old", ["no such text", "        with self._step("])
def test_a_patch_that_does_not_fit_once_is_refused(old):
    with pytest.raises(DoesNotApply, match=r"found \d+ times"):
        check([Patch("kvstore.pool.pool", old, "")], ROOT)


def test_a_patch_that_is_no_program_is_refused():
    with pytest.raises(SyntaxError):
        check([Patch("kvstore.pool.pool", "class Pool:", "class Pool")], ROOT)

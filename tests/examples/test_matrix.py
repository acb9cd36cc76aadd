"""Everything together, in cases where every two values meet; `make matrix` runs all of them."""

from __future__ import annotations

import itertools
import json
import sys

import pytest

from tests.matrix.cases import AXES, all_cases, pairs_of, pairwise


def test_every_two_values_that_can_meet_meet_in_the_chosen_cases():
    chosen = pairwise(all_cases())
    met = set().union(*map(pairs_of, chosen))
    for (name, values), (other, others) in itertools.combinations(AXES.items(), 2):
        for pair in itertools.product(values, others):
            can_meet = any((getattr(case, name), getattr(case, other)) == pair for case in all_cases())
            assert (tuple(zip((name, other), pair, strict=True)) in met) == can_meet
    assert chosen == pairwise(all_cases())
    assert len(chosen) < len(all_cases()) / 10


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", DEVICES)
def test_answers_are_those_of_a_run_without_any_cache_in_every_case(run_example, device):
    for package in ("ray", "transformers"):  # Where there is a GPU, they may not be.
        pytest.importorskip(package, reason=f"needs {package}")
    ran = run_example(sys.executable, "-m", "tests.matrix", "--pairwise", "--json", "--device", device, timeout_s=280)
    cases = json.loads(ran.stdout)["cases"]
    assert [case["problems"] for case in cases] == [[] for _ in pairwise(all_cases())], ran.stderr[-2000:]
    assert ran.returncode == 0
    assert all(case["num_requests"] >= 6 for case in cases)
    drafted, accepted = (sum(case[name] for case in cases) for name in ("num_drafted", "num_accepted"))
    assert 0 < accepted < drafted

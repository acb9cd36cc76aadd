"""What the benchmark of routers refuses before it starts anything."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks.serve_routing import main


@pytest.mark.parametrize(
    ("option", "value"), [("--replicas", "0"), ("--requests", "0"), ("--at-once", "0"), ("--tokens-per-s", "0")]
)
def test_a_count_that_would_measure_nothing_is_refused(option, value):
    run = CliRunner().invoke(main, [option, value])

    assert run.exit_code == 2
    assert f"Invalid value for '{option}'" in run.output

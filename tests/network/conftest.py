"""Clusters over real addresses; left out with a reason where this machine cannot make network namespaces."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def _lab_is_possible() -> None:
    import machines

    if reason := machines.why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def make_cluster(_lab_is_possible: None) -> Iterator[Callable[..., Any]]:
    """Makes clusters of machines with addresses of their own; each ends with the module."""
    import onprem

    made: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="rn", dir="/tmp", ignore_cleanup_errors=True) as folder:

        def make(num_machines: int, **options: Any) -> Any:
            home = Path(folder) / str(len(made))
            made.append(onprem.Cluster(home, num_machines, **options))
            return made[-1]

        try:
            yield make
        finally:
            for cluster in made:
                cluster.close()

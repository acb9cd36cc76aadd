"""Random work: every page counted after every step, and every request reads its own KV.

The long run is `PYTHONPATH=tests/kvstore python -m paged_engine`: fifty thousand steps for each size and kind of group.
"""

from __future__ import annotations

import os

import pytest
from paged_engine import work

NUM_STEPS = int(os.environ.get("RAYKV_PAGED_STEPS", "2000"))


@pytest.mark.parametrize("groups", ["full", "window", "both", "aligned"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_are_conserved_and_kv_is_right(page_size, groups):
    """Scenario 18: free, cached, locked and private pages are all; at the end everything comes back."""
    counts = work(groups, page_size, NUM_STEPS, seed=page_size, check_every=20)
    assert all(count > 0 for name, count in counts.items() if name != "copied" or page_size > 1), counts

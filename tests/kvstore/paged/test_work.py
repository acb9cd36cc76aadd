"""Random work: every page counted after every step, and every request reads its own KV.

The long run is `PYTHONPATH=tests/kvstore python -m paged_engine`: fifty thousand steps for each size and kind of group.
"""

from __future__ import annotations

import os

import pytest
from paged_engine import work

#: Together more than fifty thousand with the four kinds of groups; large pages take longer. Each seed meets every kind
#: of step in so few.
NUM_STEPS = {1: 4000, 3: 3000, 4: 3000, 16: 2000, 64: 500, 256: 300}


@pytest.mark.parametrize("groups", ["full", "window", "both", "aligned"])
@pytest.mark.parametrize("page_size", NUM_STEPS)
def test_pages_are_conserved_and_kv_is_right(page_size, groups):
    """Scenario 18: free, cached, locked and private pages are all; at the end everything comes back."""
    num_steps = int(os.environ.get("RAYKV_PAGED_STEPS", NUM_STEPS[page_size]))
    counts = work(groups, page_size, num_steps, seed=page_size % 251, check_every=20)
    assert all(count > 0 for name, count in counts.items() if name != "copied" or page_size > 1), counts

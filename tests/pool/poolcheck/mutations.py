"""The bugs that block pools have had, one small change each, and the tests that have to see it."""

from __future__ import annotations

from poolcheck.mutant import Mutant
from poolcheck.mutations_blocks import BLOCKS
from poolcheck.mutations_holders import HOLDERS

MUTANTS: tuple[Mutant, ...] = (*BLOCKS, *HOLDERS)

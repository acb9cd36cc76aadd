"""The cases of the matrix, and a part of them in which every two values meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

AXES: dict[str, tuple[Any, ...]] = {
    "model": ("llama", "mistral", "gemma2"),
    "page_size": (1, 16, 64),
    "tiers": ("engine", "memory", "disk"),
    "transfer": ("none", "peer", "handoff"),
    "num_draft_tokens": (0, 3),
    "num_decoders": (1, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination.

    Args:
        model: of examples/demo_models.py: full attention, windows, or both in turn.
        page_size: tokens of an engine's page; stored blocks have 32.
        tiers: "engine" for the engine's own pages alone, "memory" for a store beside them, "disk" for one whose memory
            is too small.
        transfer: how KV comes to the decode worker: "none", from a "peer" node that stores it, or by "handoff".
        num_draft_tokens: of each speculative step; 0 for none.
        num_decoders: data-parallel decode workers, which serve at the same time.
    """

    model: str
    page_size: int
    tiers: str
    transfer: str
    num_draft_tokens: int
    num_decoders: int

    @property
    def is_possible(self) -> bool:
        """Without a store nothing is transferred."""
        return self.tiers != "engine" or self.transfer == "none"

    def __str__(self) -> str:
        return (
            f"{self.model}, pages of {self.page_size}, {self.tiers}, {self.transfer}, {self.num_draft_tokens} drafts, "
            f"{self.num_decoders} decoders"
        )


def all_cases() -> list[Case]:
    """Return every possible case."""
    every = (Case(**dict(zip(AXES, values, strict=True))) for values in itertools.product(*AXES.values()))
    return [case for case in every if case.is_possible]


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    """Return the pairs of values that meet in a case."""
    return set(itertools.combinations(asdict(case).items(), 2))


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Return few of the cases in which every pair of values meets that meets in any of them.

    Takes the case with most new pairs again and again; the first of equal ones, so the choice never changes.
    """
    left = {case: pairs_of(case) for case in cases}
    missing, chosen = set().union(*left.values()), list[Case]()
    while missing:
        best = max(left, key=lambda case: len(left[case] & missing))
        chosen.append(best)
        missing -= left.pop(best)
    return chosen

"""Hold what one request says in a trace file, before its blocks have numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Where:
    """A line of a file, or, where a file is no list of lines, a request of it."""

    path: Path
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.path} {self.unit} {self.number}"


@dataclass(frozen=True, slots=True)
class Record:
    """One request of a file.

    Args:
        where: for errors.
        time: when it came, in the file's unit.
        input_tokens: of the prompt; None when the format has none.
        output_tokens: of the answer; 0 when the format has none.
        ids: of the prompt's blocks, from the first on.
        scope: ids of two scopes never mean the same block.
        is_whole: the ids name every block of the prompt.
    """

    where: Where
    time: float
    input_tokens: int | None
    output_tokens: int
    ids: Sequence[Hashable]
    scope: str = ""
    is_whole: bool = False

"""What a pool has of one namespace. No locking here: the pool holds its lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Space:
    """The index of one namespace from one clearing to the next.

    A clearing takes it out of the table, so that nothing of it is found from then on, and `ready` changes no more.
    Its slots still name it until they are swept, some at a time.

    Args:
        namespace: digest.
        ready: slot of each block that can be found.
        writing: slot of each block that is being written.
        orphans: how many blocks hang on one that is not here.
        unswept: the rest of `ready`, once it was cleared; None when there is no more.
    """

    namespace: bytes
    ready: dict[bytes, int] = field(default_factory=dict)
    writing: dict[bytes, int] = field(default_factory=dict)
    orphans: Counter[bytes] = field(default_factory=Counter)
    is_cleared: bool = False
    unswept: Iterator[int] | None = None

    def __len__(self) -> int:
        return len(self.ready) + len(self.writing)


#: Of a namespace that is not here; nothing is ever put into it.
NOTHING = Space(b"")

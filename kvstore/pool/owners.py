"""Keep leases or writes by id and by owner. No locking here: the pool holds its lock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar


class _Held(Protocol):
    @property
    def owner(self) -> str: ...
    @property
    def num_blocks(self) -> int: ...


T = TypeVar("T", bound=_Held)


class OwnedTable(ABC, Generic[T]):
    """Leases or writes, so that finding those of one owner needs no search through all."""

    def __init__(self) -> None:
        self.held: dict[int, T] = {}
        # Dictionaries as ordered sets.
        self._ids: dict[str, dict[int, None]] = {}
        #: Blocks that all together keep in memory; at most about `MAX_HELD_BLOCKS`.
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self.held)

    def holds(self, owner: str) -> bool:
        """Return whether an owner has one."""
        return owner in self._ids

    def of(self, number: int, owner: str) -> T | None:
        """Return the one with this id if `owner` holds it."""
        found = self.held.get(number) if isinstance(number, int) else None
        return found if found is not None and found.owner == owner else None

    def ids_of(self, owner: str) -> list[int]:
        """Return the ids of an owner, the oldest first."""
        return list(self._ids.get(owner, ()))

    def release_owner(self, owner: str) -> int:
        """End all that an owner holds; return how many."""
        return self.end_all(self.ids_of(owner))

    def end_all(self, numbers: list[int]) -> int:
        """End these; return how many."""
        for number in numbers:
            self.end(number)
        return len(numbers)

    @abstractmethod
    def end(self, number: int) -> None:
        """Give back what one held and `pop` it."""

    def add(self, number: int, entry: T) -> None:
        """Add one under a new id."""
        self.held[number] = entry
        self._ids.setdefault(entry.owner, {})[number] = None
        self.num_blocks += entry.num_blocks

    def pop(self, number: int) -> T:
        """Remove one and return it."""
        entry = self.held.pop(number)
        ids = self._ids[entry.owner]
        del ids[number]
        if not ids:
            del self._ids[entry.owner]
        self.num_blocks -= entry.num_blocks
        return entry

    def check_owners(self) -> None:
        """Assert that ids and counts are right; for tests."""
        owners = {number: owner for owner, ids in self._ids.items() for number in ids}
        assert owners == {number: entry.owner for number, entry in self.held.items()}, "ids of another owner"
        assert all(self._ids.values()), "owners of nothing"
        assert self.num_blocks == sum(entry.num_blocks for entry in self.held.values()), "blocks held"

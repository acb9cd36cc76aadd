"""Find the leases or writes of an owner by their ids. No locking here: the pool holds its lock."""

from __future__ import annotations


class IdsByOwner:
    """Ids by their owner, so that finding one owner's ids needs no search through all."""

    def __init__(self) -> None:
        # Dictionaries as ordered sets.
        self._ids: dict[str, dict[int, None]] = {}

    def __contains__(self, owner: str) -> bool:
        return owner in self._ids

    def add(self, owner: str, number: int) -> None:
        """Add an id to an owner."""
        self._ids.setdefault(owner, {})[number] = None

    def drop(self, owner: str, number: int) -> None:
        """Remove an id from its owner."""
        ids = self._ids[owner]
        del ids[number]
        if not ids:
            del self._ids[owner]

    def of(self, owner: str) -> list[int]:
        """Return the ids of an owner, the oldest first."""
        return list(self._ids.get(owner, ()))

    def check(self, owners: dict[int, str]) -> None:
        """Assert that exactly these ids and owners are known; for tests."""
        assert {number: owner for owner, ids in self._ids.items() for number in ids} == owners, "ids of another owner"
        assert all(self._ids.values()), "owners of nothing"

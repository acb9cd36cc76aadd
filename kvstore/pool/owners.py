"""Who holds which of something that has ids. No locking here: the pool holds its lock."""

from __future__ import annotations


class IdsByOwner:
    """Ids by their owner, so that nobody is looked for among what all others hold."""

    def __init__(self) -> None:
        # Dictionaries, because they keep the order.
        self._ids: dict[str, dict[int, None]] = {}

    def __contains__(self, owner: str) -> bool:
        return owner in self._ids

    def add(self, owner: str, number: int) -> None:
        """Note that an owner has an id."""
        self._ids.setdefault(owner, {})[number] = None

    def drop(self, owner: str, number: int) -> None:
        """Note that it has it no more."""
        ids = self._ids[owner]
        del ids[number]
        if not ids:
            del self._ids[owner]

    def of(self, owner: str) -> list[int]:
        """Return the ids of an owner, the oldest first."""
        return list(self._ids.get(owner, ()))

    def check(self, owners: dict[int, str]) -> None:
        """Assert that it knows these ids and their owners, and no others; for tests."""
        assert {number: owner for owner, ids in self._ids.items() for number in ids} == owners, "ids of another owner"
        assert all(self._ids.values()), "owners of nothing"

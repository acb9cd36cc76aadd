"""Announce the blocks of both tiers of a node: a block is here as long as one of them has it."""

from __future__ import annotations

from kvstore.pool.pool import Pool


class Residents:
    """The blocks of a node's memory and of its disk, as one.

    Args:
        memory: the pool of the arena.
        disk: the pool of the disk tier.
    """

    def __init__(self, memory: Pool, disk: Pool) -> None:
        self._tiers = memory, disk

    def drain_events(self) -> list[tuple[bool, bytes]] | None:
        """Return and forget the changes of both tiers; None if one of them had too many.

        That a block left one tier counts only if the other does not have it now. It may leave that one next: then the
        event of that is still to come.
        """
        found = list[tuple[bool, bytes]]()
        for tier, other in (self._tiers, self._tiers[::-1]):
            events = tier.drain_events()
            if events is None:
                return None
            gone = other.present([own for is_here, own in events if not is_here])
            found += [(is_here, own) for is_here, own in events if is_here or own not in gone]
        return found

    def resident_hashes(self) -> list[bytes]:
        """Return the hashes of both tiers, and forget pending changes."""
        memory, disk = self._tiers
        return [*memory.resident_hashes(), *disk.resident_hashes()]

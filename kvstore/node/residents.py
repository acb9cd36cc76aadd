"""Announce the blocks of both tiers of a node: a block is here as long as one of them has it."""

from __future__ import annotations

from kvstore.pool.events.log import RootedChange
from kvstore.pool.events.roots import RootKeys
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
        found = self.drain_rooted()
        return None if found is None else [(is_here, own) for is_here, hashes, _ in found for own in hashes]

    def drain_rooted(self) -> list[RootedChange] | None:
        """Return and forget the changes of both tiers like `drain_events`, with their root keys."""
        found = list[RootedChange]()
        for tier, other in (self._tiers, self._tiers[::-1]):
            events = tier.drain_rooted()
            if events is None:
                return None
            kept = other.present([own for is_here, hashes, _ in events if not is_here for own in hashes])
            found += [event if event[0] else _without(event, kept) for event in events]
        return found

    def resident_hashes(self) -> list[bytes]:
        """Return the hashes of both tiers, and forget pending changes."""
        memory, disk = self._tiers
        return [*memory.resident_hashes(), *disk.resident_hashes()]

    def resident_rooted(self) -> list[tuple[list[bytes], RootKeys | None]]:
        """Return the hashes of both tiers with their root keys. Pending changes stay."""
        memory, disk = self._tiers
        return [*memory.resident_rooted(), *disk.resident_rooted()]


def _without(event: RootedChange, kept: set[bytes]) -> RootedChange:
    is_here, hashes, roots = event
    if kept.isdisjoint(hashes):
        return event
    at = [number for number, own in enumerate(hashes) if own not in kept]
    return is_here, [own for own in hashes if own not in kept], None if roots is None else roots[at]

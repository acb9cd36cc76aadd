"""A store's announcements to the directory, and the message for a part of them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Protocol

from kvstore.blocks.chain import HASH_BYTES
from kvstore.blocks.codec import U64, Digest, Record, decoder

#: Most blocks of one message: 512 KiB of hashes, which the directory processes in some milliseconds.
PIECE_BLOCKS = 1 << 14
#: If the changes need more messages than this, a full announcement replaces them.
_MAX_PIECES_OF_CHANGES = 8


class Batch(Record, frozen=True, kw_only=True):
    """A part of a store's announcement.

    A batch that `begins` starts a full announcement, beside the one before; the batch that `ends` completes it, and it
    replaces the one before. One batch may do both. Changes meanwhile travel in the same batches. `versions` are those
    of cleared namespaces that the node was notified of since its last batch. Hashes are packed back to back.
    """

    sequence: U64
    begins: bool
    ends: bool
    added: bytes
    removed: bytes
    versions: dict[Digest, U64]

    def __post_init__(self) -> None:
        if len(self.added) % HASH_BYTES or len(self.removed) % HASH_BYTES:
            raise ValueError(f"wanted whole hashes, got {len(self.added)} and {len(self.removed)} bytes")


decode_batch = decoder(Batch)


class Blocks(Protocol):
    """The blocks of a node, whose changes are announced: a pool, or the pools of its tiers together."""

    def drain_events(self) -> list[tuple[bool, bytes]] | None:
        """Return and forget the changes since the last call; None if they were too many. See `Pool.drain_events`."""

    def resident_hashes(self) -> list[bytes]:
        """Return all hashes, mostly each after those that it builds on, and forget pending changes."""


class Announcements:
    """Cut the blocks of a pool, and their changes, into batches of bounded size.

    Changes come first: a save waits for its own changes, not for the rest of a full announcement.
    Used by one thread; other threads may call `follow`.

    Args:
        piece_blocks: the most hashes of one batch.
    """

    def __init__(self, piece_blocks: int = PIECE_BLOCKS) -> None:
        self._piece_blocks = piece_blocks
        self._pool: Blocks | None = None
        self._is_full_wanted = True
        self._sequence = 0
        #: A full announcement begins with the next batch.
        self._begins = False
        # Blocks that changed and were not announced yet: True if the block is here now.
        self._changes: dict[bytes, bool] = {}
        #: The blocks of a full announcement that are still to be sent, the last ones first; None while none is under
        #: way. In order, because a block that is known before those that it builds on is of no use yet.
        self._rest: dict[bytes, None] | None = None
        self._has_lost_changes = False

    def follow(self, blocks: Blocks | None) -> None:
        """Announce these blocks from now on; none if it is None."""
        self._pool, self._is_full_wanted = blocks, True

    def begin_connection(self) -> None:
        """Start again with a full announcement, numbered from 1: earlier batches no longer count."""
        self._sequence, self._is_full_wanted, self._begins = 0, True, False

    @property
    def is_all_told(self) -> bool:
        """Whether nothing is left to announce."""
        return not self._changes and self._rest is None and not self._is_full_wanted

    @property
    def are_changes_told(self) -> bool:
        """Whether all changes that were known at the last batch were announced."""
        return not self._changes and (self._rest is None or not self._has_lost_changes)

    def has_news(self) -> bool:
        """Look for changes; return whether the next batch would announce anything."""
        self._begins = self._look() or self._begins
        return self._begins or not self.is_all_told

    def next(self, versions: Mapping[bytes, int]) -> Batch:
        """Return the next batch; it is empty if nothing changed."""
        begins, self._begins = self._look() or self._begins, False
        room = self._piece_blocks if self._rest is None else -(-self._piece_blocks // 2)
        told = dict(islice(self._changes.items(), room))
        for block_hash in told:
            del self._changes[block_hash]
        added = [block_hash for block_hash, present in told.items() if present]
        removed = [block_hash for block_hash, present in told.items() if not present]
        ends = False
        if self._rest is not None:
            added += [self._rest.popitem()[0] for _ in range(min(len(self._rest), self._piece_blocks - len(told)))]
            if ends := not self._rest:
                self._rest = None
        self._sequence += 1
        return Batch(
            sequence=self._sequence, begins=begins, ends=ends, added=b"".join(added), removed=b"".join(removed),
            versions=dict(versions),
        )  # fmt: skip

    def _look(self) -> bool:
        """Take the pool's events; return whether a full announcement begins."""
        is_full_wanted, self._is_full_wanted = self._is_full_wanted, False  # Before `follow` may set it again.
        pool = self._pool
        events = [] if pool is None else pool.drain_events()
        if events is not None and not is_full_wanted:
            for present, block_hash in events:
                self._changes[block_hash] = present
                if self._rest is not None:
                    self._rest.pop(block_hash, None)
            is_full_wanted = len(self._changes) > _MAX_PIECES_OF_CHANGES * self._piece_blocks
        elif events is None:
            is_full_wanted = True
        if not is_full_wanted:
            return False
        self._rest = {} if pool is None else dict.fromkeys(reversed(pool.resident_hashes()))
        self._has_lost_changes = events is None
        # Blocks that became findable recently come first. Blocks that are gone do not appear in a full announcement.
        changed = [*self._changes, *(own for _, own in events or ())]
        self._changes = {own: True for own in changed if own in self._rest}
        for own in self._changes:
            del self._rest[own]
        return True

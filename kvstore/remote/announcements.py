"""What a store has still to tell the directory, and the message in which a part of it travels."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from kvstore.blocks.chain import HASH_BYTES
from kvstore.blocks.codec import U64, Digest, Record, decoder
from kvstore.pool.pool import Pool

#: Of one message: 512 KiB of hashes, which the directory takes in within some milliseconds.
PIECE_BLOCKS = 1 << 14
#: Where more has changed than so many messages hold, a full announcement says it.
_MAX_PIECES_OF_CHANGES = 8


class Batch(Record, frozen=True, kw_only=True):
    """A part of what a store announces.

    With one that `begins` a full announcement begins, beside the one before; with one that `ends` it is whole and
    takes that one's place. One batch may do both. What changes meanwhile travels in the same batches. Its `versions`
    are those of cleared namespaces that the node has heard of since its last batch. Hashes stand back to back.
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


class Announcements:
    """Cut what a pool holds, and what changes in it, into batches of bounded size.

    Changes come first: a save waits for its own, and not for the rest of a full announcement.
    Used by one thread; others may call `follow`.

    Args:
        piece_blocks: the most hashes of one batch.
    """

    def __init__(self, piece_blocks: int = PIECE_BLOCKS) -> None:
        self._piece_blocks = piece_blocks
        self._pool: Pool | None = None
        self._is_full_wanted = True
        self._sequence = 0
        # The last word on each block that changed and was not told.
        self._changes: dict[bytes, bool] = {}
        #: Of a full announcement, what is still to be told; None while there is none under way.
        self._rest: set[bytes] | None = None
        self._has_lost_changes = False

    def follow(self, pool: Pool | None) -> None:
        """Announce what `pool` holds from now on; nothing when None."""
        self._pool, self._is_full_wanted = pool, True

    def begin_connection(self) -> None:
        """Begin anew with a full announcement, numbered from 1: nothing that was told before counts."""
        self._sequence, self._is_full_wanted = 0, True

    @property
    def is_all_told(self) -> bool:
        """Whether nothing is left."""
        return not self._changes and self._rest is None and not self._is_full_wanted

    @property
    def are_changes_told(self) -> bool:
        """Whether every change was told that had been noticed when the last batch was made."""
        return not self._changes and (self._rest is None or not self._has_lost_changes)

    def next(self, versions: Mapping[bytes, int]) -> Batch:
        """Return the next batch, which is empty where nothing changed."""
        begins = self._look()
        room = self._piece_blocks if self._rest is None else -(-self._piece_blocks // 2)
        told = dict(islice(self._changes.items(), room))
        for block_hash in told:
            del self._changes[block_hash]
        added = [block_hash for block_hash, present in told.items() if present]
        removed = [block_hash for block_hash, present in told.items() if not present]
        ends = False
        if self._rest is not None:
            added += [self._rest.pop() for _ in range(min(len(self._rest), self._piece_blocks - len(told)))]
            if ends := not self._rest:
                self._rest = None
        self._sequence += 1
        return Batch(
            sequence=self._sequence, begins=begins, ends=ends, added=b"".join(added), removed=b"".join(removed),
            versions=dict(versions),
        )  # fmt: skip

    def _look(self) -> bool:
        """Take the pool's events in; returns whether a full announcement begins."""
        is_full_wanted, self._is_full_wanted = self._is_full_wanted, False  # Before `follow` may set it again.
        pool = self._pool
        events = [] if pool is None else pool.drain_events()
        if events is not None and not is_full_wanted:
            for present, block_hash in events:
                self._changes[block_hash] = present
                if self._rest is not None:
                    self._rest.discard(block_hash)
            is_full_wanted = len(self._changes) > _MAX_PIECES_OF_CHANGES * self._piece_blocks
        elif events is None:
            is_full_wanted = True
        if not is_full_wanted:
            return False
        self._rest = set() if pool is None else set(pool.resident_hashes())
        self._has_lost_changes = events is None
        # What became findable of late is told first; of what is not, a full announcement says nothing.
        changed = [*self._changes, *(own for _, own in events or ())]
        self._changes = {own: True for own in changed if own in self._rest}
        self._rest.difference_update(self._changes)
        return True

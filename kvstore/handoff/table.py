"""The hand-offs that this node's clients have published: filled slots that no lookup finds.

To the pool a published block is a write that never completes: no lookup finds it, the directory is not told of it, it
is never evicted, and giving up the write frees its slot at once. This table knows why each block is kept, for which
owner, and until when.

Slots belong to their publisher until it completes or aborts, or dies. A hand-off that is withdrawn or cleared before
that is only marked: no reader gets it, and its slots are freed when the publisher's copies have ended. Slots that a
mover fills (`move`) follow the same rule.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable

from kvstore.blocks.indexes import IndexArray, ints_in
from kvstore.errors import BlockNotFound, InvalidRequest, PoolExhausted
from kvstore.handoff.records import CLAIM_BIT, DRAINING, NOT_READY, REASONS, Claim, Handoff, Move, Place
from kvstore.runtime import clock

#: For so many ended tickets the table remembers why they ended.
_MAX_REMEMBERED = 4096


class HandoffTable:
    """The published blocks of one node, and since when by `now_s`. Any thread may call any verb."""

    def __init__(self, now_s: Callable[[], float] = clock.now_s) -> None:
        self._lock, self._now_s = threading.Lock(), now_s
        self.handoffs: dict[bytes, Handoff] = {}
        self.claims: dict[int, Handoff] = {}
        self.moves: dict[int, Move] = {}
        self.over: OrderedDict[bytes, str] = OrderedDict()
        self._numbers = itertools.count(1)
        self._num_slots: Counter[int] = Counter()
        self._num_handed_over: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self.handoffs)

    @property
    def num_slots(self) -> int:
        """Slots that are held, in all places."""
        return self._num_slots.total()

    def num_handed_over(self) -> dict[bytes, int]:
        """Return how many blocks of each namespace readers have fetched."""
        with self._lock:
            return dict(self._num_handed_over)

    @property
    def num_arena_writes(self) -> int:
        """Writes of the arena's pool that hand-offs hold, published or moved there."""
        with self._lock:
            num_published = sum(not handoff.place.slab for handoff in self.handoffs.values())
            return num_published + sum(not move.over for move in self.moves.values())

    def prepare(
        self, key: bytes, writer: int, owner: str, namespace: bytes, version: int, num_blocks: int, place: Place
    ) -> IndexArray:
        """Claim slots for blocks that `owner` is going to write.

        Before `complete` they come back only by `abort`, or when the owner is gone, or with the mover of their stage.

        Args:
            key: of the ticket.
            writer: a number that only the publisher knows, different from the key; it proves who makes the copies.
            owner: the publisher.
            namespace: of the blocks.
            version: the namespace's last clearing, as this node knows it.
            num_blocks: all of them or none.
            place: where the slots are.

        Raises:
            PoolExhausted: there is no room for all of them; nothing changed.
            InvalidRequest: no blocks, or a key that was used before; nothing changed.
        """
        if num_blocks < 1:
            raise InvalidRequest(f"wanted at least 1 block to publish, got {num_blocks}")
        write_owner = f"handoff-{next(self._numbers)}"
        with self._lock:
            if (state := self._state(key)) is not None:
                raise InvalidRequest(
                    f"wanted a ticket that was never used, got one whose blocks {state}; a ticket is published once: "
                    "publish without ticket=, or under another one"
                )
            held = self._num_slots[place.slab]
            if held + num_blocks > place.max_slots:
                raise PoolExhausted(
                    f"wanted {num_blocks} slots for a hand-off, but hand-offs hold {held} of the {place.max_slots} "
                    "they may; fetch or withdraw some, raise max_handoff_fraction, or attach a larger stage"
                )
            ticket = place.pool.reserve(num_blocks, write_owner, tenant=place.tenant)
            slots = ints_in(ticket.packed_slots)
            self.handoffs[key] = Handoff(
                key, writer, place, namespace, version, owner, write_owner, ticket.write_id, slots, self._now_s()
            )  # fmt: skip
            self._num_slots[place.slab] += num_blocks
            return slots

    def complete(self, key: bytes, writer: int, owner: str, deadline_s: float) -> bool:
        """Note that all bytes are in place. From now on `owner` keeps them, until `deadline_s` at most.

        The owner may differ from that of `prepare`: a client prepares on one connection and keeps on another.

        Returns:
            False if `writer` writes no such hand-off, or it was withdrawn or cleared meanwhile and its slots are free.
        """
        with self._lock:
            handoff = self.handoffs.get(key)
            if handoff is None or not handoff.is_written or handoff.writer != writer:
                return False
            handoff.is_written = False
            if handoff.over:
                self._end(handoff, handoff.over)
                return False
            handoff.owner, handoff.deadline_s = owner, deadline_s
            return True

    def abort(self, key: bytes, writer: int) -> bool:
        """Void a ticket and free its slots. The publisher failed, and none of its copies writes any more.

        The ticket is void also if `complete` came first, or if its slots were never asked for.

        Returns:
            Whether `writer` had such a hand-off.
        """
        with self._lock:
            handoff = self.handoffs.get(key)
            if handoff is None:
                self._void_unused(key)
                return False
            if handoff.writer != writer:
                return False
            handoff.is_written = False
            self._end(handoff, "withdrawn")
            return True

    def withdraw(self, key: bytes) -> bool:
        """Take blocks back. No reader gets them from now on. Slots are freed after the last copy or READ.

        Returns:
            Whether this call voided the ticket: its blocks are taken back, or, if there never were blocks of that
            key, no publisher can use the key any more. False if the ticket had ended before.
        """
        with self._lock:
            handoff = self.handoffs.get(key)
            if handoff is None:
                return self._void_unused(key)
            if handoff.over:
                return False
            self._end(handoff, "withdrawn")
            return True

    def _state(self, key: bytes) -> str | None:
        """Return the state of a ticket, for an error text. None if it was never used."""
        handoff = self.handoffs.get(key)
        over = self.over.get(key) if handoff is None else handoff.over
        if over:
            return "have been fetched" if over == "used" else f"are given up ({over})"
        if handoff is None:
            return None
        return "are being published" if handoff.is_written else "are published and wait for their fetch"

    def _void_unused(self, key: bytes) -> bool:
        """Void a key that was never published; return False if the key was void before."""
        if key in self.over:
            return False
        self._remember(key, "withdrawn")
        return True

    def claim(
        self,
        key: bytes,
        owner: str,
        namespace: bytes,
        version: int,
        deadline_s: float,
        *,
        is_early: bool = False,
        is_draining: bool = False,
    ) -> Claim | str:
        """Give one reader the right to the blocks of a ticket, or say why not.

        Args:
            key: of the ticket.
            owner: the reader.
            namespace: the reader's.
            version: the namespace's last clearing, as this node knows it.
            deadline_s: the slots keep their bytes until then, unless the reader ends the claim earlier.
            is_early: whether the ticket may come before its blocks are published.
            is_draining: whether nothing more is published here.
        """
        with self._lock:
            handoff = self.handoffs.get(key)
            if handoff is not None and handoff.version != version and not handoff.claim_id:
                self._end(handoff, "cleared")
            if handoff is not None and handoff.over:
                return REASONS[handoff.over]
            if key in self.over:
                return REASONS[self.over[key]]
            if handoff is None and is_early:
                return DRAINING if is_draining else NOT_READY
            if handoff is None or handoff.namespace != namespace:
                return "not_found: this store has no such ticket; it may be forged, or too long over"
            if handoff.is_written:
                return NOT_READY
            if handoff.claim_id:
                return "used: another fetch of this ticket is under way"
            if handoff.deadline_s < clock.now_s():
                self._end(handoff, "expired")
                return REASONS["expired"]
            handoff.claim_id = CLAIM_BIT | next(self._numbers)
            handoff.claim_owner, handoff.claim_deadline_s = owner, deadline_s
            self.claims[handoff.claim_id] = handoff
            return Claim(handoff.claim_id, handoff.slots, handoff.place.slab, handoff.place.generation)

    def end_claim(self, claim_id: int, owner: str, *, used: bool) -> bool:
        """End a claim. If the blocks arrived (`used`) free their slots, else let them be claimed again.

        Returns:
            False if `owner` has no such claim, or no longer has it; nothing changed.
        """
        with self._lock:
            handoff = self.claims.get(claim_id)
            if handoff is None or handoff.claim_owner != owner:
                return False
            self._end_claim(handoff, "used" if used else "")
            return True

    def release_owner(self, owner: str) -> int:
        """Take back all that a dead client published, wrote or read. Return the number of hand-offs."""
        with self._lock:
            read = [handoff for handoff in self.claims.values() if handoff.claim_owner == owner]
            for handoff in read:
                self._end_claim(handoff, "")
            owned = [h for h in self.handoffs.values() if h.owner == owner and (h.is_written or not h.over)]
            for handoff in owned:
                handoff.is_written = False
                self._end(handoff, "owner_gone")
            return len(read) + len(owned)

    def lose_stages(self) -> int:
        """Void every hand-off in a stage, also under claims. The mover is gone. Return their number.

        Publishers may still write to a stage that they have mapped, but no slot of its pool is granted again.
        """
        with self._lock:
            for claim_id, move in list(self.moves.items()):
                move.busy = False
                self._end_move(claim_id, move)
            lost = [handoff for handoff in self.handoffs.values() if handoff.place.slab]
            for handoff in lost:
                handoff.is_written, handoff.over = False, handoff.over or "peer_lost"
                if handoff.claim_id:
                    self._end_claim(handoff, "")
                else:
                    self._end(handoff, handoff.over)
            return len(lost)

    def move(self, claim_id: int, place: Place) -> IndexArray:
        """Claim slots in another place, to which the mover copies a claim's blocks.

        Raises:
            PoolExhausted: there is no room; nothing changed.
            BlockNotFound: there is no such claim any more; nothing changed.
        """
        with self._lock:
            handoff = self.claims.get(claim_id)
            if handoff is None:
                raise BlockNotFound("the claim on these blocks is over; fetch again")
            held, count, owner = self._num_slots[place.slab], len(handoff.slots), f"handoff-{next(self._numbers)}"
            if held + count > place.max_slots:
                raise PoolExhausted(f"wanted {count} slots in the arena for blocks of a GPU, but hand-offs hold {held}")
            ticket = place.pool.reserve(count, owner, tenant=handoff.place.tenant)
            self.moves[claim_id] = Move(place, ticket.write_id, owner, ints_in(ticket.packed_slots))
            self._num_slots[place.slab] += count
            return self.moves[claim_id].slots

    def moved(self, claim_id: int) -> None:
        """Note that the mover no longer writes to the slots that `move` claimed."""
        with self._lock:
            if (move := self.moves.get(claim_id)) is not None:
                move.busy = False
                self._end_move(claim_id, move)

    def _end_move(self, claim_id: int, move: Move) -> None:
        if move.over and not move.busy:
            del self.moves[claim_id]
            self._num_slots[move.place.slab] -= len(move.slots)
            move.place.pool.abort_store(move.write_id, move.owner)

    def holds(self, owner: str) -> bool:
        """Return whether an owner has a hand-off, or a claim on one."""
        with self._lock:
            return any(owner in (handoff.owner, handoff.claim_owner) for handoff in self.handoffs.values())

    def expire(self, now_s: float) -> list[int]:
        """End every claim and every hand-off that has expired; return the ids of those claims."""
        with self._lock:
            late = [handoff for handoff in self.claims.values() if handoff.claim_deadline_s < now_s]
            claim_ids = [handoff.claim_id for handoff in late]
            for handoff in late:
                self._end_claim(handoff, "")
            for handoff in [h for h in self.handoffs.values() if h.deadline_s < now_s and not h.over]:
                self._end(handoff, "expired")
            return claim_ids

    def end_cleared(self, version_of: Callable[[bytes], int]) -> None:
        """End every hand-off of blocks from before their namespace's last clearing that nobody reads.

        Args:
            version_of: returns a namespace's last clearing, as this node knows it.
        """
        with self._lock:
            for handoff in [h for h in self.handoffs.values() if not (h.claim_id or h.over)]:
                if handoff.version != version_of(handoff.namespace):
                    self._end(handoff, "cleared")

    def _end_claim(self, handoff: Handoff, over: str) -> None:
        del self.claims[handoff.claim_id]
        if over == "used":
            self._num_handed_over[handoff.namespace] += len(handoff.slots)
        if (move := self.moves.get(handoff.claim_id)) is not None:
            move.over = True
            self._end_move(handoff.claim_id, move)
        handoff.claim_id, handoff.claim_owner, handoff.claim_deadline_s = 0, "", float("inf")
        handoff.over = over or handoff.over
        if handoff.over:
            self._end(handoff, handoff.over)

    def _end(self, handoff: Handoff, over: str) -> None:
        handoff.over = handoff.over or over
        if handoff.is_written or handoff.claim_id:
            return
        del self.handoffs[handoff.key]
        self._num_slots[handoff.place.slab] -= len(handoff.slots)
        handoff.place.pool.abort_store(handoff.write_id, handoff.write_owner)
        self._remember(handoff.key, handoff.over)

    def _remember(self, key: bytes, over: str) -> None:
        self.over[key] = over
        if len(self.over) > _MAX_REMEMBERED:
            self.over.popitem(last=False)

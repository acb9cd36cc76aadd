"""What this node's clients have published for hand-offs: filled slots that nobody can look up.

To the pool a published block is being written and never will be done: no lookup finds it, no directory hears of it,
nothing evicts it, and giving the write up frees its slot at once. This table knows why each is kept, for whom, and
until when.

Slots belong to their publisher until it says that it is through with them, or is dead. What is withdrawn or cleared
before that is only marked: no reader gets it, and its slots go when the publisher's copies have ended. The same holds
for slots that a mover fills (`move`).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence

from kvstore.errors import BlockNotFound, InvalidRequest, PoolExhausted
from kvstore.handoff.records import CLAIM_BIT, NOT_READY, REASONS, Claim, Handoff, Move, Place
from kvstore.runtime import clock

#: Of how many tickets that are over it is remembered why.
_MAX_REMEMBERED = 4096


class HandoffTable:
    """The published blocks of one node. Any thread may call any verb."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handoffs: dict[bytes, Handoff] = {}
        self._claims: dict[int, Handoff] = {}
        self._moves: dict[int, Move] = {}
        self._over: OrderedDict[bytes, str] = OrderedDict()
        self._numbers = itertools.count(1)
        self._num_slots: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._handoffs)

    @property
    def num_slots(self) -> int:
        """Slots that are held, in all places."""
        return self._num_slots.total()

    def prepare(
        self, key: bytes, writer: int, owner: str, namespace: bytes, version: int, num_blocks: int, place: Place
    ) -> Sequence[int]:
        """Claim slots for blocks that `owner` is going to write.

        They come back by `abort`, or when the owner is gone; before `complete` never in another way.

        Args:
            key: of the ticket.
            writer: a number that only the publisher knows, other than the key: who names it speaks for the copies.
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
            ticket = place.pool.reserve(num_blocks, write_owner)
            self._handoffs[key] = Handoff(
                key, writer, place, namespace, version, owner, write_owner, ticket.write_id, ticket.slots
            )  # fmt: skip
            self._num_slots[place.slab] += num_blocks
            return ticket.slots

    def complete(self, key: bytes, writer: int, owner: str, deadline_s: float) -> bool:
        """Say that all bytes are in place; from now on `owner` keeps them, until `deadline_s` at most.

        The owner may be another than before: a client prepares on one connection and keeps on another.

        Returns:
            False when `writer` writes no such hand-off, or it was withdrawn or cleared meanwhile: its slots are free.
        """
        with self._lock:
            handoff = self._written_by(key, writer)
            if handoff is None:
                return False
            handoff.is_written = False
            if handoff.over:
                self._end(handoff, handoff.over)
                return False
            handoff.owner, handoff.deadline_s = owner, deadline_s
            return True

    def abort(self, key: bytes, writer: int) -> bool:
        """Say that the publisher failed and nothing of it writes any more: its slots are free, the ticket is void.

        That `complete` came first, or that the slots were never asked for, makes no difference to the ticket.

        Returns:
            Whether `writer` had such a hand-off.
        """
        with self._lock:
            handoff = self._handoffs.get(key)
            if handoff is None:
                self._void_unused(key)
                return False
            if handoff.writer != writer:
                return False
            handoff.is_written = False
            self._end(handoff, "withdrawn")
            return True

    def withdraw(self, key: bytes) -> bool:
        """Take blocks back: no reader gets them from now on, and their slots go once nobody writes or reads them.

        Returns:
            Whether this call voided the ticket: its blocks are taken back, or, if there never were any of that key,
            nobody publishes under it any more. False when it was over before.
        """
        with self._lock:
            handoff = self._handoffs.get(key)
            if handoff is None:
                return self._void_unused(key)
            if handoff.over:
                return False
            self._end(handoff, "withdrawn")
            return True

    def _state(self, key: bytes) -> str | None:
        """Return what became of a ticket, for an error; None when nobody has used it."""
        handoff = self._handoffs.get(key)
        over = self._over.get(key) if handoff is None else handoff.over
        if over:
            return "have been fetched" if over == "used" else f"are given up ({over})"
        if handoff is None:
            return None
        return "are being published" if handoff.is_written else "are published and wait for their fetch"

    def _written_by(self, key: bytes, writer: int) -> Handoff | None:
        handoff = self._handoffs.get(key)
        return handoff if handoff is not None and handoff.is_written and handoff.writer == writer else None

    def _void_unused(self, key: bytes) -> bool:
        """Have nobody publish under a key; returns whether anybody might have."""
        if key in self._over:
            return False
        self._remember(key, "withdrawn")
        return True

    def claim(
        self, key: bytes, owner: str, namespace: bytes, version: int, deadline_s: float, *, is_early: bool = False
    ) -> Claim | str:
        """Give one reader the right to the blocks of a ticket, or say why not.

        Args:
            key: of the ticket.
            owner: the reader.
            namespace: the reader's.
            version: the namespace's last clearing, as this node knows it.
            deadline_s: the slots keep their bytes until then, unless the reader says before that it is through.
            is_early: the ticket may come before its blocks are published.
        """
        with self._lock:
            handoff = self._handoffs.get(key)
            if handoff is not None and handoff.version != version and not handoff.claim_id:
                self._end(handoff, "cleared")
            if handoff is not None and handoff.over:
                return REASONS[handoff.over]
            if key in self._over:
                return REASONS[self._over[key]]
            is_written = handoff is not None and handoff.is_written and handoff.namespace == namespace
            if is_written or (handoff is None and is_early):
                return NOT_READY
            if handoff is None or handoff.namespace != namespace:
                return "not_found: this store has no such ticket; it may be forged, or too long over"
            if handoff.claim_id:
                return "used: another fetch of this ticket is under way"
            if handoff.deadline_s < clock.now_s():
                self._end(handoff, "expired")
                return REASONS["expired"]
            handoff.claim_id = CLAIM_BIT | next(self._numbers)
            handoff.claim_owner, handoff.claim_deadline_s = owner, deadline_s
            self._claims[handoff.claim_id] = handoff
            return Claim(handoff.claim_id, handoff.slots, handoff.place.slab, handoff.place.generation)

    def end_claim(self, claim_id: int, owner: str, *, used: bool) -> bool:
        """A reader is through: if the blocks arrived (`used`) their slots are free, else they may be claimed again.

        Returns:
            False when `owner` has no such claim (any more); nothing changed.
        """
        with self._lock:
            handoff = self._claims.get(claim_id)
            if handoff is None or handoff.claim_owner != owner:
                return False
            self._end_claim(handoff, "used" if used else "")
            return True

    def release_owner(self, owner: str) -> int:
        """Take back what a client published, was writing or was reading that is gone; returns how many hand-offs."""
        with self._lock:
            read = [handoff for handoff in self._claims.values() if handoff.claim_owner == owner]
            for handoff in read:
                self._end_claim(handoff, "")
            owned = [h for h in self._handoffs.values() if h.owner == owner and (h.is_written or not h.over)]
            for handoff in owned:
                handoff.is_written = False
                self._end(handoff, "owner_gone")
            return len(read) + len(owned)

    def lose_stages(self) -> int:
        """The mover is gone, and with it every block in a stage, whoever reads it; returns how many hand-offs.

        Publishers may go on to write in what they have mapped of a stage, but no slot of its pool is given out again.
        """
        with self._lock:
            for claim_id, move in list(self._moves.items()):
                move.busy = False
                self._end_move(claim_id, move)
            lost = [handoff for handoff in self._handoffs.values() if handoff.place.slab]
            for handoff in lost:
                handoff.is_written, handoff.over = False, handoff.over or "peer_lost"
                if handoff.claim_id:
                    self._end_claim(handoff, "")
                else:
                    self._end(handoff, handoff.over)
            return len(lost)

    def move(self, claim_id: int, place: Place) -> Sequence[int]:
        """Claim slots in another place for blocks under a claim, which a mover then copies there.

        Raises:
            PoolExhausted: there is no room; nothing changed.
            BlockNotFound: there is no such claim any more; nothing changed.
        """
        with self._lock:
            handoff = self._claims.get(claim_id)
            if handoff is None:
                raise BlockNotFound("the claim on these blocks is over; fetch again")
            held, count, owner = self._num_slots[place.slab], len(handoff.slots), f"handoff-{next(self._numbers)}"
            if held + count > place.max_slots:
                raise PoolExhausted(f"wanted {count} slots in the arena for blocks of a GPU, but hand-offs hold {held}")
            ticket = place.pool.reserve(count, owner)
            self._moves[claim_id] = Move(place, ticket.write_id, owner, ticket.slots)
            self._num_slots[place.slab] += count
            return ticket.slots

    def moved(self, claim_id: int) -> None:
        """No mover writes any more to what `move` claimed."""
        with self._lock:
            if (move := self._moves.get(claim_id)) is not None:
                move.busy = False
                self._end_move(claim_id, move)

    def _end_move(self, claim_id: int, move: Move) -> None:
        if move.over and not move.busy:
            del self._moves[claim_id]
            self._num_slots[move.place.slab] -= len(move.slots)
            move.place.pool.abort_store(move.write_id, move.owner)

    def holds(self, owner: str) -> bool:
        """Whether an owner has published something, or reads it."""
        with self._lock:
            return any(owner in (handoff.owner, handoff.claim_owner) for handoff in self._handoffs.values())

    def expire(self, now_s: float) -> list[int]:
        """End every claim and every hand-off whose time is over; returns the ids of those claims."""
        with self._lock:
            late = [handoff for handoff in self._claims.values() if handoff.claim_deadline_s < now_s]
            claim_ids = [handoff.claim_id for handoff in late]
            for handoff in late:
                self._end_claim(handoff, "")
            for handoff in [h for h in self._handoffs.values() if h.deadline_s < now_s and not h.over]:
                self._end(handoff, "expired")
            return claim_ids

    def _end_claim(self, handoff: Handoff, over: str) -> None:
        del self._claims[handoff.claim_id]
        if (move := self._moves.get(handoff.claim_id)) is not None:
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
        del self._handoffs[handoff.key]
        self._num_slots[handoff.place.slab] -= len(handoff.slots)
        handoff.place.pool.abort_store(handoff.write_id, handoff.write_owner)
        self._remember(handoff.key, handoff.over)

    def _remember(self, key: bytes, over: str) -> None:
        self._over[key] = over
        if len(self._over) > _MAX_REMEMBERED:
            self._over.popitem(last=False)

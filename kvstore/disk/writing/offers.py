"""Define what is offered to the disk: blocks of memory, and why they are written. No locking here."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.blocks.grants import HeldBlock
from kvstore.pool.tenants.limits import SHARED

#: Blocks that one turn of a thread writes at most, and one of so many of the memory: saves must find others to evict.
MOST_BLOCKS, LEAST_SHARE = 256, 32


class OfferKind(enum.Enum):
    """Why blocks are offered to the disk, and so what they need there."""

    #: They became readable: what the disk lacks before them is written first.
    SAVED = enum.auto()
    #: They are before others that were saved.
    BEFORE = enum.auto()
    #: What is before them was offered first; where the disk has not taken it, they are left out.
    BEHIND = enum.auto()
    #: They are about to be evicted from memory, which has what is before them.
    VICTIMS = enum.auto()


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks to write: slots of memory, hashes, and what was known of their namespace before they were pinned."""

    namespace: bytes
    slots: list[int]
    #: A slot may have another block by its turn, which was offered for itself.
    hashes: list[bytes]
    num_clears: int
    version: int
    kind: OfferKind
    #: One for each block; none if the write takes the next ones.
    generations: Sequence[int] = ()
    #: Whether the first block is written without the one before it: memory cannot tell what that is.
    is_unlinked: bool = False
    #: For BEFORE: the tenant that saved what is behind them. It pays where their owner has no room.
    tenant: str = SHARED
    #: Whether those that are left out are counted; they are not if they were before.
    is_counted: bool = True
    #: Whether a write of them failed before, or of what is behind them: they are not tried once more at once.
    is_again: bool = False
    #: Why some of these blocks, or of those before them, were left out; shared with those BEHIND.
    why: list[str] = field(default_factory=list)

    def needs_parent(self, first: HeldBlock) -> bool:
        """Return whether a run of these blocks is written only behind the block before it; `first` is its first one."""
        is_first = self.is_unlinked and first.block_hash == self.hashes[0]
        return self.kind is not OfferKind.VICTIMS and not is_first

    def split(self, most: int) -> tuple[Offer, Offer]:
        """Return the leading blocks, at most so many, and the others."""
        slots, hashes, generations = self.slots, self.hashes, self.generations
        return (
            replace(self, slots=slots[:most], hashes=hashes[:most], generations=generations[:most]),
            replace(self, slots=slots[most:], hashes=hashes[most:], generations=generations[most:], is_unlinked=False),
        )

    def held(self, blocks: Iterable[HeldBlock]) -> list[HeldBlock]:
        """Return those of the blocks in the offer's slots that were offered."""
        offered = set(self.hashes)
        return [block for block in blocks if block.block_hash in offered]

    def part(self, blocks: Sequence[HeldBlock], kind: OfferKind, why: list[str] | None = None) -> Offer:
        """Return an offer of some of these blocks."""
        slots, hashes = [block.slot for block in blocks], [block.block_hash for block in blocks]
        numbers, why = self.generation_of(), [] if why is None else why
        generations = [numbers[slot] for slot in slots] if numbers else []
        return replace(self, slots=slots, hashes=hashes, kind=kind, generations=generations, is_unlinked=False, why=why)

    def generation_of(self) -> dict[int, int]:
        """Return the generations by slot; empty if the write takes the next ones."""
        return dict(zip(self.slots, self.generations, strict=True)) if self.generations else {}


class OfferQueue:
    """Offers that wait for their turn, and how many blocks they are."""

    def __init__(self) -> None:
        self._offers: deque[Offer] = deque()
        #: All blocks, and those of them that are before others.
        self.num_blocks = self.num_before = 0

    def put(self, offers: Sequence[Offer], *, is_first: bool = False) -> None:
        """Put offers into the queue, in this order; before all others if `is_first`."""
        if is_first:
            self._offers.extendleft(reversed(offers))
        else:
            self._offers.extend(offers)
        for offer in offers:
            self._count(offer, len(offer.slots))

    def take(self, most: int) -> Offer | None:
        """Take the first offer, of which at most so many blocks; None if nothing waits."""
        if not self._offers:
            return None
        offer = self._offers.popleft()
        self._count(offer, -len(offer.slots))
        if len(offer.slots) > most:
            offer, rest = offer.split(most)
            self.put([rest], is_first=True)
        return offer

    def take_all(self) -> list[Offer]:
        """Take all offers."""
        offers = list(self._offers)
        self._offers.clear()
        self.num_blocks = self.num_before = 0
        return offers

    def _count(self, offer: Offer, num_more: int) -> None:
        self.num_blocks += num_more
        self.num_before += num_more if offer.kind is OfferKind.BEFORE else 0

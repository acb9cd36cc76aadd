"""Replay a trace against nodes with memory and disk that give each other blocks: the store's pools, and no bytes.

The calls to the pools are those of a real store, in its order: what is in memory is pinned, then the own disk is read
(kvstore.disk.reader), then another node is asked, which reads its own disk first (kvstore.remote.fetch). What became
readable in memory is written to the disk behind each request (kvstore.disk.writing.writer).
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.grants import HeldBlock, chain_of
from kvstore.blocks.indexes import ints_in
from kvstore.disk.places import Places
from kvstore.disk.records import Record
from kvstore.disk.restore import restore, usable
from kvstore.disk.writing.chains import Rewrites, allowed, put_off, runs_to_write
from kvstore.disk.writing.offers import LEAST_SHARE, MOST_BLOCKS, Offer, OfferKind
from kvstore.errors import ChainBroken
from kvstore.pool.pool import Pool
from kvstore.replay.traces import Found, TierOutcome

_OWNER, _READER, _WRITER = "replay", "disk-read", "disk-writer"
#: A lease ends with its request, so no deadline is ever looked at.
_NEVER_S = float("inf")
#: Other nodes that one load asks at most, as in kvstore.remote.fetch.
_MOST_PEERS = 4
#: Makes an empty pool of so many blocks; the second argument is told what became readable.
MakePool = Callable[[int, Callable[[bytes, list[int], str], None] | None], Pool]


class TierNode:
    """One node: its memory, its disk, and what waits to be written from one to the other.

    Args:
        make_pool: makes the pool of the memory; that of a disk is always one with LRU.
        memory_blocks: capacity of the memory.
        disk_blocks: capacity of the disk; 0 for none.
    """

    def __init__(self, make_pool: MakePool, memory_blocks: int, disk_blocks: int) -> None:
        self._make_pool, self._memory_blocks, self._disk_blocks = make_pool, memory_blocks, disk_blocks
        #: Of blocks of up to 64 KiB, as the writer of a real store takes them.
        self._most_in_turn = max(1, min(MOST_BLOCKS, memory_blocks // LEAST_SHARE))
        self.num_evicted = self.num_disk_evicted = self.num_written = self.num_read = 0
        self.dropped: Counter[str] = Counter()
        #: The index file: the record that was written last at each place.
        self._index: dict[int, Record] = {}
        self._begin()

    def _begin(self) -> None:
        self._offers = list[Offer]()
        self.memory = self._make_pool(self._memory_blocks, self._offered if self._disk_blocks else None)
        self.disk, self._places = Pool(self._disk_blocks), Places(self._disk_blocks)
        self._rewrites = Rewrites(self._disk_blocks)

    def _offered(self, namespace: bytes, slots: list[int], owner: str) -> None:
        if owner != _READER:  # Those come from the disk.
            hashes = self.memory.hashes_of(slots)
            self._offers.append(Offer(namespace, slots, hashes, num_clears=0, version=0, kind=OfferKind.SAVED))

    def restart(self) -> None:
        """Lose the memory, and fill the pool of the disk from the index."""
        self.count_evictions()
        old = usable(list(self._index.values()), self._disk_blocks, 0, lambda namespace: 0)
        self._begin()
        restore(self.disk, self._places, old, defaultdict(int))

    def count_evictions(self) -> None:
        """Add those of the present pools; once, when they end."""
        self.num_evicted += self.memory.stats().num_evicted
        self.num_disk_evicted += self.disk.stats().num_evicted

    def num_here(self, chain: BlockHashes) -> int:
        """Return how many leading blocks are in memory and then on disk."""
        num_local = self.memory.lookup(chain)
        return num_local + self.disk.lookup(chain.tail(num_local))

    def num_known(self, chain: BlockHashes) -> int:
        """Return how many leading blocks are on either tier, as the directory sees it."""
        count = 0
        while more := self.num_here(chain.tail(count)):
            count += more
        return count

    def load(self, chain: BlockHashes, peers: Sequence[TierNode]) -> Found:
        """Bring the leading blocks of a request into memory, and release them."""
        grant = self.memory.pin_prefix(chain, _OWNER, _NEVER_S)
        num_ready, num_disk, num_peer = self._fill(chain, grant.lease_id, grant.num_blocks, list(peers))
        self.memory.release(grant.lease_id, _OWNER)
        # In memory were also blocks behind some that were not: a peer had asked for these alone.
        return Found(memory=num_ready - num_disk - num_peer, disk=num_disk, peer=num_peer)

    def save(self, chain: BlockHashes) -> None:
        """Store the blocks of a request that are not here, as far as there is room."""
        ticket = self.memory.prepare_store(chain, _OWNER)
        if ticket.write_id:
            self.memory.complete_store(ticket.write_id, _OWNER)

    def _fill(self, chain: BlockHashes, lease_id: int, num_ready: int, peers: list[TierNode]) -> tuple[int, int, int]:
        """Bring blocks and pin them, as kvstore.remote.fetch does.

        Returns:
            (how many are ready, how many of them came from the disk, how many from peers).
        """
        memory, num_disk, num_peer, disk_tried_at, num_asked = self.memory, 0, 0, -1, 0
        while num_ready < len(chain):
            rest, limit = chain.tail(num_ready), 0
            if disk_tried_at != num_ready and self.disk.lookup(rest.head(1)):
                disk_tried_at = num_ready
                limit, num_read = self._read(rest)
                num_disk += num_read
            # What came from the disk, or was here behind blocks that came before.
            come = memory.pin_prefix(rest.head(limit) if limit else rest, _OWNER, _NEVER_S, lease_id).num_blocks
            if not come and num_asked < _MOST_PEERS and (peer := _best_peer(peers, rest)) is not None:
                peers.remove(peer)
                num_asked += 1
                come, num_new, is_full = self._fetch(rest, lease_id, peer)
                num_peer += num_new
                if is_full:
                    return num_ready + come, num_disk, num_peer
            elif not come:
                break
            num_ready += come
        return num_ready, num_disk, num_peer

    def _read(self, rest: BlockHashes) -> tuple[int, int]:
        """Read the run of the disk into memory; return how far it reaches now, and how many blocks were read."""
        grant = self.disk.pin_prefix(rest, _OWNER, _NEVER_S)
        ticket = self.memory.prepare_store(rest.head(grant.num_blocks), _READER, needs_parent=False)
        num_read = self.memory.complete_store(ticket.write_id, _READER) if ticket.write_id else 0
        self.disk.release(grant.lease_id, _OWNER)
        self.num_read += num_read
        return grant.num_blocks - ticket.num_refused if num_read else 0, num_read

    def _fetch(self, rest: BlockHashes, lease_id: int, peer: TierNode) -> tuple[int, int, bool]:
        """Take what a peer has; return how many blocks are pinned now, were read, and whether some found no room."""
        num_granted = peer.give(rest)
        ticket = self.memory.prepare_store(rest.head(num_granted), _OWNER, needs_parent=False)
        num_new = self.memory.complete_store(ticket.write_id, _OWNER) if ticket.write_id else 0
        reached = rest.head(num_granted - ticket.num_refused)
        come = self.memory.pin_prefix(reached, _OWNER, _NEVER_S, lease_id).num_blocks
        return come, num_new, ticket.num_refused > 0

    def give(self, rest: BlockHashes) -> int:
        """Have the blocks that a peer asks for in memory, which it reads; return how many there are."""
        memory, num_local = self.memory, self.memory.lookup(rest)
        num_disk = self.disk.lookup(rest.tail(num_local))
        brought = None
        if num_disk:
            head = rest.head(num_local + num_disk)
            brought = memory.pin_prefix(head, _OWNER, _NEVER_S)
            self._fill(head, brought.lease_id, brought.num_blocks, [])
        grant = memory.pin_prefix(rest, _OWNER, _NEVER_S)
        for lease in (grant, brought):
            if lease is not None:
                memory.release(lease.lease_id, _OWNER)
        return grant.num_blocks

    def write_behind(self) -> None:
        """Write what became readable in memory since the last call, in that order."""
        queue, self._offers = deque(self._offers), []
        while queue:
            offer = queue.popleft()
            if len(offer.slots) > self._most_in_turn:
                offer, rest = offer.split(self._most_in_turn)
                queue.appendleft(rest)
            lease_id, blocks = self.memory.hold(offer.slots, offer.namespace, _WRITER)
            held, num_done = offer.held(blocks), 0
            self._leave_out(offer, "evicted", len(offer.slots) - len(held))
            for run in runs_to_write(self.disk, offer, held):
                if not self._write(offer, run):
                    behind = held[num_done + len(run) :]
                    queue.extendleft(reversed(put_off(self.memory, self.disk, offer, run, behind)))
                    break
                num_done += len(run)
            if lease_id:
                self.memory.release(lease_id, _WRITER)

    def _write(self, offer: Offer, run: list[HeldBlock]) -> bool:
        """Write blocks that follow each other; return False, and do nothing, if they are to be put off."""
        disk, places, num_all = self.disk, self._places, len(run)
        run, num_taken = allowed(disk, self._rewrites, offer, run)
        self._leave_out(offer, "disk_full", num_all - len(run))
        if not run:
            return True
        try:
            ticket = disk.prepare_store(chain_of(run), _WRITER, needs_parent=offer.needs_parent(run[0]))
        except ChainBroken:
            self._rewrites.give_back(num_taken)
            if offer.kind is OfferKind.SAVED:
                self._rewrites.earn(len(run))
            else:
                self._leave_out(offer, [*offer.why, "gap"][0], len(run))
            return offer.kind is not OfferKind.SAVED
        self._leave_out(offer, "disk_full", ticket.num_refused)
        self._rewrites.give_back(max(num_taken - len(ticket.packed_indexes) // 4, 0))
        if not ticket.write_id:
            return True
        for index, slot in zip(
            ints_in(ticket.packed_indexes).tolist(), ints_in(ticket.packed_slots).tolist(), strict=True
        ):
            record = _record(run[index], places.place[slot], places.take_generations(1)[0])
            places.record[slot] = self._index[record.place] = record
        num_published = disk.complete_store(ticket.write_id, _WRITER)
        self.num_written += num_published
        if offer.kind is OfferKind.SAVED:
            self._rewrites.earn(num_published)
        return True

    def _leave_out(self, offer: Offer, reason: str, num_blocks: int) -> None:
        if num_blocks and offer.kind is OfferKind.BEFORE:
            offer.why.append(reason)
        elif num_blocks:
            self.dropped[reason] += num_blocks


def _record(block: HeldBlock, place: int, generation: int) -> Record:
    """Return what the index has of a block; of bytes that are not there, it has none."""
    return Record(
        place=place, generation=generation, depth=block.depth, version=0, num_bytes=0, block_hash=block.block_hash,
        parent=block.parent, namespace=block.namespace, checksum=b"",
    )  # fmt: skip


def _best_peer(peers: Sequence[TierNode], rest: BlockHashes) -> TierNode | None:
    """Return the node that has most of a run; None if none has its first block."""
    known = [(peer.num_known(rest), -at) for at, peer in enumerate(peers)]
    count, at = max(known, default=(0, 0))
    return peers[-at] if count else None


def outcome_of(nodes: Sequence[TierNode], found: Sequence[Found]) -> TierOutcome:
    """Sum up what nodes did; their evictions are counted."""
    dropped: Counter[str] = Counter()
    for node in nodes:
        dropped.update(node.dropped)
    return TierOutcome(
        found=found,
        num_disk_evictions=sum(node.num_disk_evicted for node in nodes),
        num_disk_written=sum(node.num_written for node in nodes),
        num_disk_read=sum(node.num_read for node in nodes),
        dropped=dict(dropped),
    )


def hits_of(found: Sequence[Found]) -> array[int]:
    """Return the hits of each request."""
    return array("q", [each.num_blocks for each in found])

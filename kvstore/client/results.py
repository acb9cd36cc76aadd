"""What the client's calls return."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

from kvstore.blocks.shape import KVShape
from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.job import Job

#: Reasons that the text of a result names.
_MOST_REASONS = 4


class MissReason(Enum):
    """Why a block of a load is not usable.

    STORE_LOST: the store of this node has ended, so make a new client. DRAINING: the store lives, and grants nothing
    until it is undrained; the client stays usable. DISK: the disk refused, or the block's bytes there were damaged.
    """

    NOT_FOUND = "not_found"
    PEER_LOST = "peer_lost"
    TIMEOUT = "timeout"
    LEASE_EXPIRED = "lease_expired"
    POOL_FULL = "pool_full"
    CLEARED = "cleared"
    BUSY = "busy"
    ABANDONED = "abandoned"
    STORE_LOST = "store_lost"
    DRAINING = "draining"
    STALE = "stale"
    USED = "used"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    OWNER_GONE = "owner_gone"
    DISK = "disk"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFailure:
    """One block that a load did not deliver. Its tokens may hold anything and must be recomputed.

    Args:
        index: position in the hashes given to `load`.
        block_ids: the engine's blocks that hold its tokens: one, or several if the engine's blocks are smaller than the
            stored ones. A larger one is named in the failures of several blocks. Empty without an engine.
        reason: why it was not delivered.
        detail: one sentence for a log.
    """

    index: int
    block_ids: tuple[int, ...]
    reason: MissReason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """How a load ended.

    Args:
        num_blocks: usable prefix: blocks [0, num_blocks) of the hashes hold the right bytes, skipped blocks included.
        failed: one entry for each other block.
        num_local: blocks that were in this node's memory, or were brought there meanwhile by saves or for other loads.
        num_peer: blocks that were fetched from other nodes for this load.
        peers: the nodes they came from.
        num_bytes: bytes that came from other nodes for this load; those of this node's disk are not in it.
        num_descriptors: NIXL descriptors that their READs needed, after merging neighbours.
        read_s: seconds from the start of the first READ of another node to the end of the last one.
        num_locate_calls: how often the store asked the directory.
        num_lease_calls: how often it asked a peer.
        num_disk: blocks that were read from this node's disk for this load.
    """

    num_blocks: int
    failed: tuple[BlockFailure, ...] = ()
    num_local: int = 0
    num_peer: int = 0
    peers: tuple[str, ...] = ()
    num_bytes: int = 0
    num_descriptors: int = 0
    read_s: float = 0.0
    num_locate_calls: int = 0
    num_lease_calls: int = 0
    num_disk: int = 0

    def __str__(self) -> str:
        """Return what `repr` does, with the failures counted by their reason in place of a line for each block."""
        if not self.failed:
            return repr(self)
        counts = Counter(
            f"{each.reason.value}: {each.detail}" if each.detail else each.reason.value for each in self.failed
        )
        said = "; ".join(f"{count} blocks {reason}" for reason, count in counts.most_common(_MOST_REASONS))
        more = f"; and {len(counts) - _MOST_REASONS} reasons more" if len(counts) > _MOST_REASONS else ""
        return repr(replace(self, failed=())).replace("failed=()", f"failed=({said}{more})", 1)

    @property
    def failed_block_ids(self) -> frozenset[int]:
        """The engine's blocks that hold a token which was not delivered."""
        return frozenset(block_id for failure in self.failed for block_id in failure.block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult(LoadResult):
    """How a fetch ended: a load's result, with blocks counted from the ticket's first.

    Args:
        route: the memory that the blocks went through: "host" for the nodes' arenas, "gpu" for stages on GPUs.
        note: why not the other route, if a stage was attached and could not be used.
    """

    route: str = "host"
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """How a save ended.

    Args:
        num_blocks: blocks [0, num_blocks) are in the store now, written by this save or another. With several ranks,
            all parts are there. 0 when the namespace was cleared after the call of `save`.
        num_written: how many of them, or of their parts, this save wrote.
        num_refused: blocks at the end for which there was no slot; nothing of them is kept.
    """

    num_blocks: int
    num_written: int
    num_refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Blocks that `Client.pin` keeps in this node's memory until `Client.unpin`, or until the pin's time ends.

    Args:
        pin_id: the store's number for the pin; 0 when no block was here.
        num_blocks: blocks [0, num_blocks) of the hashes are kept.
        num_refused: stored blocks after them for which the quota of pins had no room.
    """

    pin_id: int
    num_blocks: int
    num_refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a lookup found. It is a hint for other nodes, and exact for this one at that moment.

    Args:
        num_local: usable prefix length, in blocks, in this node's memory.
        nodes: (node id, prefix length) of other nodes, longest first, on whichever tier.
        num_disk: blocks after these that are on this node's disk.
        disk_bytes_per_s: how fast loads read that disk lately; 0 if it was not measured yet.
    """

    num_local: int
    nodes: tuple[tuple[str, int], ...] = ()
    num_disk: int = 0
    disk_bytes_per_s: int = 0

    def worth_loading(self, shape: KVShape, prefill_tokens_per_s: float) -> Match:
        """Return what is left when reading the disk would take longer than computing the same tokens.

        Args:
            shape: of the blocks.
            prefill_tokens_per_s: how fast the engine computes a prompt; 0 if it is not known, then nothing is left out.
        """
        if not (prefill_tokens_per_s and self.disk_bytes_per_s):
            return self
        is_slow = shape.block_bytes / self.disk_bytes_per_s > shape.block_size / prefill_tokens_per_s
        return replace(self, num_disk=0) if is_slow else self

    @property
    def num_here(self) -> int:
        """Usable prefix on this node, in memory and then on disk, in blocks."""
        return self.num_local + self.num_disk

    @property
    def num_blocks(self) -> int:
        """Longest usable prefix anywhere, in blocks."""
        return max([self.num_here, *(count for _, count in self.nodes)])


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """Blocks that are being published.

    Args:
        ticket: valid at once: a fetch waits until the blocks are in place.
        job: done when they are in place, and the engine may reuse its blocks.
    """

    ticket: HandoffTicket
    job: Job[HandoffTicket]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRoute:
    """The route that a client's hand-offs take.

    Args:
        route: "gpu" from stage to stage, or "host" through the nodes' arenas.
        why_not: why it is "host".
        gb_per_s: rate of a warm READ from each named node; 0 for a node that cannot be reached from GPU to GPU.
    """

    route: str
    why_not: str = ""
    gb_per_s: dict[str, float] = field(default_factory=dict)

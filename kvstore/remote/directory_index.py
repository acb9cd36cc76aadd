"""Which nodes hold which blocks. There is a bit mask per hash, and for each holder its hashes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Most entries that one step removes; the other entries of a forgotten holder are removed in later steps.
SWEEP_BLOCKS = 1 << 14


@dataclass(slots=True)
class _Holder:
    node_id: str
    bit: int
    hashes: set[bytes]


class DirectoryIndex:
    """The blocks of each node, by the lives of its store. Any thread may call.

    A node may have several lives here at once: an announcement under way beside the one before it, or a store that
    falsely uses a node's id beside the real one. No life changes the entries of another.
    A forgotten life is not found any more; its entries are removed in steps, so that no call takes long.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._masks: dict[bytes, int] = {}
        self._holders: dict[tuple[str, int], _Holder] = {}
        #: Forgotten holders that still have entries; no live holder uses their bits.
        self._leaving: list[_Holder] = []
        self._used_bits = self._live_bits = 0

    def __len__(self) -> int:
        return len(self._masks)

    def nodes(self) -> list[str]:
        """Return the nodes that ever published and were not forgotten."""
        with self._lock:
            return sorted({node_id for node_id, _ in self._holders})

    def add(self, node_id: str, hashes: Iterable[bytes], life: int = 0) -> None:
        """Note that a node holds blocks."""
        with self._lock:
            holder, masks = self._holder(node_id, life), self._masks
            bit = holder.bit
            for block_hash in hashes:
                masks[block_hash] = masks.get(block_hash, 0) | bit
                holder.hashes.add(block_hash)

    def remove(self, node_id: str, hashes: Iterable[bytes], life: int = 0) -> None:
        """Note that a node no longer holds blocks."""
        with self._lock:
            holder = self._holder(node_id, life)
            for block_hash in hashes:
                if block_hash in holder.hashes:
                    holder.hashes.remove(block_hash)
                    self._drop(block_hash, holder.bit)

    def forget(self, node_id: str, life: int = 0) -> None:
        """Drop all blocks of one life of a node; do nothing if it has none."""
        with self._lock:
            holder = self._holders.pop((node_id, life), None)
            if holder is not None:
                self._live_bits &= ~holder.bit
                self._leaving.append(holder)
                self.sweep()

    @property
    def is_sweeping(self) -> bool:
        """Whether entries of forgotten lives are left."""
        return bool(self._leaving)

    def sweep(self, max_blocks: int = SWEEP_BLOCKS) -> None:
        """Remove at most `max_blocks` entries of forgotten lives."""
        with self._lock:
            while self._leaving:
                holder = self._leaving[-1]
                taken = min(max_blocks, len(holder.hashes))
                for _ in range(taken):
                    self._drop(holder.hashes.pop(), holder.bit)
                max_blocks -= taken
                if holder.hashes:
                    break
                self._leaving.pop()
                self._used_bits &= ~holder.bit

    def locate(self, hashes: Sequence[bytes]) -> list[tuple[str, int]]:
        """Return (node, length of the prefix it holds), longest first. Nodes that hold none are left out."""
        masks, lengths, count = self._masks, dict[str, int](), 0
        with self._lock:
            alive = masks.get(hashes[0], 0) & self._live_bits if hashes else 0
            while alive:
                still = alive & masks.get(hashes[count], 0) if count < len(hashes) else 0
                if still != alive:
                    # `count` grows, so the longest of a node's lives is written last.
                    lengths |= {h.node_id: count for h in self._holders.values() if h.bit & alive & ~still}
                    alive = still
                count += 1
        return sorted(lengths.items(), key=lambda item: (-item[1], item[0]))

    def _holder(self, node_id: str, life: int) -> _Holder:
        holder = self._holders.get((node_id, life))
        if holder is None:
            bit = ~self._used_bits & (self._used_bits + 1)  # The lowest that is free.
            holder = self._holders[node_id, life] = _Holder(node_id, bit, set())
            self._used_bits |= bit
            self._live_bits |= bit
        return holder

    def _drop(self, block_hash: bytes, bit: int) -> None:
        mask = self._masks[block_hash] & ~bit
        if mask:
            self._masks[block_hash] = mask
        else:
            del self._masks[block_hash]

"""Events as vLLM's subscribers decode them (vllm/distributed/kv_events.py): names and order of fields are the wire.

The store knows hashes and no tokens, so `token_ids` is empty, and `block_size` is 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from msgspec import Struct

from kvstore.blocks.chain import event_hash

#: Most hashes of one event, and of one batch: some 36 KiB.
MOST_HASHES = 4096


class BlockStored(Struct, tag=True, omit_defaults=True, kw_only=True, frozen=True):
    """A run of blocks that became findable, each the child of the one before.

    Args:
        block_hashes: of the run, the low 64 bits of each.
        parent_block_hash: of the block before the run; None where the run begins at the root of its chain.
        token_ids: always empty.
        block_size: always 0, for unknown.
        lora_id: always None.
        medium: "CPU" or "STORAGE".
        lora_name: always None; an adapter is part of the hashes.
        locality: always "LOCAL", as seen from the publisher.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    locality: str | None = None


class BlockRemoved(Struct, tag=True, omit_defaults=True, kw_only=True, frozen=True):
    """Blocks that can no longer be found in one medium: evicted, cleared, or damaged on the disk."""

    block_hashes: list[int]
    medium: str
    locality: str | None = None


class AllBlocksCleared(Struct, tag=True, omit_defaults=True, frozen=True):
    """No block of this publisher can be found, in any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, array_like=True, omit_defaults=True, frozen=True):
    """The payload of one message.

    Args:
        ts: when it was made, in seconds since 1970.
        events: in order.
        data_parallel_rank: always 0; subscribers of vLLM expect one.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def stored(hashes: Sequence[bytes], parents: Sequence[bytes], medium: str) -> Iterator[BlockStored]:
    """Yield the events of blocks, given with the hash before each, b"" at a root."""
    begin = 0
    for at in range(1, len(hashes) + 1):
        if at < len(hashes) and parents[at] == hashes[at - 1] and at - begin < MOST_HASHES:
            continue
        yield BlockStored(
            block_hashes=[event_hash(own) for own in hashes[begin:at]],
            parent_block_hash=event_hash(parents[begin]) if parents[begin] else None,
            token_ids=(),
            block_size=0,
            lora_id=None,
            medium=medium,
            lora_name=None,
            locality="LOCAL",
        )
        begin = at


def removed(hashes: Collection[bytes], medium: str) -> Iterator[BlockRemoved]:
    """Yield the events of blocks that went."""
    rest = map(event_hash, hashes)
    while piece := list(islice(rest, MOST_HASHES)):
        yield BlockRemoved(block_hashes=piece, medium=medium, locality="LOCAL")


def in_chains(hashes: Sequence[bytes], parents: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return the blocks in another order: each behind its parent, and chains in one piece where they can be."""
    here, children, tops = set(hashes), dict[bytes, list[bytes]](), list[tuple[bytes, bytes]]()
    for own, parent in zip(hashes, parents, strict=True):
        if parent in here:
            children.setdefault(parent, []).append(own)
        else:
            tops.append((own, parent))
    ordered, above, todo = list[bytes](), list[bytes](), tops[::-1]
    while todo:
        own, parent = todo.pop()
        ordered.append(own)
        above.append(parent)
        todo += [(child, own) for child in children.get(own, ())]
    return ordered, above

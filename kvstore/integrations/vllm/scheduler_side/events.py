"""KV cache events of one engine in vLLM's format: blocks that its saves stored, and those gone since."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.client.client import Client
from kvstore.integrations.vllm.scheduler_side.subscription import Subscription

logger = logging.getLogger(__name__)

#: The most blocks remembered as told; some 50 MB. Beyond it the oldest are forgotten, and may be told again.
_MOST_TOLD = 1 << 18
#: The most blocks remembered as gone: a worker may report a block that was evicted since.
_MOST_GONE = 1 << 16


class StoreEvents:
    """Events for vLLM's publisher; the scheduler's thread alone calls, but for `opened`.

    Each block is told once until it is removed. A subscriber that reads this engine alone finds the parent of each run
    among the blocks told before, also if another engine stored the parent.

    Args:
        is_on: whether vLLM publishes events; if not, calls have no effect.
        most_told: how many blocks are remembered.
    """

    def __init__(self, is_on: bool, most_told: int = _MOST_TOLD) -> None:
        self.is_on, self._most_told = is_on, most_told
        self._told: dict[bytes, None] = {}
        self._gone: dict[bytes, None] = {}
        self._subscription = Subscription()
        self._events: list[Any] = []

    def opened(self, client: Client) -> None:
        """Hear of evictions, if the client's store publishes events, too; called on any thread."""
        if self.is_on:
            self._subscription.opened(client)

    def close(self) -> None:
        """Hear of nothing any more; may be called again."""
        self._subscription.close()

    def stored(self, space: Namespace, request: Any, hashes: BlockHashes) -> None:
        """Note that blocks of a request are in the store, from the root of their chain on."""
        if not self.is_on:
            return
        self._read()
        for begin, end in _runs([own not in self._told and own not in self._gone for own in hashes]):
            self._events.append(_stored(space, request, hashes, begin, end))
            self._told.update(dict.fromkeys(hashes[begin:end]))
        _shorten(self._told, self._most_told)

    def removed(self, hashes: Collection[bytes]) -> None:
        """Note that blocks are not in this node's store any more; those that were not told are left out."""
        gone = [own for own in hashes if own in self._told]
        for own in gone:
            del self._told[own]
        if gone:
            self._events.append(_made(BlockRemoved, block_hashes=gone, medium="CPU", locality="LOCAL"))

    def cleared(self) -> None:
        """Note that no block is in the store any more.

        The blocks are named: AllBlocksCleared has no medium, and would be read as the end of the engine's own, too.
        """
        self.removed(list(self._told))

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        if self.is_on:
            self._read()
        events, self._events = self._events, []
        return events

    def _read(self) -> None:
        """Take in what the store of this node published. An error ends the subscription, not the engine."""
        try:
            for change in self._subscription.changes():
                self._take_in(change)
        except Exception:
            logger.exception("evictions of the store are not heard of any more")
            self.close()
            self.cleared()

    def _take_in(self, change: tuple[bool, list[Any]] | None) -> None:
        if change is None:
            self.cleared()
            self._gone.clear()
            return
        is_here, hashes = change
        if is_here:
            for own in hashes:
                self._gone.pop(own, None)
        else:
            self.removed(hashes)
            self._gone.update(dict.fromkeys(hashes))
            _shorten(self._gone, _MOST_GONE)


def _shorten(known: dict[bytes, None], most: int) -> None:
    while len(known) > most:
        del known[next(iter(known))]


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield where each run of true flags begins and ends."""
    begin = None
    for at, flag in enumerate((*flags, False)):
        if flag and begin is None:
            begin = at
        elif not flag and begin is not None:
            yield begin, at
            begin = None


def _stored(space: Namespace, request: Any, hashes: BlockHashes, begin: int, end: int) -> Any:
    """Return the event of blocks [begin, end). The hashes are the store's, and differ from those in vLLM's own events.

    They are of the stored block size.
    """
    size, lora = space.shape.block_size, request.lora_request
    return _made(
        BlockStored,
        block_hashes=list(hashes[begin:end]),
        parent_block_hash=hashes[begin - 1] if begin else None,
        token_ids=list(request.all_token_ids[begin * size : end * size]),
        block_size=size,
        lora_id=getattr(lora, "adapter_id", None),
        medium="CPU",
        lora_name=lora.lora_name if lora else None,
        extra_keys=_extra_keys(request, size, begin, end),
        locality="LOCAL",
    )


def _extra_keys(request: Any, size: int, begin: int, end: int) -> list[Any] | None:
    """Return what vLLM hashes beside the tokens of each block; None for text alone."""
    has_embeds = getattr(request, "prompt_embeds", None) is not None
    if not (request.lora_request or request.mm_features or request.cache_salt or has_embeds):
        return None
    found, media = list[Any](), 0
    for block in range(begin, end):
        keys, media = generate_block_hash_extra_keys(request, block * size, (block + 1) * size, media)
        found.append(keys)
    return found


def _made(kind: Any, **fields: Any) -> Any:
    """Return an event without the fields that this vLLM does not know."""
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})

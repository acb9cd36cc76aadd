"""KV cache events of one engine in vLLM's format: blocks that it knows to be in the store, and those gone since.

Routers count a block only under the engine's own hash, behind the engine's own blocks. So events name blocks of the
engine's size by these hashes, in the form that the engine's events have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from kvstore.blocks.chain import event_hash
from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.client.client import Client
from kvstore.integrations.vllm.scheduler_side.subscription import Subscription

logger = logging.getLogger(__name__)

#: The most blocks remembered as told; some 60 MB. Beyond it the oldest are forgotten, and may be told again.
_MOST_TOLD = 1 << 18
#: The most blocks remembered as gone: a worker may report a block that was evicted since.
_MOST_GONE = 1 << 16


class StoreEvents:
    """Events for vLLM's publisher; the scheduler's thread alone calls, but for `opened`.

    Each block is told once until it is removed. A subscriber that reads this engine alone finds the parent of each run
    among the blocks told before, also if another engine stored the parent.

    Args:
        is_on: whether vLLM publishes events; if not, calls have no effect.
        block_size: tokens of vLLM's blocks.
        most_told: how many blocks are remembered.
    """

    def __init__(self, is_on: bool, block_size: int, most_told: int = _MOST_TOLD) -> None:
        self.is_on, self._block_size, self._most_told = is_on, block_size, most_told
        #: Stored blocks, as the store's events name them, and what was told of each: the engine's blocks that need it.
        self._told: dict[int, list[Any]] = {}
        self._gone: dict[int, None] = {}
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
        stored_size, own_size = space.shape.block_size, self._block_size
        # One of the two sizes divides the other; the larger one is told or not as a whole.
        num_stored, num_own = max(1, own_size // stored_size), max(1, stored_size // own_size)
        names = list(map(event_hash, hashes))
        pieces = [names[at : at + num_stored] for at in range(0, len(names) - num_stored + 1, num_stored)]
        pieces = pieces[: len(request.block_hashes) // num_own]
        for begin, end in _runs([self._is_news(piece) for piece in pieces]):
            event = _stored(request, own_size, begin * num_own, end * num_own)
            self._events.append(event)
            for at, piece in enumerate(pieces[begin:end]):
                told = event.block_hashes[at * num_own : (at + 1) * num_own]
                self._told.update(dict.fromkeys(piece, told))
        _shorten(self._told, self._most_told)

    def removed(self, names: Iterable[int]) -> None:
        """Note that stored blocks are not in this node's store any more; those that were not told are left out."""
        gone = list(dict.fromkeys(own for name in names for own in self._told.pop(name, ())))
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

    def _is_news(self, names: list[int]) -> bool:
        """Whether all of these blocks may be in the store, and not all were told."""
        return not all(name in self._told for name in names) and not any(name in self._gone for name in names)

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
        is_here, names = change
        if is_here:
            for name in names:
                self._gone.pop(name, None)
        else:
            self.removed(names)
            self._gone.update(dict.fromkeys(names))
            _shorten(self._gone, _MOST_GONE)


def _shorten(known: dict[int, Any], most: int) -> None:
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


def _stored(request: Any, size: int, begin: int, end: int) -> Any:
    """Return the event of the engine's blocks [begin, end) of a request."""
    hashes, lora = request.block_hashes, request.lora_request
    return _made(
        BlockStored,
        block_hashes=[maybe_convert_block_hash(own) for own in hashes[begin:end]],
        parent_block_hash=maybe_convert_block_hash(hashes[begin - 1]) if begin else None,
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

"""Block hashes of a request, over everything that vLLM counts as part of a block's content.

These are the store's own chained hashes. vLLM's hashes depend on the engine's block size and hash algorithm, so engines
with different ones could not share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

from msgspec.structs import replace
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.token_bytes import ExtraKey, encode_key, token_bytes
from kvstore.integrations.prompt_keys import named_keys
from kvstore.integrations.vllm.identity import plain

#: Digests of a request's media by index, each made when it is first needed. An empty one: the medium's name is enough.
Media = dict[int, bytes]

#: What the log says of the first request whose media nothing tells apart.
NO_CONTENT = (
    "requests with media go on without the store, request %s is the first: wanted media with their data, got names "
    "that vLLM counts anew in each process (turn on --enable-prefix-caching, or set --mm-processor-cache-gb above 0), "
    "or addresses of data (set --mm-processor-cache-type lru)"
)

#: Tokens hashed in one piece; meanwhile the scheduler's thread may wait for the interpreter.
_PIECE_TOKENS = 512


class PromptHashes:
    """The hashes of the full blocks of a request's prompt, made piece by piece."""

    def __init__(self, space: Namespace, request: Any, media: Media | None = None) -> None:
        self._space, self._request, self._media, self._size = space, request, media, space.shape.block_size
        tokens: Sequence[int] | None = request.prompt_token_ids
        # Of embeddings the extra keys have the content.
        self._tokens = [0] * int(request.num_prompt_tokens) if tokens is None else tokens
        self._runs: list[BlockHashes] = []
        self._num_made = 0
        self.num_tokens = len(self._tokens)
        self.num_blocks = self.num_tokens // self._size

    @property
    def is_quick(self) -> bool:
        """Whether one block is hashed in microseconds; embeddings and media take longer, as they are read whole."""
        return getattr(self._request, "prompt_embeds", None) is None and not self._request.mm_features

    @property
    def is_made(self) -> bool:
        """Whether all hashes are made."""
        return self._num_made >= self.num_blocks

    def first(self) -> BlockHashes:
        """Return the hash of the first block alone; the prompt must have at least one block."""
        if not self._runs:
            self._make(1)
        return self._runs[0][:1]

    def advance(self) -> None:
        """Make the next hashes, if any are left; takes a fraction of a millisecond."""
        if not self.is_made:
            self._make(max(_PIECE_TOKENS // self._size, 1))

    def all(self) -> BlockHashes:
        """Make the hashes that are left and return all; other threads can run in between."""
        while not self.is_made:
            self.advance()
            time.sleep(0)
        if not self._runs:
            return hash_blocks(self._space, self._request, [], media=self._media)
        if len(self._runs) > 1:
            self._runs = [replace(self._runs[0], data=b"".join(run.data for run in self._runs))]
        return self._runs[0]

    def _make(self, num_blocks: int) -> None:
        begin = self._num_made * self._size
        end = min(self._num_made + num_blocks, self.num_blocks) * self._size
        parent = self._runs[-1] if self._runs else None
        self._runs.append(hash_blocks(self._space, self._request, self._tokens[begin:end], parent, self._media))
        self._num_made = end // self._size


def has_content(features: Sequence[Any]) -> bool:
    """Whether all media of a request came with their data; vLLM may pass an address in place of it."""
    return all(
        each.data and any(not isinstance(its.data, int | None) for its in each.data.values()) for each in features
    )


def hash_blocks(
    space: Namespace,
    request: Any,
    tokens: Sequence[int],
    parent: BlockHashes | None = None,
    media: Media | None = None,
) -> BlockHashes:
    """Hash the full blocks of some of a request's tokens.

    Args:
        space: namespace of the blocks.
        request: vLLM's.
        tokens: those behind the blocks of `parent`; without a parent, those from the first one on.
        parent: the run of blocks before them.
        media: what is known of the request's media; more is added.

    Raises:
        InvalidRequest: vLLM counts something as content that is neither text, bytes nor number.
    """
    has_embeds = getattr(request, "prompt_embeds", None) is not None
    if not (request.lora_request or request.mm_features or request.cache_salt or has_embeds):
        return space.block_hashes(tokens, parent=parent)
    size, begin = space.shape.block_size, 0 if parent is None else parent.start + len(parent)
    extra: list[Sequence[ExtraKey]] = []
    found, at = {} if media is None else media, 0
    for block in range(begin, begin + len(tokens) // size):
        keys, at = _extra_keys(request, block, block * size, (block + 1) * size, at, found)
        extra.append(keys)
    return space.block_hashes(tokens, extra, parent)


def tail_digest(space: Namespace, request: Any, media: Media) -> bytes:
    """Return a digest of the tokens behind a prompt's full blocks, of their number, and of their extra keys.

    Raises:
        InvalidRequest: as for `hash_blocks`.
    """
    size, end = space.shape.block_size, int(request.num_prompt_tokens)
    block = end // size
    keys, _ = _extra_keys(request, block, block * size, end, 0, media)
    tokens = () if request.prompt_token_ids is None else request.prompt_token_ids[block * size : end]
    return sha256(encode_key((end % size, token_bytes(tokens), *keys))).digest()


def _extra_keys(
    request: Any, block: int, begin: int, end: int, before: int, media: Media
) -> tuple[list[ExtraKey], int]:
    """Return the keys of tokens [begin, end) of a block, and the medium at which vLLM's own keys go on."""
    lora = request.lora_request.lora_name if request.lora_request else None
    named = named_keys(block, lora=lora, salt=request.cache_salt)
    keys, at = generate_block_hash_extra_keys(request, begin, end, before)
    # Of media that overlap, as a video and its sound do, vLLM names the first alone.
    for index, each in enumerate(request.mm_features or ()):
        where = each.mm_position
        if where.offset < end and begin < where.offset + where.length:
            media[index] = media[index] if index in media else digest_of(each)
            named.append(("media", media[index] or str(each.identifier), where.offset - begin))
    if getattr(request, "prompt_embeds", None) is not None:
        is_tokens = getattr(request, "prompt_is_token_ids", None) or ()
        named.append(("embeds", str(request.prompt_embeds.dtype), bytes(is_tokens[begin:end])))
    return [*named, *_plain(keys or ())], at


def digest_of(feature: Any) -> bytes:
    """Return a digest of a medium's content; without content another one each time, so that nobody finds it."""
    data = plain(feature.data.get_data(), "media") if has_content([feature]) else os.urandom(32).hex()
    return sha256(json.dumps(data, sort_keys=True).encode()).digest()


def _plain(keys: Sequence[Any]) -> Iterator[ExtraKey]:
    """Yield vLLM's nested keys, with each list made a tuple."""
    for key in keys:
        yield tuple(_plain(key)) if isinstance(key, list | tuple) else key

"""From a request to the hashes of its blocks, with everything that vLLM counts as part of a block's content.

The store's own chained hashes are used, not vLLM's: those depend on the engine's block size and hash algorithm,
and engines with other ones could not share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvstore.hashing import BlockHashes, ExtraKey, Namespace

#: Hashed at a stretch; meanwhile the scheduler's thread may wait for the interpreter.
_PIECE_TOKENS = 1024


def has_extra_keys(request: Any) -> bool:
    """Whether anything but its tokens decides what a request's KV is."""
    return bool(
        request.lora_request
        or request.mm_features
        or request.cache_salt
        or getattr(request, "prompt_embeds", None) is not None
    )


def prompt_tokens(request: Any) -> Sequence[int]:
    """Return the prompt; one of embeddings has zeros, and its content in the extra keys."""
    tokens: Sequence[int] | None = request.prompt_token_ids
    return [0] * int(request.num_prompt_tokens) if tokens is None else tokens


def hash_prompt(space: Namespace, request: Any) -> BlockHashes:
    """Hash the full blocks of a request's prompt, and let other threads go on in between."""
    tokens, size = prompt_tokens(request), space.shape.block_size
    piece = max(_PIECE_TOKENS // size, 1) * size
    found = [hash_blocks(space, request, tokens[:piece])]
    for first in range(piece, len(tokens) - size + 1, piece):
        time.sleep(0)
        found.append(hash_blocks(space, request, tokens[first : first + piece], found[-1]))
    return replace(found[0], data=b"".join(run.data for run in found))


def hash_blocks(
    space: Namespace, request: Any, tokens: Sequence[int], parent: BlockHashes | None = None
) -> BlockHashes:
    """Hash the full blocks of some of a request's tokens.

    Args:
        space: what the blocks mean.
        request: vLLM's.
        tokens: those that follow the blocks of `parent`, from the first one on when there is none.
        parent: the run before them.

    Raises:
        InvalidRequest: vLLM counts something as content that is neither text, bytes nor number.
    """
    if not has_extra_keys(request):
        return space.block_hashes(tokens, parent=parent)
    size, begin = space.shape.block_size, 0 if parent is None else parent.start + len(parent)
    lora = request.lora_request.lora_name if request.lora_request else None
    extra: list[Sequence[ExtraKey]] = []
    media = 0
    for block in range(begin, begin + len(tokens) // size):
        keys, media = generate_block_hash_extra_keys(request, block * size, (block + 1) * size, media)
        # vLLM's keys name no kinds: an adapter that is called like another tenant's salt would pass for it.
        named: list[ExtraKey] = [("lora", lora)] if lora is not None else []
        if request.cache_salt and block == 0:
            named.append(("salt", request.cache_salt))
        extra.append([*named, *_plain(keys or ())])
    return space.block_hashes(tokens, extra, parent)


def _plain(keys: Sequence[Any]) -> Iterator[ExtraKey]:
    """Make tuples of vLLM's nested keys, which may be lists."""
    for key in keys:
        yield tuple(_plain(key)) if isinstance(key, list | tuple) else key

"""Read token ids from a file, and hash them. Errors say where a file is wrong, and never what the tokens are."""

from __future__ import annotations

import json
import re
from typing import BinaryIO

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.hashing import hash_tokens
from kvstore.blocks.token_bytes import token_bytes
from kvstore.bounds import DIGEST_BYTES, MAX_CHAIN_BYTES
from kvstore.errors import InvalidRequest

_MOST_BYTES = 64 << 20
_BETWEEN = re.compile(r"[\s,]+")


def read_tokens(file: BinaryIO) -> list[int]:
    """Return the token ids of a file: a list in JSON, or numbers with spaces, commas or line ends between them.

    Raises:
        InvalidRequest: it has something else, or too much.
    """
    data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise InvalidRequest(f"--tokens: wanted at most {_MOST_BYTES} bytes, got more; give one prompt")
    try:
        text = data.decode("ascii").strip()
        found = json.loads(text) if text[:1] == "[" else [int(word) for word in _BETWEEN.split(text) if word]
    except ValueError:
        found = None
    is_list = isinstance(found, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in found)
    if not is_list or not found:
        raise InvalidRequest(
            "--tokens: wanted token ids, each from 0 to 4294967295, as a list in JSON or with spaces between them, got "
            "something else; write what the engine's tokenizer gives to the file"
        )
    return list(found)


def chain_of(tokens: list[int], namespace: bytes, block_size: int) -> BlockHashes:
    """Return the chain of the full blocks of tokens, without adapters and media.

    Raises:
        InvalidRequest: they do not fill a block, or are more than one question may have.
    """
    num_blocks, most = len(tokens) // block_size, MAX_CHAIN_BYTES // DIGEST_BYTES
    if not 0 < num_blocks <= most:
        raise InvalidRequest(
            f"--tokens: wanted the tokens of 1 to {most} blocks of {block_size}, got {len(tokens)}; only full blocks "
            "are stored"
        )
    return BlockHashes(namespace, namespace, 0, b"".join(hash_tokens(namespace, token_bytes(tokens), 4 * block_size)))

"""Block hashes of prompts, as every integration that shares blocks with vLLM engines has to make them.

Needs no vLLM, so a router can make the hashes that an engine will ask for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.token_bytes import ExtraKey


def named_keys(block: int, *, lora: str | None = None, salt: str | None = None) -> list[ExtraKey]:
    """Return the keys of a block that say which kind they are.

    vLLM's own keys carry no kind: an adapter named like another tenant's salt would be taken for that salt.

    Args:
        block: index in the chain; only block 0 depends on the salt by itself, the others through their parents.
        lora: name of the request's adapter.
        salt: the request's `cache_salt`.
    """
    named: list[ExtraKey] = [("lora", lora)] if lora is not None else []
    if salt and block == 0:
        named.append(("salt", salt))
    return named


def text_hashes(space: Namespace, token_ids: Sequence[int] | npt.ArrayLike, salt: str | None = None) -> BlockHashes:
    """Hash the full blocks of a prompt of text without adapter, as a vLLM engine with RaykvConnector does.

    Args:
        space: namespace of the engine's blocks.
        token_ids: of the whole prompt, each in [0, 2**32).
        salt: the request's `cache_salt`; None or empty for none.

    Raises:
        InvalidRequest: these are not token ids, or the salt is no text.
    """
    if not salt:
        return space.block_hashes(token_ids)
    # Behind the named keys come vLLM's own; of such a prompt that is the salt once more.
    return space.block_hashes(token_ids, _first_block(space, token_ids, [*named_keys(0, salt=salt), salt]))


def _first_block(space: Namespace, token_ids: object, keys: list[ExtraKey]) -> dict[int, list[ExtraKey]]:
    """Return keys of block 0, or none for a prompt without a full block."""
    has_block = hasattr(token_ids, "__len__") and len(token_ids) >= space.shape.block_size
    return {0: keys} if has_block else {}

"""Namespaces as text, for processes that have to make an engine's block hashes and have no engine."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape, Planes, SideTensor
from kvstore.bounds import clip
from kvstore.errors import ConfigError, InvalidRequest

_MOST_CHARS = 1 << 20


def space_to_text(space: Namespace) -> str:
    """Return a namespace as JSON; `space_from_text` reads it."""
    shape = {name.name: getattr(space.shape, name.name) for name in fields(KVShape) if name.init}
    shape |= {"planes": Planes(space.shape.planes).value, "sides": [asdict(side) for side in space.shape.sides]}
    own = {name: getattr(space, name) for name in ("model", "revision", "lora", "quantization", "tenant")}
    return json.dumps({**own, "salt": space.salt.hex(), "shape": shape, "digest": space.digest.hex()})


def space_from_text(text: str) -> Namespace:
    """Return the namespace that `space_to_text` wrote.

    Raises:
        InvalidRequest: it did not write this text, or another version of raykv did, whose hashes are different.
    """
    try:
        if len(text) > _MOST_CHARS:
            raise ValueError(f"{len(text)} characters")
        given: dict[str, Any] = json.loads(text)
        digest, shape = given.pop("digest"), given.pop("shape")
        shape["sides"] = [SideTensor(**side) for side in shape["sides"]]
        space = Namespace(**{**given, "salt": bytes.fromhex(given["salt"])}, shape=KVShape(**shape))
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError, RecursionError) as error:
        raise InvalidRequest(
            f"namespace: wanted the text that space_to_text wrote, got {clip(text)} ({type(error).__name__}: {error}); "
            "take it from an engine of this version"
        ) from error
    if space.digest.hex() != digest:
        raise InvalidRequest(
            f"namespace: wanted one whose hashes are rooted in {clip(digest)}, got {space.digest.hex()[:16]}; run "
            "engines and routers with the same version of raykv"
        )
    return space

"""What a mover says to its store, taken apart: a word that is none is an error of one kind."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from kvstore.wire import unpack_json


@dataclass(frozen=True, slots=True)
class OwnTransport:
    """What peers need to read this node's slab through its present mover."""

    generation: int
    agent: bytes
    address: int


def own_transport(generation: int, payload: bytes) -> OwnTransport:
    """Return what a mover announced, as that of a generation."""
    value = unpack_json(payload)
    return OwnTransport(generation, base64.b64decode(value["agent"]), int(value["address"]))

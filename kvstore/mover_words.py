"""What a mover says to its store, taken apart: a word that is none is an error of one kind."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvstore.errors import ProtocolError
from kvstore.wire import unpack_json

_T = TypeVar("_T")


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


def unpacked(unpack: Callable[[bytes], _T], payload: bytes) -> _T:
    """Take a payload apart.

    Raises:
        ProtocolError: it is not what `unpack` takes.
    """
    try:
        return unpack(payload)
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{len(payload)} bytes are no word of a mover of this version: {error!r}") from error

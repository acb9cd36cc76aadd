"""What a load or a fetch cost, as the store tells it to the client with its last word, which the client waits for."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

_NUMBERS = struct.Struct("<6Q2d")
_SEPARATOR = "\0"


@dataclass(slots=True)
class LoadReport:
    """What one load cost.

    Args:
        num_local: blocks that were in this node's memory.
        num_peer: blocks that were read from other nodes.
        reason: why it ended early, or nothing.
        peers: the nodes that were read from.
        num_bytes: that were read from them.
        num_descriptors: that the engine needed for it.
        read_s: from the first question to a peer to the last byte.
        num_locate_calls: how often the directory was asked.
        num_lease_calls: how often a peer was.
        note: why a hand-off did not go the faster way.
        waited_s: that a fetch had waited here when its blocks were claimed for it; the claim was made no earlier.
    """

    num_local: int = 0
    num_peer: int = 0
    reason: str = ""
    peers: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_descriptors: int = 0
    read_s: float = 0.0
    num_locate_calls: int = 0
    num_lease_calls: int = 0
    note: str = ""
    waited_s: float = 0.0

    def to_bytes(self) -> bytes:
        """Return what `unpack_report` takes; texts are told without NUL characters."""
        numbers = _NUMBERS.pack(
            self.num_local, self.num_peer, self.num_bytes, self.num_descriptors, self.num_locate_calls,
            self.num_lease_calls, self.read_s, self.waited_s,
        )  # fmt: skip
        texts = _SEPARATOR.join(text.replace(_SEPARATOR, " ") for text in (self.reason, self.note, *self.peers))
        return numbers + texts.encode()


def unpack_report(data: bytes) -> dict[str, Any]:
    """Return the fields of a report by name."""
    num_local, num_peer, num_bytes, num_descriptors, num_locate_calls, num_lease_calls, read_s, waited_s = (
        _NUMBERS.unpack_from(data)
    )
    reason, note, *peers = data[_NUMBERS.size :].decode().split(_SEPARATOR)
    return {
        "num_local": num_local,
        "num_peer": num_peer,
        "num_bytes": num_bytes,
        "num_descriptors": num_descriptors,
        "num_locate_calls": num_locate_calls,
        "num_lease_calls": num_lease_calls,
        "read_s": read_s,
        "waited_s": waited_s,
        "reason": reason,
        "note": note,
        "peers": peers,
    }

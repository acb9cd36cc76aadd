"""Which clearing of each namespace a process has heard of, and in which order it heard.

Both a store and the directory keep one: each tells the other what it has not told it yet, so that a store that was
away, or is new, hears of a clearing before it keeps blocks that the next peer would make it drop.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping

from kvstore.errors import ProtocolError

_ENTRY = struct.Struct("<32sQ")


class NamespaceVersions:
    """The version of the last clearing of each namespace; any thread may call.

    A version is later than another when it is larger; a namespace that was never cleared has version 0.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serial = 0
        self._known: dict[bytes, tuple[int, int]] = {}

    def get(self, namespace: bytes) -> int:
        """Return the version of a namespace."""
        return self._known.get(namespace, (0, 0))[0]

    def advance(self, namespace: bytes, version: int) -> bool:
        """Note a clearing; whether it is later than what was known. Nothing changes if not."""
        with self._lock:
            if version <= self.get(namespace):
                return False
            self._serial += 1
            self._known[namespace] = version, self._serial
            return True

    def since(self, serial: int) -> tuple[int, dict[bytes, int]]:
        """Return (serial of the last one heard of, versions heard of after `serial`); 0 asks for all."""
        with self._lock:
            if serial == self._serial:
                return serial, {}
            return self._serial, {space: version for space, (version, at) in self._known.items() if at > serial}


def pack_versions(versions: Mapping[bytes, int]) -> bytes:
    """Pack versions by namespace: 40 bytes each."""
    return b"".join(_ENTRY.pack(namespace, version) for namespace, version in versions.items())


def unpack_versions(payload: bytes) -> dict[bytes, int]:
    """Return what `pack_versions` packed.

    Raises:
        ProtocolError: these are no versions.
    """
    if len(payload) % _ENTRY.size:
        raise ProtocolError(f"wanted versions of {_ENTRY.size} bytes each, got {len(payload)} bytes")
    return dict(_ENTRY.iter_unpack(payload))

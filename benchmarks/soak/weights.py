"""Weights that change under the clients: whoever clears the namespace says so in a file that all of them map."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_VERSIONS = struct.Struct("=QQ")


class Weights:
    """Two version numbers that processes share: the oldest whose KV may still be read, and the newest written.

    The one writer calls `changed` after the namespace was cleared on every node, and before it saves anything of the
    new weights; a load that began afterwards and still finds KV of older weights read stale bytes.

    Args:
        path: of the file; the writer makes it.
        writer: whether this process is the one that changes the weights.
    """

    def __init__(self, path: Path, *, writer: bool = False) -> None:
        if writer:
            path.write_bytes(_VERSIONS.pack(0, 0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _VERSIONS.size)

    @property
    def oldest(self) -> int:
        """The oldest version that a load which begins now may find."""
        return int(_VERSIONS.unpack_from(self._memory)[0])

    @property
    def newest(self) -> int:
        """The newest version of which anything may have been saved."""
        return int(_VERSIONS.unpack_from(self._memory)[1])

    def changed(self) -> int:
        """Begin the next version; returns it."""
        version = self.newest + 1
        # The newest first: a reader must never meet KV of a version that it does not know of.
        _VERSIONS.pack_into(self._memory, 0, self.oldest, version)
        _VERSIONS.pack_into(self._memory, 0, version, version)
        return version

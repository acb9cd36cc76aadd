"""Weights that change under the clients: whoever clears the namespace says so in a file that all of them map."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_VERSIONS = struct.Struct("=QQQ")


class Weights:
    """Two version numbers that processes share: the oldest whose KV may still be read, and the newest written.

    Beside them is how often the namespace without weights was cleared.

    The one writer calls `changed` after the namespace was cleared on every node, and before it saves anything of the
    new weights; a load that began afterwards and still finds KV of older weights read stale bytes.

    Args:
        path: of the file; the writer makes it.
        writer: whether this process is the one that changes the weights.
    """

    def __init__(self, path: Path, *, writer: bool = False) -> None:
        if writer:
            path.write_bytes(_VERSIONS.pack(0, 0, 0))
        self._path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _VERSIONS.size)

    @contextlib.contextmanager
    def using(self) -> Iterator[int]:
        """Compute with the newest weights, and ask for saves of what was computed; they do not change meanwhile."""
        with self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield self.newest

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Clear and call `changed` while no other process is `using` them."""
        with self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @property
    def oldest(self) -> int:
        """The oldest version that a load which begins now may find."""
        return int(_VERSIONS.unpack_from(self._memory)[0])

    @property
    def newest(self) -> int:
        """The newest version of which anything may have been saved."""
        return int(_VERSIONS.unpack_from(self._memory)[1])

    @property
    def num_clearings(self) -> int:
        """How often all that clients save and publish was cleared; counted when that is over."""
        return int(_VERSIONS.unpack_from(self._memory)[2])

    def changed(self) -> int:
        """Begin the next version; returns it."""
        version = self.newest + 1
        # The newest first: a reader must never meet KV of a version that it does not know of.
        _VERSIONS.pack_into(self._memory, 0, self.oldest, version, self.num_clearings)
        _VERSIONS.pack_into(self._memory, 0, version, version, self.num_clearings)
        return version

    def cleared(self) -> None:
        """Count a clearing that is over on every node."""
        _VERSIONS.pack_into(self._memory, 0, self.oldest, self.newest, self.num_clearings + 1)

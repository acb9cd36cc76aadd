"""Keep one record per slot in a file, at the slot's own place, so that a new store knows what is on the disk.

A table instead of a journal: a change is one small write, the file never grows, and nothing has to be cleaned up. A
record that was lost, torn or is too old costs its block only, because the same record stands before the block's bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.disk.own_files import open_own
from kvstore.disk.records import RECORD_BYTES, Record, unpack_index
from kvstore.disk.slot_file import neighbours, set_size


class IndexFile:
    """The file of records. Any thread may call.

    Args:
        path: of the file; `resize` makes it.
        tier_id: of the label.

    Raises:
        ConfigError, OSError: the file is not this store's, or cannot be opened.
    """

    def __init__(self, path: Path, tier_id: bytes) -> None:
        self._path, self._tier_id = path, tier_id
        self.fd = open_own(path, os.O_RDWR) if path.exists() else -1

    def resize(self, num_slots: int) -> None:
        """Have the file hold this many records.

        Raises:
            OSError: the disk refused, or has no room for it.
        """
        if self.fd < 0:
            self.fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
        set_size(self.fd, num_slots * RECORD_BYTES)

    def read_all(self) -> list[Record]:
        """Return all valid records, in the order of their slots.

        Raises:
            OSError: the disk refused.
        """
        pieces, at = list[bytes](), 0
        while self.fd >= 0 and (piece := os.pread(self.fd, 1 << 26, at)):
            pieces.append(piece)
            at += len(piece)
        return unpack_index(self._tier_id, b"".join(pieces))

    def write_all(self, records: Sequence[Record], packed: Sequence[bytes]) -> None:
        """Write several records, given with what `pack_record` made of them, to their places; neighbours with one call.

        Raises:
            OSError: the disk refused; some of them may be written.
        """
        order = sorted(range(len(records)), key=lambda at: records[at].place)
        places = [records[at].place for at in order]
        for begin, end in neighbours(places, len(places)):
            data = b"".join([packed[at] for at in order[begin:end]])
            os.pwrite(self.fd, data, places[begin] * RECORD_BYTES)

    def erase(self, place: int) -> None:
        """Remove the record of a slot: its block is damaged.

        Raises:
            OSError: the disk refused.
        """
        os.pwrite(self.fd, bytes(RECORD_BYTES), place * RECORD_BYTES)

    def sync(self) -> None:
        """Have the disk keep what was written, also without power.

        Raises:
            OSError: the disk refused.
        """
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Close the file; call this once, when no call runs any more."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)

"""Keep one record per slot in a file, at the slot's own place, so that a new store knows what is on the disk.

A table instead of a journal: a change is one small write, the file never grows, and nothing has to be cleaned up. A
record that was lost, torn or is too old costs its block only, because the same record stands before the block's bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.disk.records import RECORD_BYTES, Record, pack_record, unpack_index
from kvstore.disk.slot_file import neighbours


class IndexFile:
    """The file of records. Any thread may call.

    Args:
        path: of the file; made if it is not there.
        tier_id: of the label.
        num_slots: number of records.

    Raises:
        OSError: the file cannot be opened, or the disk has no room for it.
    """

    def __init__(self, path: Path, tier_id: bytes, num_slots: int) -> None:
        self._tier_id, self._num_bytes = tier_id, num_slots * RECORD_BYTES
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(self.fd).st_size > self._num_bytes:
                os.ftruncate(self.fd, self._num_bytes)
            os.posix_fallocate(self.fd, 0, self._num_bytes)
        except BaseException:
            os.close(self.fd)
            raise

    def read_all(self) -> list[Record]:
        """Return all valid records, in the order of their slots.

        Raises:
            OSError: the disk refused.
        """
        pieces, at = list[bytes](), 0
        while at < self._num_bytes and (piece := os.pread(self.fd, min(self._num_bytes - at, 1 << 26), at)):
            pieces.append(piece)
            at += len(piece)
        return unpack_index(self._tier_id, b"".join(pieces))

    def write(self, record: Record) -> None:
        """Write one record to its place.

        Raises:
            OSError: the disk refused.
        """
        os.pwrite(self.fd, pack_record(self._tier_id, record), record.place * RECORD_BYTES)

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
        with contextlib.suppress(OSError):
            os.close(self.fd)

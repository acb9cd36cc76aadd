"""Read and write blocks in the slot file, past the page cache where the file system can (O_DIRECT).

A slot of the file is a page with the block's record, and the bytes of a slot of memory. Both move with one call, to and
from the arena itself: no byte is copied on the way. Neighbouring slots move together.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.disk.own_files import open_own
from kvstore.disk.records import PAGE_BYTES, RECORD_BYTES

logger = logging.getLogger(__name__)

#: Most buffers of one call; Linux takes 1,024.
MOST_BUFFERS = 512


class SlotFile:
    """The file of slots. Any thread may call; each call blocks until the disk has answered.

    Args:
        path: of the file; `resize` makes it.
        slot_bytes: bytes of a slot in memory, a multiple of `PAGE_BYTES`.

    Raises:
        ConfigError, OSError: the file is not this store's, or cannot be opened.
    """

    def __init__(self, path: Path, slot_bytes: int) -> None:
        assert slot_bytes % PAGE_BYTES == 0, "the arena's slots are aligned to pages when there is a disk tier"
        self.slot_bytes, self.stride_bytes = slot_bytes, PAGE_BYTES + slot_bytes
        self._path, self.fd, self.is_direct = path, -1, True
        #: Slots that the file holds whole.
        self.num_slots = 0
        if path.exists():
            self._open(os.O_RDWR)
            self.num_slots = os.fstat(self.fd).st_size // self.stride_bytes

    def resize(self, num_slots: int) -> None:
        """Have the file hold this many slots.

        Raises:
            OSError: the disk refused, or has no room for it.
        """
        if self.fd < 0:
            self._open(os.O_RDWR | os.O_CREAT)
        set_size(self.fd, num_slots * self.stride_bytes)
        self.num_slots = num_slots

    def _open(self, flags: int) -> None:
        self.fd, self.is_direct = _open(self._path, flags)
        try:
            if self.is_direct and not self._can_read_direct():
                direct, self.fd, self.is_direct = self.fd, open_own(self._path, flags), False
                os.close(direct)
        except BaseException:
            self.close()
            raise
        if not self.is_direct:
            logger.info("%s: the file system has no O_DIRECT; blocks go through the page cache", self._path)

    def _can_read_direct(self) -> bool:
        # Some file systems take the flag when a file is opened, and refuse the first read.
        with mmap.mmap(-1, PAGE_BYTES) as page:
            try:
                os.preadv(self.fd, [page], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return False
        return True

    def write(self, first: int, buffers: Sequence[memoryview | mmap.mmap]) -> None:
        """Write neighbouring slots: of each its page with the record, then its bytes, perhaps not to the slot's end.

        Raises:
            OSError: the disk refused, or took a part only.
        """
        at = first * self.stride_bytes
        wanted = sum(len(buffer) for buffer in buffers)
        if (got := os.pwritev(self.fd, buffers, at)) != wanted:
            raise OSError(errno.EIO, f"wrote {got} of {wanted} bytes at slot {first}")

    def read(self, first: int, buffers: Sequence[memoryview | mmap.mmap]) -> None:
        """Read neighbouring slots into the same kind of buffers.

        If the file was cut and ends before, the rest of the buffers is as it was: checksums say which blocks are there.

        Raises:
            OSError: the disk refused.
        """
        at = first * self.stride_bytes
        wanted = sum(len(buffer) for buffer in buffers)
        got = os.preadv(self.fd, buffers, at)
        # A cut file is no failing disk: its blocks have to be forgotten, else they fail again and again.
        if got != wanted and os.fstat(self.fd).st_size >= at + wanted:
            raise OSError(errno.EIO, f"read {got} of {wanted} bytes at slot {first}")

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


class RunPages:
    """Aligned pages for the records of blocks that are written together; one set for each thread that wrote at once.

    Args:
        most: blocks that are written together.
    """

    def __init__(self, most: int) -> None:
        self._most, self._free = most, list[mmap.mmap]()

    def write(
        self, slots: SlotFile, places: Sequence[int], records: Sequence[bytes], bytes_of: Callable[[int], memoryview]
    ) -> None:
        """Write blocks with their records to their places; neighbours with one call.

        Args:
            slots: the file.
            places: of the blocks there.
            records: of the blocks, packed.
            bytes_of: returns the memory of the n-th block; it is released here.

        Raises:
            OSError: the disk refused.
        """
        order = sorted(range(len(places)), key=places.__getitem__)
        in_order = [places[at] for at in order]
        with self._taken() as pages:
            for begin, end in neighbours(in_order, MOST_BUFFERS // 2):
                buffers, views = list[memoryview](), memoryview(pages)
                for number, at in enumerate(order[begin:end], begin):
                    page = views[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
                    page[:RECORD_BYTES] = records[at]
                    buffers += [page, bytes_of(at)]
                try:
                    slots.write(in_order[begin], buffers)
                finally:
                    while buffers:
                        buffers.pop().release()
                    views.release()

    @contextmanager
    def _taken(self) -> Iterator[mmap.mmap]:
        try:
            pages = self._free.pop()
        except IndexError:
            # An anonymous mapping is aligned. After its record each page stays zero.
            pages = mmap.mmap(-1, PAGE_BYTES * self._most)
        try:
            yield pages
        finally:
            self._free.append(pages)  # The system takes a fault for each page of new ones.


def neighbours(places: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return the stretches [begin, end) of positions whose places follow each other, each of at most `most`."""
    found, begin = list[tuple[int, int]](), 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1 or at - begin == most:
            found.append((begin, at))
            begin = at
    return found


def set_size(fd: int, num_bytes: int) -> None:
    """Cut a file, or have the disk give it more room.

    Raises:
        OSError: the disk refused, or has no room for it.
    """
    if num_bytes < os.fstat(fd).st_size:
        os.ftruncate(fd, num_bytes)
    else:
        os.posix_fallocate(fd, 0, num_bytes)


def _open(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return open_own(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return open_own(path, flags), False

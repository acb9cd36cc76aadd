"""Share the capacity of a folder among the files of all sizes of slots in it.

With its first block the size of the present store takes what the others leave. These stay as they are until it needs
more places than that: then they are cut at their end by as much, the one that was written longest ago first.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from kvstore.disk.folder import sized_files, sizes_in
from kvstore.disk.index_file import IndexFile
from kvstore.disk.own_files import open_own
from kvstore.disk.records import PAGE_BYTES, RECORD_BYTES, place_bytes
from kvstore.disk.slot_file import SlotFile
from kvstore.errors import ConfigError


class Room:
    """The files of the present size of slots, and how many bytes those of others take. Any thread may call.

    Nothing on the disk changes before the first `hold`.

    Args:
        folder: of the tier.
        tier_id: of its label.
        slot_bytes: the size.
        capacity_bytes: of all files.

    Raises:
        ConfigError: the capacity is too small, or a file is not this store's.
        OSError: a file cannot be opened.
    """

    def __init__(self, folder: Path, tier_id: bytes, slot_bytes: int, capacity_bytes: int) -> None:
        self._folder, self._slot_bytes, self._capacity_bytes = folder, slot_bytes, capacity_bytes
        self._place_bytes, self._lock, self._has_held = place_bytes(slot_bytes), threading.Lock(), False
        if (num_slots := capacity_bytes // self._place_bytes) < 2:
            raise ConfigError(
                f"disk_capacity_bytes: wanted room for at least 2 blocks of {slot_bytes} bytes, got {capacity_bytes}; "
                "raise it"
            )
        self.num_slots = num_slots
        self.num_other_bytes = sum(found[1] for size, found in sizes_in(folder).items() if size != slot_bytes)
        slots, index = sized_files(folder, slot_bytes)
        self.slots = SlotFile(slots, slot_bytes)
        try:
            self.index = IndexFile(index, tier_id)
        except BaseException:
            self.slots.close()
            raise

    def hold(self, num_places: int) -> None:
        """Make sure that the files have this many places, before the last of them is written.

        Raises:
            OSError: the disk refused, or has no room for them.
        """
        if self._has_held and num_places <= self.slots.num_slots:
            return
        with self._lock:
            others = sizes_in(self._folder)
            others.pop(self._slot_bytes, None)
            self.num_other_bytes = sum(num_bytes for _, num_bytes in others.values())
            num_left = max(self._capacity_bytes - self.num_other_bytes, 0) // self._place_bytes
            wanted = max(num_left, self.slots.num_slots, num_places)
            wanted = min(wanted, self.num_slots)  # Fewer than there are if the capacity was lowered.
            for slot_bytes in sorted(others, key=others.__getitem__):
                num_over = wanted * self._place_bytes + self.num_other_bytes - self._capacity_bytes
                if num_over > 0:
                    self.num_other_bytes -= self._cut(slot_bytes, others[slot_bytes][1] - num_over)
            # First the index is cut: no record is of a place that is not there.
            self.index.resize(wanted)
            self.slots.resize(wanted)
            self._has_held = True

    def _cut(self, slot_bytes: int, num_bytes: int) -> int:
        """Cut the files of another size to so many bytes in all; return how many went. Their times stay."""
        num_places, num_cut = max(num_bytes, 0) // place_bytes(slot_bytes), 0
        slots, index = sized_files(self._folder, slot_bytes)
        for path, each in ((index, RECORD_BYTES), (slots, PAGE_BYTES + slot_bytes)):
            with contextlib.suppress(FileNotFoundError), open(open_own(path, os.O_RDWR), "r+b") as file:
                info = os.fstat(file.fileno())
                num_cut += max(info.st_size - num_places * each, 0)
                os.ftruncate(file.fileno(), min(info.st_size, num_places * each))
                os.utime(file.fileno(), ns=(info.st_atime_ns, info.st_mtime_ns))
        return num_cut

    def close(self) -> None:
        """Close the files; call this once, when no call runs any more."""
        self.slots.close()
        self.index.close()

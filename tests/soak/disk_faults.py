"""What goes wrong with a disk: bytes of its files that change, files that shrink, calls that fail or hang.

Files are changed here, from outside. Calls fail through `disk_hook/sitecustomize.py`, which each process of the soak's
cluster imports when it starts, and which obeys a control file.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvstore.disk.folder import sized_files
from kvstore.disk.records import PAGE_BYTES, RECORD_BYTES
from tests.soak.plan import SHAPE, Fault

HOOK = Path(__file__).with_name("disk_hook")
_CONTROL = "RAYKV_SOAK_DISK_CONTROL"
#: Of a slot in the file: its page with the record, and the block.
STRIDE_BYTES = PAGE_BYTES + SHAPE.block_bytes
SLOTS, INDEX = (path.name for path in sized_files(Path(), SHAPE.block_bytes))
#: So many slots one fault changes, so that clients meet some of them.
_NUM_SPOILT = 40
_KINDS = {Fault.FILL_DISK: "fill", Fault.FAIL_DISK: "fail", Fault.HANG_DISK: "hang"}


def environment(folder: Path, before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which processes have the hook."""
    paths = [str(HOOK), *filter(None, [before.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), _CONTROL: str(folder / "disk-control")}


class DiskFaults:
    """Faults of the disks below one path.

    Args:
        root: `disk_path` of the stores.
        control: file that the hook reads.
        rng: chooses slots and bytes.
    """

    def __init__(self, root: Path, control: Path, rng: random.Random) -> None:
        self._root, self._control, self._rng = root, control, rng
        #: Slots and records as they were once, by folder and place.
        self._old: dict[Path, dict[int, tuple[bytes, bytes]]] = {}

    def folders(self) -> list[Path]:
        """Return the folders of the stores, in the order of their names."""
        return sorted(self._root.iterdir())

    @contextlib.contextmanager
    def refusing(self, fault: Fault, folder: Path, seconds: float) -> Iterator[None]:
        """Have calls for a folder's files fail or hang from now on, for at most `seconds`."""
        new = self._control.with_suffix(".new")
        new.write_text(f"{_KINDS[fault]} {time.monotonic() + seconds} {folder}")
        new.replace(self._control)
        try:
            yield
        finally:
            self._control.unlink()

    def num_refused(self) -> dict[str, int]:
        """Return how many calls have met each kind of fault."""
        files = {kind: Path(f"{self._control}.{kind}") for kind in _KINDS.values()}
        return {kind: file.stat().st_size if file.exists() else 0 for kind, file in files.items()}

    def spoil(self, fault: Fault, folder: Path) -> str:
        """Change a folder's files; return what was done. Changes nothing when they are not there yet."""
        slots, index, rng = folder / SLOTS, folder / INDEX, self._rng
        if not slots.exists() or not index.exists() or not (places := written(index)):
            return "there are no blocks"
        if fault is Fault.TRUNCATE_SLOTS:
            # Also at places that are no beginning of a page or of a slot.
            size = rng.randrange(slots.stat().st_size)
            os.truncate(slots, size)
            return f"cut at byte {size}"
        chosen = rng.sample(places, min(_NUM_SPOILT, len(places)))
        with slots.open("r+b", 0) as slots_file, index.open("r+b", 0) as index_file:
            if fault is Fault.PUT_BACK_SLOTS:
                chosen = self._put_back(folder, slots_file.fileno(), index_file.fileno())
            for place in chosen:
                self._spoil_place(fault, place, rng.choice(places), slots_file.fileno(), index_file.fileno())
        return f"{len(chosen)} places"

    def _spoil_place(self, fault: Fault, place: int, other: int, slots: int, index: int) -> None:
        rng, begin, record = self._rng, place * STRIDE_BYTES, place * RECORD_BYTES
        at = rng.randrange(STRIDE_BYTES)
        if fault is Fault.FLIP_SLOTS:
            # One of three in the record, whose page is mostly empty.
            _flip(slots, begin + (at if rng.random() < 0.67 else at % RECORD_BYTES), rng)
        elif fault is Fault.ZERO_SLOTS:
            os.pwrite(slots, bytes(rng.randint(1, STRIDE_BYTES - at)), begin + at)
        elif fault is Fault.COPY_SLOTS:
            # From its first byte on, so that record and block are right but for another place; or a piece of it.
            at = rng.choice((0, PAGE_BYTES, at))
            os.pwrite(slots, os.pread(slots, STRIDE_BYTES - at, other * STRIDE_BYTES + at), begin + at)
        elif fault is Fault.FLIP_INDEX:
            _flip(index, record + at % RECORD_BYTES, rng)
        elif fault is Fault.ERASE_INDEX:
            os.pwrite(index, bytes(RECORD_BYTES), record)
        elif fault is Fault.COPY_INDEX:
            os.pwrite(index, os.pread(index, RECORD_BYTES, other * RECORD_BYTES), record)

    def remember(self) -> None:
        """Read some slots of each disk as they are now, to be put back later."""
        for folder in self.folders():
            if not (folder / SLOTS).exists() or not (places := written(folder / INDEX)):
                continue
            old = self._old.setdefault(folder, {})
            chosen = self._rng.sample(places, min(_NUM_SPOILT, len(places)))
            with (folder / SLOTS).open("rb", 0) as slots, (folder / INDEX).open("rb", 0) as index:
                for place in {*chosen} - {*old}:
                    slot = os.pread(slots.fileno(), STRIDE_BYTES, place * STRIDE_BYTES)
                    old[place] = slot, os.pread(index.fileno(), RECORD_BYTES, place * RECORD_BYTES)

    def _put_back(self, folder: Path, slots: int, index: int) -> list[int]:
        """Have the disk lose writes: places are as they were once, with or without their record in the index."""
        old = self._old.pop(folder, {})
        for place, (slot, record) in old.items():
            os.pwrite(slots, slot, place * STRIDE_BYTES)
            if self._rng.random() < 0.5:
                os.pwrite(index, record, place * RECORD_BYTES)
        return list(old)


def written(index: Path) -> list[int]:
    """Return the places that have a record in an index file; none if there is no file."""
    data = index.read_bytes() if index.exists() else b""
    return [at // RECORD_BYTES for at in range(0, len(data), RECORD_BYTES) if any(data[at : at + 8])]


def _flip(fd: int, at: int, rng: random.Random) -> None:
    if byte := os.pread(fd, 1, at):
        os.pwrite(fd, bytes([byte[0] ^ 1 << rng.randrange(8)]), at)

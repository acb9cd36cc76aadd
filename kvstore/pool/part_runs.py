"""Keep which ranks write which parts of blocks, per claim. No locking here: the pool holds its lock.

Ranks mostly write the same blocks, so a rank that comes or ends changes a stretch of each column at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.pool.runs import Run, Segment
from kvstore.pool.slot_columns import SlotColumns


@dataclass(slots=True, eq=False)
class _Parts:
    """The progress of the ranks that write the blocks of one claim in parts, per block.

    Args:
        num_parts: of a block.
        deadline_s: when the pool gives up blocks for which not all ranks have come.
        num_writers: how many ranks write the block now.
        num_done: how many ranks have written it.
        is_open: whether its slot is neither published nor given back.
        came: by part, whether the part's rank has come for the block.
    """

    num_parts: int
    deadline_s: float
    num_writers: npt.NDArray[np.int32]
    num_done: npt.NDArray[np.int32]
    is_open: npt.NDArray[np.bool_]
    came: dict[int, npt.NDArray[np.bool_]]


class PartRuns:
    """The claims of one pool that are being written in parts; `on_over` is called with each that no longer is."""

    def __init__(self, columns: SlotColumns, on_over: Callable[[Run], object]) -> None:
        self._columns, self._on_over = columns, on_over
        # Ordered, so that a run of a test can be repeated exactly.
        self._runs: dict[Run, _Parts] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def begin(self, run: Run, num_parts: int, deadline_s: float) -> None:
        """Note that the blocks of a new claim are written in parts."""
        count = len(run.slots)
        run.is_in_parts = True
        none, is_open = np.zeros(count, np.int32), np.ones(count, np.bool_)
        self._runs[run] = _Parts(num_parts, deadline_s, none, none.copy(), is_open, {})

    def joinable(self, segment: Segment, part: int, num_parts: int) -> list[int]:
        """Return the positions that this part's rank may join: blocks of `num_parts` parts, not joined yet."""
        run, place, at, count = segment
        parts = self._runs.get(run)
        if parts is None or parts.num_parts != num_parts:
            return []
        came = parts.came.get(part)
        if came is None:
            return list(range(at, at + count))
        found: list[int] = (np.flatnonzero(~came[place : place + count]) + at).tolist()
        return found

    def come(self, segments: list[Segment], part: int) -> None:
        """Note that a rank writes its part of these blocks from now on."""
        for run, place, _, count in segments:
            parts = self._runs[run]
            came = parts.came.setdefault(part, np.zeros(len(run.slots), np.bool_))
            came[place : place + count] = True
            parts.num_writers[place : place + count] += 1

    def end(self, segments: list[Segment], slots: list[int], *, done: bool) -> list[int]:
        """Record a rank's part as `done` or given up; return the positions of blocks that are whole now.

        Aborted slots become free after their last writer.
        """
        aborted, whole = self._columns.aborted, list[int]()
        for run, place, at, count in segments:
            parts, stretch = self._runs[run], slice(place, place + count)
            parts.num_writers[stretch] -= 1
            parts.num_done[stretch] += int(done)
            is_whole = (parts.num_done[stretch] == parts.num_parts) & done
            if aborted:
                for offset in [i for i, slot in enumerate(slots[at : at + count]) if slot in aborted]:
                    is_whole[offset] = False
                    self.leave(run, place + offset)
            if is_whole.any():
                found = np.flatnonzero(is_whole)
                whole += (found + at).tolist()
                self._close(run, found + place)
        return whole

    def leave(self, run: Run, place: int) -> None:
        """Free an aborted slot if no rank writes to it any more."""
        parts = self._runs.get(run)
        if parts is not None and parts.is_open[place] and not parts.num_writers[place]:
            self._columns.end_aborted((run.slots[place],))
            self._close(run, np.array([place]))

    def overdue(self, now_s: float) -> list[tuple[Run, int]]:
        """Return (claim, place) of each open block for which a rank came too late; each is returned once.

        The caller gives these up. The others are being written, until their last writer ends.
        """
        late = list[tuple[Run, int]]()
        for run, parts in self._runs.items():
            if parts.deadline_s < now_s:
                parts.deadline_s = float("inf")
                num_came = np.sum([*parts.came.values()], axis=0)
                is_late = parts.is_open & (num_came < parts.num_parts)
                late += [(run, place) for place in np.flatnonzero(is_late).tolist()]
        return late

    def _close(self, run: Run, places: npt.NDArray[np.intp]) -> None:
        parts = self._runs[run]
        parts.is_open[places] = False
        if not parts.is_open.any():
            del self._runs[run]
            run.is_in_parts = False
            self._on_over(run)

    def check(self, num_writers: dict[int, int]) -> set[int]:
        """Assert that the counts of writers by slot are right; return all slots that are written in parts."""
        known = set[int]()
        for run, parts in self._runs.items():
            assert parts.is_open.any(), f"{parts}: no open blocks"
            came = np.sum([*parts.came.values()], axis=0)
            for place in np.flatnonzero(parts.is_open).tolist():
                slot, count = run.slots[place], int(parts.num_writers[place])
                assert num_writers.get(slot, 0) == count, f"slot {slot}: {parts}"
                assert count + parts.num_done[place] <= came[place] <= parts.num_parts, f"slot {slot}: {parts}"
                assert slot not in self._columns.aborted or count, f"slot {slot}: aborted and nobody writes it"
                known.add(slot)
        return known

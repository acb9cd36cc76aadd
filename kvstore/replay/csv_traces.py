"""Read libCacheSim's tables: `time,obj_id[,size]`, with or without a header. Each object is a chain of one block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.bounds import clip
from kvstore.errors import InvalidRequest
from kvstore.replay.records import Record, Where

#: The format has no tokens. This is the block of the store's examples.
CSV_BLOCK_TOKENS = 16


def csv_records(lines: Sequence[str], path: Path) -> Iterator[Record]:
    """Yield the objects of a table, each as a request for one block. Sizes are not used.

    Raises:
        InvalidRequest: a line is not `time,obj_id[,size]`.
    """
    is_first = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        cells, where = [cell.strip() for cell in line.split(",")], Where(path, number)
        time_s = _time_of(cells[0])
        is_header = time_s is None and is_first and len(cells) > 1 and not any(cell[:1].isdigit() for cell in cells)
        is_first = False
        if is_header:
            continue
        if time_s is None or len(cells) < 2 or not cells[1]:
            raise InvalidRequest(
                f"{where}: wanted time,obj_id or time,obj_id,size with the time in seconds, got {clip(line)}; put "
                "these columns first, divided by commas"
            )
        yield Record(where, time_s, None, 0, cells[1:2])


def _time_of(cell: str) -> float | None:
    try:
        time_s = float(cell)
    except ValueError:
        return None
    return time_s if math.isfinite(time_s) else None

"""Read libCacheSim's tables: `time,obj_id[,size]`, with or without a header. Each object is a chain of one block."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.bounds import clip
from kvstore.errors import InvalidRequest
from kvstore.replay.records import Record, Where

#: The format has no tokens. This is the block of the store's examples.
CSV_BLOCK_TOKENS = 16
#: Names that a header may give the columns.
_COLUMNS = ({"time", "timestamp", "ts"}, {"obj_id", "object_id", "obj", "id", "key"}, {"size", "obj_size", "bytes"})
#: Not all that Python reads as a number: no "inf", no "1_000", no digits of other scripts.
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def csv_records(lines: Sequence[str], path: Path) -> Iterator[Record]:
    """Yield the objects of a table, each as a request for one block. Sizes are not used.

    Raises:
        InvalidRequest: a line is not `time,obj_id[,size]`, or the header names other columns.
    """
    is_first = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        cells, where = [cell.strip() for cell in line.split(",")], Where(path, number)
        names, is_first = tuple(cell.lower() for cell in cells) if is_first else (), False
        if 2 <= len(names) <= 3 and all(name in known for name, known in zip(names, _COLUMNS, strict=False)):
            continue
        if not (2 <= len(cells) <= 3 and cells[1] and all(_NUMBER.fullmatch(cell) for cell in (cells[0], *cells[2:]))):
            raise InvalidRequest(
                f"{where}: wanted time,obj_id or time,obj_id,size with the time in seconds, got {clip(line)}; put "
                "these columns first, divided by commas, and leave the others out"
            )
        yield Record(where, float(cells[0]), None, 0, cells[1:2])

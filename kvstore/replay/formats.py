"""Read a trace file. The format is taken from its first record, or named.

A file is refused as a whole: an error names the line, what was wanted there, what was found, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvstore.bounds import clip
from kvstore.errors import ChainBroken, InvalidRequest
from kvstore.replay.csv_traces import CSV_BLOCK_TOKENS, csv_records
from kvstore.replay.records import Record, Where
from kvstore.replay.traces import Chains, Request, Trace
from kvstore.replay.weka import weka_records

#: Format -> tokens of a block, unless the file or the caller says.
FORMATS: Mapping[str, int] = {"mooncake": 512, "bailian": 16, "weka": 64, "csv": CSV_BLOCK_TOKENS}
_KNOWN = (
    'a line {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} (mooncake), the same with '
    '"chat_id" and seconds (bailian), an object with "requests" (weka), or a line time,obj_id (csv)'
)
#: Unit of a file's times -> how many of them a second has.
TIME_UNITS: Mapping[str, float] = {"s": 1.0, "ms": 1000.0}
#: Formats whose times are no seconds.
_OTHER_UNITS = {"mooncake": "ms"}
#: No trace is longer, and none begins later after its zero: 3,000 years.
_MOST_S = 1e11
#: Milliseconds from request to request, on average, below which they are seconds: of whole times, and of others.
_LEAST_MS, _LEAST_FRACTION_MS = 1.0, 20.0
#: Fewer whole times may well come together.
_FEW = 100


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the Mooncake or the Bailian format.

    The fields of the latter alone say nothing about blocks. A field that is not known here might: it is refused.
    """

    timestamp: float
    input_length: int
    hash_ids: list[int]
    output_length: int = 0
    chat_id: Any = None
    parent_chat_id: Any = None
    type: Any = None
    turn: Any = None


def read_trace(path: Path, format_name: str = "", block_tokens: int = 0, time_unit: str = "") -> Trace:
    """Read a whole trace.

    Args:
        path: of the file.
        format_name: one of `FORMATS`; found out when empty.
        block_tokens: tokens of a block; what the file or its format says when 0.
        time_unit: one of `TIME_UNITS`; that of the format when empty, and then times that are plainly others are
            refused.

    Raises:
        InvalidRequest: the file cannot be read, or is not a trace.
        ChainBroken: the ids of a request cannot be a chain.
    """
    text = _read(path)
    lines = text.split("\n")
    first = next((number for number, line in enumerate(lines, 1) if line.strip()), 0)
    if not first:
        raise InvalidRequest(f"{path}: wanted a trace, got an empty file; `kvstore trace make` writes one")
    name = format_name or detect_format(Where(path, first), lines[first - 1], text)
    if name == "weka":
        found, own_tokens = weka_records(text, lines, path)
        tokens = block_tokens or own_tokens or FORMATS[name]
    else:
        found, tokens = _LINE_FORMATS[name](lines, path), block_tokens or FORMATS[name]
    return _as_trace(found, path, name, tokens, time_unit)


def detect_format(where: Where, first: str, text: str) -> str:
    """Return the format of a file by its first line that is not empty, which stands at `where`.

    Raises:
        InvalidRequest: it is of no format that is known here.
    """
    try:
        record = msgspec.json.decode(first)
    except (msgspec.DecodeError, RecursionError):
        # An object or an array over several lines, or a table.
        if text.lstrip()[:1] in "[{":
            if '"requests"' in text:
                return "weka"
        elif "," in first:
            return "csv"
        record = None
    if isinstance(record, list) and record:
        record = record[0]
    if isinstance(record, dict):
        if "requests" in record:
            return "weka"
        if {"timestamp", "hash_ids"} <= record.keys():
            return "bailian" if "chat_id" in record else "mooncake"
    raise InvalidRequest(f"{where}: wanted {_KNOWN}, got {clip(first)}; name the format with --format")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidRequest(
            f"{path}: wanted a trace file, got {error.strerror}; name a file that can be read"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path}: wanted text in UTF-8, got byte {error.object[error.start]:#04x} at {error.start}; if the file is "
            "compressed, decompress it first"
        ) from error


def _rows(lines: Sequence[str], path: Path, format_name: str) -> Iterator[tuple[Where, Row]]:
    decoder = msgspec.json.Decoder(Row)
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = Where(path, number)
            try:
                yield where, decoder.decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                raise InvalidRequest(
                    f"{where}: wanted a line of the {format_name} format, got {clip(line)} ({error}); repair the line, "
                    "or name another --format"
                ) from error


def _mooncake(lines: Sequence[str], path: Path) -> Iterator[Record]:
    for where, row in _rows(lines, path, "mooncake"):
        if len(set(row.hash_ids)) < len(row.hash_ids):
            twice = next(each for at, each in enumerate(row.hash_ids) if each in row.hash_ids[:at])
            raise ChainBroken(
                f"{where}: wanted each id of a request once, as an id of this format means all tokens up to it, got "
                f"{twice} twice; where ids are hashes of single blocks and times are seconds, use --format bailian"
            )
        yield Record(where, row.timestamp, row.input_length, row.output_length, row.hash_ids, is_whole=True)


def _bailian(lines: Sequence[str], path: Path) -> Iterator[Record]:
    for where, row in _rows(lines, path, "bailian"):
        yield Record(where, row.timestamp, row.input_length, row.output_length, row.hash_ids)


_LINE_FORMATS: dict[str, Callable[[Sequence[str], Path], Iterator[Record]]] = {
    "mooncake": _mooncake,
    "bailian": _bailian,
    "csv": csv_records,
}


def _as_trace(records: Iterator[Record], path: Path, format_name: str, block_tokens: int, time_unit: str) -> Trace:
    chains, requests, before_s = Chains(), list[Request](), 0.0
    unit = time_unit or _OTHER_UNITS.get(format_name, "s")
    where, has_fraction = Where(path, 0), False
    for record in records:
        where, time_s = record.where, record.time / TIME_UNITS[unit]
        _check(record, time_s, before_s, block_tokens)
        before_s, has_fraction = time_s, has_fraction or record.time % 1 > 0
        blocks = chains.blocks_of(record.ids, record.scope)
        tokens = record.input_tokens if record.input_tokens is not None else len(blocks) * block_tokens
        requests.append(Request(time_s, tokens, record.output_tokens, blocks))
    if not any(request.blocks for request in requests):
        raise InvalidRequest(
            f"{path}: wanted requests with ids of blocks, got {len(requests)} without; use another file"
        )
    if unit == "ms" and not time_unit:
        _check_unit(where, requests, has_fraction)
    return Trace(path.name, format_name, block_tokens, requests, chains.digests())


def _check_unit(where: Where, requests: list[Request], has_fraction: bool) -> None:
    """Refuse times that would be milliseconds and are plainly seconds; `where` is the last one."""
    took_ms = 1000 * (requests[-1].time_s - requests[0].time_s)
    least_ms = _LEAST_FRACTION_MS if has_fraction else _LEAST_MS if len(requests) > _FEW else 0.0
    if 0 < took_ms < least_ms * len(requests):
        raise InvalidRequest(
            f"{where}: wanted times in milliseconds, got {len(requests)} requests in {took_ms:g} ms, so they may be "
            "seconds; say --time-unit s, or --time-unit ms if they are milliseconds"
        )


def _check(record: Record, time_s: float, before_s: float, block_tokens: int) -> None:
    where = record.where
    if not 0 <= time_s <= _MOST_S:
        raise InvalidRequest(
            f"{where}: wanted a time from 0 to {_MOST_S:g} s, got {time_s:g} s; let the trace begin at 0, or say "
            "--time-unit ms"
        )
    if time_s < before_s:
        raise InvalidRequest(
            f"{where}: wanted a time of {before_s:g} s or more, as requests stand in the order of their time, got "
            f"{time_s:g} s; sort the lines by time"
        )
    for name, tokens in (("input", record.input_tokens), ("output", record.output_tokens)):
        if tokens is not None and tokens < 0:
            raise InvalidRequest(f"{where}: wanted 0 or more {name} tokens, got {tokens}; repair the line")
    if record.is_whole and record.input_tokens is not None:
        full, partial = divmod(record.input_tokens, block_tokens)
        if not full <= len(record.ids) <= full + bool(partial):
            raise ChainBroken(
                f"{where}: wanted {full + bool(partial)} ids, for {record.input_tokens} tokens in blocks of "
                f"{block_tokens}, got {len(record.ids)}; a chain names every block from the first on. If blocks have "
                "another size, say --block-tokens"
            )

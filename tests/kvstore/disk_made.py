"""Records of blocks that tests of kvstore.disk make up."""

from __future__ import annotations

from kvstore.disk.records import Record, checksum_of


def digest(number: int) -> bytes:
    """Return a hash for a number."""
    return number.to_bytes(4, "little") * 8


#: Of the namespace of these blocks.
SPACE = digest(1 << 20)


def record(place: int = 0, *, own: int = 1, parent: int | bytes = SPACE, depth: int = 0, **more) -> Record:
    """Return the record of a block; numbers stand for hashes."""
    values = {"generation": 7, "version": 3, "num_bytes": 1024, "namespace": SPACE, "checksum": checksum_of(b"x")}
    above = digest(parent) if isinstance(parent, int) else parent
    return Record(place=place, block_hash=digest(own), parent=above, depth=depth, **(values | more))


def chain(*numbers: int, depth: int = 0, parent: int | bytes = SPACE, **more) -> list[Record]:
    """Return the records of a chain; the place of each is its number."""
    found = list[Record]()
    for at, own in enumerate(numbers):
        above = found[-1].block_hash if found else parent
        found.append(record(own, own=own, parent=above, depth=depth + at, **more))
    return found

"""Define the record of a block on disk: it stands before the block's bytes, and once more in the index file.

docs/disk.md describes both files. A record names the block, the tier and the place that it was written for, and has
the checksum of the block's bytes and its own. So bytes that were torn, moved, overwritten or changed are noticed when
they are read, whatever the index says.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.blocks.chain import HASH_BYTES

#: Reads and writes begin and end at multiples of this, as O_DIRECT wants it.
PAGE_BYTES = 4096
#: Of a record in the index file. Before the bytes of a block it has a page of its own.
RECORD_BYTES = 256
TIER_ID_BYTES = 16
CHECKSUM_BYTES = 16

_MAGIC = b"RAYKVBLK"
_FIELDS = struct.Struct("<8s16sQQQQQ32s32s32s16s")
_SUM, _TAG = struct.Struct("<Q"), struct.Struct("<I")
_PADDING = bytes(RECORD_BYTES - _FIELDS.size - _SUM.size - _TAG.size)
#: The same fields, to find the written records of a whole index file at once.
_COLUMNS = np.dtype(
    [("magic", "S8"), ("tier", f"V{TIER_ID_BYTES}"), ("place", "<u8"), ("rest", f"V{RECORD_BYTES - 32}")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A block on disk.

    Args:
        place: number of its slot in the slot file.
        generation: grows with every write of the tier; tells two blocks apart that had the same place.
        depth: number of the block in its chain.
        version: of the last clearing of its namespace before it was stored.
        num_bytes: of the block.
        block_hash: its name.
        parent: hash of the block before it, the namespace digest for a first block.
        namespace: digest of its namespace.
        checksum: XXH3, 128 bits, of its bytes.
        tenant_tag: of the tenant that stored it, from `tag_of`. It stands behind the checksum of the record, where
            older versions wrote zeros.
    """

    place: int
    generation: int
    depth: int
    version: int
    num_bytes: int
    block_hash: bytes
    parent: bytes
    namespace: bytes
    checksum: bytes
    tenant_tag: int = 0


def place_bytes(slot_bytes: int) -> int:
    """Return how much of the disk a block takes whose slot in memory has so many bytes."""
    return PAGE_BYTES + slot_bytes + RECORD_BYTES


def checksum_of(data: memoryview | bytes) -> bytes:
    """Return the checksum of a block's bytes. Other threads run meanwhile."""
    return xxhash.xxh3_128_digest(data)


def pack_record(tier_id: bytes, record: Record) -> bytes:
    """Return a record as `RECORD_BYTES` bytes."""
    fields = _FIELDS.pack(
        _MAGIC, tier_id, record.place, record.generation, record.depth, record.version, record.num_bytes,
        record.block_hash, record.parent, record.namespace, record.checksum,
    )  # fmt: skip
    return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields)) + _TAG.pack(record.tenant_tag) + _PADDING


def unpack_record(tier_id: bytes, data: bytes | memoryview) -> Record | None:
    """Return the record that `pack_record` wrote for this tier; None for any other bytes."""
    fields = bytes(data[: _FIELDS.size])
    end = _FIELDS.size + _SUM.size
    if len(data) < end + _TAG.size or _SUM.unpack(data[_FIELDS.size : end])[0] != xxhash.xxh3_64_intdigest(fields):
        return None
    magic, tier, place, generation, depth, version, num_bytes, own, parent, namespace, checksum = _FIELDS.unpack(fields)
    if magic != _MAGIC or tier != tier_id:
        return None
    return Record(
        place=place, generation=generation, depth=depth, version=version, num_bytes=num_bytes, block_hash=own,
        parent=parent, namespace=namespace, checksum=checksum, tenant_tag=_TAG.unpack_from(data, end)[0],
    )  # fmt: skip


def unpack_index(tier_id: bytes, data: bytes) -> list[Record]:
    """Return the valid records of a whole index file; each has to stand at its own place."""
    rows = np.frombuffer(data, _COLUMNS, len(data) // RECORD_BYTES)
    places: npt.NDArray[np.intp] = np.flatnonzero(rows["magic"] == _MAGIC)
    found = list[Record]()
    for place in places.tolist():
        record = unpack_record(tier_id, data[place * RECORD_BYTES : (place + 1) * RECORD_BYTES])
        if record is not None and record.place == place:
            found.append(record)
    return found


def runs_of(blocks: Sequence[Record]) -> list[list[Record]]:
    """Group blocks of one namespace into runs of a chain: each block follows the one before it, of the same tenant.

    A block goes into a run after its parent; of several children the first continues the run, the others begin new
    ones. Blocks nearer the root come first, so that the parent of a run is known before the run.
    """
    by_hash = {block.block_hash: block for block in blocks}
    children: dict[bytes, list[Record]] = {}
    heads = list[Record]()
    for block in sorted(blocks, key=lambda block: block.depth):
        above = by_hash.get(block.parent)
        # A record whose depth does not fit that of its parent begins a run: no circle can come from it.
        follows = above is not None and above.depth + 1 == block.depth and above.tenant_tag == block.tenant_tag
        if follows:
            children.setdefault(block.parent, []).append(block)
        else:
            heads.append(block)
    runs = list[list[Record]]()
    heads.reverse()
    while heads:
        run = [heads.pop()]
        while nexts := children.pop(run[-1].block_hash, []):
            run.append(nexts[0])
            heads += reversed(nexts[1:])
        runs.append(run)
    return runs


def hashes_of(run: Sequence[Record]) -> bytes:
    """Return the hashes of a run, back to back."""
    data = b"".join([block.block_hash for block in run])
    assert len(data) == len(run) * HASH_BYTES
    return data

"""Records of blocks on disk: any other bytes are refused, and runs are made of whatever is found."""

import itertools
from dataclasses import fields, replace

import pytest
from disk_made import chain, digest, record

from kvstore.disk.records import (
    RECORD_BYTES,
    TIER_ID_BYTES,
    Record,
    hashes_of,
    pack_record,
    runs_of,
    unpack_index,
    unpack_record,
)

TIER, OTHER = bytes(range(TIER_ID_BYTES)), bytes(TIER_ID_BYTES)
#: Bytes of a record that mean something; zeros follow.
USED_BYTES = 184


def test_a_record_comes_back():
    one = record(5)
    packed = pack_record(TIER, one)
    assert len(packed) == RECORD_BYTES
    assert unpack_record(TIER, packed) == one
    assert unpack_record(TIER, memoryview(packed + bytes(4096))) == one


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_any_changed_byte_is_refused(mask):
    packed = bytearray(pack_record(TIER, record(5)))
    for at in range(USED_BYTES):
        packed[at] ^= mask
        assert unpack_record(TIER, bytes(packed)) is None, at
        packed[at] ^= mask
    assert unpack_record(TIER, bytes(packed)) is not None


def test_other_bytes_are_refused():
    packed = pack_record(TIER, record(5))
    assert unpack_record(OTHER, packed) is None, "of another tier"
    for data in (b"", packed[:1], packed[: USED_BYTES - 1], bytes(RECORD_BYTES), b"\xff" * RECORD_BYTES, packed[1:]):
        assert unpack_record(TIER, data) is None
    # A sum over other fields, even a right one, is of no use without the first bytes.
    assert unpack_record(TIER, pack_record(TIER, record(5))[8:] + bytes(8)) is None


def test_every_field_counts():
    """Two records are the same block only if all their fields are."""
    one = record(5)
    for field in fields(Record):
        value = getattr(one, field.name)
        other = replace(one, **{field.name: value + 1 if isinstance(value, int) else bytes(len(value))})
        assert other != one
        assert pack_record(TIER, other) != pack_record(TIER, one)
        assert unpack_record(TIER, pack_record(TIER, other)) == other


def test_an_index_gives_valid_records_at_their_own_place():
    rows = [pack_record(TIER, record(place, own=place + 1)) for place in range(6)]
    rows[1] = bytes(RECORD_BYTES)
    rows[2] = rows[3]
    rows[4] = pack_record(OTHER, record(4))
    rows[5] = rows[5][:100] + b"\xaa" + rows[5][101:]
    data = b"".join(rows)
    assert [found.place for found in unpack_index(TIER, data)] == [0, 3]
    assert [found.place for found in unpack_index(TIER, data[: RECORD_BYTES + 10])] == [0]
    assert unpack_index(TIER, data[:10]) == []
    assert unpack_index(TIER, b"") == []


def names(runs):
    return [[int.from_bytes(block.block_hash[:4], "little") for block in run] for run in runs]


def test_runs_of_a_chain_in_any_order():
    blocks = chain(1, 2, 3, 4)
    assert names(runs_of(blocks)) == [[1, 2, 3, 4]]
    assert names(runs_of(blocks[::-1])) == [[1, 2, 3, 4]]
    assert b"".join(digest(own) for own in (1, 2, 3, 4)) == hashes_of(blocks)
    assert runs_of([]) == []


def test_runs_of_a_fork():
    """A13: a run has blocks of one chain only."""
    trunk = chain(1, 2)
    left, right = chain(3, 4, depth=2, parent=digest(2)), chain(5, 6, 7, depth=2, parent=digest(2))
    found = names(runs_of([*right, *left, *trunk]))
    assert sorted(map(tuple, found)) in ([(1, 2, 3, 4), (5, 6, 7)], [(1, 2, 5, 6, 7), (3, 4)])
    assert found[0][0] == 1, "the parent's run comes first"


def test_runs_with_a_gap():
    blocks = chain(1, 2, 3, 4, 5)
    assert names(runs_of([*blocks[:2], *blocks[3:]])) == [[1, 2], [4, 5]]


def test_runs_with_circles_and_wrong_depths():
    one, other = record(1, own=1, parent=2, depth=1), record(2, own=2, parent=1, depth=2)
    assert sorted(names(runs_of([one, other]))) == [[1, 2]]
    assert names(runs_of([record(1, own=1, parent=1, depth=4)])) == [[1]]
    wrong = [record(1, own=1), record(2, own=2, parent=1, depth=5), record(3, own=3, parent=2, depth=6)]
    assert sorted(names(runs_of(wrong))) == [[1], [2, 3]]
    both = [record(1, own=1, parent=2, depth=3), record(2, own=2, parent=1, depth=3)]
    assert sorted(names(runs_of(both))) == [[1], [2]]


def test_every_block_is_in_one_run():
    """Also of 2,000 blocks that hang on each other at random."""
    blocks = [record(own, own=own, parent=(own * 7919) % 2000, depth=(own * 31) % 50) for own in range(1, 2000)]
    found = [own for run in names(runs_of(blocks)) for own in run]
    assert sorted(found) == list(range(1, 2000))
    for run in runs_of(blocks):
        assert all(b.parent == a.block_hash and b.depth == a.depth + 1 for a, b in itertools.pairwise(run))


def test_a_run_has_blocks_of_one_tenant():
    blocks = chain(1, 2, 3, 4)
    mixed = [*blocks[:2], *(replace(block, tenant_tag=7) for block in blocks[2:])]
    assert names(runs_of(mixed)) == [[1, 2], [3, 4]]

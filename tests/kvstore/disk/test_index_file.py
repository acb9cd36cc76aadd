"""The file of records: each at its own place, whatever the file had before."""

import pytest
from disk_made import record

from kvstore.disk.index_file import IndexFile
from kvstore.disk.records import RECORD_BYTES, TIER_ID_BYTES, pack_record

TIER = bytes(range(TIER_ID_BYTES))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "index.bin"


def opened(path, num_slots=8):
    file = IndexFile(path, TIER)
    file.resize(num_slots)
    return file


def places(path, num_slots=8):
    file = opened(path, num_slots)
    found = [each.place for each in file.read_all()]
    file.close()
    return found


def fill(path, num_slots=8):
    file = opened(path, num_slots)
    records = [record(place, own=place + 1) for place in range(num_slots)]
    file.write_all(records, [pack_record(TIER, each) for each in records])
    file.sync()
    file.close()


def test_records_come_back(path):
    assert places(path) == []
    assert path.stat().st_mode & 0o777 == 0o600
    fill(path)
    assert places(path) == list(range(8))


def test_an_erased_record_is_gone(path):
    fill(path)
    file = opened(path)
    file.erase(3)
    file.erase(7)
    assert [each.place for each in file.read_all()] == [0, 1, 2, 4, 5, 6]
    file.close()


def test_more_and_fewer_slots(path):
    fill(path)
    assert places(path, 20) == list(range(8))
    assert places(path, 5) == list(range(5))
    assert path.stat().st_size == 5 * RECORD_BYTES


def test_any_content(path):
    fill(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at])
        assert places(path) == list(range(at // RECORD_BYTES + (at % RECORD_BYTES >= 184)))
    path.write_bytes(bytes(range(256)) * 8)
    assert places(path) == []
    path.write_bytes(whole[RECORD_BYTES:] + whole[:RECORD_BYTES])
    assert places(path) == [], "each record has its own place"


def test_a_file_that_is_not_there_has_no_records_and_is_not_made(path):
    file = IndexFile(path, TIER)
    assert file.read_all() == []
    file.close()
    assert not path.exists()

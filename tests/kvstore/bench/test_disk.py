"""The benchmark of the disk tier: what it measures, refuses and leaves behind."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from kvstore.bench import disk
from kvstore.bench.disk import run_disk
from kvstore.errors import ConfigError, InvalidRequest

SIZE, BLOCK = 4 << 20, 64 << 10


def measure(folder, num_bytes=SIZE, block_bytes=BLOCK, rounds=2):
    said = []
    return run_disk(folder, num_bytes, [block_bytes], rounds, said.append), said


def test_it_measures_both_ways_of_both_operations(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "CHAIN_BYTES", 3 * BLOCK)
    rows, said = measure(tmp_path, SIZE + 1)
    assert [(row["op"], row["way"]) for row in rows] == [
        ("write", "plain"), ("write", "tier"), ("read", "plain"), ("read", "tier")
    ]  # fmt: skip
    for row in rows:
        assert (row["block_bytes"], row["num_bytes"], row["rounds"]) == (BLOCK, SIZE, 2)
        assert len(row["gb_per_s_of_rounds"]) == 2
        assert min(row["gb_per_s_of_rounds"]) <= row["gb_per_s"] <= max(row["gb_per_s_of_rounds"])
        assert row["cpu_s_per_gb"] > 0
        assert ("of_plain" in row) == (row["way"] == "tier")
    assert len(said) == 1 + 2 * 4
    assert list(tmp_path.iterdir()) == []


def test_it_measures_several_sizes_of_blocks(tmp_path):
    rows = run_disk(tmp_path, SIZE, [BLOCK, 2 * BLOCK], 1, lambda text: None)
    assert [row["block_bytes"] for row in rows] == 4 * [BLOCK] + 4 * [2 * BLOCK]
    with pytest.raises(InvalidRequest, match="wanted"):
        run_disk(tmp_path, SIZE, [BLOCK, 1000], 1, lambda text: pytest.fail("nothing is measured"))


def can_read_direct(folder) -> bool:
    path = folder / "probe"
    path.write_bytes(bytes(4096))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, 4096) as page:
            return os.preadv(fd, [page], 0) == 4096
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink()


def test_it_says_whether_the_page_cache_was_used(tmp_path):
    rows, _ = measure(tmp_path, rounds=1)
    assert {row["is_direct"] for row in rows} == {can_read_direct(tmp_path)}


def test_a_block_that_comes_back_with_other_bytes_is_no_result(tmp_path, monkeypatch):
    load = disk.Bench.load

    def loads_badly(self, chains):
        load(self, chains)
        self._in_slot(0)[5] ^= np.uint8(1)

    monkeypatch.setattr(disk.Bench, "load", loads_badly)
    with pytest.raises(AssertionError, match="other bytes"):
        measure(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_bytes", "block_bytes"), [(SIZE, 0), (SIZE, 1000), (SIZE, 1 << 50), (BLOCK, BLOCK)])
def test_a_size_that_cannot_be_measured_is_refused(tmp_path, num_bytes, block_bytes):
    with pytest.raises(InvalidRequest, match="wanted"):
        measure(tmp_path, num_bytes, block_bytes)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_too_little_room_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="wanted room for"):
        measure(tmp_path, 1 << 55, 2 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="wanted a folder that can be written to"):
        measure(tmp_path / "missing")

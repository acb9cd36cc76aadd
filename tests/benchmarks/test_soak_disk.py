"""The soak's disk faults: files change as the fault says, and calls fail or hang in a process that has the hook."""

import json
import os
import random
import subprocess
import sys
import time

import pytest

from kvstore.disk.records import RECORD_BYTES
from tests.soak.disk_faults import INDEX, SLOTS, STRIDE_BYTES, DiskFaults, environment, written
from tests.soak.plan import REFUSING, SPOILING, Fault

NUM_PLACES = 60
#: Writes and reads below two folders, and says of each how it ended and how long it took.
_CALLS = """
import json, os, sys, time
def end(call, *args):
    began = time.monotonic()
    try:
        call(*args)
        error = 0
    except OSError as raised:
        error = raised.errno
    return error, time.monotonic() - began
fds = [os.open(path, os.O_RDWR | os.O_CREAT) for path in sys.argv[1:]]
for line in sys.stdin:
    found = [[end(os.pwritev, fd, [b"x"], 0), end(os.preadv, fd, [bytearray(1)], 0)] for fd in fds]
    print(json.dumps(found), flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "disk" / "soak-0"
    made.mkdir(parents=True)
    rng = random.Random(1)
    (made / SLOTS).write_bytes(rng.randbytes(NUM_PLACES * STRIDE_BYTES))
    # Every second place has a record.
    records = [rng.randbytes(RECORD_BYTES) if place % 2 else bytes(RECORD_BYTES) for place in range(NUM_PLACES)]
    (made / INDEX).write_bytes(b"".join(records))
    return made


@pytest.fixture
def faults(tmp_path, folder):
    return DiskFaults(tmp_path / "disk", tmp_path / "disk-control", random.Random(2))


def contents(folder):
    return (folder / SLOTS).read_bytes(), (folder / INDEX).read_bytes()


@pytest.mark.parametrize("fault", SPOILING)
def test_a_fault_changes_the_file_that_it_names_and_no_other(faults, folder, fault):
    assert faults.folders() == [folder]
    before = contents(folder)
    if fault is Fault.PUT_BACK_SLOTS:
        faults.remember()
        faults.spoil(Fault.ZERO_SLOTS, folder)
        assert contents(folder) != before
        faults.spoil(fault, folder)
        assert contents(folder) == before
        return
    faults.spoil(fault, folder)
    slots, index = contents(folder)
    if fault in (Fault.FLIP_INDEX, Fault.ERASE_INDEX, Fault.COPY_INDEX):
        assert slots == before[0]
        assert index != before[1]
        assert len(index) == len(before[1])
    else:
        assert index == before[1]
        assert slots != before[0]
        assert len(slots) == len(before[0]) or fault is Fault.TRUNCATE_SLOTS
    if fault is Fault.FLIP_SLOTS:
        wrong = sum((a ^ b).bit_count() for a, b in zip(slots, before[0], strict=True))
        assert wrong == len(written(folder / INDEX)) == NUM_PLACES // 2


def test_a_folder_without_blocks_stays_as_it_is(faults, folder):
    (folder / INDEX).write_bytes(bytes(NUM_PLACES * RECORD_BYTES))
    before = contents(folder)
    assert faults.spoil(Fault.FLIP_SLOTS, folder) == "there are no blocks"
    assert contents(folder) == before


def test_calls_meet_a_fault_below_its_folder_until_it_is_over(tmp_path, faults, folder):
    other = tmp_path / "disk" / "soak-1"
    other.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", _CALLS, str(folder / "file"), str(other / "file")],
        env={**os.environ, **environment(tmp_path, os.environ)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ends():
        process.stdin.write("\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    try:
        assert [[error for error, _ in calls] for calls in ends()] == [[0, 0], [0, 0]]
        for fault, errors in ((Fault.FILL_DISK, [28, 0]), (Fault.FAIL_DISK, [5, 5])):
            with faults.refusing(fault, folder, 60.0):
                assert [[error for error, _ in calls] for calls in ends()] == [errors, [0, 0]]
        began_s = time.monotonic()
        with faults.refusing(Fault.HANG_DISK, folder, 0.5):
            (hung, _), _ = ends()
        assert hung[0] == 0
        assert hung[1] > 0.3
        assert time.monotonic() - began_s < 20.0
        assert [[error for error, _ in calls] for calls in ends()] == [[0, 0], [0, 0]]
    finally:
        process.communicate(timeout=20)
    assert faults.num_refused() == {"fill": 1, "fail": 2, "hang": 1}
    assert len(REFUSING) == 3

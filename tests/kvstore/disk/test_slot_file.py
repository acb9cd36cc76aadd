"""The file of slots: whole slots move, neighbours with one call, and a part of one is an error."""

import errno
import mmap
import os

import pytest

from kvstore.disk.records import PAGE_BYTES
from kvstore.disk.slot_file import SlotFile

SLOT_BYTES, NUM_SLOTS = 8192, 6


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slots.bin"


@pytest.fixture
def file(path):
    made = sized(path)
    yield made
    made.close()


def sized(path, num_slots=NUM_SLOTS):
    made = SlotFile(path, SLOT_BYTES)
    made.resize(num_slots)
    return made


def pages(count: int, fill: int = 0):
    """Page-aligned memory of `count` slots, as buffers of a page and a slot each."""
    memory = memoryview(mmap.mmap(-1, count * (PAGE_BYTES + SLOT_BYTES)))
    memory[:] = bytes([fill]) * len(memory)
    buffers, at = [], 0
    for _ in range(count):
        buffers += [memory[at : at + PAGE_BYTES], memory[at + PAGE_BYTES : at + PAGE_BYTES + SLOT_BYTES]]
        at += PAGE_BYTES + SLOT_BYTES
    return buffers


def test_the_file_has_all_its_bytes_at_once(file, path):
    """A1: the first and the last byte of the last slot can be written and read."""
    info = path.stat()
    assert info.st_size == NUM_SLOTS * (PAGE_BYTES + SLOT_BYTES)
    assert info.st_blocks * 512 >= info.st_size
    assert info.st_mode & 0o777 == 0o600
    file.write(NUM_SLOTS - 1, pages(1, 7))
    found = pages(1)
    file.read(NUM_SLOTS - 1, found)
    assert all(bytes(buffer) == b"\7" * len(buffer) for buffer in found)
    with path.open("rb") as other:
        assert os.pread(other.fileno(), 10, info.st_size - 1) == b"\7"


def test_neighbours_move_with_one_call(file):
    wanted = [*pages(1, 1), *pages(1, 2), *pages(1, 3)]
    file.write(2, wanted)
    found = pages(3)
    file.read(2, found)
    assert [bytes(buffer) for buffer in found] == [bytes(buffer) for buffer in wanted]
    before, after = pages(2), pages(1)
    file.read(0, before)
    file.read(5, after)
    assert not any(any(buffer) for buffer in [*before, *after])


def test_nothing_comes_from_behind_the_end(file, path):
    """A1: what a file that was cut does not have is not made up; the checksums notice it."""
    file.write(NUM_SLOTS - 1, pages(1, 7))
    os.truncate(path, NUM_SLOTS * (PAGE_BYTES + SLOT_BYTES) - 4096)
    found = pages(1, 9)
    file.read(NUM_SLOTS - 1, found)
    assert bytes(found[0]) == b"\7" * PAGE_BYTES
    assert bytes(found[1][: SLOT_BYTES - 4096]) == b"\7" * (SLOT_BYTES - 4096)
    assert 7 not in bytes(found[1][SLOT_BYTES - 4096 :])


def test_a_read_of_a_part_is_an_error(file, monkeypatch):
    monkeypatch.setattr("os.preadv", lambda fd, buffers, at: 4096)
    with pytest.raises(OSError, match="read 4096 of"):
        file.read(0, pages(1))


def test_a_write_of_a_part_is_an_error(file, monkeypatch):
    monkeypatch.setattr("os.pwritev", lambda fd, buffers, at: 4096)
    with pytest.raises(OSError, match="wrote 4096 of"):
        file.write(0, pages(1))


def test_more_and_fewer_slots(path):
    SlotFile(path, SLOT_BYTES).close()
    assert not path.exists(), "only `resize` makes it"
    for num_slots in (6, 9, 3, 5):
        sized(path, num_slots).close()
        assert path.stat().st_size == num_slots * (PAGE_BYTES + SLOT_BYTES)
        again = SlotFile(path, SLOT_BYTES)
        assert again.num_slots == num_slots
        again.close()


def test_a_file_system_without_direct_io(path, monkeypatch):
    """Some refuse it when the file is opened, some at the first read."""
    real = os.open

    def refuse(name, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(name, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr("os.open", refuse)
        first = sized(path)
    with monkeypatch.context() as patch:
        patch.setattr("os.preadv", lambda *args: (_ for _ in ()).throw(OSError(errno.EINVAL, "no")))
        second = sized(path)
    for file in (first, second):
        assert not file.is_direct
        file.write(1, pages(1, 9))
        found = pages(1)
        file.read(1, found)
        assert bytes(found[1]) == b"\x09" * SLOT_BYTES
        file.close()


def test_nothing_stays_open_when_the_disk_refuses(path, monkeypatch, num_fds):
    """And nothing is closed twice: its number may belong to another file by then."""
    real, closed, before = os.close, [], num_fds()
    sized(path).close()

    def refuse(*args):
        raise OSError(errno.EIO, "broken")

    def close(fd):
        closed.append(fd)
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr("os.close", close)
        patch.setattr("os.preadv", lambda *args: (_ for _ in ()).throw(OSError(errno.EINVAL, "no")))
        opens = [os.open, refuse]
        patch.setattr("os.open", lambda *args: opens.pop(0)(*args))
        with pytest.raises(OSError, match="broken"):
            SlotFile(path, SLOT_BYTES)
    assert num_fds() == before
    assert len(closed) == 1

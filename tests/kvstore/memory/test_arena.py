from __future__ import annotations

import fcntl
import os
import re
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.memory import room
from kvstore.memory.arena import attach_arena, create_arena

NUM_BYTES = 3 * 65536 + 4096


@pytest.fixture
def slab():
    made = create_arena(NUM_BYTES)
    yield made
    made.close()


def mapped(fd: int) -> bool:
    """Whether this process maps the file behind `fd`."""
    info = os.fstat(fd)
    return any(line.split()[4] == str(info.st_ino) and "raykv-arena" in line for line in maps())


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def test_the_size_is_exact_and_all_pages_are_there(slab):
    assert slab.num_bytes == os.fstat(slab.fd).st_size == len(slab.bytes_view()) == NUM_BYTES
    assert os.fstat(slab.fd).st_blocks * 512 == NUM_BYTES


@pytest.mark.parametrize("num_bytes", [NUM_BYTES - 4096, NUM_BYTES + 4096, 0])
def test_nobody_changes_the_size(slab, num_bytes):
    with pytest.raises(PermissionError):
        os.ftruncate(slab.fd, num_bytes)
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(slab.fd, fcntl.F_GET_SEALS) & wanted == wanted
    assert os.fstat(slab.fd).st_size == NUM_BYTES


def test_two_mappings_are_the_same_memory(slab):
    other = attach_arena(FileIO(os.dup(slab.fd)), NUM_BYTES)
    try:
        assert other.address != slab.address
        slab.bytes_view()[-3:] = 7
        assert other.bytes_view()[-4:].tolist() == [0, 7, 7, 7]
        other.populate()
        assert other.bytes_view()[-1] == 7
    finally:
        other.close()


def test_the_view_is_at_the_address(slab):
    view = slab.bytes_view()
    assert view.dtype == np.uint8
    assert view.ctypes.data == slab.address


def test_more_than_there_is_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(room, "find_room", lambda _: room.Room(300 << 20, "cgroup limit /x/memory.max"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as caught:
        create_arena(301 << 20)
    text = str(caught.value)
    assert str(301 << 20) in text
    assert str(300 << 20) in text
    assert "/x/memory.max" in text
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_terabyte_too_much_is_refused_by_this_machine():
    found = room.find_room()
    assert found.free_bytes > 0
    assert found.source
    with pytest.raises(ConfigError, match=re.escape(str(found.free_bytes + (1 << 40)))):
        create_arena(found.free_bytes + (1 << 40))


def test_a_failed_allocation_leaves_no_descriptor(monkeypatch):
    def full(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="No space left"):
        create_arena(65536)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_has_no_mapping(slab):
    assert mapped(slab.fd)
    child = os.fork()
    if child == 0:
        os._exit(3 if mapped(slab.fd) else 0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("wanted", [NUM_BYTES - 4096, NUM_BYTES + 4096])
def test_a_file_of_another_size_is_refused_and_closed(slab, wanted):
    fd = os.dup(slab.fd)
    with pytest.raises(ConfigError) as caught:
        attach_arena(FileIO(fd), wanted)
    assert str(wanted) in str(caught.value)
    assert str(NUM_BYTES) in str(caught.value)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_close_unmaps():
    made = create_arena(65536)
    fd = os.dup(made.fd)
    assert mapped(fd)
    made.close()
    assert not mapped(fd)
    os.close(fd)


def test_mappings_begin_where_huge_pages_can():
    arena = create_arena(3 << 20)
    other = attach_arena(FileIO(os.dup(arena.fd)), 3 << 20)
    assert arena.address % (2 << 20) == other.address % (2 << 20) == 0
    arena.memory[-1] = 7
    assert other.memory[-1] == 7
    assert len(other.memory) == 3 << 20
    other.close()
    arena.close()

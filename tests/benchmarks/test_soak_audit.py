"""A leak of each kind is seen, and what is none is not called one."""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import pytest

from kvstore.memory.arena import create_arena
from tests.soak import audit


def mine() -> audit.Held:
    return audit.held_by(os.getpid())


@pytest.fixture(params=["arena", "pidfd", "eventpoll", "tcp closing", "raykv socket", "twenty pipes"])
def leak(request, tmp_path_factory):
    """Holds something that nobody closed, and says what it is."""
    kept = []
    if request.param == "arena":
        kept.append(create_arena(1 << 16))
    elif request.param == "pidfd":
        fd = os.pidfd_open(os.getpid())
    elif request.param == "eventpoll":
        kept.append(select.epoll())
    elif request.param == "tcp closing":
        listener = socket.create_server(("127.0.0.1", 0))
        kept.append(socket.create_connection(listener.getsockname(), timeout=5))
        accepted, _ = listener.accept()
        accepted.close()
        listener.close()
    elif request.param == "raykv socket":
        import tempfile

        with tempfile.TemporaryDirectory(prefix="raykv", dir="/tmp") as folder:
            kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            kept[0].bind(f"{folder}/x.sock")
    else:
        pipes = [os.pipe() for _ in range(20)]

    yield request.param
    for thing in kept:
        thing.close()
    if request.param == "pidfd":
        os.close(fd)
    if request.param == "twenty pipes":
        for pipe in pipes:
            os.close(pipe[0])
            os.close(pipe[1])


@pytest.fixture
def before():
    return mine()


def test_what_was_not_closed_is_a_leak(before, leak):
    found = audit.leaks("me", before, mine())
    assert found
    assert any(("pipe" if leak == "twenty pipes" else leak) in text for text in found)


def test_a_process_that_holds_what_it_held_leaks_nothing(before):
    assert audit.leaks("me", before, mine()) == []
    assert mine().num_threads >= 1


def test_the_processes_of_a_run_are_found_by_their_mark_and_no_others():
    mark = f"RAYKV_SOAK_TEST={secrets.token_hex(8)}"
    name, value = mark.split("=")
    child = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, name: value},
    )
    try:
        assert child.stdout.readline() == "up\n"  # what it is before its exec is over has no environment
        assert audit.carries(child.pid, mark)
        assert list(audit.processes_with(mark)) == [child.pid]
        assert not audit.carries(os.getpid(), mark)
    finally:
        child.communicate("\n", timeout=10)
    assert audit.processes_with(mark) == {}
    assert not audit.carries(child.pid, mark)


def test_the_end_of_each_traceback_is_found(tmp_path):
    (tmp_path / "worker-1.err").write_text(
        "hello\nTraceback (most recent call last):\n  File x\n    y()\nKeyError: 'z'\nbye\n"
        "Traceback (most recent call last):\n  File x\nkvstore.errors.PeerLost: gone\n"
    )
    (tmp_path / "worker-2.err").write_text("Error: a line that is none\n")
    assert audit.tracebacks(tmp_path, "worker-*.err") == [
        "worker-1.err: KeyError: 'z'",
        "worker-1.err: kvstore.errors.PeerLost: gone",
    ]


def test_shared_memory_is_left_over_when_nobody_holds_it_any_more():
    memory = SharedMemory(create=True, size=4096)
    try:
        assert memory.name not in audit.unheld_shared_memory()
        memory.close()
        assert memory.name in audit.unheld_shared_memory()
    finally:
        memory.unlink()
    assert memory.name not in audit.unheld_shared_memory()

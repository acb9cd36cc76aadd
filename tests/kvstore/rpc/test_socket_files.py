"""The files of Unix sockets: nobody removes the one of a store that lives, and a hung store holds no other up."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from kvstore.rpc import socket_files
from kvstore.rpc.server import ControlServer
from kvstore.rpc.socket_files import SocketFile, remove_stale_sockets


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="rkf", dir="/tmp") as path:
        yield Path(path)


def packet_socket():
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def serving(path) -> ControlServer:
    server = ControlServer(lambda connection, message: b"", lambda connection: None)
    server.listen_local(str(path))
    server.start()
    return server


def test_a_socket_between_its_bind_and_its_listen_is_left_alone(folder, monkeypatch):
    """Another store that starts in that moment takes it for one of a store that was killed."""
    removed, listen = [], socket.socket.listen

    def another_store_starts(sock, backlog):
        removed.append(remove_stale_sockets(folder))
        listen(sock, backlog)

    monkeypatch.setattr(socket.socket, "listen", another_store_starts)
    server = serving(folder / "a.sock")
    monkeypatch.undo()
    try:
        assert removed == [0]
        with packet_socket() as client:
            client.connect(str(folder / "a.sock"))
        assert [path.name for path in folder.iterdir()] == ["a.sock"]
    finally:
        server.stop()
    assert list(folder.iterdir()) == []


def test_a_hung_store_whose_backlog_is_full_does_not_hold_up_the_next_one(folder):
    path = str(folder / "hung.sock")
    with packet_socket() as hung:
        hung.bind(path)
        hung.listen(1)
        waiting = [packet_socket() for _ in range(8)]
        for each in waiting:
            each.setblocking(False)
            try:
                each.connect(path)
            except BlockingIOError:
                break
        else:
            pytest.fail("the backlog never was full")
        removed = []
        start = threading.Thread(target=lambda: removed.append(remove_stale_sockets(folder)), daemon=True)
        start.start()
        start.join(5)
        assert removed == [0]
        assert os.path.exists(path)
        for each in waiting:
            each.close()


def test_sockets_of_dead_stores_are_removed_and_those_that_began_long_ago(folder, monkeypatch):
    for name in ("dead.sock", "dead.hand", "half.new"):
        with packet_socket() as sock:
            sock.bind(str(folder / name))
    server = serving(folder / "alive.sock")
    try:
        assert remove_stale_sockets(folder) == 2
        monkeypatch.setattr(socket_files, "_UNFINISHED_FOR_S", -1.0)
        assert remove_stale_sockets(folder) == 1
        assert [path.name for path in folder.iterdir()] == ["alive.sock"]
    finally:
        server.stop()


def test_a_store_that_stops_leaves_the_socket_that_another_put_in_its_place(folder):
    path = folder / "a.sock"
    first = serving(path)
    second = serving(path)
    try:
        first.stop()
        with packet_socket() as client:
            client.connect(str(path))
    finally:
        second.stop()
    assert not path.exists()


def test_a_file_of_another_kind_in_its_place_is_left_too(folder):
    path = folder / "a.sock"
    with packet_socket() as sock:
        made = SocketFile(str(path), sock)
        sock.listen(1)
        made.finish()
        path.unlink()
        path.write_text("somebody's")
        made.remove()
        path.unlink()
        made.remove()

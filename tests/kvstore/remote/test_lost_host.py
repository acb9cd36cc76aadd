"""A host that vanishes says nothing more, not even that its connections end."""

from __future__ import annotations

import ctypes
import select
import socket
import struct

import pytest
from directory_client import connect, tell

from kvstore.blocks.chain import BlockHashes
from kvstore.remote.directory_link import Hints
from kvstore.remote.versions import NamespaceVersions
from kvstore.rpc import channel
from poolcheck.chains import chain_of

_SO_ATTACH_FILTER, _BPF_RETURN = 26, 0x06


def vanish(sock: socket.socket) -> None:
    """Have the kernel drop what comes for a socket, acknowledgements and probes too, as where there is no host."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


@pytest.fixture(autouse=True)
def _sooner(monkeypatch):
    monkeypatch.setattr(channel, "KEEP_IDLE_S", 1)
    monkeypatch.setattr(channel, "KEEP_INTERVAL_S", 1)
    monkeypatch.setattr(channel, "KEEP_PROBES", 2)


def test_the_directory_forgets_a_store_whose_host_vanished(directory, wait_until):
    lost, other = connect(directory.address(), node="lost"), connect(directory.address(), node="other")
    for client in (lost, other):
        tell(client, 1, chain_of("uv").hashes(), whole=True)
    assert directory.index.locate(chain_of("uv").hashes()) == [("lost", 2), ("other", 2)]
    vanish(lost.channel.sock)
    wait_until(lambda: directory.index.locate(chain_of("uv").hashes()) == [("other", 2)], 20)
    tell(other, 2)
    lost.close()
    other.close()


def test_a_store_notices_that_the_host_of_its_directory_vanished(directory, wait_until):
    said = []
    hints = Hints("a", directory.address, 2.0, NamespaceVersions(), lambda *_: None, said.append)
    hints.start(2.0)
    assert hints.locate(BlockHashes(b"n" * 32, b"n" * 32, 0, b"h" * 32)) == []
    assert hints.is_alone()
    for connection in directory.server.connections:
        vanish(connection.sock)
    wait_until(lambda: not hints.is_alone(), 20)
    wait_until(lambda: said[-1] is False, 20)
    hints.stop()


def test_a_peer_whose_host_vanished_is_noticed_before_it_is_asked(cluster, wait_until):
    core, other = cluster.add("a", mover=False), cluster.add("b", mover=False)
    peer = core.state.peers.get("b")
    for connection in other.control.server.connections:
        if not connection.local:
            vanish(connection.sock)
    ended = select.poll()
    ended.register(peer.client.fileno(), select.POLLIN)
    assert ended.poll(20_000), "its end can be read"
    wait_until(lambda: not peer.client.is_quiet())

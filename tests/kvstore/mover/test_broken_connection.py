"""Real movers over TCP: their connection breaks once, as behind a firewall, and both live on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket

import pytest

from kvstore.actors.plain_nodes import _ChildMover
from kvstore.mover.keeper import MoverKeeper

PIDFD_GETFD = 438


def break_tcp(pid: int) -> int:
    """Shut down every TCP connection of a process; returns how many those were."""
    libc, pidfd, num_broken = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid), 0
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                fd = libc.syscall(PIDFD_GETFD, pidfd, int(name), 0)
                if fd < 0:
                    pytest.skip("this process may not take descriptors of its children")
                with socket.socket(fileno=fd) as sock:
                    if (sock.family, sock.type) == (socket.AF_INET, socket.SOCK_STREAM):
                        sock.shutdown(socket.SHUT_RDWR)
                        num_broken += 1
    finally:
        os.close(pidfd)
    return num_broken


@pytest.fixture
def movers(cluster):
    """Nodes "a" and "b" with movers in processes of their own."""
    keepers = []
    for name in "ab":
        core = cluster.add(name, mover=False, capacity_bytes=1 << 20, call_timeout_s=10.0, lane="tcp")
        keepers.append(MoverKeeper(name, lambda core=core: _ChildMover(core), core.state.mover.wait_ready, 20.0))
        keepers[-1].start()
    assert all(core.state.mover.wait_ready(25.0) for core in cluster.nodes.values())
    yield [core.state.mover.pid for core in cluster.nodes.values()]
    for keeper in keepers:
        keeper.stop()


def test_a_connection_between_live_movers_that_broke_is_made_anew(cluster, movers, wait_until):
    one, two = cluster.worker("a", 8, seed=1), cluster.worker("b", 8, seed=2)
    hashes, core = cluster.hashes(6), cluster.nodes["b"]
    one.save(hashes, range(6))
    assert two.load(hashes, range(6), timeout_s=20.0).num_blocks == 6
    assert break_tcp(movers[1]) > 0

    def loads():
        core.pool.clear(cluster.space.digest)
        core.state.peers.succeeded("a")
        return two.load(hashes, range(6), timeout_s=10.0).num_blocks == 6

    wait_until(loads, 30.0)
    assert all(two.block(i) == one.block(i) for i in range(6))
    assert movers == [node.state.mover.pid for node in cluster.nodes.values()], "both live on"

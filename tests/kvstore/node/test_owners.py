"""Who owns what a local process holds, and when it comes back: forks, big processes, namespaces, older kernels."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from kvstore.blocks.codec import encode
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import ConfigError
from kvstore.rpc import acceptor
from kvstore.rpc.connect import connect_local
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Ask, Prepare, decode_grant

#: A worker that leases one chain and begins to write another, after what its last argument says.
WORKER = """
import mmap, os, sys, time
from kvstore.blocks.chain import decode_chain
from kvstore.blocks.codec import encode
from kvstore.config import PROTOCOL_VERSION
from kvstore.rpc.connect import connect_local
from kvstore.rpc.messages import Ask, Prepare, decode_grant, decode_ticket
from kvstore.rpc.framing import Op

how = sys.argv[4]
client, fd = connect_local(sys.argv[1], {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=5.0)
stored, other = (decode_chain(bytes.fromhex(text)) for text in sys.argv[2:4])
grant = decode_grant(client.call(Op.LEASE, encode(Ask(stored, 600.0)), timeout_s=5.0))
ticket = decode_ticket(client.call(Op.PREPARE_STORE, encode(Prepare(other, 1)), timeout_s=5.0))
child = 0
if how == "big":
    memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(23)
elif how == "fork":
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
print(len(grant.slots), len(ticket.slots), child, flush=True)
sys.stdin.read()
"""


class Held:
    """A store on which a worker process holds three pinned blocks and two half-written ones."""

    def __init__(self, cluster, how="", prefix=()):
        self.core = cluster.nodes.get("a") or cluster.add("a")
        engine = cluster.worker("a", 8)
        stored, other = cluster.hashes(3), cluster.hashes(2, seed=1)
        engine.save(stored, range(3))
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", WORKER, self.core.control_path,
             stored.encode().hex(), other.encode().hex(), how],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        leased, written, self.child = map(int, self.process.stdout.readline().split())
        assert (leased, written) == (3, 2)
        assert self.held() == (3, 2)

    def held(self):
        stats = self.core.pool.stats()
        return stats.num_pinned, stats.num_writing

    def kill_and_wait(self, within_s):
        started_s = time.monotonic()
        self.process.kill()
        while self.held() != (0, 0):
            assert time.monotonic() - started_s < within_s, self.held()
            time.sleep(0.001)
        self.core.pool.check_integrity()
        return time.monotonic() - started_s

    def end(self):
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def hold(cluster):
    made = []

    def make(*args, **options):
        made.append(Held(cluster, *args, **options))
        return made[-1]

    yield make
    for held in made:
        held.end()


def test_a_dead_worker_holds_nothing_after_a_moment(hold):
    assert hold().kill_and_wait(1.0) > 0


def test_a_forked_child_that_keeps_the_socket_is_not_the_owner(hold):
    held = hold("fork")
    try:
        held.kill_and_wait(1.0)
        os.kill(held.child, 0)
    finally:
        os.kill(held.child, signal.SIGKILL)


def test_a_process_with_a_gibibyte_of_memory_takes_longer_to_die_but_not_for_ever(hold):
    hold("big").kill_and_wait(3.0)


def test_a_worker_of_another_pid_namespace_is_watched(hold):
    if not can_unshare():
        pytest.skip("this user may not make PID namespaces")
    held = hold("", ("unshare", "--fork", "--pid", "--kill-child"))
    started_s = time.monotonic()
    held.process.kill()
    while held.held() != (0, 0):
        assert time.monotonic() - started_s < 2
        time.sleep(0.001)


def can_unshare():
    command = shutil.which("unshare")
    return bool(command) and subprocess.run([command, "--fork", "--pid", "true"], check=False).returncode == 0


@pytest.fixture
def old_kernel(monkeypatch):
    """One without SO_PEERPIDFD, as before Linux 6.5."""
    monkeypatch.setattr(acceptor, "_SO_PEERPIDFD", 12345)


def test_on_an_older_kernel_the_process_is_watched_by_its_pid(old_kernel, hold):
    hold().kill_and_wait(1.0)


def test_a_worker_that_cannot_be_watched_may_read_but_not_write(old_kernel, cluster, monkeypatch, wait_until):
    core = cluster.add("a")
    hashes = cluster.hashes(3)
    cluster.worker("a", 8).save(hashes, range(3))

    def refuse(pid):
        raise OSError("no such system call")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    client, fd = connect_local(core.control_path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=2.0)
    fd.close()

    granted_s = time.monotonic()
    grant = decode_grant(client.call(Op.LEASE, encode(Ask(hashes, 0.6)), timeout_s=2.0))
    assert len(grant.slots) == 3
    other = cluster.hashes(2, seed=1)
    with pytest.raises(ConfigError, match="may read but not write"):
        client.call(Op.PREPARE_STORE, encode(Prepare(other, 1)), timeout_s=2.0)
    # It may have gone on reading after its connection closed: its pins end with their time, not before.
    client.close()
    wait_until(lambda: not any(c.role == "client" and c.pidfd < 0 for c in core.control.server.connections))
    if time.monotonic() - granted_s < 0.5:
        assert core.pool.stats().num_pinned == 3
    wait_until(lambda: core.pool.stats().num_pinned == 0)
    assert time.monotonic() - granted_s >= 0.6
    assert core.pool.stats().num_writing == 0


def test_a_mover_that_cannot_be_watched_is_refused(old_kernel, cluster, monkeypatch):
    core = cluster.add("a", mover=False)
    monkeypatch.setattr(os, "pidfd_open", lambda pid: (_ for _ in ()).throw(OSError("no such system call")))
    with pytest.raises(ConfigError, match="fenced"):
        connect_local(core.control_path, {"role": "mover", "protocol": PROTOCOL_VERSION}, timeout_s=2.0)


def test_a_process_that_ended_before_it_was_named_is_nobody(old_kernel, cluster):
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = acceptor.peer_pidfd(ours, os.getpid())
    assert pidfd >= 0
    os.close(pidfd)
    theirs.close()
    assert acceptor.peer_pidfd(ours, os.getpid()) == -1, "whose pid that is now, nobody can say"
    assert acceptor.peer_pidfd(ours, 0) == -1, "a process that cannot be seen from this namespace"
    ours.close()

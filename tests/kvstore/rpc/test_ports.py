"""What a stranger on a port, or a client that misbehaves, costs the others: little, and not for long."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import resource
import socket
import subprocess
import sys
import tempfile
from io import FileIO

import msgspec
import pytest

from kvstore.blocks.codec import encode
from kvstore.bounds import clip
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import ConfigError, IncompatibleStore, InvalidRequest, KVStoreError, PeerLost, ProtocolError
from kvstore.memory.arena import attach_arena
from kvstore.remote.announcements import Batch
from kvstore.remote.messages import PeerLease
from kvstore.rpc import limits
from kvstore.rpc.connect import connect_local, connect_remote
from kvstore.rpc.framing import HEADER, STRANGER_BYTES, Decoder, Op, pack_error, unpack_error
from kvstore.rpc.messages import Ask, Found

HELLO = {
    "role": "peer",
    "protocol": PROTOCOL_VERSION,
    "node": "x",
    "epoch": b"epoch--1".hex(),
    "owner": b"owner--1".hex(),
}


def frame(op, payload=b"", *, flag=0, request=1, more=0, length=None, magic=b"RKV1"):
    return HEADER.pack(magic, op, flag, more, len(payload) if length is None else length, request) + payload


def dial(address, timeout_s=5.0):
    return socket.create_connection((address.host, address.port), timeout=timeout_s)


def all_of(sock):
    """Everything that comes until the other side cuts the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def errors_in(data):
    return [unpack_error(message.payload) for message in Decoder().stream(data)]


@pytest.fixture
def store(cluster):
    """A node with three blocks, a healthy worker, and what others share with it."""
    made = cluster.add("a")
    made.worker, made.hashes = cluster.worker("a", 8), cluster.hashes(3)
    made.worker.save(made.hashes, range(3))
    return made


@pytest.fixture(params=["store", "directory"])
def port(request, cluster, store):
    """The address of a TCP port on which strangers may knock; the healthy worker beside it has to go on."""
    yield store.peer_address() if request.param == "store" else cluster.directory.address()
    assert store.worker.client.lookup(store.hashes).num_local == 3
    assert store.control.server.is_serving(5.0)
    assert cluster.directory.server.is_serving(5.0)


def server_of(port, cluster, store):
    return store.control.server if port == store.peer_address() else cluster.directory.server


def local(store, **more):
    client, fd = connect_local(
        store.control_path, {"role": "client", "protocol": PROTOCOL_VERSION} | more, timeout_s=5.0
    )
    fd.close()
    return client


def test_a_stranger_may_send_4_kib(port, caplog):
    for payload in (b"x" * (STRANGER_BYTES + 1), json.dumps({"role": "x" * STRANGER_BYTES}).encode()):
        with dial(port) as sock:
            sock.sendall(frame(Op.HELLO, payload))
            assert all_of(sock) == b"", "it is cut before anything is made of its message"


def test_a_message_that_was_only_announced_costs_nothing(port):
    with dial(port) as sock:
        sock.sendall(frame(Op.HELLO, length=64 << 20))
        assert all_of(sock) == b""


def test_fragments_of_a_stranger_are_counted_together(port):
    with dial(port) as sock:
        sock.sendall(frame(Op.HELLO, more=1) * 300)
        assert all_of(sock) == b""
    with dial(port) as sock:
        sock.sendall(frame(Op.HELLO, b"x" * 1000, more=1) * 5)
        assert all_of(sock) == b""


BAD_HELLOS = {
    "non-ASCII token": json.dumps({**HELLO, "token": "\u00e9"}).encode(),
    "surrogate": json.dumps({**HELLO, "token": "\ud800"}).encode(),
    "nested": b"[" * 4000,
    "not UTF-8": b"\xff\xfe\x00",
    "huge number": b'{"protocol":' + b"9" * 4000 + b"}",
    "NaN": b'{"protocol":NaN}',
    "list": b'{"protocol":%d,"role":["peer"],"token":{}}' % PROTOCOL_VERSION,
    "wrong token": json.dumps({**HELLO, "token": "0" * 32}).encode(),
    "long role": json.dumps({**HELLO, "role": "x" * 3000}).encode(),
    "long protocol": json.dumps({**HELLO, "protocol": "x" * 3000}).encode(),
}


@pytest.mark.parametrize("name", BAD_HELLOS)
def test_a_bad_hello_is_answered_shortly_without_a_traceback_and_cut(port, caplog, name):
    with caplog.at_level(logging.INFO), dial(port) as sock:
        sock.sendall(frame(Op.HELLO, BAD_HELLOS[name]))
        data = all_of(sock)
    assert len(data) < 500
    (error,) = errors_in(data)
    assert isinstance(error, IncompatibleStore | ProtocolError)
    assert not any(record.exc_info for record in caplog.records)


def test_a_stranger_has_one_message(port, cluster, store):
    before = server_of(port, cluster, store).num_served.total()
    with dial(port) as sock:
        sock.sendall(frame(Op.HELLO, b"{}") * 50)
        assert len(errors_in(all_of(sock))) <= 1
    assert server_of(port, cluster, store).num_served.total() == before + 1


def test_strangers_write_little_into_the_log(port, caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            with dial(port) as sock:
                sock.sendall(frame(Op.HELLO, b"\xff"))
                all_of(sock)
    assert len(caplog.records) <= 2


def test_a_stranger_that_says_nothing_is_cut(port, monkeypatch):
    monkeypatch.setattr(limits, "HELLO_WITHIN_S", 0.1)
    with dial(port) as silent, dial(port) as slow:
        slow.sendall(frame(Op.HELLO)[:7])
        assert all_of(silent) == all_of(slow) == b""


def test_of_too_many_strangers_the_oldest_are_cut(port, cluster, store, monkeypatch):
    monkeypatch.setattr(limits, "HELLO_WITHIN_S", 60.0)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(dial(port)) for _ in range(2 * limits.MAX_PER_HOST)]
        assert [all_of(sock) for sock in socks[: limits.MAX_PER_HOST]] == [b""] * limits.MAX_PER_HOST
        socks[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            socks[-1].recv(1)
        server = server_of(port, cluster, store)
        assert len(server.strangers) <= limits.MAX_PER_HOST
        assert server.strangers.num_cut >= limits.MAX_PER_HOST
        # Who belongs here gets in beside them.
        role = "peer" if port == store.peer_address() else "store"
        connect_remote(port.host, port.port, {**HELLO, "role": role, "token": port.token}, timeout_s=5.0).close()


def test_local_strangers_are_cut_too(store, monkeypatch):
    monkeypatch.setattr(limits, "HELLO_WITHIN_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5.0)
        sock.connect(store.control_path)
        assert all_of(sock) == b""
    assert store.worker.client.lookup(store.hashes).num_local == 3


@pytest.mark.parametrize("role", ["client", "presence", "mover"])
def test_a_second_hello_cuts_the_connection_and_leaves_nothing(cluster, store, wait_until, role):
    client = local(store)
    client.call(Op.LEASE, encode(Ask(store.hashes, 60.0)), timeout_s=5.0)
    assert store.pool.num_leases() == 1
    with pytest.raises(ProtocolError, match="one HELLO"):
        client.call(Op.HELLO, json.dumps({"role": role, "protocol": PROTOCOL_VERSION}).encode(), timeout_s=5.0)
    with pytest.raises(PeerLost):
        client.call(Op.LOOKUP, store.hashes.encode(), timeout_s=5.0)
    # The role that it had decides what becomes of its leases: they end with its process, or when it says goodbye.
    (connection,) = [c for c in store.control.server.connections if c.closed]
    assert connection.role == "client"
    store.control.server.owners.died(connection)
    assert store.pool.num_leases() == 0


@pytest.mark.parametrize(
    ("op", "payload"),
    [
        (Op.ATTACH, b"null"),
        (Op.ATTACH, b'{"namespace":7,"block_bytes":1e999}'),
        (Op.ATTACH, b'{"namespace":"zz","block_bytes":1024}'),
        (Op.HANDOFF_STAGE, b'{"num_bytes":1}'),
        (Op.HANDOFF_STAGE, b'{"num_bytes":1000,"block_bytes":0,"uuid":"u"}'),
        (Op.HANDOFF_FETCH, b"\xff" * 120),
        (Op.HANDOFF_WITHDRAW, b"k" * 60_000),
        (Op.HANDOFF_PACKING, b"k" * 31),
        (Op.RELEASE, b"abc"),
    ],
)
def test_what_is_malformed_costs_its_connection_and_nothing_else(store, op, payload):
    client, before = local(store), store.control.server.num_malformed
    with pytest.raises(KVStoreError):
        client.call(op, payload, timeout_s=5.0)
    if store.control.server.num_malformed > before:
        with pytest.raises(PeerLost):
            client.call(Op.LOOKUP, store.hashes.encode(), timeout_s=5.0)
    client.close()
    assert store.worker.client.lookup(store.hashes).num_local == 3
    store.pool.check_integrity()


def test_answers_that_are_not_read_wait_and_the_others_do_not(store, monkeypatch):
    monkeypatch.setattr(limits, "READ_WITHIN_S", 0.5)
    greedy = local(store)
    sock, num_asked = greedy.detach(), 0
    sock.setblocking(False)
    question = frame(Op.RELEASE, encode(1))
    with contextlib.suppress(OSError):  # The store cuts it.
        while num_asked < 500_000:  # No socket holds as many.
            try:
                sock.send(question)
                num_asked += 1
            except BlockingIOError:
                store.worker.client.lookup(store.hashes)
    assert num_asked < 500_000
    assert store.stats()["ports"]["num_unread_cut"] == 1
    assert store.worker.client.lookup(store.hashes).num_local == 3
    sock.close()


@contextlib.contextmanager
def no_descriptors():
    """Leave this process without a free descriptor."""
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


def test_without_descriptors_the_listener_rests_and_comes_back(store, wait_until, caplog):
    acceptor = store.control.server.acceptor
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waits, caplog.at_level(logging.INFO):
        waits.settimeout(10.0)
        assert store.worker.client.lookup(store.hashes).num_local == 3  # It has a connection now.
        with no_descriptors():
            waits.connect(store.control_path)
            wait_until(lambda: acceptor.num_pauses_in_row >= 3)
            assert store.worker.client.lookup(store.hashes).num_local == 3
        records = [record for record in caplog.records if "no connection can be accepted" in record.getMessage()]
        assert len(records) == 1
        # Who waited is served.
        waits.sendall(frame(Op.HELLO, json.dumps({"role": "client", "protocol": PROTOCOL_VERSION}).encode()))
        data, fds, _, _ = socket.recv_fds(waits, 1 << 16, 1)
        assert json.loads(data[HEADER.size :])["node"] == "a"
        for fd in fds:
            os.close(fd)


def test_without_descriptors_strangers_make_room(store, wait_until, monkeypatch):
    monkeypatch.setattr(limits, "HELLO_WITHIN_S", 60.0)
    address, server = store.peer_address(), store.control.server
    with dial(address) as stranger, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waits:
        wait_until(lambda: len(server.strangers) == 1)
        with no_descriptors():
            waits.connect(store.control_path)
            assert all_of(stranger) == b""


def test_values_from_outside_are_clipped():
    assert clip("x" * 100) == f"'{'x' * 60}'... (100 in all)"
    assert clip(b"abc") == "b'abc'"
    assert clip(["x"] * 1000).endswith("...")
    assert len(clip(10**1000)) < 70


def test_errors_on_the_wire_are_short():

    assert len(pack_error(ProtocolError("x" * 10**6))) < 3000
    text = str(unpack_error(json.dumps({"error": "PeerLost", "text": "x" * 10**6}).encode()))
    assert len(text) < 3000


def test_a_store_that_names_another_ones_epoch_takes_nothing_of_it_back(cluster, store, wait_until):
    directory, run = cluster.directory, [store.hashes.data[:32]]
    wait_until(lambda: directory.index.locate(run) == [("a", 1)])
    address = directory.address()
    same = {"role": "store", "node": "a", "epoch": store.state.epoch.hex(), "token": address.token}
    with contextlib.closing(connect_remote(address.host, address.port, HELLO | same, timeout_s=5.0)) as impostor:
        empty = Batch(sequence=1, begins=True, ends=True, added=b"", removed=run[0], versions={})
        impostor.call(Op.PUBLISH, encode(empty), timeout_s=5.0)
        assert directory.index.locate(run) == [("a", 1)]
    assert directory.server.is_serving(5.0)
    assert directory.index.locate(run) == [("a", 1)]


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff", encode([]), encode([7]), encode([{"a": 1}]), encode([[["b"]]]), encode([[["b", None]]]), encode({}),
        encode([[["b", math.inf]]]), encode([[["b", -5], ["c", 0]]]), encode([[["b", 0]]]), b"\x91" * 5000, b"{}",
        encode([[["b", 1]], 7]), encode([[[b"b", 1]]]),
    ],
)  # fmt: skip
def test_answers_of_a_directory_that_are_none_are_misses(cluster, store, monkeypatch, answer):
    monkeypatch.setattr(store.state.hints, "ask", lambda chain: answer)
    monkeypatch.setattr(store.state.hints, "is_alone", lambda: False)
    assert store.state.hints.locate(store.hashes) == []
    assert store.worker.load(cluster.hashes(2, seed=9), range(2)).num_blocks == 0


def test_what_a_directory_says_is_cut_to_what_was_asked(store, monkeypatch):
    nodes = [(f"n{i}", 2**40) for i in range(100_000)]
    monkeypatch.setattr(store.state.hints, "ask", lambda chain: encode(Found(nodes)))
    monkeypatch.setattr(store.state.hints, "is_alone", lambda: False)
    found = store.state.hints.locate(store.hashes)
    assert len(found) == 256
    assert {count for _, count in found} == {3}


@pytest.mark.parametrize("num_hashes", [1 << 18, 2_000_000])
def test_a_run_that_is_too_long_costs_its_peer_the_connection(store, num_hashes):
    address, chain = store.peer_address(), msgspec.structs.replace(store.hashes, data=bytes(32) * num_hashes)
    lease = PeerLease(chain=chain, block_bytes=1024, slot_format=1, namespace_version=0, ttl_s=1.0, within_s=2.0)
    with (
        contextlib.closing(
            connect_remote(address.host, address.port, HELLO | {"token": address.token}, timeout_s=5.0)
        ) as peer,
        pytest.raises(PeerLost),
    ):
        peer.call(Op.PEER_LEASE, encode(lease), timeout_s=10.0)
    assert store.worker.client.lookup(store.hashes).num_local == 3


def test_a_client_refuses_a_run_that_is_too_long_by_itself(store, monkeypatch):
    monkeypatch.setattr("kvstore.client.attachment.MAX_CHAIN_BYTES", 64)
    with pytest.raises(InvalidRequest, match="at most 2 in one call"):
        store.worker.client.lookup(store.hashes)
    assert store.worker.client.lookup(store.hashes[:2]).num_local == 2


_POSES_AS_A_STORE = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.setgroups([]), os.setgid(12345), os.setuid(12345)
sock.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
sock.listen(1)
print("listens", flush=True)
client, _ = sock.accept()
print(len(client.recv(1 << 16)), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_store_of_another_user_is_told_nothing(tmp_path_factory):
    with tempfile.TemporaryDirectory(prefix="rku", dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        command = [sys.executable, "-c", _POSES_AS_A_STORE, f"{folder}/s"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "listens\n"
            with pytest.raises(ConfigError, match="got a process of user 12345"):
                connect_local(f"{folder}/s", {"role": "client"}, timeout_s=5.0)
            assert process.stdout.readline() == "0\n", "it was told something"


def test_only_sealed_memory_of_a_store_is_mapped(store):
    plain = os.memfd_create("plain")
    os.ftruncate(plain, 1 << 16)
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    for fd in (plain, read_fd):
        with pytest.raises(ConfigError, match="sealed memory"):
            attach_arena(FileIO(fd), 1 << 16)
    attach_arena(FileIO(os.dup(store.state.arena.fd)), store.state.arena.num_bytes).close()


def test_a_surprise_while_a_connection_is_taken_does_not_make_the_store_deaf(store, monkeypatch):
    """Raised, the loop would watch the listener no more, and the store would still say that it serves."""
    acceptor, failures = store.control.server.acceptor, [MemoryError(), RuntimeError("a surprise")]
    take = acceptor.take

    def fail(sock, host):
        if failures:
            raise failures.pop()
        take(sock, host)

    monkeypatch.setattr(acceptor, "take", fail)
    for _ in range(2):
        with pytest.raises(KVStoreError):
            local(store)
    local(store).close()
    with dial(store.peer_address()):
        assert store.control.server.is_serving(5.0)


def test_a_listener_that_cannot_be_watched_again_is_tried_again(store, monkeypatch, wait_until):
    acceptor, failures = store.control.server.acceptor, [OSError(errno.ENOMEM, "out of memory")] * 2
    watch = acceptor.watch

    def fail(listener):
        if failures:
            raise failures.pop()
        watch(listener)

    monkeypatch.setattr(acceptor, "watch", fail)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waits, no_descriptors():
        waits.connect(store.control_path)
        wait_until(lambda: acceptor.is_paused)
    wait_until(lambda: not failures and not acceptor.is_paused)
    local(store).close()


def test_processes_that_only_say_to_be_a_mover_write_little_into_the_log(store, caplog, wait_until):
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            sock = local(store, role="mover").detach()
            sock.sendall(frame(Op.MOVER_STATS, b"{}", flag=1))
            wait_until(lambda sock=sock: all_of(sock) == b"")
            sock.close()
    assert sum("is turned away" in record.getMessage() for record in caplog.records) == 1
    assert store.state.mover.pid == os.getpid()

"""Server and client of control connections over real sockets, with real processes that die."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from inner_parts import parts_of

from kvstore.blocks.codec import encode, encode_object
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import (
    ChainBroken,
    IncompatibleStore,
    KVStoreError,
    PeerLost,
    PoolExhausted,
    ProtocolError,
    StoreNotRunning,
    TransferTimeout,
)
from kvstore.rpc.client import ControlClient
from kvstore.rpc.connect import connect_local, connect_remote
from kvstore.rpc.framing import Flag, Message, Op, packets_of
from kvstore.rpc.messages import Ask, Prepare
from kvstore.rpc.server import ControlServer


class Echo:
    """Answers LOOKUP with its payload; other ops have a use each."""

    def __init__(self):
        self.gone, self.seen, self.release = [], [], threading.Event()
        self.connections = {}

    def serve(self, connection, message):
        self.seen.append(message.op)
        self.connections[connection.owner] = connection
        if message.op is Op.HELLO:
            connection.role = "client"
            if connection.local:
                read_fd, write_fd = os.pipe()
                hello = encode_object({"owner": connection.owner, "pid": connection.pid})
                connection.send(Op.HELLO, Flag.REPLY, message.request, hello, (read_fd,))
                os.close(read_fd)
                os.close(write_fd)
                return None
            return encode_object({"owner": connection.owner})
        if message.op is Op.LEASE:
            raise PoolExhausted("wanted 3 slots, got 1; release leases")
        if message.op is Op.RENEW:
            raise RuntimeError("a bug")
        if message.op is Op.STATS:
            return None
        if message.op is Op.PIN:
            assert self.release.wait(20.0)
        if message.op is Op.LOAD:
            for i in range(3):
                connection.send(Op.LOAD, Flag.PROGRESS, message.request, bytes([i]))
            connection.send(Op.LOAD, Flag.REPLY, message.request, b"last")
            return None
        return message.payload


@pytest.fixture
def echo(tmp_path_factory):
    import tempfile

    made = Echo()
    server = ControlServer(made.serve, made.gone.append)
    with tempfile.TemporaryDirectory(prefix="rkc", dir="/tmp") as folder:
        made.path = f"{folder}/s"
        server.listen_local(made.path)
        server.listen_remote("127.0.0.1")
        made.port, made.server = server.port, server
        server.start()
        yield made
        server.stop()
        assert not server.is_serving(0.0)


@pytest.fixture(params=["local", "remote"])
def client(request, echo):
    made = local(echo) if request.param == "local" else remote(echo)
    yield made
    made.close()


def local(echo) -> ControlClient:
    client, fd = connect_local(echo.path, {}, timeout_s=2.0)
    fd.close()
    return client


def remote(echo) -> ControlClient:
    return connect_remote("127.0.0.1", echo.port, {}, timeout_s=2.0)


@pytest.mark.parametrize("num_hashes", [0, 1, 128, 2048, 8192])
def test_messages_of_many_hashes(client, num_hashes):
    payload = random.Random(num_hashes).randbytes(32 * num_hashes)
    assert client.call(Op.LOOKUP, payload, timeout_s=5.0) == payload
    assert client.call(Op.LOOKUP, payload, timeout_s=5.0) == payload
    assert client.num_calls - (not client.name.startswith("node")) == 2, "HELLO is a call of its own over TCP"


def test_8192_hashes_reach_a_real_node_store(cluster):
    cluster.add("a", capacity_bytes=1 << 24)
    worker = cluster.worker("a", 8)
    for count in (2048, 8192):
        hashes = cluster.hashes(count)
        assert worker.client.lookup(hashes).num_blocks == 0
        ticket = cluster.nodes["a"].state.pool_service.prepare_store(hashes, "w")
        cluster.nodes["a"].state.pool_service.complete_store(ticket.write_id, "w")
        assert worker.client.lookup(hashes).num_local == count
        with worker.client.lease(hashes, 5.0) as lease:
            assert list(lease.slots) == list(ticket.slots)
        assert cluster.nodes["a"].state.pool_service.clear(cluster.space.digest, count) == count


def test_errors_keep_their_class(client):
    with pytest.raises(PoolExhausted, match="wanted 3 slots"):
        client.call(Op.LEASE, timeout_s=2.0)
    with pytest.raises(KVStoreError, match="RuntimeError: a bug"):
        client.call(Op.RENEW, timeout_s=2.0)
    assert client.call(Op.LOOKUP, b"still here", timeout_s=2.0) == b"still here"
    assert not client.closed


def test_a_call_without_an_answer_closes_the_connection(client):
    started_s = time.monotonic()
    with pytest.raises(TransferTimeout):
        client.call(Op.STATS, timeout_s=0.2)
    assert 0.15 < time.monotonic() - started_s < 2
    assert client.closed
    with pytest.raises(PeerLost):
        client.call(Op.LOOKUP, timeout_s=0.2)


def test_many_timeouts_in_a_row_are_each_obeyed(client):
    for timeout_s in (5.0, 0.5, 3.0, 0.05):
        assert client.call(Op.LOOKUP, b"x", timeout_s=timeout_s) == b"x"
    started_s = time.monotonic()
    with pytest.raises(TransferTimeout):
        client.call(Op.STATS, timeout_s=0.1)
    assert time.monotonic() - started_s < 1


def test_a_stream_of_answers(client):
    assert list(client.call_stream(Op.LOAD, b"", timeout_s=2.0)) == [
        (False, b"\0"),
        (False, b"\1"),
        (False, b"\2"),
        (True, b"last"),
    ]
    assert client.call(Op.LOOKUP, b"next", timeout_s=2.0) == b"next"


@pytest.mark.parametrize("awake_s", [0.05, 60.0])
def test_a_reader_that_stays_awake_reads_and_gives_up_as_ever(client, monkeypatch, awake_s):
    asked, read = [], client.channel.read
    monkeypatch.setattr(client.channel, "read", lambda timeout_s: (asked.append(timeout_s), read(timeout_s))[1])
    pieces = client.call_stream(Op.LOAD, b"", timeout_s=2.0)
    pieces.awake_s = awake_s
    assert [payload for _, payload in pieces] == [b"\0", b"\1", b"\2", b"last"]
    pieces = client.call_stream(Op.STATS, b"", timeout_s=0.2)  # never answered
    pieces.awake_s = awake_s
    asked.clear()
    with pytest.raises(TransferTimeout):
        next(pieces)
    assert asked.count(None) > 1, "without sleeping"
    assert asked[-1] is not None, "and then as ever"
    assert client.closed


def test_who_stays_awake_for_an_answer_gets_it_or_gives_up_as_ever(client):
    assert client.call(Op.LOOKUP, b"x", timeout_s=2.0, awake_s=60.0) == b"x"
    with pytest.raises(TransferTimeout):
        client.call(Op.STATS, timeout_s=0.2, awake_s=60.0)  # never answered
    assert client.closed


def test_a_stream_that_is_left_closes_the_connection(client):
    with contextlib.closing(client.call_stream(Op.LOAD, b"", timeout_s=2.0)) as pieces:
        assert next(pieces) == (False, b"\0")
    assert client.closed


def test_word_of_an_answer_to_come_is_no_answer(client):
    heard, deadline_s = [], time.monotonic() + 2.0
    assert client.call(Op.LOAD, b"", timeout_s=2.0) == b"last"
    assert client.call(Op.LOAD, b"", timeout_s=2.0, progress=lambda: heard.append("soon")) == b"last"
    assert heard == ["soon"] * 3
    heard.clear()
    with contextlib.closing(client.ask(Op.LOAD, b"", lambda: heard.append("soon"))) as question:
        while (answer := question.take()) is None:
            assert time.monotonic() < deadline_s
    assert (answer, heard) == (b"last", ["soon"] * 3)
    assert client.call(Op.LOOKUP, b"next", timeout_s=2.0) == b"next"


def test_a_server_that_stays_awake_serves_as_ever_and_sleeps_again(echo, client):
    echo.server.stay_awake(0.2)
    for _ in range(20):
        assert client.call(Op.LOOKUP, b"x", timeout_s=2.0) == b"x"
    echo.server.stay_awake(60.0)
    echo.server.stay_awake(0.0)
    assert client.call(Op.LOOKUP, b"y", timeout_s=2.0) == b"y"
    used_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used_s < 0.3
    assert client.call(Op.LOOKUP, b"z", timeout_s=2.0) == b"z"


def test_a_stream_that_fails_keeps_the_connection(client):
    with pytest.raises(PoolExhausted):
        list(client.call_stream(Op.LEASE, b"", timeout_s=2.0))
    assert client.call(Op.LOOKUP, b"x", timeout_s=2.0) == b"x"


def test_close_ends_the_call_of_another_thread(echo, client):
    ended, heard = threading.Event(), []

    def ask():
        try:
            client.call(Op.STATS, timeout_s=20.0)  # never answered
        except KVStoreError as error:
            heard.append(error)
        ended.set()

    thread = threading.Thread(target=ask)
    thread.start()
    deadline_s = time.monotonic() + 5.0
    while Op.STATS not in echo.seen:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    client.close()
    assert ended.wait(10.0), "long before the answer's own time is over"
    thread.join(10.0)
    assert [type(error) for error in heard] == [PeerLost]
    assert client.channel.sock.fileno() == -1


def test_a_call_waits_for_those_of_others_no_longer_than_for_its_own_answer(echo, client, wait_until):
    answers = []
    other = threading.Thread(target=lambda: answers.append(client.call(Op.PIN, b"late", timeout_s=10.0)))
    other.start()
    wait_until(lambda: Op.PIN in echo.seen)
    began_s = time.monotonic()
    with pytest.raises(TransferTimeout, match="not asked"):
        client.call(Op.LOOKUP, b"x", timeout_s=0.1)
    assert time.monotonic() - began_s < 1.0
    assert not client.closed
    echo.release.set()
    other.join(10)
    assert answers == [b"late"], "it is not disturbed"
    assert client.call(Op.LOOKUP, b"y", timeout_s=2.0) == b"y"


def test_threads_share_a_connection(client):
    wrong = []

    def work(seed):
        for i in range(50):
            payload = bytes([seed]) * (i * 97)
            if client.call(Op.LOOKUP, payload, timeout_s=5.0) != payload:
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []


def test_a_server_that_stops_is_a_lost_peer(echo, client):
    echo.server.stop()
    with pytest.raises(PeerLost):
        client.call(Op.LOOKUP, timeout_s=2.0)
    assert client.closed


def test_one_way_messages_have_no_answer(client):
    client.send(Op.LOOKUP, b"no answer")
    assert client.call(Op.LOOKUP, b"answer", timeout_s=2.0) == b"answer"


# Bytes that are not ours.

GARBAGE = {
    "text": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "zeros": bytes(64),
    "unknown op": packets_of(Message(Op.LOOKUP, Flag.REQUEST, 1, b""))[0].replace(b"RKV1\x04\x00", b"RKV1\xff\xff"),
    "huge": b"RKV1" + b"\x04\0\0\0" + b"\xff\xff\xff\xff" + bytes(8),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_malformed_bytes_close_only_that_connection(echo, client, name):
    bad_local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bad_local.connect(echo.path)
    bad_remote = socket.create_connection(("127.0.0.1", echo.port))
    for sock in (bad_local, bad_remote):
        sock.settimeout(3.0)
        sock.sendall(GARBAGE[name])
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
        sock.close()
    assert client.call(Op.LOOKUP, b"fine", timeout_s=2.0) == b"fine"


@pytest.mark.parametrize(
    "op", [Op.LOOKUP, Op.LEASE, Op.RELEASE, Op.LOAD, Op.PREPARE_STORE, Op.COMPLETE_STORE, Op.ATTACH]
)
@pytest.mark.parametrize("payload", [b"", b"\xff" * 7, b"\xff" * 200])
def test_payloads_of_garbage_are_errors_and_change_nothing(cluster, op, payload):
    core = cluster.add("a")
    worker = cluster.worker("a", 4)
    worker.save(cluster.hashes(2), range(2))
    before = core.stats()["pool"]
    client, fd = connect_local(core.control_path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=2.0)
    fd.close()
    with pytest.raises(KVStoreError):
        client.call(op, payload, timeout_s=2.0)
    assert core.stats()["pool"] == before
    assert worker.client.lookup(cluster.hashes(2)).num_local == 2
    client.close()


def test_without_hello_a_node_store_serves_nothing(cluster):
    core = cluster.add("a")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(core.control_path)
    client = ControlClient(sock, "stranger")
    with pytest.raises(ProtocolError, match="HELLO"):
        client.call(Op.STATS, timeout_s=2.0)
    client.close()


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        ({"role": "client", "protocol": PROTOCOL_VERSION + 1}, IncompatibleStore),
        ({"role": "client"}, IncompatibleStore),
        ({"role": "king", "protocol": PROTOCOL_VERSION}, ProtocolError),
        ({"role": "peer", "protocol": PROTOCOL_VERSION}, ProtocolError),
    ],
)
def test_a_bad_hello_is_refused(cluster, hello, error):
    core = cluster.add("a")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error):
        connect_local(core.control_path, hello, timeout_s=2.0)
    deadline_s = time.monotonic() + 2
    while len(os.listdir("/proc/self/fd")) > before + 2:
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("hello", [{"role": "peer", "token": "x"}, {"role": "client"}, {"role": "mover"}])
def test_a_remote_stranger_is_refused(cluster, hello):
    address = cluster.add("a").peer_address()
    with pytest.raises((IncompatibleStore, ProtocolError)):
        connect_remote(address.host, address.port, hello | {"protocol": PROTOCOL_VERSION}, timeout_s=2.0)


_OF_PEERS = [
    Op.PEER_LEASE, Op.PEER_RELEASE, Op.PEER_TRANSPORT, Op.PEER_CLAIM, Op.PEER_CLAIM_END, Op.PEER_STAGES,
]  # fmt: skip
_OF_WORKERS = [
    Op.ATTACH, Op.LOOKUP, Op.LEASE, Op.RELEASE, Op.RENEW, Op.PREPARE_STORE, Op.COMPLETE_STORE, Op.LOAD, Op.STATS,
    Op.HANDOFF_PREPARE, Op.HANDOFF_FETCH, Op.HANDOFF_WITHDRAW,
]  # fmt: skip
_OF_OTHERS = [Op.MOVER_READY, Op.MOVER_READ, Op.MOVER_DONE, Op.MOVER_TERMINAL, Op.PUBLISH, Op.LOCATE]


def test_a_worker_cannot_do_what_peers_and_movers_do(cluster):
    core = cluster.add("a")
    for op in _OF_PEERS + _OF_OTHERS:
        client, fd = connect_local(core.control_path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=2.0)
        fd.close()
        with pytest.raises(ProtocolError, match=f"does not serve {op.name} to a client"):
            client.call(op, b"", timeout_s=2.0)
        client.close()


def test_a_peer_cannot_do_what_workers_and_movers_do(cluster):
    core = cluster.add("a")
    address, owner = core.peer_address(), bytes(8).hex()
    hello = {"role": "peer", "protocol": PROTOCOL_VERSION, "token": address.token, "node": "x", "owner": owner}
    for op in _OF_WORKERS + _OF_OTHERS:
        client = connect_remote(address.host, address.port, hello, timeout_s=2.0)
        with pytest.raises(ProtocolError, match=f"does not serve {op.name} to a peer"):
            client.call(op, b"", timeout_s=2.0)
        client.close()


@pytest.mark.parametrize("name", ["nothing", "\ud800", "a\0b", "n" * 200])
def test_nobody_listens(tmp_path, name):
    with pytest.raises(StoreNotRunning, match=r"kvstore\.start"):
        connect_local(str(tmp_path / name), {}, timeout_s=1.0)


def test_a_socket_that_does_not_answer(tmp_path):
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rkc", dir="/tmp") as folder:
        deaf = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deaf.bind(f"{folder}/s")
        deaf.listen(1)
        started_s = time.monotonic()
        with pytest.raises(StoreNotRunning, match="does not answer"):
            connect_local(f"{folder}/s", {}, timeout_s=0.2)
        assert time.monotonic() - started_s < 2
        deaf.close()


def test_a_socket_that_takes_no_connection_any_more():
    """As of a store that stands still while many connect to it: the kernel has the next one wait."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rkc", dir="/tmp") as folder, contextlib.ExitStack() as opened:
        deaf = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        deaf.bind(f"{folder}/s")
        deaf.listen(0)
        refused, raised = 0, []
        while refused == 0:
            queued = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            queued.setblocking(False)
            refused = queued.connect_ex(f"{folder}/s")
        assert refused == errno.EAGAIN

        def connect():
            try:
                connect_local(f"{folder}/s", {}, timeout_s=0.1)
            except StoreNotRunning as error:
                raised.append(error)

        connecting = threading.Thread(target=connect, daemon=True)
        connecting.start()
        connecting.join(5)
        assert not connecting.is_alive(), "it waits for ever"
    assert isinstance(raised[0].__cause__, BlockingIOError), "a client tells by this that the store is only late"


def test_a_port_that_does_not_answer():
    deaf = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(TransferTimeout):
        connect_remote("127.0.0.1", deaf.getsockname()[1], {}, timeout_s=0.2)
    deaf.close()


# Who is gone, and who is not.


def test_a_closed_connection_of_a_live_process_is_not_gone(echo):
    client = local(echo)
    owner = client.hello["owner"]
    client.close()
    deadline_s = time.monotonic() + 2
    while not echo.connections[owner].closed:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    time.sleep(0.1)
    assert echo.gone == []


def test_goodbye_means_gone(echo, wait_until):
    client = local(echo)
    client.send(Op.GOODBYE)
    wait_until(lambda: [c.owner for c in echo.gone] == [client.hello["owner"]])
    client.close()
    time.sleep(0.05)
    assert len(echo.gone) == 1


def test_goodbye_is_heard_also_of_a_client_that_left_an_answer_unread(echo, wait_until):
    """The kernel then says that the connection was reset, before it gives out what the client had said."""
    client = local(echo)
    owner = client.hello["owner"]
    client.channel.send(Op.LOOKUP, Flag.REQUEST, b"an answer that nobody reads")
    client.channel.send(Op.PIN, Flag.ONE_WAY, b"keeps the server busy until the client is gone")
    wait_until(lambda: Op.PIN in echo.seen)
    client.send(Op.GOODBYE)
    client.close()
    echo.release.set()
    wait_until(lambda: [c.owner for c in echo.gone] == [owner])


def test_a_remote_connection_that_closes_is_gone(echo, wait_until):
    client = remote(echo)
    client.close()
    wait_until(lambda: [c.owner for c in echo.gone] == [client.hello["owner"]])


def test_each_connection_is_an_owner_of_its_own_named_by_the_kernel(echo):
    clients = [local(echo), local(echo), remote(echo)]
    assert len({c.hello["owner"] for c in clients}) == 3
    assert clients[0].hello["pid"] == os.getpid()
    for client in clients:
        client.close()


CHILD = """
import os, sys
from kvstore.blocks.chain import decode_chain
from kvstore.blocks.codec import encode
from kvstore.config import PROTOCOL_VERSION
from kvstore.rpc.connect import connect_local
from kvstore.rpc.messages import Ask, Prepare, decode_grant, decode_ticket
from kvstore.rpc.framing import Op

client, fd = connect_local(sys.argv[1], {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=5.0)
stored, other = (decode_chain(bytes.fromhex(text)) for text in sys.argv[2:4])
grant = decode_grant(client.call(Op.LEASE, encode(Ask(stored, 600.0)), timeout_s=5.0))
ticket = decode_ticket(client.call(Op.PREPARE_STORE, encode(Prepare(other, 1)), timeout_s=5.0))
if sys.argv[4] == "close":
    client.close()
print(len(grant.slots), len(ticket.slots), flush=True)
sys.stdin.read()
"""


def holder(core, stored, other, how: str) -> subprocess.Popen:
    """A process that leases `stored`, begins to write `other`, and then waits."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, core.control_path, stored.encode().hex(), other.encode().hex(), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline().split() == [str(len(stored)), str(len(other))]
    return child


def end(child: subprocess.Popen) -> None:
    child.kill()
    child.wait(10)
    child.stdin.close()
    child.stdout.close()


@pytest.mark.parametrize("how", ["stay", "close"])
def test_what_a_killed_process_held_comes_back_and_not_before(cluster, wait_until, how):
    core = cluster.add("a")
    worker = cluster.worker("a", 8)
    stored, other = cluster.hashes(3), cluster.hashes(2, seed=1)
    worker.save(stored, range(3))
    mine = worker.client.lease(stored[:1], 60.0)
    child = holder(core, stored, other, how)
    try:
        time.sleep(0.3)
        stats = core.pool.stats()
        assert (stats.num_pinned, stats.num_leases, stats.num_writing) == (3, 2, 2), "it lives, connected or not"
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        assert core.pool.stats().num_leases == 2, "a stopped process is not dead"
        started_s = time.monotonic()
        child.kill()
        wait_until(lambda: core.pool.stats().num_leases == 1)
        assert time.monotonic() - started_s < 2
    finally:
        end(child)
    stats = core.pool.stats()
    assert (stats.num_pinned, stats.num_writing, stats.num_writes) == (1, 0, 0)
    assert mine.release()
    assert worker.save(other, range(2)).num_written == 2
    core.pool.check_integrity()


def test_the_server_leaks_no_descriptors(echo, wait_until):
    local(echo).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        client = local(echo)
        client.send(Op.GOODBYE)
        client.close()
        remote(echo).close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_connection_that_cannot_be_watched_leaves_nothing(echo, monkeypatch):
    watch, failed = echo.server.watch, []

    def fails(fd, then, when_writable=None):
        if when_writable is not None:  # The socket itself; its process is watched already.
            failed.append(num_pidfds())
            raise OSError(errno.ENOMEM, "no memory")
        watch(fd, then)

    before = num_pidfds()
    monkeypatch.setattr(echo.server, "watch", fails)
    with pytest.raises(KVStoreError):
        local(echo)
    assert failed[0] == before + 1
    assert num_pidfds() == before
    monkeypatch.undo()
    local(echo).close()


def num_pidfds() -> int:
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry.path))
    return sum("pidfd" in link for link in links)


def test_connections_that_a_live_process_closed_are_forgotten_once_they_hold_nothing(cluster, wait_until):
    core = cluster.add("a")
    worker, before = cluster.worker("a", 8), num_pidfds()
    stored, other = cluster.hashes(2), cluster.hashes(2, seed=1)
    worker.save(stored, range(2))
    known = num_pidfds()
    hello = {"role": "client", "protocol": PROTOCOL_VERSION}
    idle, leasing, writing = (connect_local(core.control_path, hello, timeout_s=5.0) for _ in range(3))
    leasing[0].call(Op.LEASE, encode(Ask(parts_of(worker.client).chain(stored), 1.0)), timeout_s=5.0)
    writing[0].call(Op.PREPARE_STORE, encode(Prepare(parts_of(worker.client).chain(other), 1)), timeout_s=5.0)
    assert num_pidfds() == known + 3 > before
    for connection, fd in (idle, leasing, writing):
        fd.close()
        connection.close()  # As a call that timed out does: without a word.

    wait_until(lambda: num_pidfds() == known + 2)
    assert core.pool.stats().num_pinned == 2
    wait_until(lambda: core.pool.stats().num_pinned == 0)
    wait_until(lambda: num_pidfds() == known + 1)
    # Its process lives and may still be writing into the arena.
    assert core.pool.stats().num_writing == 2


def test_chain_errors_cross_the_socket(cluster):
    core = cluster.add("a")
    client, fd = connect_local(core.control_path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=2.0)
    fd.close()
    with contextlib.closing(client), pytest.raises(ChainBroken):
        client.call(Op.LOOKUP, encode([[bytes(32), bytes(32), 0, b"short"], 1.0, 0.0]), timeout_s=2.0)


def test_ticks_come_only_while_they_are_wanted(wait_until):
    ticks, wanted = [], [False]
    server = ControlServer(lambda c, m: None, lambda c: None, lambda: ticks.append(1), lambda: wanted[0], tick_s=0.01)
    server.start()
    try:
        time.sleep(0.1)
        assert ticks == []
        wanted[0] = True
        server.wake()
        wait_until(lambda: len(ticks) > 2)
    finally:
        server.stop()


def test_a_server_that_ended_writes_to_no_descriptor(echo):
    """The numbers of its own belong to other files by then."""
    wake_fd = echo.server.loop._wake_write
    echo.server.stop()
    read, write = os.pipe2(os.O_NONBLOCK)
    os.dup2(write, wake_fd)
    try:
        echo.server.wake()
        echo.server.stay_awake(1.0)
        echo.server.stop()
        assert not echo.server.is_serving(0.0)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        for fd in {read, write, wake_fd}:
            os.close(fd)

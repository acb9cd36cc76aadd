"""What a client that asks and does not read its answers costs the others: nothing, and itself its connection."""

from __future__ import annotations

import contextlib
import gc
import socket
import weakref

import pytest

from kvstore.blocks.codec import decode_count, encode
from kvstore.rpc import connection as control_connection
from kvstore.rpc import limits
from kvstore.rpc.connect import connect_local, connect_remote
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import HEADER, SOCKET_BUFFER_BYTES, Decoder, Flag, Op
from kvstore.rpc.limits import Unread
from kvstore.rpc.server import ControlServer

#: No socket takes as much.
LONG = 20 << 20


def frame(op, payload=b"", *, request=1):
    return HEADER.pack(b"RKV1", op, 0, 0, len(payload), request) + payload


class Streamer:
    """Answers LOOKUP with as many bytes as it is asked for."""

    def __init__(self, folder):
        self.seen, self.gone = [], []
        self.server = ControlServer(self._serve, self.gone.append)
        self.path = str(folder / "s")
        self.server.listen_local(self.path)
        self.server.listen_remote("127.0.0.1")
        self.server.start()

    def _serve(self, connection, message):
        connection.role = connection.role or "x"
        if message.op is Op.HELLO:
            if connection.local:
                connection.send(Op.HELLO, Flag.REPLY, message.request, b"{}", (0,))
                return None
            return b"{}"
        self.seen.append(message.request)
        if message.op is Op.RENEW:
            connection.reads_on = True
            return b""
        return bytes(decode_count(message.payload))

    def dial(self, kind="remote"):
        if kind == "remote":
            return connect_remote("127.0.0.1", self.server.port, {}, timeout_s=5.0)
        client, fd = connect_local(self.path, {}, timeout_s=5.0)
        fd.close()
        return client

    @property
    def num_connections(self):
        return len(self.server.connections)


@pytest.fixture
def streamer(tmp_path):
    made = Streamer(tmp_path)
    yield made
    made.server.stop()


def ask(sock, num_bytes, request=1):
    sock.sendall(frame(Op.LOOKUP, encode(num_bytes), request=request))


def answers_of(sock, count, *, local):
    decoder, found = Decoder(), []
    while len(found) < count:
        data = sock.recv(1 << 20)
        assert data, "the connection was cut"
        if local:
            message = decoder.packet(memoryview(data))
            found += [] if message is None else [message]
        else:
            found += decoder.stream(memoryview(data))
    return [(message.request, len(message.payload)) for message in found]


def test_a_long_answer_goes_out_as_it_is_read(streamer):
    for kind in ("remote", "local"):
        with contextlib.closing(streamer.dial(kind)) as client:
            assert client.call(Op.LOOKUP, encode(LONG), timeout_s=10.0) == bytes(LONG)
            assert client.call(Op.LOOKUP, encode(5), timeout_s=10.0) == bytes(5)
    assert streamer.server.is_serving(5.0)
    assert len(streamer.server.unread) == 0


@pytest.mark.parametrize("kind", ["remote", "local"])
def test_a_client_that_does_not_read_is_served_no_further_and_loses_nothing(streamer, wait_until, kind):
    with contextlib.closing(streamer.dial(kind)) as client, contextlib.closing(streamer.dial()) as other:
        sock = client.detach()
        sock.settimeout(10.0)
        ask(sock, LONG, 1)
        wait_until(lambda: len(streamer.server.unread) == 1)
        more = range(100, 140)
        for request in more:
            ask(sock, request, request)
        assert other.call(Op.LOOKUP, encode(9), timeout_s=5.0) == bytes(9)
        assert set(more).isdisjoint(streamer.seen), "no answer is made that nobody takes"
        found = answers_of(sock, 1 + len(more), local=kind == "local")
        assert found == [(1, LONG), *((request, request) for request in more)]
        assert len(streamer.server.unread) == 0
        sock.close()


@pytest.mark.parametrize("kind", ["remote", "local"])
def test_a_client_that_does_not_read_is_cut_and_counted(streamer, monkeypatch, wait_until, caplog, kind):
    monkeypatch.setattr(limits, "READ_WITHIN_S", 0.3)
    deaf, other = streamer.dial(kind), streamer.dial()
    sock = deaf.detach()
    try:
        ask(sock, LONG)
        wait_until(lambda: streamer.server.unread.num_cut == 1, 10.0)
        wait_until(lambda: streamer.num_connections == 1 + (kind == "local"))  # Of a process that lives.
        assert other.call(Op.LOOKUP, encode(9), timeout_s=5.0) == bytes(9)
    finally:
        sock.close()
        other.close()
    assert caplog.text.count("it read no answer") == 1


@pytest.mark.parametrize("kind", ["remote", "local"])
def test_one_that_goes_while_answers_wait_is_seen_to_go(streamer, wait_until, kind):
    client = streamer.dial(kind)
    sock = client.detach()
    ask(sock, LONG)
    wait_until(lambda: len(streamer.server.unread) == 1)
    sock.send(frame(Op.GOODBYE))
    sock.close()
    wait_until(lambda: streamer.num_connections == 0)
    assert len(streamer.server.unread) == 0
    assert len(streamer.gone) == 1
    assert streamer.server.is_serving(5.0)
    assert streamer.server.unread.num_cut == 0


def test_one_that_is_to_be_heard_is_heard_while_its_answers_wait(streamer, wait_until, monkeypatch):
    monkeypatch.setattr(limits, "READ_WITHIN_S", 0.0)
    monkeypatch.setattr(control_connection, "MAX_UNSENT_BYTES", 2 * LONG)
    with contextlib.closing(streamer.dial()) as client:
        assert client.call(Op.RENEW, timeout_s=5.0) == b""
        sock = client.detach()
        ask(sock, LONG, 2)
        ask(sock, 7, 3)
        wait_until(lambda: 3 in streamer.seen)
        assert streamer.server.is_serving(5.0)
        sock.settimeout(10.0)
        assert answers_of(sock, 2, local=False) == [(2, LONG), (3, 7)]
        assert streamer.server.unread.num_cut == 0
        sock.close()


def test_what_waits_for_a_client_is_bounded(streamer, monkeypatch, wait_until):
    monkeypatch.setattr(control_connection, "MAX_UNSENT_BYTES", 1 << 20)
    with contextlib.closing(streamer.dial()) as client:
        assert client.call(Op.RENEW, timeout_s=5.0) == b""
        sock = client.detach()
        for _ in range(3):
            ask(sock, LONG)
        wait_until(lambda: streamer.num_connections == 0)
        sock.close()


def test_only_one_that_takes_nothing_is_cut():
    cut = []
    found = Unread(cut.append)
    slow, deaf, mover = (
        Connection(None, "local-1", True, role="client", taken_s=taken_s, reads_on=reads_on)
        for taken_s, reads_on in ((100.0, False), (95.0, False), (0.0, True))
    )
    for each in (slow, deaf, mover):
        found.came(each)
    found.tick(95.1 + limits.READ_WITHIN_S)
    assert (cut, found.num_cut, len(found)) == ([deaf], 1, 2)
    found.left(slow)
    found.left(slow)
    found.tick(1e6)
    assert (cut, len(found)) == ([deaf], 1)


def test_nothing_is_sent_or_watched_once_a_connection_is_closed():
    """Its descriptor's number is another file's by then."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection(ours, "local-1", True)
        connection.want_writable = lambda wanted: pytest.fail("it is watched")
        connection.closed = True
        connection.close()
        for num_bytes in (8, 2 * SOCKET_BUFFER_BYTES):
            assert not connection.send(Op.LOOKUP, Flag.REPLY, 1, bytes(num_bytes))
        theirs.settimeout(5.0)
        assert theirs.recv(100) == b""


def test_what_came_over_a_connection_goes_with_it(streamer, wait_until):
    """At once, and not when the interpreter collects: a peer that is cut again and again would take all memory."""
    gc.collect()
    gc.disable()
    try:
        with contextlib.closing(streamer.dial()) as client:
            wait_until(lambda: streamer.num_connections == 1)
            seen = [weakref.ref(connection.decoder) for connection in streamer.server.connections]
            sock = client.detach()
            sock.sendall(frame(Op.LOOKUP, bytes(1 << 20))[: 1 << 19])
            sock.close()
        wait_until(lambda: streamer.num_connections == 0)
        streamer.gone.clear()
        wait_until(lambda: (streamer.server.wake(), seen[0]() is None)[1])
    finally:
        gc.enable()


def test_one_connection_full_of_questions_leaves_others_their_turn(streamer, monkeypatch):
    monkeypatch.setattr("kvstore.rpc.server._MESSAGES_A_ROUND", 2)
    with contextlib.closing(streamer.dial()) as client:
        sock = client.detach()
        sock.settimeout(5.0)
        sock.sendall(b"".join(frame(Op.LOOKUP, encode(i), request=i) for i in range(100)))
        assert answers_of(sock, 100, local=False) == [(i, i) for i in range(100)]
        sock.close()


def test_a_long_question_takes_others_no_more_than_a_moment(streamer, monkeypatch):
    """A round of one connection ends with its time, and the next one goes on where it ended."""
    monkeypatch.setattr("kvstore.rpc.server._ROUND_S", 0.0)
    with contextlib.closing(streamer.dial()) as client:
        sock = client.detach()
        sock.settimeout(5.0)
        sock.sendall(b"".join(frame(Op.LOOKUP, encode(i), request=i) for i in range(100)))
        assert answers_of(sock, 100, local=False) == [(i, i) for i in range(100)]
        sock.close()

"""How a connection to a store of this machine begins, where what answers is no store, or an interrupt comes."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import tempfile
import threading

import pytest

from kvstore.blocks.codec import encode_object
from kvstore.client.client import Client
from kvstore.client.connections import StoreConnections
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import ConfigError, KVStoreError, ProtocolError, StoreNotRunning
from kvstore.rpc.connect import connect_local
from kvstore.rpc.framing import Flag, Op, encode_short

GOOD = {
    "protocol": PROTOCOL_VERSION, "epoch": "0" * 16, "node": "n", "connection": "c", "config": "{}",
    "arena_bytes": 4096,
}  # fmt: skip


def reply(**fields) -> bytes:
    return encode_short(Op.HELLO, Flag.REPLY, 0, encode_object(GOOD | fields))


def raw(payload: bytes, flag: Flag = Flag.REPLY) -> bytes:
    return encode_short(Op.HELLO, flag, 0, payload)


@pytest.fixture
def broken():
    """A path, and a list of the packet that is sent to who connects there, with a descriptor."""
    with tempfile.TemporaryDirectory(prefix="rkg", dir="/tmp") as folder:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(f"{folder}/s")
        listening.listen(16)
        fd, answers = os.memfd_create("of this test"), []
        os.ftruncate(fd, 4096)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listening.accept()
                    with sock:
                        sock.recv(1 << 16)
                        socket.send_fds(sock, [answers[0]], [fd])

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"{folder}/s", answers
        listening.shutdown(socket.SHUT_RDWR)
        serving.join(5)
        listening.close()
        os.close(fd)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def settles(condition) -> bool:
    """What the other side's thread has closed may be open for another moment."""
    return any(condition() or threading.Event().wait(0.01) for _ in range(2000))


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (raw(b"{"), ProtocolError, "no JSON object"),
        (raw(b"[]"), ProtocolError, "no JSON object"),
        (b"X" * 40, ProtocolError, "wanted a b'RKV1' packet"),
        (raw(b"{}"), ProtocolError, "wanted the greeting of a store of this version"),
        (reply(config="{"), ConfigError, "settings: wanted what StoreConfig.to_json wrote, got '{'"),
        (reply(config="[]"), ConfigError, "settings: wanted the JSON object"),
        (reply(config=7), ProtocolError, r"\$\.config"),
        (reply(node=None), ProtocolError, r"\$\.node"),
        (reply(epoch="zz"), ProtocolError, r"\$\.epoch"),
        (reply(connection=1), ProtocolError, r"\$\.connection"),
        (reply(arena_bytes="x"), ProtocolError, r"\$\.arena_bytes"),
        (reply(arena_bytes=-1), ProtocolError, r"\$\.arena_bytes"),
        (reply(config=StoreConfig(capacity_bytes=1 << 20).to_json()), ConfigError, "wanted sealed memory"),
        (raw(b"\xff", Flag.ERROR), ProtocolError, "no JSON object"),
    ],
)
def test_what_is_no_greeting_is_a_typed_error_and_leaves_nothing_open(broken, cluster, answer, error, says):
    path, answers = broken
    answers.append(answer)
    before = num_open()
    for _ in range(5):
        with pytest.raises(error, match=says):
            Client(path, cluster.space)
    assert settles(lambda: num_open() <= before), "descriptors are left open"


# Python closes a socket that nobody has any more, and warns of it.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("make", ["a connection", "connections"])
def test_an_interrupt_anywhere_leaves_nothing_open(cluster, make):
    """One comes behind any call; so here is one behind each, one after the other."""
    core = cluster.add("a", mover=False)
    hello = {"role": "client", "protocol": PROTOCOL_VERSION}

    def connect():
        if make == "a connection":
            client, file = connect_local(core.control_path, hello, timeout_s=5.0)
            file.close()
            client.close()
            return
        store = StoreConnections(core.control_path, lambda: None)
        sys.setprofile(None)
        store.end()
        store.close(jobs_are_over=True)
        store.arena.close()

    gc.collect()
    connect()
    own, before = threading.get_ident(), num_open()
    for at in range(1, 5000):
        left = [at]

        def interrupt(frame, event, arg, left=left):
            # Not behind what other libraries do in a collection, of which nothing can be raised.
            is_ours = "hypothesis" not in frame.f_code.co_filename
            if is_ours and event in ("return", "c_return") and threading.get_ident() == own:
                left[0] -= 1
                if not left[0]:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        try:
            sys.setprofile(interrupt)
            connect()
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if at % 50 == 0:
            gc.collect()
    else:
        raise AssertionError("it never came through")
    gc.collect()
    assert at > 20, "nothing was interrupted"
    assert settles(lambda: (gc.collect(), num_open())[1] <= before), f"{num_open() - before} descriptors are left open"


def test_a_store_that_hands_out_nothing_is_none(broken, monkeypatch):
    path, answers = broken
    answers.append(reply())
    monkeypatch.setattr(socket, "send_fds", lambda sock, data, fds: sock.send(data[0]))
    before = num_open()
    with pytest.raises(StoreNotRunning) as raised:
        connect_local(path, {}, timeout_s=5.0)
    assert isinstance(raised.value, KVStoreError)
    assert settles(lambda: num_open() <= before)

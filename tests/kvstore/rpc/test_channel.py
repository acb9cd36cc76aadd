"""A client's end of a socket, and another side that sends without end."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from kvstore.errors import PeerLost, TransferTimeout
from kvstore.rpc.channel import Channel
from kvstore.rpc.framing import Flag, Op, encode_short


@pytest.fixture
def flooded():
    """Returns a channel that was asked two questions, and floods it with replies of a number."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel, stopped, threads = Channel(here, "a peer that floods"), threading.Event(), []
    channel._is_stream = True
    for _ in range(2):
        channel.send(Op.PEER_LEASE, Flag.REQUEST, b"")

    def flood(number):
        many = encode_short(Op.PEER_LEASE, Flag.REPLY, number, b"") * 2000

        def send():
            there.settimeout(1.0)
            try:
                while not stopped.is_set():
                    there.sendall(many)
            except OSError:
                pass

        threads.append(threading.Thread(target=send))
        threads[0].start()
        return channel

    yield flood
    stopped.set()
    channel.shut_down()
    threads[0].join(10.0)
    here.close()
    there.close()


def test_answers_to_earlier_questions_without_end_keep_nobody_beyond_its_time(flooded):
    channel, begun_s = flooded(1), time.monotonic()
    with pytest.raises(TransferTimeout):
        channel.receive(2, 0.5)
    assert time.monotonic() - begun_s < 5.0
    assert channel.closed
    assert channel._backlog == []


def test_answers_to_what_was_not_asked_end_the_connection(flooded):
    channel = flooded(999)
    with pytest.raises(PeerLost, match="what was not asked"):
        channel.receive(2, 30.0)
    assert channel.closed


def test_a_piece_is_waited_for_no_longer_than_was_said_whatever_else_comes(flooded):
    channel, begun_s = flooded(1), time.monotonic()
    assert channel.receive_soon(2, 0.2, 0.1) is None
    assert time.monotonic() - begun_s < 5.0
    assert not channel.closed

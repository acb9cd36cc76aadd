"""A holder gives a store's memory to one process only, and to nobody before it has all of it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from types import SimpleNamespace

import pytest

from kvstore.config import StoreConfig
from kvstore.errors import ProtocolError, StoreUnavailable
from kvstore.node.handover import holder as holding
from kvstore.node.handover.holder import Holder
from kvstore.node.handover.taking import take_old_life
from kvstore.node.handover.transfer import GIVE, HAVE, MOST_WHY_BYTES, NOTHING, TAKE, Parcel, connect, receive, send


@pytest.fixture
def path(tmp_path_factory):
    return f"{os.environ['RAYKV_SOCKET_DIR']}/held.hand"


@pytest.fixture
def holder(path):
    made, results = Holder(path), []
    thread = threading.Thread(target=lambda: results.append(made.run(20.0)), daemon=True)
    thread.start()
    made.ended = lambda: (thread.join(10.0), results)[1]
    yield made
    made.close()
    thread.join(10.0)


def memory_of(text):
    fd = os.memfd_create("held", os.MFD_CLOEXEC)
    os.write(fd, text)
    return fd


@pytest.fixture
def parcel():
    made = Parcel(memory_of(b"arena"), memory_of(b"message"), (os.pidfd_open(os.getpid()), os.pidfd_open(1)))
    yield made
    made.close()


def ask(path, word, parcel=None):
    with connect(path, 5.0) as sock:
        send(sock, word, parcel)
        return receive(sock)


def num_open(kind):
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The holder's thread closes its sockets meanwhile.
            found += kind in os.readlink(f"/proc/self/fd/{fd}")
    return found


def test_it_gives_what_it_got_once_and_keeps_nothing(path, holder, parcel):
    assert ask(path, TAKE) == (NOTHING, None)
    assert ask(path, GIVE, parcel) == (HAVE, None)
    word, got = ask(path, TAKE)
    assert word == HAVE
    assert os.pread(got.arena, 99, 0) == b"arena"
    assert os.pread(got.message, 99, 0) == b"message"
    assert len(got.processes) == 2
    assert not any(os.get_inheritable(fd) for fd in got.fds)
    got.close()
    assert holder.ended() == [True]
    assert num_open("memfd:held") == 2  # The giver's own.
    with pytest.raises(StoreUnavailable):
        connect(path, 1.0)


def test_a_second_giver_is_refused(path, holder, parcel):
    assert ask(path, GIVE, parcel) == (HAVE, None)
    assert ask(path, GIVE, parcel)[0] == NOTHING
    ask(path, TAKE)[1].close()


def test_a_process_that_dies_while_it_takes_leaves_nothing_for_the_next(path, holder, parcel):
    ask(path, GIVE, parcel)
    with connect(path, 5.0) as sock:
        send(sock, TAKE)
    assert holder.ended() == [True]
    with pytest.raises(StoreUnavailable):
        connect(path, 1.0)
    assert num_open("memfd:held") == 2


def test_a_giver_that_dies_before_it_has_given_leaves_nothing(path, holder):
    connect(path, 5.0).close()
    assert ask(path, TAKE) == (NOTHING, None)


def test_a_store_that_gets_nothing_is_told_why_and_however_long_that_is(path, holder, parcel):
    holder.why_nothing = "the old store gave nothing: it had no slots"
    config = StoreConfig()
    assert take_old_life(path, config, "n") == (None, "the old store gave nothing: it had no slots")
    holder.why_nothing = "\u00fc" * MOST_WHY_BYTES
    old, why = take_old_life(path, config, "n")
    assert (old, why.strip("\ufffd")) == (None, "\u00fc" * (MOST_WHY_BYTES // 2))
    holder.why_nothing = ""
    assert take_old_life(path, config, "n") == (None, "the old store gave nothing")
    assert ask(path, GIVE, parcel) == (HAVE, None)
    ask(path, TAKE)[1].close()


def test_too_few_descriptors_are_refused_and_closed(path, holder):
    arena = memory_of(b"arena")
    with connect(path, 5.0) as sock:
        socket.send_fds(sock, [GIVE], [arena, arena])
        assert sock.recv(16) == b""
    os.close(arena)
    assert ask(path, TAKE) == (NOTHING, None)
    assert num_open("memfd:held") == 0


def test_descriptors_that_are_no_parcel_are_closed_by_their_receiver():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = memory_of(b"x")
    with one, other:
        socket.send_fds(one, [HAVE], [fd])
        with pytest.raises(ProtocolError, match="1 descriptors"):
            receive(other)
    os.close(fd)
    assert num_open("memfd:held") == 0


def test_a_parcel_is_kept_from_when_it_was_given_however_long_it_was_waited_for(path, parcel):
    made = Holder(path)
    thread = threading.Thread(target=made.run, args=(20.0, 3600.0), daemon=True)
    thread.start()
    assert made.kept_s() == 0.0
    assert ask(path, GIVE, parcel) == (HAVE, None)
    assert 0.0 < made.kept_s() <= 20.0
    word, taken = ask(path, TAKE)
    taken.close()
    thread.join(10.0)
    assert (word, made.kept_s()) == (HAVE, 0.0)


def test_it_ends_by_itself(path, parcel):
    made = Holder(path)
    assert made.run(0.0) is False
    assert not os.path.exists(path)


def test_the_holder_of_a_killed_restart_keeps_its_place_while_it_has_a_parcel(path, holder, parcel):
    ask(path, GIVE, parcel)
    other = Holder(path)
    assert (other.is_given, other.run(20.0)) == (True, False)
    word, got = ask(path, TAKE)
    assert word == HAVE
    got.close()
    assert holder.ended() == [True]


def test_the_holder_of_a_killed_restart_that_has_nothing_is_replaced(path, holder, parcel):
    other = Holder(path)
    thread = threading.Thread(target=other.run, args=(20.0,), daemon=True)
    thread.start()
    assert not other.is_given
    assert ask(path, GIVE, parcel) == (HAVE, None)
    holder.close()
    assert holder.ended() == [False]
    ask(path, TAKE)[1].close()
    thread.join(10.0)


def test_what_an_ended_store_has_left_is_first_offered_to_the_store_that_begins(path, holder, process, monkeypatch):
    process.kill()
    process.wait(10)
    left = Parcel(memory_of(b"arena"), memory_of(b"message"), (os.dup(process.pidfd), os.dup(process.pidfd)))
    with contextlib.closing(left):
        ask(path, GIVE, left)
    taken = []

    def take(seconds):
        taken.append(ask(path, TAKE)[0])
        assert holder.ended() == [True]

    monkeypatch.setattr(holding, "time", SimpleNamespace(sleep=take))
    other = Holder(path)
    assert (taken, other.is_given) == ([HAVE], False)
    other.run(0.0)


def test_what_an_ended_store_has_left_and_nobody_takes_is_given_up(path, holder, process, parcel, monkeypatch):
    process.kill()
    process.wait(10)
    left = Parcel(memory_of(b"arena"), memory_of(b"message"), (os.dup(process.pidfd), os.dup(process.pidfd)))
    with contextlib.closing(left):
        ask(path, GIVE, left)
    monkeypatch.setattr(holding, "TAKEN_WITHIN_S", 0.0)
    other = Holder(path)
    thread = threading.Thread(target=other.run, args=(20.0,), daemon=True)
    thread.start()
    assert not other.is_given
    assert ask(path, GIVE, parcel) == (HAVE, None)
    ask(path, TAKE)[1].close()
    thread.join(10.0)


def test_a_process_of_another_user_gets_nothing_and_gives_nothing(path, holder, parcel, monkeypatch):
    ask(path, GIVE, parcel)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1 << 20)
        with pytest.raises(StoreUnavailable, match="of user"):
            connect(path, 5.0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(5.0)
            sock.connect(path)
            with contextlib.suppress(BrokenPipeError):  # It may be refused before it has asked.
                sock.send(TAKE)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(16) == b""
    ask(path, TAKE)[1].close()


def test_the_time_begins_anew_only_for_a_parcel_that_is_held(holder, path, parcel):
    assert holder.keep_longer(500.0) == 0.0
    with connect(path, 5.0) as sock:
        send(sock, GIVE, parcel)
        assert receive(sock)[0] == HAVE
    assert holder.kept_s() <= 20.0
    assert 490.0 < holder.keep_longer(500.0) <= 500.0
    with connect(path, 5.0) as sock:
        send(sock, TAKE)
        _, taken = receive(sock)
        taken.close()
    assert holder.ended() == [True]
    assert holder.keep_longer(500.0) == 0.0

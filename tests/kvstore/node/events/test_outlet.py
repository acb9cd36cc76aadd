"""The process with the sockets: what it costs, and how it ends, is no matter of the store."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys

import pytest

pytest.importorskip("zmq")

from event_subscriber import SOON_S, named

from kvstore.blocks.chain import BlockHashes
from kvstore.pool.pool import Pool


def num_resident_bytes(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_after_the_loss_of_its_process_a_subscriber_is_told_all_anew(publisher, subscribe, wait_until):
    pool, subscriber, before = Pool(8), subscribe(publisher), publisher.stats()
    chain = BlockHashes(b"n" * 32, b"n" * 32, 0, random.Random(1).randbytes(32 * 8))
    publisher.follow([(pool, "CPU")])
    pool.complete_store(pool.prepare_store(chain.head(2), "writer").write_id, "writer")
    subscriber.read_until(lambda: subscriber.here["CPU"] == set(named(chain.head(2))))
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: publisher.stats()["num_lost"] == 1)
    pool.complete_store(pool.prepare_store(chain, "writer").write_id, "writer")
    wait_until(lambda: publisher.stats()["pid"] not in (None, before["pid"]) and publisher.stats()["num_kept"])
    subscriber.begin_anew()
    subscriber.read_until(lambda: subscriber.here["CPU"] == set(named(chain)))
    for name in ("endpoint", "replay_endpoint", "num_failures"):
        assert publisher.stats()[name] == before[name]


def test_a_process_that_takes_nothing_is_replaced(publish, subscribe, wait_until):
    publisher = publish(take_s=1.0)
    pool, subscriber = Pool(1 << 16), subscribe(publisher)
    chain = BlockHashes(b"n" * 32, b"n" * 32, 0, random.Random(1).randbytes(32 << 16))
    pool.complete_store(pool.prepare_store(chain, "writer").write_id, "writer")
    stopped = publisher.stats()["pid"]
    os.kill(stopped, signal.SIGSTOP)
    publisher.follow([(pool, "CPU")])  # 576 KiB of hashes, more than its socket keeps.
    wait_until(lambda: publisher.stats()["pid"] not in (None, stopped) and publisher.stats()["num_kept"])
    assert publisher.stats()["num_lost"] >= 1
    subscriber.begin_anew()
    subscriber.read_until(lambda: subscriber.here["CPU"] == set(named(chain)))


def test_a_store_ends_also_when_its_process_does_not(publisher):
    pid = publisher.stats()["pid"]
    os.kill(pid, signal.SIGSTOP)
    publisher.stop()
    assert publisher.stats()["pid"] is None
    assert not os.path.exists(f"/proc/{pid}")


def test_the_process_ends_with_the_store_that_was_killed():
    code = (
        "import sys, time; from kvstore.node.events.publisher import EventPublisher\n"
        "print(EventPublisher('tcp://127.0.0.1:0', '', 'n', 's').stats()['pid'], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as store:
        pidfd = os.pidfd_open(int(store.stdout.readline()))
        try:
            store.kill()
            assert select.select([pidfd], [], [], SOON_S)[0]
        finally:
            os.close(pidfd)


def greet(endpoint, kind):
    """Connect and greet as ZeroMQ does, by hand."""
    sock = socket.create_connection(("127.0.0.1", int(endpoint.rsplit(":", 1)[1])), SOON_S)
    sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    sock.sendall(b"\x04" + bytes([len(ready)]) + ready)
    return sock


@pytest.mark.parametrize(("endpoint", "kind"), [("endpoint", b"SUB"), ("replay_endpoint", b"DEALER")])
def test_a_message_without_an_end_costs_events_and_not_the_store(publish, subscribe, endpoint, kind, wait_until):
    publisher = publish(most_memory_bytes=48 << 20)
    before, frames = num_resident_bytes("self"), (b"\x03" + (1024).to_bytes(8, "big") + bytes(1024)) * 1000

    def send():
        with greet(publisher.stats()[endpoint], kind) as sock:
            for _ in range(200):
                sock.sendall(frames)

    with pytest.raises(ConnectionError):  # libzmq cuts the connection, or the process ends.
        send()
    assert num_resident_bytes("self") - before < 32 << 20
    sizes = []

    def is_measured():
        with contextlib.suppress(OSError):  # It is gone, and the next one is not there yet.
            sizes.append(num_resident_bytes(publisher.stats()["pid"]))
        return bool(sizes)

    wait_until(is_measured)
    assert sizes[0] < 96 << 20
    publisher.follow([])
    wait_until(lambda: publisher.stats()["num_kept"])
    subscriber = subscribe(publisher)
    subscriber.begin_anew()
    subscriber.read_until(lambda: subscriber.next == publisher.stats()["num_batches"])


def test_connections_cost_no_descriptor_of_the_store(publish, subscribe, wait_until):
    publisher = publish(num_descriptors=40)
    subscriber, pid, before = subscribe(publisher), publisher.stats()["pid"], len(os.listdir("/proc/self/fd"))
    subscriber.catch_up()
    with contextlib.ExitStack() as strangers:
        made = [strangers.enter_context(greet(publisher.stats()["endpoint"], b"SUB")) for _ in range(60)]
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 40)
        assert len(os.listdir("/proc/self/fd")) < before + len(made) + 10  # Theirs, and those of the subscriber.
        publisher.follow([])
        subscriber.read_until(lambda: subscriber.next >= 2)
    assert publisher.stats()["num_lost"] == 0

"""A forked child has its parent's client as a copy: it may not speak over it, and ends nothing of it."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback

import pytest
from inner_parts import parts_of

from kvstore.client.client import Client
from kvstore.errors import ForkedClient
from kvstore.memory.arena import create_arena
from kvstore.runtime.forks import withhold

SCRIPT = """
import os, sys
from kvstore.client.client import Client
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape

shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)
client = Client(sys.argv[1], Namespace(model="m", shape=shape))
links = []
for fd in os.listdir("/proc/self/fd"):
    try:
        links.append(os.readlink(f"/proc/self/fd/{fd}"))
    except FileNotFoundError:
        pass  # That of the folder itself.
print([link for link in links if "raykv-arena" in link], flush=True)
child = os.fork()
if child == 0:
    sys.exit()  # With all that a process does at its end.
print(os.waitpid(child, 0)[1], client.stats()["node_id"], flush=True)
"""


def in_child(run):
    """Run a function in a forked child; fails as that does, and does not wait for ever."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            run()
        except BaseException:  # noqa: BLE001
            os.write(write, traceback.format_exc().encode()[-4000:])
            os._exit(1)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as text:
        said = text.read().decode()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said


@pytest.fixture
def core(cluster):
    return cluster.add("a")


@pytest.fixture
def worker(cluster, core):
    worker = cluster.worker("a", 16, seed=1)
    worker.save(cluster.hashes(4), range(4))
    return worker


def test_a_child_that_uses_its_parents_client_is_refused_and_told_what_to_do(cluster, worker):
    client, hashes = worker.client, cluster.hashes(4)
    client.map_presence()
    lease, pinned, ticket = client.lease(hashes), client.pin(hashes), client.publish([0])
    job = client.load(hashes, range(4))
    job.result(10)
    doors = {
        "lookup": lambda: client.lookup(hashes),
        "is_surely_absent": lambda: client.is_surely_absent(hashes),
        "map_presence": client.map_presence,
        "lease": lambda: client.lease(hashes),
        "block": lambda: lease.block(0),
        "renew": lease.renew,
        "release": lease.release,
        "renew after it": lease.renew,
        "pin": lambda: client.pin(hashes),
        "unpin": lambda: client.unpin(pinned),
        "stats": client.stats,
        "save": lambda: client.save(hashes, range(4)),
        "load": lambda: client.load(hashes, range(4)),
        "prefetch": lambda: client.prefetch(hashes),
        "publish": lambda: client.publish([1]),
        "fetch": lambda: client.fetch(ticket, [2]),
        "withdraw": lambda: client.withdraw(ticket),
        "register_kv_caches": lambda: client.register_kv_caches(worker.caches),
        "result": job.result,
        "abandon": job.abandon,
        "wait_on": job.wait_on,
        "done": job.done,
        "add_done_callback": lambda: job.add_done_callback(print),
    }

    def use():
        for door in doors.values():
            with pytest.raises(ForkedClient, match="make a new client in the child"):
                door()

    in_child(use)
    assert lease.held()
    assert lease.release()
    assert client.unpin(pinned)
    assert client.fetch(ticket, [2]).result(10).num_blocks == 1


def test_a_child_that_closes_or_drops_its_copy_takes_nothing_from_its_parent(cluster, core, worker):
    client, hashes = worker.client, cluster.hashes(4)
    client.map_presence()
    lease, held = client.lease(hashes), [client, worker]
    right = bytes(lease.block(0))

    def close():
        with lease:
            pass
        client.close()
        client.close()

    def drop():
        held.clear()
        for name in ("client", "worker"):
            worker.__dict__.pop(name, None)
        cluster.clients.clear()
        gc.collect()

    num_leases = core.pool.num_leases()
    for end in (close, drop):
        in_child(end)
        assert core.pool.num_leases() == num_leases
        assert lease.held()
        assert bytes(lease.block(0)) == right
        assert client.lookup(hashes).num_local == 4
        assert not client.is_surely_absent(hashes)
    assert lease.release()


def test_parent_and_child_get_their_own_answers_from_a_client_each(cluster, core, worker):
    one, other = cluster.hashes(1), cluster.hashes(1, seed=5)
    worker.save(other, [7])
    right, wrong = (bytes(worker.client.lease(hashes).block(0)) for hashes in (one, other))
    assert right != wrong

    def ask():
        client = Client(core.control_path, cluster.space)
        for _ in range(30):
            with client.lease(other) as lease:
                assert bytes(lease.block(0)) == wrong
        client.close()

    child = multiprocessing.get_context("fork").Process(target=ask)
    child.start()
    for _ in range(30):
        with worker.client.lease(one) as lease:
            assert bytes(lease.block(0)) == right
    child.join(20)
    assert child.exitcode == 0


def test_a_stores_copy_in_a_child_ends_with_nothing_of_the_store(cluster, core, worker):
    in_child(core.stop)
    assert worker.load(cluster.hashes(4), range(4, 8)).num_blocks == 4
    assert os.path.exists(core.control_path)


def test_the_addresses_of_the_arena_are_kept_free_in_a_child(cluster, worker):
    """What unmaps them there would else unmap whatever the child has put at them."""
    arena = parts_of(worker.client).arena
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.reserved))
    size = len(arena.reserved)
    gc.collect()

    def look():
        with open("/proc/self/maps") as maps:
            for line in maps:
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                if begin <= address and address + size <= end:
                    assert line.split()[1] == "---p", line
                    return
        raise AssertionError("the addresses are free for anything")

    in_child(look)


def test_addresses_of_a_closed_mapping_are_not_kept(core):
    arena = create_arena(1 << 20)
    address = arena.address
    arena.close()

    def look():
        with open("/proc/self/maps") as maps:
            for line in maps:
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                assert not (begin <= address < end and line.split()[1] == "---p"), line

    in_child(look)
    assert arena.reserved.closed


def test_a_mapping_that_the_kernel_refuses_to_withhold_is_said(worker):
    with pytest.raises(OSError, match="Invalid argument"):
        withhold(parts_of(worker.client).arena.reserved, 1, 4096)


def test_a_worker_keeps_no_descriptor_of_the_arena_and_its_child_may_end_as_any_process(core):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, core.control_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["[]", "0 a"], done.stderr


def test_no_descriptor_outlives_an_exec(cluster):
    """As `os.system` and C libraries do it: with all that is not closed by itself."""

    def inherited():
        command = ["find", "/proc/self/fd", "-type", "l", "-printf", "%l\n"]
        done = subprocess.run(command, close_fds=False, capture_output=True, text=True, timeout=20, check=True)
        return sorted(line for line in done.stdout.splitlines() if not line.startswith(("/proc/", "pipe:")))

    before = inherited()
    core = cluster.add("a")
    cluster.add("b")
    worker, other = cluster.worker("a", 8), cluster.worker("b", 8)
    worker.save(cluster.hashes(4), range(4))
    worker.client.map_presence()
    ticket = worker.client.publish([0])
    other.load(cluster.hashes(4), range(4))
    other.client.fetch(ticket, [5]).result(10)
    assert inherited() == before
    assert not os.get_inheritable(core.state.arena.fd)

"""Peers that hang and resume, workers that die while they load, stores that come back: over TCP with real NIXL."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inner_parts import parts_of
from waiting import state_of

from kvstore.client.results import MissReason


@pytest.fixture(scope="module")
def cluster_of_module(start_cluster):
    return start_cluster(lane="tcp")


@pytest.fixture
def cluster(cluster_of_module):
    yield cluster_of_module
    cluster_of_module.resume()


@pytest.fixture(scope="module")
def fenced(start_cluster):
    """A cluster that kills a mover as soon as a READ that was given up is half a second old."""
    return start_cluster(lane="tcp", max_quarantine_s=0.5)


def saved(cluster, eventually, num_blocks=64):
    hashes = cluster.chain(num_blocks)
    cluster.engines["source"].save(hashes)
    cluster.stores["reader"].ask("forgive", node="source")
    eventually(lambda: cluster.engines["reader"].client.lookup(hashes).num_blocks == num_blocks)
    eventually(lambda: cluster.engines["reader"].load(hashes[:1]).num_blocks == 1)
    return hashes


@contextlib.contextmanager
def held(engine, *chains):
    """Hold leases on chains; not one byte of them may change meanwhile."""
    with contextlib.ExitStack() as stack:
        leases = [stack.enter_context(engine.client.lease(chain, ttl_s=60)) for chain in chains]

        def bytes_now():
            return [hashlib.sha256(lease.block(i)).digest() for lease in leases for i in range(len(lease))]

        before = bytes_now()
        assert len(before) > 100
        yield
        after = bytes_now()
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert not changed, f"{len(changed)} of {len(before)} blocks changed under a lease"


def test_a_source_that_resumes_after_its_reader_was_fenced_corrupts_nothing(fenced, eventually):
    reader, source = fenced.engines["reader"], fenced.engines["source"]
    hashes = saved(fenced, eventually, 128)
    epochs = {node: fenced.stats(node)["epoch"] for node in fenced.stores}
    generation = fenced.stores["reader"].ask("generation")
    fenced.send("source_mover", signal.SIGSTOP)
    began_s = time.monotonic()
    assert reader.load(hashes, timeout_s=1.0).failed[-1].reason is MissReason.TIMEOUT
    assert fenced.pool("reader")["num_quarantined"] > 0

    # Within the documented bound the mover is gone, killed, and the slots are free; another one takes its place.
    eventually(lambda: fenced.pool("reader")["num_quarantined"] == 0, 3)
    assert time.monotonic() - began_s < 1.0 + 1.0 + 0.5 + 1.0
    assert fenced.stats("reader")["num_fenced_movers"] == 1
    # Who starts the next one waits for it on a thread of its own.
    eventually(lambda: fenced.stores["reader"].ask("exits")[-1:] == [-signal.SIGKILL], 3)
    assert fenced.stores["reader"].ask("ready")
    assert fenced.stores["reader"].ask("generation") == generation + 1

    # The slots are wanted again: the whole pool is filled with other blocks. Only then does the source resume.
    others = [fenced.chain(120), fenced.chain(120)]
    for other in others:
        reader.save(other)
    with held(reader, *others):
        fenced.resume()
        # Its mover aborts or goes on. When it serves again, whatever it had still to send has been sent.
        fenced.stores["reader"].ask("forgive", node="source")
        eventually(lambda: reader.load(hashes[:8], timeout_s=2.0).num_blocks == 8, 20)
    for other in others:
        kept = reader.load(other, timeout_s=1.0)
        assert kept.num_local == kept.num_blocks > 100
    assert source.load(hashes).num_local == 128
    assert {node: fenced.stats(node)["epoch"] for node in fenced.stores} == epochs
    fenced.stores["reader"].ask("forgive", node="source")
    eventually(lambda: reader.load(hashes, timeout_s=2.0).num_blocks == 128, 20)
    fenced.settle()


def test_a_read_that_ends_late_writes_only_to_slots_that_nobody_has(cluster, eventually):
    """Scenario 20: what comes after the deadline is let go, here and at the source."""
    reader = cluster.engines["reader"]
    hashes = saved(cluster, eventually, 128)
    cluster.send("source_mover", signal.SIGSTOP)
    assert reader.load(hashes, timeout_s=1.0).failed[-1].reason is MissReason.TIMEOUT
    num_quarantined = cluster.pool("reader")["num_quarantined"]
    assert num_quarantined > 0
    assert cluster.pool("source")["num_pinned"] > 0, "pinned, because it may still be read"
    # Somebody wants all the room there is, and gets what is not set aside.
    other = cluster.chain(240)
    wanted = reader.save(other)
    assert wanted.num_refused > 0
    assert cluster.pool("reader")["num_quarantined"] == num_quarantined
    with held(reader, other):
        cluster.resume()
        eventually(lambda: cluster.pool("reader")["num_quarantined"] == 0, 10)
        eventually(lambda: reader.load(hashes[:8], timeout_s=2.0).num_blocks == 8, 20)
    kept = reader.load(other, timeout_s=0.5)
    assert kept.num_blocks == wanted.num_blocks
    assert cluster.stats("reader")["num_fenced_movers"] == 0
    eventually(lambda: reader.load(hashes, timeout_s=2.0).num_blocks == 128, 20)
    cluster.settle()


def test_a_store_that_stopped_costs_one_call_and_is_then_left_alone(cluster, eventually):
    reader = cluster.engines["reader"]
    hashes = saved(cluster, eventually)
    cluster.send("source", signal.SIGSTOP)
    began_s = time.monotonic()
    first = reader.load(hashes, timeout_s=5.0)
    assert first.failed[-1].reason is MissReason.TIMEOUT
    assert time.monotonic() - began_s < 2.5, "one call's timeout, not the load's"
    began_s = time.monotonic()
    second = reader.load(hashes, timeout_s=5.0)
    assert (second.num_lease_calls, second.failed[-1].reason) == (0, MissReason.PEER_LOST)
    assert time.monotonic() - began_s < 0.5
    cluster.resume()
    eventually(lambda: reader.load(hashes, timeout_s=2.0).num_blocks == 64, 20)
    cluster.settle()


def test_a_directory_that_stopped_fails_no_save_and_no_local_load(cluster, eventually):
    reader = cluster.engines["reader"]
    saved(cluster, eventually)
    cluster.send("directory", signal.SIGSTOP)
    for limit_s in (2.0, 2.0, 2.0):
        hashes = cluster.chain(8)
        began_s = time.monotonic()
        assert reader.save(hashes).num_written == 8
        assert time.monotonic() - began_s < limit_s
        assert reader.load(hashes).num_local == 8
    cluster.resume()
    eventually(lambda: cluster.engines["source"].client.lookup(hashes).num_blocks == 8, 15)
    cluster.settle()


def start_loader(cluster, hashes, num_threads, timeout_s=10.0, *options):
    client = cluster.engines["reader"].client
    script = str(Path(__file__).with_name("loader.py"))
    arguments = (
        parts_of(client).store.path,
        parts_of(client).chain(hashes).encode().hex(),
        num_threads,
        timeout_s,
        client.slot_bytes,
        *options,
    )
    child = subprocess.Popen(
        [sys.executable, script, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    return child


def begin(child):
    child.stdin.write("begin\n")
    child.stdin.flush()


def end(child):
    child.kill()
    child.wait(10)
    child.stdin.close()
    child.stdout.close()


def test_fifty_loads_of_five_processes_make_one_fetch(cluster, eventually):
    hashes = cluster.chain(64)
    cluster.engines["source"].save(hashes)
    eventually(lambda: cluster.engines["reader"].client.lookup(hashes).num_blocks == 64)
    with cluster.engines["source"].client.lease(hashes) as lease:
        wanted = hashlib.sha256(b"".join(bytes(lease.block(i)) for i in range(64))).hexdigest()
    reader = cluster.stores["reader"]
    num_leases = cluster.stats("source")["calls"].get("PEER_LEASE", 0)
    children = [start_loader(cluster, hashes, 10) for _ in range(5)]
    try:
        reader.ask("shut", name="lease")
        for child in children:
            begin(child)
        eventually(lambda: reader.ask("waiting") == 49, 10)
        # Nobody who waits holds up a load of something else.
        assert cluster.engines["reader"].load(cluster.chain(4), timeout_s=2.0).failed[0].reason is MissReason.NOT_FOUND
        reader.ask("open")
        results = [result for child in children for result in json.loads(child.stdout.readline())]
    finally:
        reader.ask("open")
        for child in children:
            end(child)
    assert results == [[64, wanted]] * 50
    assert cluster.stats("source")["calls"]["PEER_LEASE"] - num_leases == 1
    cluster.settle()


@pytest.mark.parametrize("phase", ["lease", "read", "publish", "copy"])
def test_a_worker_that_is_killed_while_it_loads_leaves_nothing(cluster, eventually, phase):
    hashes = saved(cluster, eventually)
    reader = cluster.stores["reader"]
    child = start_loader(cluster, hashes, 2, 10.0, *(["hold"] if phase == "copy" else []))
    try:
        if phase == "copy":
            begin(child)
            assert [child.stdout.readline() for _ in range(2)] == ["copying\n"] * 2
            assert cluster.stats("reader")["pool"]["num_pinned"] == 64
        elif phase == "read":
            reader.ask("mover", do_="shut")
            begin(child)
            eventually(lambda: reader.ask("mover", do_="held") == ["read"])
        else:
            reader.ask("shut", name=phase)
            begin(child)
            eventually(lambda: reader.ask("held") == [phase])
        child.kill()
        child.wait(10)
    finally:
        reader.ask("mover", do_="open") if phase == "read" else reader.ask("open")
        end(child)
    cluster.settle()
    assert cluster.engines["reader"].load(hashes).num_blocks == 64
    cluster.settle()


def test_a_store_that_was_restarted_has_a_new_epoch_and_takes_no_old_descriptor(cluster, eventually):
    """Scenario 21: nothing is read from the new life of a store under names of the old one."""
    reader = cluster.stores["reader"]
    hashes = saved(cluster, eventually)
    epoch = cluster.stats("source")["epoch"]
    old_client = cluster.engines["source"].client
    old = reader.ask("remember", node="source", chain=parts_of(old_client).chain(hashes).encode().hex())
    assert old["epoch"] == epoch
    assert reader.ask("read_as_remembered") == "", "while that life lasts, it can be read"
    cluster.send("source", signal.SIGKILL)
    cluster.stores["source"].process.wait(10)
    cluster.start_store("source")
    assert cluster.stores["source"].ask("ready")
    assert cluster.stats("source")["epoch"] != epoch
    # Bytes, pins and clients of the old life: none of them counts any more.
    assert reader.ask("read_as_remembered") in ("PeerLost", "TransferError")
    lost = cluster.engines["source"].load(hashes, timeout_s=1.0)
    assert (lost.num_blocks, lost.failed[0].reason) == (0, MissReason.STORE_LOST)
    engine = cluster.open("source")
    assert engine.client.epoch != epoch
    engine.save(hashes)
    before = cluster.pool("source")
    assert reader.ask("release_as_remembered", node="source") is None
    assert cluster.pool("source") == before
    cluster.stores["reader"].ask("forgive", node="source")
    eventually(lambda: cluster.engines["reader"].load(hashes, timeout_s=2.0).num_blocks == 64, 20)
    cluster.settle()


def test_a_store_that_stopped_while_its_first_mover_came_up_gets_one(start_cluster, eventually):
    """And stayed so for longer than the mover waits for an answer."""
    cluster = start_cluster()
    wait = Path(cluster.folder) / "wait"
    wait.touch()
    cluster.start_store("reader")
    assert cluster.stores["reader"].ask("path"), "it serves, and its mover waits"
    assert cluster.stores["reader"].ask("generation") == 0
    (first,) = eventually(lambda: children_of(cluster.stores["reader"].pid))
    cluster.send("reader", signal.SIGSTOP)
    wait.unlink()
    eventually(lambda: state_of(Path(f"/proc/{first}")) == "Z", 20)
    cluster.resume()
    reader = cluster.open("reader")
    assert cluster.stores["reader"].ask("generation") == 1
    hashes = saved(cluster, eventually)
    assert reader.load(hashes).num_blocks == 64
    others = cluster.chain()
    reader.save(others)
    eventually(lambda: cluster.engines["source"].load(others).num_blocks == 64)
    cluster.settle()


def children_of(pid):
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]

"""Events of a store: a subscriber knows which blocks lookups find, from its numbers on and after it missed some."""

from __future__ import annotations

import os
import random
import sys

import pytest

zmq = pytest.importorskip("zmq")

from event_subscriber import SOON_S, named  # noqa: E402

from kvstore.blocks.chain import BlockHashes  # noqa: E402
from kvstore.errors import ConfigError  # noqa: E402
from kvstore.node.events.changes import PoolChanges  # noqa: E402
from kvstore.node.events.outlet import Limits  # noqa: E402
from kvstore.node.events.publisher import EventPublisher  # noqa: E402
from kvstore.pool.pool import Pool  # noqa: E402

ADDRESSES = {"events_endpoint": "tcp://127.0.0.1:0", "events_replay_endpoint": "tcp://127.0.0.1:0"}
NUM_BLOCKS = 16


@pytest.fixture
def node(cluster):
    """A node with room for some chains, and a worker."""
    core = cluster.add("a", mover=False, capacity_bytes=1 << 16, **ADDRESSES)
    core.worker = cluster.worker("a")
    return core


def chains(cluster, count):
    return [cluster.hashes(NUM_BLOCKS, seed) for seed in range(count)]


def save(core, *runs):
    for run in runs:
        core.worker.save(run, range(len(run)))


def num_resident_bytes(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def agree(subscriber, core, runs):
    """Whether it knows what lookups find, block by block."""

    def found():
        return {own for run in runs for own in list(run)[: core.state.pool_service.lookup(run)]}

    def holds():
        known = subscriber.here["CPU"]
        prefixes = {run: next((at for at, own in enumerate(named(run)) if own not in known), len(run)) for run in runs}
        return found() == {own for run, count in prefixes.items() for own in list(run)[:count]} and (
            known == set(named(core.pool.present([own for run in runs for own in run])))
        )

    return holds


def test_a_subscriber_knows_what_lookups_find(cluster, node, subscribe):
    subscriber, runs = subscribe(node), chains(cluster, 12)
    save(node, *runs[:3])
    subscriber.read_until(agree(subscriber, node, runs))
    assert subscriber.here["CPU"] == {own for run in runs[:3] for own in named(run)}
    save(node, *runs[3:])
    assert node.pool.stats().num_evicted
    subscriber.read_until(agree(subscriber, node, runs))
    assert "BlockRemoved" in subscriber.kinds
    for run in runs:
        assert [subscriber.parents[own] for own in named(run)] == [None, *named(run)[:-1]]
    node.state.pool_service.clear(cluster.space.digest)
    subscriber.read_until(agree(subscriber, node, runs))
    assert subscriber.here["CPU"] == set()
    save(node, runs[0])
    subscriber.read_until(lambda: subscriber.here["CPU"] == set(named(runs[0])))


def test_one_that_comes_late_gets_all_batches_again(cluster, node, subscribe):
    early, runs = subscribe(node), chains(cluster, 12)
    for run in runs:
        save(node, run)
        early.read_until(lambda run=run: set(named(run)) <= early.here["CPU"])
    late = subscribe(node)
    late.catch_up()
    assert (late.here, late.parents, late.next) == (early.here, early.parents, early.next)
    numbers = [number for number, _ in late.replayed(3)]
    assert numbers == list(range(3, early.next))
    assert late.replayed(early.next) == []
    assert agree(late, node, runs)()


def test_messages_name_the_node_and_the_store(cluster, node, subscribe):
    subscriber, others = subscribe(node, topic=b"kv@a@"), subscribe(node, topic=b"kv@b@")
    (run,) = chains(cluster, 1)
    save(node, run)
    subscriber.read_until(lambda: subscriber.here["CPU"])

    def heard():
        node.undrain() if node.drain(0.0) else None  # Sends batches, until the subscription has come through.
        return subscriber.topics

    subscriber.read_until(heard)
    assert subscriber.topics == {b"kv@a@default"}
    assert not others.read(0)


def test_a_drained_node_has_no_block_and_an_undrained_one_has_them_again(cluster, node, subscribe):
    subscriber, runs = subscribe(node), chains(cluster, 3)
    save(node, *runs)
    subscriber.read_until(agree(subscriber, node, runs))
    node.drain(0.0)
    subscriber.read_until(lambda: not subscriber.here["CPU"])
    node.undrain()
    subscriber.read_until(agree(subscriber, node, runs))
    assert subscriber.here["CPU"]


def test_a_store_that_ends_says_so_and_one_that_begins_says_it_is_empty(cluster, node, subscribe):
    subscriber, runs = subscribe(node), chains(cluster, 1)
    save(node, *runs)

    def is_live():
        node.drain(0.0)
        node.undrain()
        return subscriber.topics

    subscriber.read_until(is_live)
    assert subscriber.kinds[0] == "AllBlocksCleared"
    subscriber.read_until(agree(subscriber, node, runs))
    num_before = node.stats()["events"]["num_batches"]
    cluster.stop_node("a")
    while subscriber.next <= num_before:
        assert subscriber.read(SOON_S * 1000)
    assert subscriber.here["CPU"] == set()
    assert subscriber.kinds[-1] == "AllBlocksCleared"


def test_a_tier_on_disk_has_a_medium_of_its_own_also_after_a_restart(cluster, subscribe, tmp_path):
    settings = {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 20, **ADDRESSES}
    (run,) = chains(cluster, 1)
    node = cluster.add("a", mover=False, **settings)
    node.worker, subscriber = cluster.worker("a"), subscribe(node)
    save(node, run)
    subscriber.read_until(lambda: subscriber.here == {"CPU": set(named(run)), "STORAGE": set(named(run))})
    cluster.stop_node("a")
    node = cluster.add("a", mover=False, **settings)
    cluster.worker("a")
    subscriber = subscribe(node)
    subscriber.read_until(lambda: subscriber.here == {"CPU": set(), "STORAGE": set(named(run))})
    assert [subscriber.parents[own] for own in named(run)] == [None, *named(run)[:-1]]
    node.state.pool_service.clear(cluster.space.digest)
    subscriber.read_until(lambda: not subscriber.here["STORAGE"])


def test_a_slow_subscriber_loses_batches_sees_it_and_recovers(cluster, subscribe, wait_until):
    publisher, pool = EventPublisher(*ADDRESSES.values(), "n", "s", Limits(num_unread=1)), Pool(1 << 13)
    try:
        subscriber, chain = subscribe(publisher, RCVHWM=1, RCVBUF=1 << 12), cluster.hashes(1 << 13)
        publisher.follow([(pool, "CPU")])

        def store():
            pool.complete_store(pool.prepare_store(chain, "w").write_id, "w")

        def change():
            """Send four batches of 36 KB."""
            before = publisher.stats()["num_batches"]
            pool.clear(cluster.space.digest)
            store()
            wait_until(lambda: publisher.stats()["num_batches"] >= before + 4)
            return subscriber.topics

        store()
        subscriber.read_until(lambda: subscriber.here["CPU"])  # From now on no change is a part of the beginning.
        subscriber.read_until(change)
        while subscriber.read():
            pass
        gaps = subscriber.num_gaps
        for _ in range(160):  # It reads none of these 23 MB: more than all sockets keep.
            change()
        while subscriber.num_gaps == gaps:  # What the sockets kept has no gap; it comes first.
            change()
            assert subscriber.read(SOON_S * 1000)
        subscriber.read_until(lambda: subscriber.next == publisher.stats()["num_batches"])
        assert subscriber.here["CPU"] == set(named(chain))
    finally:
        publisher.stop()


def test_an_address_that_is_taken_is_refused_and_nothing_stays(cluster, node):
    taken = {"events_endpoint": node.stats()["events"]["endpoint"]}
    for settings in (taken, {**ADDRESSES, "events_replay_endpoint": taken["events_endpoint"]}):
        name = "events_endpoint" if settings is taken else "events_replay_endpoint"
        with pytest.raises(ConfigError, match=f"{name}: wanted an address that is free.*another process has it"):
            cluster.add("b", mover=False, **settings)
    with pytest.raises(ConfigError, match="events_endpoint: wanted an address that is free"):
        cluster.add("b", mover=False, events_endpoint="tcp://192.0.2.1:5557")
    cluster.add("b", mover=False, **ADDRESSES)


def test_an_address_is_free_again_when_the_store_has_ended(cluster, node):
    taken = {"events_endpoint": node.stats()["events"]["endpoint"]}
    cluster.stop_node("a")
    cluster.add("b", mover=False, **taken)


def test_a_store_without_the_package_says_what_to_install(cluster, monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"wanted the package pyzmq on every node.*extra `events`"):
        cluster.add("a", mover=False, **ADDRESSES)
    assert cluster.add("b", mover=False).stats()["events"] is None


def test_nonsense_is_counted_and_not_answered(publisher, subscribe):
    subscriber = subscribe(publisher)
    for frames in ((b"",), (b"", b"short"), (b"x", bytes(8)), (b"", bytes(8), b"more")):
        subscriber.ask(*frames)
    assert subscriber.replayed(1 << 40) == []  # Behind them, on the same connection.
    assert publisher.stats()["num_malformed"] == 4
    assert publisher.stats()["num_replays"] == 1


def test_what_is_kept_for_replays_is_bounded(publish, subscribe):
    publisher = publish(num_kept=3)
    subscriber = subscribe(publisher)
    subscriber.catch_up()
    for count in range(2, 8):
        publisher.follow([])
        subscriber.read_until(lambda count=count: subscriber.next >= count)
    kept = [number for number, _ in subscriber.replayed(0)]
    assert len(kept) == publisher.stats()["num_kept"] == 3
    assert kept[-1] == subscriber.next - 1


def test_one_that_asks_again_and_reads_nothing_costs_no_memory_for_each_answer(publisher, wait_until):
    pool = Pool(1 << 16)
    chain = BlockHashes(b"n" * 32, b"n" * 32, 0, random.Random(1).randbytes(32 << 16))
    pool.complete_store(pool.prepare_store(chain, "writer").write_id, "writer")
    for count in range(1, 9):
        publisher.follow([(pool, "CPU")])
        wait_until(lambda count=count: publisher.stats()["num_batches"] > 16 * count)
    pid = publisher.stats()["pid"]
    before, num_asked = num_resident_bytes(pid), 40  # Each answer has 4.5 MiB.
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        for name, value in {"LINGER": 0, "RCVHWM": 1, "RCVBUF": 4096}.items():
            asker.setsockopt(getattr(zmq, name), value)
        asker.connect(publisher.stats()["replay_endpoint"])
        for _ in range(num_asked):
            asker.send_multipart([b"", bytes(8)])
        wait_until(lambda: publisher.stats()["num_replays"] == num_asked)
        assert num_resident_bytes(pid) - before < 64 << 20


def test_what_is_kept_for_replays_is_bounded_in_bytes_too(publish, subscribe):
    publisher = publish(num_kept_bytes=100)
    subscriber = subscribe(publisher)
    subscriber.catch_up()
    for count in range(2, 12):
        publisher.follow([])
        subscriber.read_until(lambda count=count: subscriber.next >= count)
    kept = subscriber.replayed(0)
    assert 1 < len(kept) < 8
    assert sum(len(payload) for _, payload in kept) <= 100


def test_after_a_round_that_failed_a_subscriber_is_told_all_anew(publisher, subscribe, monkeypatch, wait_until):
    pool, subscriber = Pool(8), subscribe(publisher)
    chain = BlockHashes(b"n" * 32, b"n" * 32, 0, random.Random(1).randbytes(32 * 8))
    publisher.follow([(pool, "CPU")])
    # What it publishes shows that its first round is over, so the next one has changes only.
    pool.complete_store(pool.prepare_store(chain.head(2), "writer").write_id, "writer")
    subscriber.read_until(lambda: subscriber.here["CPU"] == set(named(chain.head(2))))
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.node.events.changes.PoolChanges.events", lambda *_: 1 / 0)
        pool.complete_store(pool.prepare_store(chain.head(4), "writer").write_id, "writer")
        wait_until(lambda: publisher.stats()["num_failures"])
    pool.complete_store(pool.prepare_store(chain, "writer").write_id, "writer")
    subscriber.read_until(lambda: subscriber.here["CPU"] == set(named(chain)))


def test_a_change_during_a_round_wakes_the_next_one(publisher, subscribe, monkeypatch):
    monkeypatch.setattr("kvstore.node.events.publisher._LOOK_MS", 600_000)
    pool, subscriber = Pool(8), subscribe(publisher)
    chain = BlockHashes(b"n" * 32, b"n" * 32, 0, random.Random(1).randbytes(32 * 8))
    publisher.follow([(pool, "CPU")])
    pool.complete_store(pool.prepare_store(chain.head(2), "writer").write_id, "writer")
    subscriber.read_until(lambda: subscriber.here["CPU"] == set(named(chain.head(2))))
    real, rest = PoolChanges.events, [chain, chain.head(6)]

    def change_meanwhile(source, changes):
        yield from real(source, changes)
        if rest:
            pool.complete_store(pool.prepare_store(rest.pop(), "writer").write_id, "writer")

    monkeypatch.setattr(PoolChanges, "events", change_meanwhile)
    pool.complete_store(pool.prepare_store(chain.head(4), "writer").write_id, "writer")
    subscriber.read_until(lambda: subscriber.here["CPU"] == set(named(chain)))

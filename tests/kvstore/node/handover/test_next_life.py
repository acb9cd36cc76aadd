"""A node core that begins with the memory of the last one: right bytes, or none.

Both lives run in this process, so its end is not waited for; tests/actors/restart has processes that end.
"""

from __future__ import annotations

import os

import pytest
from inner_parts import parts_of

from kvstore.client.results import MissReason
from kvstore.errors import KVStoreError, PeerLost, StoreUnavailable
from kvstore.memory import room
from kvstore.node.handover import giving, taking
from kvstore.node.handover.giving import hand_over
from kvstore.node.handover.transfer import handover_path
from kvstore.pool.handover.adoption import OLD_WRITER
from kvstore.remote.directory import DirectoryServer
from tests.kvstore.node.handover.lives import HOST, NODE, SETTINGS, Lives, prepare


@pytest.fixture(autouse=True)
def _both_lives_are_here(monkeypatch):
    monkeypatch.setattr(taking, "end", lambda pidfd, patience_s, killed_within_s: True)
    monkeypatch.setattr(taking, "pid_of", lambda pidfd: 1)


@pytest.fixture
def lives(cluster):
    cluster.add(NODE, **SETTINGS)
    return Lives(cluster)


def _memory_files():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(link) and "raykv-arena" in os.readlink(link) for link in links)


@pytest.fixture(autouse=True)
def _of_other_tests():
    """Note what tests before have left, as a benchmark that runs in this process does."""
    _OTHERS[:] = [_memory_files()]


_OTHERS = [0]


def memory_files():
    return _memory_files() - _OTHERS[0]


def test_blocks_are_loaded_from_the_memory_of_the_life_before_also_the_next_time(cluster, lives):
    hashes, first = cluster.hashes(20), cluster.worker(NODE, seed=1)
    first.save(hashes, range(20))
    saved = [first.block(block) for block in range(20)]
    epochs = {cluster.nodes[NODE].state.epoch}
    for _ in range(2):
        beginning = lives.go_on()
        assert (beginning.is_warm, beginning.num_blocks, beginning.why_cold) == (True, 20, "")
        epochs.add(cluster.nodes[NODE].state.epoch)
        worker = cluster.worker(NODE, seed=2)
        result = worker.load(hashes, range(30, 50))
        assert (result.num_blocks, result.num_local) == (20, 20)
        assert [worker.block(block) for block in range(30, 50)] == saved
        assert worker.save(hashes, range(20)).num_written == 0
    assert len(epochs) == 3
    assert memory_files() == 1
    lost = first.load(hashes, range(20))
    assert (lost.num_blocks, lost.failed[0].reason) == (0, MissReason.STORE_LOST)


def test_what_may_be_surely_absent_is_known_in_the_next_life(cluster, lives):
    hashes = cluster.hashes(4)
    cluster.worker(NODE).save(hashes, range(4))
    lives.go_on()
    client = cluster.client(NODE)
    client.map_presence()
    assert not client.is_surely_absent(hashes, remote=False)
    assert client.is_surely_absent(cluster.hashes(4, seed=9), remote=False)


def test_another_node_reads_the_blocks_of_the_next_life_and_never_by_old_grants(cluster, lives):
    cluster.add("b", **SETTINGS)
    hashes, one = cluster.hashes(6), cluster.worker(NODE, seed=1)
    one.save(hashes, range(6))
    lives.go_on()
    two = cluster.worker("b", seed=2)
    result = two.load(hashes, range(6))
    assert (result.num_peer, result.num_blocks) == (6, 6)
    assert [two.block(block) for block in range(6)] == [one.block(block) for block in range(6)]


def test_a_clearing_between_two_lives_holds(cluster, lives, wait_until):
    other = cluster.add("b", **SETTINGS)
    hashes = cluster.hashes(4)
    cluster.worker(NODE).save(hashes, range(4))
    cluster.worker("b")
    lives.give()
    other.state.pool_service.clear(cluster.space.digest)
    wait_until(lambda: cluster.directory.versions.get(cluster.space.digest) == 1)
    lives.take()
    assert cluster.client(NODE).lookup(hashes, remote=False).num_local == 0
    assert cluster.nodes[NODE].state.versions.get(cluster.space.digest) == 1


def test_a_store_that_gave_its_memory_away_refuses_a_clearing_and_what_is_written_late(cluster, lives):
    core, worker, hashes = cluster.nodes[NODE], cluster.worker(NODE), cluster.hashes(4)
    worker.save(hashes[:2], range(2))
    ticket = prepare(worker, hashes)
    core.pool.freeze()
    with pytest.raises(StoreUnavailable, match="new client"):
        core.state.pool_service.clear(cluster.space.digest)
    core.state.pool_service.hear_clearing(cluster.space.digest, 5)
    assert core.state.versions.get(cluster.space.digest) == 0
    with pytest.raises(StoreUnavailable):
        core.state.pool_service.complete_store(ticket.write_id, "client")


def test_without_the_directory_nothing_is_kept(cluster, lives, monkeypatch):
    monkeypatch.setattr("kvstore.node.handover.old_life.MEETS_WITHIN_S", 0.3)
    hashes = cluster.hashes(4)
    cluster.worker(NODE).save(hashes, range(4))
    lives.give()
    cluster.directory.stop()
    beginning = lives.take()
    assert (beginning.is_warm, beginning.num_blocks) == (False, 0)
    assert "directory" in beginning.why_cold
    worker = cluster.worker(NODE)
    assert worker.client.lookup(hashes, remote=False).num_local == 0
    assert worker.save(hashes, range(4)).num_written == 4


def test_a_directory_that_is_away_for_a_moment_costs_nothing(cluster, lives, monkeypatch):
    hashes = cluster.hashes(4)
    cluster.worker(NODE).save(hashes, range(4))
    lives.give()
    address, failures = cluster.directory.address, iter([PeerLost("not yet")])

    def find():
        for failure in failures:
            raise failure
        return address()

    monkeypatch.setattr(cluster.directory, "address", find)
    assert lives.take().num_blocks == 4


def test_a_writer_of_the_old_life_harms_no_block_of_the_new_one(cluster, lives, wait_until):
    frozen, hashes = cluster.worker(NODE, seed=1), cluster.hashes(8)
    frozen.save(hashes[:4], range(4))
    slots = prepare(frozen, hashes).slots
    attached = parts_of(frozen.client)
    view = attached.arena.memory[:]  # As a copy under way has: it stays mapped.
    beginning = lives.go_on()
    assert (beginning.is_warm, beginning.num_held_slots) == (True, 4)
    core, worker = cluster.nodes[NODE], cluster.worker(NODE, seed=2)
    used = set()
    for seed in range(20, 40):  # Many times what the node can hold.
        chain = cluster.hashes(10, seed)
        worker.save(chain, range(10))
        for slot in slots:
            view[slot * attached.slot_bytes : (slot + 1) * attached.slot_bytes] = b"\xff" * attached.slot_bytes
        result = worker.load(chain, range(40, 50))
        assert [worker.block(40 + i) for i in range(result.num_blocks)] == [
            worker.block(i) for i in range(result.num_blocks)
        ]
        with worker.client.lease(chain) as lease:
            used |= set(lease.slots)
    assert used.isdisjoint(slots)
    assert core.pool.stats().num_writing == len(slots)
    core.pool.release_owner(f"{OLD_WRITER}0")
    assert core.pool.stats().num_writing == 0
    view.release()


def test_bytes_that_a_reader_of_the_old_life_may_use_stay_until_its_lease_ends(cluster, lives, wait_until):
    reader, hashes = cluster.worker(NODE, seed=1), cluster.hashes(3)
    reader.save(hashes, range(3))
    lease = reader.client.lease(hashes, ttl_s=3.0)
    blocks = [bytes(lease.block(i)) for i in range(3)]
    views = [lease.block(i) for i in range(3)]
    lives.go_on()
    core, worker = cluster.nodes[NODE], cluster.worker(NODE, seed=2)
    for seed in range(20, 30):
        worker.save(cluster.hashes(20, seed), range(20))
    assert core.pool.stats().num_pinned == 3
    assert [bytes(view) for view in views] == blocks
    wait_until(lambda: core.pool.stats().num_pinned == 0)
    for view in views:
        view.release()


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity_bytes": 1 << 18},
        {"capacity_bytes": 1 << 16},
        {"block_bytes": 1 << 12},
        {"disk_path": "here", "disk_capacity_bytes": 1 << 20},
    ],
)
def test_blocks_are_copied_to_memory_of_another_size_and_old_writers_do_not_reach_it(
    cluster, lives, settings, tmp_path
):
    settings |= {"disk_path": str(tmp_path)} if "disk_path" in settings else {}
    hashes, first = cluster.hashes(20), cluster.worker(NODE, seed=1)
    first.save(hashes, range(20))
    late = prepare(first, cluster.hashes(4, seed=7))
    view, slot_bytes = parts_of(first.client).arena.memory[:], parts_of(first.client).slot_bytes
    beginning = lives.go_on(**settings)
    assert (beginning.is_warm, beginning.num_blocks, beginning.num_held_slots) == (True, 20, 0)
    view[:] = b"\xff" * len(view)
    assert (memory_files(), len(late.slots), slot_bytes) == (1, 4, 1024)
    worker = cluster.worker(NODE, seed=2)
    assert worker.load(hashes, range(30, 50)).num_local == 20
    assert [worker.block(30 + block) for block in range(20)] == [first.block(block) for block in range(20)]
    view.release()


def test_a_smaller_memory_keeps_what_would_be_evicted_last(cluster, lives):
    worker = cluster.worker(NODE, seed=1)
    chains = [cluster.hashes(30, seed) for seed in range(4)]
    for chain in chains:
        worker.save(chain, range(30))
    worker.load(chains[0], range(30))
    beginning = lives.go_on(capacity_bytes=1 << 16, eviction="lru")
    assert (beginning.is_warm, beginning.num_blocks) == (True, 64)
    client = cluster.client(NODE)
    assert [client.lookup(chain, remote=False).num_local for chain in chains] == [30, 0, 4, 30]


def test_memory_of_another_size_needs_room_for_both_at_once(cluster, lives, monkeypatch):
    hashes = cluster.hashes(4)
    cluster.worker(NODE).save(hashes, range(4))
    lives.give()
    monkeypatch.setattr(room, "find_room", _once(lambda _: room.Room(0, "a test"), room.find_room))
    beginning = lives.take(capacity_bytes=1 << 18)
    assert (beginning.is_warm, "for the capacity" in beginning.why_cold, memory_files()) == (False, True, 1)
    assert cluster.worker(NODE).save(hashes, range(4)).num_written == 4


def _once(first, then):
    calls = iter([first])
    return lambda num_bytes: next(calls, then)(num_bytes)


def test_the_memory_of_another_store_is_refused(cluster, lives):
    hashes = cluster.hashes(4)
    cluster.worker(NODE).save(hashes, range(4))
    beginning = lives.go_on(name="other")
    assert (beginning.is_warm, beginning.num_blocks, memory_files()) == (False, 0, 1)
    assert "store 'default'" in beginning.why_cold


def test_other_settings_keep_the_blocks(cluster, lives):
    hashes = cluster.hashes(4)
    cluster.worker(NODE).save(hashes, range(4))
    changes = {
        "lease_ttl_s": 9.0, "max_pinned_fraction": 0.5, "eviction": "lru", "low_watermark": 0.1, "save_wait_s": 0.0,
        "max_handoff_fraction": 0.2,
    }  # fmt: skip
    assert lives.go_on(**changes).num_blocks == 4
    assert cluster.worker(NODE).load(hashes, range(4)).num_blocks == 4


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:50], lambda data: b"", lambda data: data[:-1] + b"x"]
)
def test_an_index_that_was_cut_or_damaged_begins_an_empty_store(cluster, lives, monkeypatch, damage):
    seal = giving.seal
    monkeypatch.setattr(giving, "seal", lambda message: damage(seal(message)))
    cluster.worker(NODE).save(cluster.hashes(4), range(4))
    beginning = lives.go_on()
    assert not beginning.is_warm
    assert "index of the old store" in beginning.why_cold
    assert memory_files() == 1


def test_memory_that_cannot_be_adopted_is_given_up_for_new_memory(cluster, lives, monkeypatch):
    cluster.worker(NODE).save(cluster.hashes(4), range(4))
    lives.give()

    def fail(*_):
        raise KVStoreError("in the middle")

    monkeypatch.setattr("kvstore.pool.pool.adopt", fail)
    beginning = lives.take()
    assert (beginning.is_warm, "in the middle" in beginning.why_cold) == (False, True)
    assert memory_files() == 1
    assert cluster.worker(NODE).save(cluster.hashes(4), range(4)).num_written == 4


def test_an_old_store_that_does_not_end_keeps_its_memory(cluster, lives, monkeypatch):
    cluster.worker(NODE).save(cluster.hashes(4), range(4))
    monkeypatch.setattr(taking, "end", lambda pidfd, patience_s, killed_within_s: False)
    beginning = lives.go_on()
    assert (beginning.is_warm, "does not end" in beginning.why_cold) == (False, True)


def test_a_store_without_slots_gives_nothing_and_serves_on(cluster, lives):
    with pytest.raises(StoreUnavailable, match="no namespace has attached"):
        hand_over(cluster.nodes[NODE], handover_path("default", NODE), 0.1)
    assert cluster.worker(NODE).save(cluster.hashes(4), range(4)).num_written == 4
    with pytest.raises(StoreUnavailable, match="no process holds"):
        hand_over(cluster.nodes[NODE], handover_path("default", NODE), 0.1)
    assert cluster.worker(NODE).load(cluster.hashes(4), range(4)).num_blocks == 4


def test_memory_and_disk_agree_in_the_next_life(cluster, tmp_path, wait_until):
    disk = {"disk_path": str(tmp_path), "disk_capacity_bytes": 1 << 20, "capacity_bytes": 1 << 17}
    cluster.add(NODE, **(SETTINGS | disk))
    lives, hashes, worker = Lives(cluster), cluster.hashes(12), cluster.worker(NODE, seed=1)
    worker.save(hashes, range(12))
    saved = [worker.block(block) for block in range(12)]
    tier = cluster.nodes[NODE].state.disk
    wait_until(lambda: tier.pool.lookup(hashes) == 12)
    assert lives.go_on(**disk).num_blocks == 12
    core, again = cluster.nodes[NODE], cluster.worker(NODE, seed=2)
    wait_until(lambda: core.state.disk.num_restored == 12)
    core.state.disk.pool.check_integrity()
    assert again.load(hashes, range(12)).num_local == 12
    # Not at once: the disk looks at blocks that were offered again, and holds them meanwhile.
    wait_until(lambda: (core.pool.evict(99), core.pool.lookup(hashes))[1] == 0)
    result = again.load(hashes, range(20, 32))
    assert result.num_disk > 0
    assert result.num_blocks == 12
    assert [again.block(block) for block in range(20, 32)] == saved
    core.state.disk.pool.check_integrity()


def test_what_memory_does_not_keep_is_not_written_to_a_disk(cluster, tmp_path, monkeypatch):
    """Life 1 has no disk. Meanwhile there is a clearing that the directory of life 2 does not know."""
    cluster.add(NODE, **(SETTINGS | {"block_bytes": 4096}))
    lives, hashes = Lives(cluster), cluster.hashes(12)
    cluster.worker(NODE, seed=1).save(hashes, range(12))
    lives.give()
    cluster.directory.stop()
    cluster.directory = DirectoryServer(HOST, settle_s=0.0)
    offered = []
    monkeypatch.setattr("kvstore.disk.tier.DiskTier.offer", lambda self, *blocks: offered.append(blocks))
    disk = {"disk_path": str(tmp_path), "disk_capacity_bytes": 1 << 20, "block_bytes": 4096}
    assert "directory" in lives.take(**disk).why_cold
    assert not offered

"""Reads of the disk: order, damage, errors, hanging calls, many loads at once."""

import errno
import threading

import pytest
from disk_store import HALF, SOON_S, flip, slot_span, wait_until

from kvstore.disk.records import PAGE_BYTES, RECORD_BYTES


def why(result) -> str:
    """Return why blocks are missing."""
    return " ".join({f"{failure.reason.value} {failure.detail}" for failure in result.failed})


@pytest.fixture
def stored(start, cluster):
    """A store that has a chain of 12 blocks on its disk only."""
    store = start()
    hashes = cluster.hashes(12)
    store.save(hashes)
    store.empty_memory()
    return store, hashes


def test_what_is_on_the_disk_is_read(stored):
    """A4: a load never writes to the tier that it reads."""
    store, hashes = stored
    before = store.slots.read_bytes(), store.index.read_bytes()
    result = store.load(hashes)
    assert (result.num_blocks, result.num_disk, why(result)) == (12, 12, "")
    store.settle()
    assert (store.slots.read_bytes(), store.index.read_bytes()) == before
    assert store.load(hashes).num_local == 12


@pytest.mark.parametrize("num_local", [1, 5, 11])
def test_a_prefix_in_memory_and_the_rest_on_disk(stored, num_local):
    store, hashes = stored
    assert store.load(hashes[:num_local]).num_disk == num_local
    result = store.load(hashes)
    assert (result.num_blocks, result.num_local, result.num_disk) == (12, num_local, 12 - num_local)


def test_a_hole_in_memory_is_filled(stored):
    store, hashes = stored
    store.load(hashes)
    pinned = store.core.pool.pin_prefix(hashes, "test", 1e12)
    middle = list(pinned.slots)[4:6]
    store.core.pool.release(pinned.lease_id, "test")
    assert store.core.pool.discard(middle) == 2
    store.check()
    result = store.load(hashes)
    assert (result.num_blocks, result.num_local, result.num_disk, result.num_peer) == (12, 10, 2, 0)


def test_a_load_of_nothing_reads_nothing(stored, reads):
    """A18: a transfer of no blocks moves no bytes."""
    store, hashes = stored
    before = store.worker.bytes()
    result = store.worker.load(hashes[:0], [])
    assert (result.num_blocks, reads.num_calls) == (0, 0)
    assert store.worker.bytes() == before


def test_a_lookup_reads_nothing_and_pins_nothing(stored, reads):
    """A5: the answer of a lookup is a count of blocks on each tier, and a block under way counts on neither."""
    store, hashes = stored
    match = store.worker.client.lookup(hashes)
    assert (match.num_local, match.num_disk, match.num_here, match.nodes) == (0, 12, 12, ())
    assert (reads.num_calls, store.disk.pool.num_leases()) == (0, 0)
    with reads.held():
        job = store.worker.client.load(hashes, list(range(HALF, HALF + 12)))
        wait_until(lambda: reads.num_waiting)
        assert store.worker.client.lookup(hashes).num_local == 0
    assert job.result(SOON_S).num_blocks == 12


@pytest.mark.parametrize("at", [0, 7, 8, 100, RECORD_BYTES - 80, PAGE_BYTES, PAGE_BYTES + 1023])
def test_a_changed_byte_is_a_miss_and_the_block_is_stored_again(stored, at):
    """A byte of the record's page or the first or last one of the block's bytes."""
    store, hashes = stored
    flip(store.slots, slot_span(store.folder, hashes[5])[0] + at)
    result = store.load(hashes)
    assert (result.num_blocks, result.num_disk) == (5, 5)
    assert "damaged" in why(result)
    store.settle()
    assert store.num("num_damaged") == 1
    assert store.disk.lookup(hashes) == 5
    store.save(hashes)
    store.empty_memory()
    assert store.load(hashes).num_disk == 12


@pytest.mark.parametrize("at", [RECORD_BYTES, PAGE_BYTES - 1, PAGE_BYTES + 1024, 2 * PAGE_BYTES - 1])
def test_a_changed_byte_of_the_padding_changes_no_block(stored, at):
    """Of the record's page behind the record, and of the slot behind the block: nobody reads these bytes."""
    store, hashes = stored
    flip(store.slots, slot_span(store.folder, hashes[5])[0] + at)
    assert store.load(hashes).num_blocks == 12
    assert store.num("num_damaged") == 0


def test_every_byte_of_a_slot_changed_one_by_one(stored):
    """Whatever byte is changed: right bytes or a miss."""
    store, hashes = stored
    own = store.read_slot(hashes[0])
    one = hashes[:1]
    for at in [*range(0, 256, 5), *range(256, 8192, 397)]:
        store.write_slot(hashes[0], own[:at] + bytes([own[at] ^ 1]) + own[at + 1 :])
        result = store.load(one)
        if at < 184 or PAGE_BYTES <= at < PAGE_BYTES + 1024:
            assert result.num_blocks == 0, at
        if not result.num_blocks:
            store.settle()
            store.save(one)
        else:
            store.write_slot(hashes[0], own)
        own = store.read_slot(hashes[0])
        store.empty_memory()


def test_a_copy_of_another_place_is_a_miss(stored):
    store, hashes = stored
    store.write_slot(hashes[3], store.read_slot(hashes[4]))
    assert store.load(hashes).num_blocks == 3
    assert store.num("num_damaged") == 1
    assert store.load(hashes).num_blocks == 3


def test_swapped_places_are_misses(stored):
    store, hashes = stored
    one, other = store.read_slot(hashes[3]), store.read_slot(hashes[4])
    store.write_slot(hashes[3], other)
    store.write_slot(hashes[4], one)
    assert store.load(hashes).num_blocks == 3
    assert store.num("num_damaged") == 2


def test_an_older_generation_copied_back_is_a_miss(start, cluster):
    store = start(disk_capacity_bytes=1 << 16)  # 7 places.
    old = cluster.hashes(4)
    store.save(old)
    contents = {store_place: store.read_slot(own) for own in old for store_place in [slot_span(store.folder, own)]}
    for seed in range(1, 4):
        store.save(cluster.hashes(6, seed=seed), first=8)
    new = cluster.hashes(6, seed=3)
    store.empty_memory()
    places = {slot_span(store.folder, own): own for own in new if store.disk.lookup(new) == 6}
    copied = [places[span] for span in contents if span in places]
    assert copied
    for own in copied:
        store.write_slot(own, contents[slot_span(store.folder, own)])
    first = min(new.hashes().index(own) for own in copied)
    assert store.load(new).num_blocks == first
    assert store.num("num_damaged") == len(copied)
    assert store.load(old).num_blocks == 0


def test_a_damaged_block_in_the_middle_comes_from_a_peer(start, cluster):
    store, other = start("a"), start("b")
    hashes = cluster.hashes(12)
    store.save(hashes)
    other.worker.load(hashes, range(HALF, HALF + 12))
    store.empty_memory()
    other.settle()
    flip(store.slots, slot_span(store.folder, hashes[5])[0] + PAGE_BYTES)
    result = store.load(hashes)
    assert result.num_blocks == 12
    assert result.num_disk + result.num_peer == 12
    assert result.num_disk >= 5
    assert result.num_peer >= 1


@pytest.mark.usefixtures("in_one_turn")
def test_an_error_of_the_disk_is_a_miss(stored, reads):
    store, hashes = stored
    reads.error = OSError(errno.EIO, "broken")
    result = store.load(hashes)
    assert (result.num_blocks, result.num_disk) == (0, 0)
    assert "broken" in why(result)
    store.settle()
    assert store.num("num_failed") == 12
    assert store.num("num_damaged") == 0, "what cannot be read may be whole"
    reads.error = None
    assert store.load(hashes).num_disk == 12


@pytest.mark.usefixtures("in_one_turn")
def test_a_load_that_the_disk_refuses_ends(stored, reads):
    """It is not tried again for ever: once at each place of the chain."""
    store, hashes = stored
    reads.error = OSError(errno.EIO, "broken")
    for _ in range(6):
        store.load(hashes)
    assert reads.num_calls <= 6
    assert store.stats()["num_trips"] >= 1


def test_the_tier_is_off_after_errors_and_serves_again(stored, reads):
    store, hashes = stored
    reads.error = OSError(errno.EIO, "broken")
    wait_until(lambda: store.load(hashes).num_blocks == 0 and store.stats()["num_trips"])
    assert "broken" in store.stats()["reason"]
    reads.error = None
    wait_until(lambda: not store.disk.is_off)
    assert store.load(hashes).num_disk == 12
    # Saves are written again, too.
    store.save(cluster_chain(store, 5), first=20)


def cluster_chain(store, seed, num_blocks=4):
    return store.cluster.hashes(num_blocks, seed=seed)


def test_saves_are_written_again_after_reads_turned_the_tier_off(stored, reads, writes):
    """Nothing waited to be written when the disk went off."""
    store, hashes = stored
    reads.error = OSError(errno.EROFS, "broken")
    store.load(hashes)
    wait_until(lambda: store.stats()["num_trips"] == 1)
    reads.error = None
    wait_until(lambda: not store.disk.is_off)
    store.save(cluster_chain(store, 6), first=20)


@pytest.mark.usefixtures("in_one_turn")
def test_a_hanging_read(start, cluster, reads):
    store = start(disk_timeout_s=0.2, transfer_timeout_s=0.6)
    hashes, others = cluster.hashes(12), cluster.hashes(8, seed=1)
    store.save(hashes)
    store.empty_memory()
    num_free = store.core.pool.stats().num_free
    with reads.held():
        result = store.load(hashes)
        assert (result.num_blocks, result.num_disk) == (0, 0)
        assert "timeout" in why(result)
        assert store.disk.is_off
        assert "hangs" in store.stats()["reason"]
        # Everything else goes on, without the slots of the read.
        stats = store.core.pool.stats()
        assert (stats.num_writing, stats.num_free) == (12, num_free - 12)
        store.save(others, first=20, is_written=False)
        assert store.load(others).num_local == 8
        assert store.worker.client.lookup(hashes).num_here == 0
        store.check()
    wait_until(lambda: store.core.pool.stats().num_writing == 0)
    store.settle()
    wait_until(lambda: not store.disk.is_off)
    # What came when the disk was off is read once more.
    assert store.num("num_late") == 12
    assert store.load(hashes).num_disk == 12
    wait_until(lambda: not store.disk.is_off)


def test_a_load_does_not_wait_for_a_disk_that_is_off(start, cluster, reads):
    """The engine computes what a hanging disk has, long before the load's own time is over."""
    store = start(disk_timeout_s=0.2, transfer_timeout_s=6 * SOON_S)
    hashes = cluster.hashes(12)
    store.save(hashes)
    store.empty_memory()
    with reads.held():
        result = store.worker.client.load(hashes, list(range(HALF, HALF + 12))).result(SOON_S)
        assert result.num_blocks == 0
        assert "timeout: the disk" in why(result)
    store.settle()
    assert store.num("num_late") == 12
    wait_until(lambda: not store.disk.is_off)
    assert store.load(hashes).num_disk == 12


def test_what_comes_after_the_time_of_its_load_is_kept_while_the_disk_is_on(start, cluster, reads):
    store = start(disk_timeout_s=6 * SOON_S)
    hashes = cluster.hashes(12)
    store.save(hashes)
    store.empty_memory()
    with reads.held():
        assert store.load(hashes, timeout_s=0.2).num_blocks == 0
    store.settle()
    assert store.num("num_late") == 12
    assert store.load(hashes).num_local == 12


def test_a_hanging_disk_takes_a_part_of_the_memory(start, cluster, reads, monkeypatch):
    """One call hangs, and a long chain is asked for: other blocks still find room."""
    monkeypatch.setattr("kvstore.remote.fetch._MOST_DISK_BYTES", 8 * 1024)
    store = start(disk_timeout_s=0.2, transfer_timeout_s=SOON_S)
    hashes, others = cluster.hashes(60), cluster.hashes(40, seed=1)
    store.save(hashes)
    store.empty_memory()
    with reads.held():
        assert store.worker.client.load(hashes, list(range(HALF, HALF + 60))).result(SOON_S).num_blocks == 0
        assert store.core.pool.stats().num_writing == 8
        store.save(others, is_written=False)
        assert store.load(others).num_local == 40
    store.settle()
    wait_until(lambda: not store.disk.is_off)
    store.save(hashes)
    store.empty_memory()
    result = store.load(hashes)
    assert result.num_blocks > 50, "all that the budget of pins has room for"
    assert (result.num_local, result.num_disk, result.num_peer) == (0, result.num_blocks, 0)


def test_blocks_that_hang_can_be_saved_and_loaded_meanwhile(start, cluster, reads):
    """A15: nobody waits for ever for a block that another one is bringing."""
    store = start(disk_timeout_s=0.2, transfer_timeout_s=SOON_S)
    hashes = cluster.hashes(6)
    store.save(hashes)
    store.empty_memory()
    with reads.held():
        job = store.worker.client.load(hashes, list(range(HALF, HALF + 6)))
        wait_until(lambda: reads.num_waiting)
        result = store.worker.save(hashes, range(6))
        assert (result.num_blocks, result.num_written) == (6, 6), "it waited for the hanging disk, but not for long"
        assert job.result(SOON_S).num_blocks in (0, 6)
        assert store.load(hashes).num_local == 6
        store.check()
    store.settle()
    wait_until(lambda: not store.disk.is_off)
    assert store.load(hashes).num_local == 6


def test_a_hanging_read_that_ends_late_writes_to_no_slot_of_another_block(start, cluster, reads):
    """Scenario 20: its blocks may be had anew while it hangs, but its slots are out of use until it has ended."""
    store = start(disk_timeout_s=0.2, transfer_timeout_s=SOON_S, capacity_bytes=16 * 4096)
    hashes, others = cluster.hashes(6), cluster.hashes(6, seed=1)
    store.save(hashes)
    store.empty_memory()
    with reads.held():
        assert store.load(hashes).num_blocks == 0
        assert store.core.pool.stats().num_writing == 6
        store.save(hashes, is_written=False)
        # All other slots are in use, and none of them is one that the disk may still write to.
        store.save(others, first=20, is_written=False)
        assert store.core.pool.stats().num_writing == 6
        ticket = store.core.pool.reserve(10, "test")
        assert store.core.pool.stats().num_free == 0
        for slot in ticket.slots:
            begin = slot * 4096
            store.core.state.arena.memory[begin : begin + 4096] = bytes([slot]) * 4096
        store.check()
    wait_until(lambda: store.core.pool.stats().num_writing == 10)
    for slot in ticket.slots:
        begin = slot * 4096
        assert bytes(store.core.state.arena.memory[begin : begin + 4096]) == bytes([slot]) * 4096
    store.core.pool.abort_store(ticket.write_id, "test")
    store.settle()


def test_many_loads_of_one_chain_read_it_once(stored, reads):
    """A12: several holders of the same blocks, and none disturbs another."""
    store, hashes = stored
    with reads.held():
        jobs = [store.worker.client.load(hashes, list(range(HALF, HALF + 12))) for _ in range(12)]
        wait_until(lambda: reads.num_waiting)
    results = [job.result(SOON_S) for job in jobs]
    assert [result.num_blocks for result in results] == [12] * 12
    assert store.num("num_read") == 12
    # One load had them read; the others found them in memory, and none came from another node.
    assert sorted((result.num_local, result.num_disk) for result in results) == [(0, 12)] + [(12, 0)] * 11
    assert [result.num_peer for result in results] == [0] * 12
    for at in range(12):
        assert store.worker.block(HALF + at) == store.saved[hashes[at]]
    store.settle()


def test_a_lookup_does_not_wait_for_what_comes_from_the_disk(start, cluster, reads):
    """It counts as a block of the disk at once."""
    store = start(save_wait_s=2 * SOON_S, call_timeout_s=16 * SOON_S)
    hashes = cluster.hashes(6)
    store.save(hashes)
    store.empty_memory()
    with reads.held():
        job = store.worker.client.load(hashes, list(range(HALF, HALF + 6)))
        wait_until(lambda: reads.num_waiting)
        assert store.cluster.client("a").lookup(hashes).num_disk == 6
        assert not job.done()
    assert job.result(SOON_S).num_disk == 6


def test_loads_of_chains_that_fork(start, cluster):
    store = start()
    shape = store.worker.client.space.shape
    tokens = list(range(12 * shape.block_size))
    chains = []
    for number in range(4):
        own = tokens[: 6 * shape.block_size] + [1000 + number] * (6 * shape.block_size)
        chains.append(cluster.space.block_hashes(own))
    for number, chain in enumerate(chains):
        store.save(chain, first=12 * number if number < 4 else 0)
    assert store.disk.pool.stats().num_published == 6 + 4 * 6
    store.empty_memory()
    jobs = [
        store.worker.client.load(chain, list(range(HALF + 12 * n, HALF + 12 * n + 12)))
        for n, chain in enumerate(chains)
    ]
    assert [job.result(SOON_S).num_blocks for job in jobs] == [12] * 4
    store.settle()
    assert store.num("num_read") == 30


def test_a_memory_smaller_than_the_chain(start, cluster):
    """A14: the leading blocks that fit come, and nothing after them."""
    store = start()
    hashes = cluster.hashes(40)
    store.save(hashes)
    store.restart(capacity_bytes=1 << 17)  # 32 slots.
    result = store.load(hashes)
    assert 16 <= result.num_blocks <= 32
    assert "pool_full" in why(result)
    store.settle()
    assert result.num_blocks <= store.core.pool.lookup(hashes) <= 32


def test_no_room_in_memory_is_a_miss_without_a_side_effect(start, cluster):
    """A9."""
    store = start(capacity_bytes=1 << 17)
    hashes, others = cluster.hashes(8), cluster.hashes(32, seed=1)
    store.save(hashes)
    store.empty_memory()
    ticket = store.core.pool.reserve(32, "test")
    before = store.core.pool.stats(), store.disk.pool.stats()
    result = store.load(hashes)
    assert (result.num_blocks, result.num_disk) == (0, 0)
    assert "pool_full" in why(result)
    after = store.core.pool.stats(), store.disk.pool.stats()
    assert (after[0].num_free, after[0].num_writing, after[1].num_pinned) == (
        before[0].num_free, before[0].num_writing, 0,
    )  # fmt: skip
    store.core.pool.abort_store(ticket.write_id, "test")
    assert store.load(hashes).num_blocks == 8
    assert len(others) == 32


def test_the_oldest_block_is_pinned_and_others_make_room(start, cluster):
    """A11: on the disk, too, a pinned block does not keep others from being evicted."""
    store = start(disk_capacity_bytes=1 << 16)
    oldest = cluster.hashes(1, seed=50)
    store.save(oldest)
    grant = store.disk.pool.pin_prefix(oldest, "test", 1e12)
    for seed in range(4):
        own = cluster.hashes(3, seed=seed)
        store.save(own, first=4, is_written=False)
        wait_until(lambda own=own: store.disk.lookup(own) == 3)
    assert store.disk.lookup(oldest) == 1
    assert store.dropped("disk_full") == 0
    store.disk.pool.release(grant.lease_id, "test")
    store.check()


def test_the_budget_of_pins(start, cluster):
    store = start(capacity_bytes=1 << 17, max_pinned_fraction=0.25)  # 8 of 32 slots.
    hashes = cluster.hashes(16)
    store.save(hashes, is_written=False)
    wait_until(lambda: store.disk.pool.lookup(hashes) == 16 or store.dropped("evicted"))
    store.settle()
    store.empty_memory()
    result = store.load(hashes)
    assert result.num_blocks <= 8
    store.settle()


def test_a_client_that_leaves_during_the_read(stored, reads):
    store, hashes = stored
    with reads.held():
        other = store.cluster.worker("a", 2 * HALF, seed=9)
        other.client.load(hashes, list(range(HALF, HALF + 12)))
        wait_until(lambda: reads.num_waiting)
        other.client.close(0.1)
    wait_until(lambda: store.num("num_read") == 12)
    store.settle()
    assert store.load(hashes).num_local == 12


def test_stop_with_a_hanging_read(stored, reads, monkeypatch):
    monkeypatch.setattr("kvstore.disk.tier._STOP_S", 0.2)
    store, hashes = stored
    with reads.held():
        store.worker.client.load(hashes, list(range(HALF, HALF + 12)))
        wait_until(lambda: reads.num_waiting)
        ended = threading.Event()
        stopper = threading.Thread(target=lambda: (store.cluster.stop_node("a"), ended.set()))
        stopper.start()
        assert ended.wait(SOON_S)
        stopper.join(SOON_S)
    wait_until(lambda: not any(thread.name.startswith("raykv-disk-") for thread in threading.enumerate()))

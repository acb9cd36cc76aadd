"""Chains on disk have no gaps, whatever was evicted there, refused or left out before."""

from __future__ import annotations

import errno
import random

import numpy as np
import pytest
from disk_store import refuse, stops_writing, wait_until

from kvstore.disk.admission import MOST_MISSING, Missing, Postponed, missing_above
from kvstore.disk.writer import Writer
from kvstore.pool.pool import Pool
from tests.kvstore.conftest import SHAPE
from tests.kvstore.pool.pool_steps import SPACE, chain, read, store


def all_are_found(pool, space):
    """Whether each block of a disk's pool is behind all that it builds on."""
    index = pool.table.index.space_of(space)
    return all(
        parent == space or parent in index.ready
        for parent in map(pool.table.index.parent.__getitem__, index.ready.values())
    )


def held(pool, hashes, at):
    lease_id, (block,) = pool.hold([read(pool, hashes)[at]], SPACE, "test")
    pool.release(lease_id, "test")
    return block


def test_what_is_missing_above_a_block():
    memory, disk, hashes = Pool(600), Pool(600), chain(*range(1, 601))
    store(memory, hashes)
    slots, first = read(memory, hashes), held(memory, hashes, 0)
    last = held(memory, hashes, 599)
    assert missing_above(memory, disk, first, 0) == Missing([], True)
    assert missing_above(memory, disk, last, 600) == Missing(slots[:599], True)
    assert missing_above(memory, disk, last, 598) is None
    for num_there in (1, 343, 344, 599):
        store(disk, hashes.head(num_there))
        assert missing_above(memory, disk, last, 600) == Missing(slots[num_there:599], True)
    disk.clear(SPACE)
    ticket = disk.prepare_store(hashes.head(400), "writer")
    assert missing_above(memory, disk, last, 600) == Missing(slots[400:599], True), "it is being written"
    disk.abort_store(ticket.write_id, "writer")
    memory.discard(slots[99:100])
    assert missing_above(memory, disk, last, 600) == Missing(slots[100:599], False)
    store(disk, hashes.head(100))
    assert missing_above(memory, disk, last, 600) == Missing(slots[100:599], True)


def test_a_run_that_waits_may_lack_fewer_each_time():
    postponed = Postponed()
    assert postponed.take(b"a") == MOST_MISSING
    postponed.note(b"a", 7)
    assert [postponed.take(b"a"), postponed.take(b"a")] == [7, MOST_MISSING]
    for number in range(1025):
        postponed.note(number.to_bytes(2), 0)
    assert (postponed.take((0).to_bytes(2)), postponed.take((1).to_bytes(2))) == (MOST_MISSING, 0)


def test_what_the_disk_evicted_of_a_chain_is_written_before_its_next_blocks(start, cluster):
    saves = start(disk_capacity_bytes=1 << 16)  # 7 places.
    mine, other = cluster.hashes(12), cluster.hashes(5, seed=1)
    for hashes in (mine[:5], other):
        saves.save(hashes, is_written=False)
        stops_writing(saves)
    assert [saves.disk.pool.lookup(hashes) for hashes in (mine, other)] == [2, 5]
    for end in (6, 7, 12):
        saves.save(mine[:end], is_written=False)
        stops_writing(saves)
        assert saves.disk.pool.lookup(mine) == min(end, 7)
    assert saves.stats()["dropped"] == {"disk_full": 5}
    saves.empty_memory()
    assert saves.load(mine).num_disk == 7


def test_what_a_failed_write_left_out_is_written_before_the_next_blocks(start, cluster, writes):
    saves, hashes = start(), cluster.hashes(12)
    writes.error = refuse(errno.EIO)
    saves.save(hashes[:2], is_written=False)
    stops_writing(saves)
    assert saves.dropped("error") == 2
    writes.error = None
    saves.save(hashes)
    assert saves.disk.pool.lookup(hashes) == 12


def test_behind_low_blocks_nothing_is_written(start, cluster):
    saves, hashes = start(), cluster.hashes(8)
    saves.worker.client.save(hashes[:4], range(4), priority="low").result(10.0)
    saves.worker.client.save(hashes.tail(4), range(4, 8)).result(10.0)
    stops_writing(saves)
    assert (saves.disk.pool.lookup(hashes), saves.num("num_written")) == (0, 0)
    assert saves.dropped("low_priority") == 8


@pytest.mark.parametrize("settings", [{}, {"disk_write": "back", "low_watermark": 0.2, "high_watermark": 0.4}])
@pytest.mark.parametrize("seed", range(3))
def test_conversations_that_the_disk_cannot_hold_together_have_no_gaps_there(start, cluster, seed, settings):
    saves, rng = start(disk_capacity_bytes=1 << 18, **settings), random.Random(seed)  # 31 places, 64 slots of memory.
    prompts = [list(np.random.default_rng([seed, number]).integers(0, 1000, 4)) for number in range(5)]
    for step in range(60):
        prompt = rng.choice(prompts)
        if rng.random() < 0.2:
            prompt = prompt[: rng.randint(1, len(prompt))]
            prompts.append(prompt)
        prompt += np.random.default_rng([seed, step, 99]).integers(0, 1000, rng.randint(1, 6)).tolist()
        tokens = np.repeat(np.asarray(prompt[:20]), SHAPE.block_size)
        saves.save(cluster.space.block_hashes(tokens), is_written=False)
        if rng.random() < 0.5:
            stops_writing(saves)
            assert all_are_found(saves.disk.pool, cluster.space.digest)
    stops_writing(saves)
    assert all_are_found(saves.disk.pool, cluster.space.digest)
    assert saves.disk.pool.stats().num_evicted > 0
    saves.check()


def test_victims_whose_beginnings_the_disk_cannot_hold_together_go_all_the_same(start, cluster):
    """Else an idle store would write them in turns for ever, each in the places of the others."""
    back = {"disk_write": "back", "eviction": "lru", "low_watermark": 0.1, "high_watermark": 0.2}
    saves = start(disk_capacity_bytes=1 << 17, **back)  # 15 places, 64 slots of memory.
    prompts = [cluster.hashes(14, seed=seed) for seed in range(4)]
    for number, prompt in enumerate(prompts):
        saves.save(prompt, 14 * (number % 2), is_written=False)
    for prompt in prompts:  # Now their ends are what was used least recently.
        saves.load(prompt[:13])
    saves.save(cluster.hashes(6, seed=9), 40, is_written=False)
    wait_until(lambda: saves.core.pool.num_free >= 12)
    stops_writing(saves)
    assert saves.num("num_written") <= 4 * 15
    assert all_are_found(saves.disk.pool, cluster.space.digest)


def test_a_slot_that_has_another_block_by_its_turn_is_not_written_without_its_parent(start, cluster, monkeypatch):
    saves, mine, other = start(), cluster.hashes(40), cluster.hashes(30, seed=1)
    real, gone = Writer.write_missing, []

    def evict_first(self, waiting, claimed):
        if not gone and waiting.first.block_hash in set(mine):
            gone.append(saves.core.pool.evict(64))
            saves.worker.save(other, range(30))
        return real(self, waiting, claimed)

    monkeypatch.setattr(Writer, "write_missing", evict_first)
    monkeypatch.setattr("kvstore.disk.writer.Writer.queue_up", lambda self, *_, **__: None)
    saves.save(mine[:20], is_written=False)
    monkeypatch.undo()
    monkeypatch.setattr(Writer, "write_missing", evict_first)
    saves.save(mine, is_written=False)
    stops_writing(saves)
    assert gone
    assert all_are_found(saves.disk.pool, cluster.space.digest)

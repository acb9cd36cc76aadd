"""The changes of a pool as events: in order, whole or named as lost."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.blocks.chain import event_hash
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.node.events import changes as module
from kvstore.node.events.changes import PoolChanges
from kvstore.node.events.schema import MOST_HASHES, BlockRemoved, BlockStored, in_chains, removed, stored
from kvstore.pool.pool import Pool

SPACE = Namespace(model="m", shape=KVShape(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", block_size=4))


def named(hashes):
    return [event_hash(own) for own in hashes]


def chain(num_blocks, seed=0, parent=None):
    tokens = np.random.default_rng(seed).integers(0, 1000, 4 * num_blocks)
    return SPACE.block_hashes(tokens, parent=parent)


def store(pool, run):
    pool.complete_store(pool.prepare_store(run, "w").write_id, "w")
    pool.check_integrity()


def here(events):
    found = set()
    for event in events:
        if isinstance(event, BlockStored):
            found.update(event.block_hashes)
        else:
            found.difference_update(event.block_hashes)
    return found


@pytest.fixture
def pool():
    return Pool(8)


@pytest.fixture
def woken():
    return []


@pytest.fixture
def followed(pool, woken):
    made = PoolChanges(pool, "CPU", lambda: woken.append(True))
    made.follow()
    assert made.take() is None
    assert list(made.all_stored()) == []
    return made


def test_blocks_come_with_the_one_before_and_go_when_they_are_evicted(pool, followed, woken):
    run = chain(6)
    store(pool, run[:2])
    store(pool, run)
    first, second = followed.events(followed.take())
    assert (first.block_hashes, first.parent_block_hash) == (named(run[:2]), None)
    assert (second.block_hashes, second.parent_block_hash) == (named(run[2:]), named(run)[1])
    assert woken
    store(pool, chain(5, 1))
    events = list(followed.events(followed.take()))
    assert [type(event) for event in events] == [BlockRemoved, BlockStored]
    assert events[0].block_hashes == named(run)[:2:-1]
    assert followed.take() == []


def test_what_was_there_before_comes_first_parents_before_children(pool):
    run = chain(3)
    store(pool, run)
    store(pool, chain(2, 1, parent=run[:2]))
    late = PoolChanges(pool, "STORAGE", lambda: None)
    late.follow()
    seen = set()
    for event in late.all_stored():
        assert event.medium == "STORAGE"
        assert event.parent_block_hash is None or event.parent_block_hash in seen
        seen.update(event.block_hashes)
    assert seen == set(named(pool.resident_hashes()))


def test_clearing_and_bad_bytes_remove(pool, followed):
    run = chain(3)
    store(pool, run)
    pool.discard([1])
    assert here(followed.events(followed.take())) == set(named([run[0], run[2]]))
    store(pool, chain(1, 1))
    pool.clear(SPACE.digest)
    _, gone = followed.events(followed.take())
    assert set(gone.block_hashes) == set(named([run[0], run[2], chain(1, 1)[0]]))


def test_too_many_changes_are_lost_as_a_whole_and_begin_anew(pool, followed, woken, monkeypatch):
    monkeypatch.setattr(module, "_FEWEST_KEPT", 0)
    store(pool, chain(6))
    woken.clear()
    store(pool, chain(6, 1))
    assert woken
    assert followed.take() is None
    store(pool, chain(2, 2))
    assert followed.take() is None
    assert here(followed.all_stored()) == set(named(pool.resident_hashes()))
    store(pool, chain(1, 3))
    assert here(followed.events(followed.take())) == set(named(chain(1, 3)))


def test_after_the_end_nothing_is_told(pool, followed, woken):
    followed.end()
    store(pool, chain(2))
    assert not woken
    assert followed.take() == []


def test_long_runs_are_cut():
    run = list(chain(2 * MOST_HASHES + 1))
    events = list(stored(run, [b"", *run[:-1]], "CPU"))
    assert [len(event.block_hashes) for event in events] == [MOST_HASHES, MOST_HASHES, 1]
    assert [event.parent_block_hash for event in events] == [
        None,
        *named([run[MOST_HASHES - 1], run[2 * MOST_HASHES - 1]]),
    ]
    assert [len(event.block_hashes) for event in removed(run, "CPU")] == [MOST_HASHES, MOST_HASHES, 1]


def test_orphans_are_named_with_the_parent_that_is_gone():
    run = list(chain(5))
    hashes, parents = in_chains([run[4], run[1], run[2]], [run[3], run[0], run[1]])
    assert dict(zip(hashes, parents, strict=True)) == {run[4]: run[3], run[1]: run[0], run[2]: run[1]}
    assert hashes.index(run[1]) + 1 == hashes.index(run[2])

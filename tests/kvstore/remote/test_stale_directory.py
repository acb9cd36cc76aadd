"""Scenario 19: the owner evicted blocks after a lookup, and the directory still names it: misses, no waiting."""

from __future__ import annotations

import pytest

from kvstore.client.results import MissReason
from kvstore.remote.directory_link import Hints


@pytest.fixture
def stale(cluster, monkeypatch):
    """Return a way to evict all but the first blocks of a chain from node a, of which node b hears nothing."""
    source = cluster.add("a")
    cluster.add("b")
    one, two = cluster.worker("a", 200, seed=1), cluster.worker("b", 6, seed=2)
    num_slots = source.pool.stats().num_slots
    hashes = cluster.hashes(6)
    one.save(hashes, range(6))

    def evict(num_kept):
        assert max(count for _, count in two.client.lookup(hashes).nodes) == 6
        monkeypatch.setattr(Hints, "locate", lambda hints, chain, until_s: [("a", 6)])
        pin = one.client.pin(hashes[:num_kept]) if num_kept else None
        others = cluster.hashes(num_slots - num_kept, seed=9)
        assert one.save(others, range(len(others))).num_written == len(others)
        if pin is not None:
            one.client.unpin(pin)
        return hashes

    return one, two, evict


@pytest.mark.parametrize("num_kept", [0, 1, 4])
def test_what_the_owner_evicted_after_a_lookup_is_a_miss_and_no_other_bytes(cluster, stale, num_kept, wait_until):
    one, two, evict = stale
    wanted = [one.block(block_id) for block_id in range(6)]
    hashes = evict(num_kept)
    before = [two.block(block_id) for block_id in range(6)]
    result = two.load(hashes, range(6), timeout_s=5.0)
    assert (result.num_blocks, result.num_peer) == (num_kept, num_kept)
    assert [(failure.index, failure.reason) for failure in result.failed] == [
        (index, MissReason.NOT_FOUND) for index in range(num_kept, 6)
    ]
    # No block that is called missing is touched; the engine computes those, as if it had looked up fewer.
    assert [two.block(block_id) for block_id in range(6)] == wanted[:num_kept] + before[num_kept:]
    stats = cluster.nodes["b"].pool.stats()
    assert (stats.num_writing, stats.num_writes, stats.num_quarantined) == (0, 0, 0)
    wait_until(lambda: all(node.pool.stats().num_pinned == 0 for node in cluster.nodes.values()))
    assert cluster.nodes["b"].state.peers.is_usable("a"), "a wrong hint is no fault of the peer"


def test_what_is_missing_is_computed_saved_and_found_here(cluster, stale):
    _, two, evict = stale
    hashes = evict(2)
    assert two.load(hashes, range(6)).num_blocks == 2
    assert two.save(hashes, range(6)).num_written == 4
    assert two.load(hashes, range(6)).num_local == 6

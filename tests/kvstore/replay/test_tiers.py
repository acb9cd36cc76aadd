"""Nodes with memory, disk and peers do what plain lists do."""

from __future__ import annotations

import pytest
from small_traces import random_prompts, trace_of

from kvstore.replay.simulate import Nodes, replay_tiers
from kvstore.replay.traces import Found, first_requests


def nothing():
    pass


class PlainTier:
    """A list, the least recent first; of one prompt the deepest first. Only leaves are evicted, none that is held."""

    def __init__(self, size, parents):
        self.size, self.parents, self.kept, self.num_evictions = size, parents, [], 0

    def prefix(self, blocks):
        return next((at for at, block in enumerate(blocks) if block not in self.kept), len(blocks))

    def touch(self, blocks):
        self.kept = [block for block in self.kept if block not in blocks] + blocks[::-1]

    def store(self, blocks, held=()):
        """Store the missing blocks of a run; return them, and how far the run reaches now."""
        above, new, reached = self.parents[blocks[0]], [], []
        for block in blocks:
            if block not in self.kept:
                if len(self.kept) >= self.size and not self.evict_one({*held, *blocks, above}):
                    break
                self.kept.append(block)
                new.append(block)
            reached.append(block)
        self.touch([above, *reached] if above in self.kept else reached)
        return new, len(reached)

    def evict_one(self, held):
        inner = {self.parents[block] for block in self.kept}
        for block in self.kept:
            if block not in inner and block not in held:
                self.kept.remove(block)
                self.num_evictions += 1
                return True
        return False


class PlainNode:
    def __init__(self, memory_blocks, disk_blocks, parents):
        self.memory, self.disk = PlainTier(memory_blocks, parents), PlainTier(disk_blocks, parents)
        self.offers, self.num_written, self.num_read, self.parents = [], 0, 0, parents

    def bring(self, blocks, held=()):
        new, reached = self.memory.store(blocks, held)
        self.offers += [new] if new else []
        return new, reached

    def fill(self, blocks, ready, peers):
        num_disk, num_peer, tried_at = 0, 0, -1
        while ready < len(blocks):
            held, rest = blocks[:ready], blocks[ready:]
            on_disk = self.disk.prefix(rest) if tried_at != ready else 0
            tried_at = ready if on_disk else tried_at
            come = 0
            if on_disk:
                self.disk.touch(rest[:on_disk])
                new, come = self.bring(rest[:on_disk], held)
                self.num_read += len(new)
                num_disk += len(new)
                come = come if new else 0
            come = come or self.memory.prefix(rest)
            if not come:
                peer = max(peers, key=lambda peer: peer.known(rest), default=None)
                if peer is None or not peer.known(rest):
                    break
                peers.remove(peer)
                granted = peer.give(rest)
                if granted:
                    new, come = self.bring(rest[:granted], held)
                    num_peer += len(new)
                if come < granted:
                    self.memory.touch(rest[:come])
                    return ready + come, num_disk, num_peer
            self.memory.touch(rest[:come])
            ready += come
        return ready, num_disk, num_peer

    def known(self, rest):
        both = {*self.memory.kept, *self.disk.kept}
        return next((at for at, block in enumerate(rest) if block not in both), len(rest))

    def give(self, rest):
        local = self.memory.prefix(rest)
        on_disk = self.disk.prefix(rest[local:])
        if on_disk:
            self.memory.touch(rest[:local])
            self.fill(rest[: local + on_disk], local, [])
        granted = self.memory.prefix(rest)
        self.memory.touch(rest[:granted])
        return granted

    def serve(self, blocks, peers):
        local = self.memory.prefix(blocks)
        self.memory.touch(blocks[:local])
        ready, num_disk, num_peer = self.fill(blocks, local, peers)
        if ready < len(blocks):
            self.bring(blocks)
        return Found(memory=ready - num_disk - num_peer, disk=num_disk, peer=num_peer)

    def write_behind(self):
        offers, self.offers = self.offers, []
        for offer in offers if self.disk.size else []:
            for block in [block for block in offer if block in self.memory.kept]:
                self.write(block)

    def write(self, block):
        """Write a block, and before it those of its chain that the disk lacks, as far as there is room."""
        chain = [block]
        while (above := self.parents[chain[-1]]) is not None and above not in self.disk.kept:
            chain.append(above)
        for each in chain[::-1]:
            new, reached = self.disk.store([each])
            self.num_written += len(new)
            if not reached:
                break


def plain(trace, memory_blocks, disk_blocks, num_nodes, restart_at=0):
    parents = {}
    nodes, found, num_evictions = [PlainNode(memory_blocks, disk_blocks, parents) for _ in range(num_nodes)], [], 0
    for index, request in enumerate(trace.requests):
        if restart_at and index == restart_at:
            for node in nodes:
                num_evictions += node.memory.num_evictions
                node.memory = PlainTier(memory_blocks, parents)
        blocks = list(request.blocks)
        parents.update(zip(blocks, [None, *blocks], strict=False))
        at = index % num_nodes
        found.append(nodes[at].serve(blocks, nodes[:at] + nodes[at + 1 :]))
        for node in nodes:
            node.write_behind()
    return nodes, found, num_evictions + sum(node.memory.num_evictions for node in nodes)


def agree(trace, memory_blocks, disk_blocks, num_nodes, restart_at=0):
    nodes, found, num_evictions = plain(trace, memory_blocks, disk_blocks, num_nodes, restart_at)
    outcome = replay_tiers(trace, "lru", memory_blocks, disk_blocks, nothing, Nodes(num_nodes), restart_at)
    assert list(outcome.tiers.found) == found
    assert list(outcome.hits) == [each.num_blocks for each in found]
    assert outcome.num_evictions == num_evictions
    assert outcome.tiers.num_disk_evictions == sum(node.disk.num_evictions for node in nodes)
    assert outcome.tiers.num_disk_written == sum(node.num_written for node in nodes)
    assert outcome.tiers.num_disk_read == sum(node.num_read for node in nodes)
    return outcome


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize(("memory_blocks", "disk_blocks"), [(6, 0), (6, 200), (7, 12), (12, 7), (30, 60)])
def test_tiers_are_plain_lists(seed, num_nodes, memory_blocks, disk_blocks):
    agree(trace_of(*random_prompts(seed, 80, num_ids=3, most=5)), memory_blocks, disk_blocks, num_nodes)


@pytest.mark.parametrize("seed", range(3))
def test_a_restart_keeps_the_disk_alone(seed):
    trace = trace_of(*random_prompts(seed, 100, num_ids=3, most=5))
    outcome = agree(trace, 10, 400, 2, restart_at=50)
    assert all(each.memory == 0 for each in outcome.tiers.found[50:51])
    assert sum(each.disk for each in outcome.tiers.found[50:]) > 0


def test_each_tier_in_turn():
    # Two nodes in turns. Memory has room for 4 blocks, the disk for all.
    trace = trace_of([1, 2], [9], [1, 2, 3], [1, 2, 3, 4], [5, 6, 7, 8], [9], [1, 2, 3, 4])
    found = replay_tiers(trace, "lru", 4, 50, nothing, Nodes(2)).tiers.found
    assert found[2] == Found(memory=2)
    assert found[3] == Found(peer=3)
    assert found[4] == Found()
    assert found[5] == Found(disk=1), "it went to the disk when the prompt before filled the memory"
    assert found[6] == Found(disk=3, peer=1)


def test_without_a_disk_a_restart_loses_all():
    outcome = replay_tiers(trace_of([1], [1], [1], [1]), "lru", 4, 0, nothing, restart_at=2)
    assert list(outcome.hits) == [0, 1, 0, 1]
    assert outcome.tiers.dropped == {}


def test_prefix_routing_counts_the_disk():
    trace = trace_of([1, 2], [5], [6, 7, 8], [1, 2])
    outcome = replay_tiers(trace, "lru", 3, 50, nothing, Nodes(2, "prefix"))
    assert outcome.tiers.found[3].num_blocks == 2
    assert outcome.tiers.found[3].peer == 0


def test_a_restart_restores_a_full_disk_as_the_store_does():
    trace = trace_of(*random_prompts(2, 200, num_ids=3, most=5))
    outcome = replay_tiers(trace, "lru", 6, 12, nothing, Nodes(2), restart_at=100)
    assert outcome.tiers.num_disk_evictions > 0
    assert sum(each.disk + each.peer for each in outcome.tiers.found[100:]) > 0


def test_the_first_requests_have_their_own_blocks_alone():
    trace = first_requests(trace_of([1, 2], [1, 3], [4]), 2)
    assert (len(trace.requests), trace.num_blocks, trace.num_references) == (2, 3, 4)
    assert first_requests(trace, 50).num_blocks == 3
    assert first_requests(trace_of([], [1]), 1).num_blocks == 0

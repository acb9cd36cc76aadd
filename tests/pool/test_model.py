"""The pool beside a plain model of it, through random calls; integrity is checked after each."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvstore.errors import ChainBroken, LeaseReleased
from kvstore.pool import Pool
from poolcheck.chains import NAMESPACES, chain_of
from poolcheck.model import Block, Held, Model, Write

NUM_SLOTS, MAX_PINNED = 4, 3
READS = ("read-1", "read-2")


class PoolMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    writes = Bundle("writes")
    owners = st.sampled_from(("p", "q"))
    chains = st.builds(
        lambda tokens, namespace, start: chain_of(tokens, NAMESPACES[namespace], start % len(tokens)),
        st.text("ab", min_size=1, max_size=3),
        st.sampled_from((0,) * 7 + (1,)),
        st.sampled_from((0,) * 6 + (1, 2)),
    )

    def __init__(self):
        super().__init__()
        self.pool, self.model = Pool(NUM_SLOTS, MAX_PINNED), Model(NUM_SLOTS, MAX_PINNED)
        self.now_s = 0.0
        self.replayed: set[bytes] = set()

    @initialize(some=st.sampled_from(((), ("ab", "ba"), ("a", "b", "ab"))), used=st.lists(chains, max_size=2))
    def begin(self, some, used):
        for tokens in some:
            self.store(chain_of(tokens), "p")
        for chain in used:
            self.release(self.pin(chain, "p", 1), "p")

    @rule(chain=chains)
    def lookup(self, chain):
        assert self.pool.lookup(chain) == len(self.model.prefix(chain))

    @rule(target=leases, chain=chains, owner=owners, ttl_s=st.integers(1, 5))
    def pin(self, chain, owner, ttl_s):
        wanted = self.model.pinnable(chain)
        grant = self.pool.pin_prefix(chain, owner, self.now_s + ttl_s)
        assert list(grant.slots) == wanted
        self.model.pin(wanted)
        self.model.touch(wanted)
        self.model.leases[grant.lease_id] = Held(owner, self.now_s + ttl_s, wanted)
        return grant.lease_id

    @rule(lease_id=leases, chain=chains, owner=owners, ttl_s=st.integers(1, 5))
    def grow(self, lease_id, chain, owner, ttl_s):
        held = self.model.leases.get(lease_id)
        if held is None or held.owner != owner:
            with pytest.raises(LeaseReleased):
                self.pool.pin_prefix(chain, owner, self.now_s + ttl_s, lease_id)
            return
        wanted = self.model.pinnable(chain)
        grant = self.pool.pin_prefix(chain, owner, self.now_s + ttl_s, lease_id)
        assert (grant.lease_id, list(grant.slots)) == (lease_id, wanted)
        self.model.pin(wanted)
        self.model.touch(wanted)
        held.slots.extend(wanted)
        held.deadline_s = max(held.deadline_s, self.now_s + ttl_s)

    @rule(lease_id=leases, owner=owners)
    def release(self, lease_id, owner):
        held = self.model.leases.get(lease_id)
        mine = held is not None and held.owner == owner
        assert self.pool.release(lease_id, owner) == mine
        if mine:
            self.model.unpin(self.model.leases.pop(lease_id).slots)

    @rule(lease_id=leases, owner=owners, ttl_s=st.integers(0, 5))
    def renew(self, lease_id, owner, ttl_s):
        held = self.model.leases.get(lease_id)
        mine = held is not None and held.owner == owner
        assert self.pool.renew(lease_id, owner, self.now_s + ttl_s) == mine
        if mine:
            held.deadline_s = max(held.deadline_s, self.now_s + ttl_s)

    @rule(seconds=st.sampled_from((0.5, 1.0, 3.0)))
    def expire(self, seconds):
        self.now_s += seconds
        expired = [i for i, held in self.model.leases.items() if held.deadline_s < self.now_s]
        assert self.pool.expire(self.now_s) == len(expired)
        for lease_id in expired:
            self.model.unpin(self.model.leases.pop(lease_id).slots)

    @rule(target=writes, chain=chains, owner=owners, needs_parent=st.booleans())
    def prepare(self, chain, owner, needs_parent):
        model, hashes = self.model, chain.hashes()
        parent = model.find(chain.parent) if chain.start else -1
        if chain.start and parent < 0 and needs_parent:
            with pytest.raises(ChainBroken):
                self.pool.prepare_store(chain, owner)
            return multiple()
        found = [model.find(block_hash) for block_hash in hashes]
        kept = [slot for slot in (parent, *found) if slot >= 0 and model.blocks[slot].ready]
        model.pin(kept)
        missing = [i for i, slot in enumerate(found) if slot < 0]
        free = model.free_slots()
        victims = model.victims(len(missing) - len(free))
        count = min(len(missing), len(free) + len(victims))
        refused_at = missing[count] if count < len(missing) else len(hashes)

        ticket = self.pool.prepare_store(chain, owner, needs_parent=needs_parent)

        assert (ticket.indexes, len(ticket.slots)) == (tuple(missing[:count]), count)
        assert (ticket.num_resident, ticket.num_refused) == (refused_at - count, len(hashes) - refused_at)
        taken = set(ticket.slots)
        assert len(taken) == count
        assert taken - free == set(victims), "what was evicted is not the least recently used that could go"
        for slot in victims:
            del model.blocks[slot]
        for i, slot in zip(ticket.indexes, ticket.slots, strict=True):
            model.claim(slot, Block(hashes[i], chain.namespace, hashes[i - 1] if i else chain.parent))
            found[i] = slot
        model.touch([*([parent] if parent >= 0 else []), *found[:refused_at]])
        assert bool(ticket.write_id) == bool(count)
        if not count:
            model.unpin(kept)
            return multiple()
        model.writes[ticket.write_id] = Write(owner, count, list(ticket.slots), kept)
        return ticket.write_id

    @rule(chain=chains, owner=owners)
    def store(self, chain, owner):
        write_id = self.prepare(chain, owner, needs_parent=False)
        if isinstance(write_id, int):
            self.complete(write_id, owner, None)

    @rule(some=st.lists(chains, min_size=1, max_size=3), owner=owners)
    def use(self, some, owner):
        for chain in some:
            self.release(self.pin(chain, owner, 1), owner)

    @rule(write_id=writes, owner=owners, count=st.sampled_from((None, None, 1, 2)))
    def complete(self, write_id, owner, count):
        write = self.model.writes.get(write_id)
        if write is None or write.owner != owner:
            assert self.pool.complete_store(write_id, owner, count=count) == 0
            return
        # `count` is of the whole ticket; the model has only what is left of it.
        done = write.num_claimed - len(write.pending)
        more = len(write.pending) if count is None else max(0, count - done)
        assert self.pool.complete_store(write_id, owner, count=count) == self.model.publish(write_id, more)

    @rule(write_id=consumes(writes), owner=owners, quarantine=st.sampled_from(("", "", *READS)))
    def abort(self, write_id, owner, quarantine):
        write = self.model.writes.get(write_id)
        mine = write is not None and write.owner == owner
        expected = self.model.abort(write_id, quarantine) if mine else 0
        assert self.pool.abort_store(write_id, owner, quarantine=quarantine) == expected

    @rule(name=st.sampled_from(READS))
    def end_quarantine(self, name):
        assert self.pool.end_quarantine(name) == len(self.model.aside.pop(name, []))

    @precondition(lambda self: len(self.model.blocks) == NUM_SLOTS)
    @rule(namespace=st.sampled_from(NAMESPACES))
    def clear(self, namespace):
        assert self.pool.clear(namespace) == self.model.clear(namespace)

    @rule(owner=owners)
    def release_owner(self, owner):
        leases = [i for i, held in self.model.leases.items() if held.owner == owner]
        writes = [i for i, write in self.model.writes.items() if write.owner == owner]
        for lease_id in leases:
            self.model.unpin(self.model.leases.pop(lease_id).slots)
        for write_id in writes:
            self.model.abort(write_id, "")
        assert self.pool.release_owner(owner) == len(leases) + len(writes)

    @invariant()
    def agrees(self):
        self.pool.check_integrity()
        stats, model = self.pool.stats(), self.model
        ready = [slot for slot, block in model.blocks.items() if block.ready]
        assert (stats.num_free, stats.num_writing) == (len(model.free_slots()), len(model.blocks) - len(ready))
        assert stats.num_quarantined == sum(map(len, model.aside.values()))
        assert (stats.num_pinned, stats.num_idle) == (len(model.pinned()), len(ready) - len(model.pinned()))
        assert (stats.num_leases, stats.num_writes) == (len(model.leases), len(model.writes))
        lives = tuple(model.lives.get(slot, 0) for slot in range(NUM_SLOTS))
        assert self.pool.generations(tuple(range(NUM_SLOTS))) == lives
        for present, block_hash in self.pool.drain_events():
            (self.replayed.add if present else self.replayed.remove)(block_hash)
        findable = {block.block_hash for block in model.blocks.values() if block.ready and block.findable}
        assert self.replayed == findable, "the events replayed are not what can be found"

    def teardown(self):
        assert set(self.pool.resident_hashes()) == self.replayed


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    # Whether a mutant is caught needs no shortest example.
    phases=[Phase.generate] if os.environ.get("POOLCHECK_MUTANT") else tuple(Phase),
)

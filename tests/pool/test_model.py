"""The pool beside a plain model of it, through random calls; integrity is checked after each."""

from __future__ import annotations

import os
from collections import Counter
from typing import ClassVar

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

from kvstore.blocks.grants import PinKind
from kvstore.blocks.priority import Priority, Retention
from kvstore.errors import ChainBroken, InvalidRequest, LeaseReleased, PoolExhausted
from kvstore.pool.eviction.learned import LearnedReuse
from kvstore.pool.eviction.reuse import EDGES_S
from kvstore.pool.pool import Pool
from kvstore.pool.slot_lists import SlotList
from kvstore.pool.tenants.limits import TenantLimits
from kvstore.pool.tenants.table import TenantTable
from poolcheck.chains import NAMESPACES, chain_of
from poolcheck.model import NEVER_S, SAVE_GAP_S, Block, Held, Model, Watch, Write

NUM_SLOTS, MAX_PINNED, MAX_HARD_PINNED = 4, 3, 1
READS = ("read-1", "read-2")


class PoolMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    writes = Bundle("writes")
    watches = Bundle("watches")
    owners = st.sampled_from(("p", "q"))
    chains = st.builds(
        lambda tokens, namespace, start: chain_of(tokens, NAMESPACES[namespace], start % len(tokens)),
        st.text("ab", min_size=1, max_size=3),
        st.sampled_from((0,) * 7 + (1,)),
        st.sampled_from((0,) * 6 + (1, 2)),
    )

    priorities = st.sampled_from((*Priority, Priority.NORMAL))
    priority_times = st.sampled_from((NEVER_S, 2.0, 4.0))

    num_slots = NUM_SLOTS
    #: Slots and pins of each tenant, and the tenants of owners; the others are shared.
    quotas: ClassVar[dict[str, tuple[int, int]]] = {}
    tenant_of: ClassVar[dict[str, str]] = {}

    def __init__(self):
        super().__init__()
        self.model = Model(self.num_slots, MAX_PINNED, MAX_HARD_PINNED, quotas=self.quotas)
        self.pool = Pool(
            self.num_slots, MAX_PINNED, max_hard_pinned=MAX_HARD_PINNED, eviction=self.policy(),
            now_s=lambda: self.model.now_s, tenants=self.tenants(),
        )  # fmt: skip
        self.waiting: dict[int, tuple[Watch, list[int]]] = {}
        self.told: list[list[int]] = []
        self.replayed: set[bytes] = set()

    def policy(self):
        return None

    def tenants(self):
        return None

    def whose(self, owner):
        return self.tenant_of.get(owner, "")

    @property
    def now_s(self):
        return self.model.now_s

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
        tenant = self.whose(owner)
        wanted = self.model.pinnable(chain, tenant=tenant)
        grant = self.pool.pin_prefix(chain, owner, self.now_s + ttl_s, tenant=tenant)
        assert list(grant.slots) == wanted
        assert grant.num_refused == len(self.model.prefix(chain)) - len(wanted)
        self.model.hold(grant.lease_id, Held(owner, self.now_s + ttl_s, [], tenant=tenant), wanted)
        return grant.lease_id

    @rule(
        target=leases,
        chain=chains,
        owner=owners,
        kind=st.sampled_from((PinKind.HARD, PinKind.SOFT)),
        ttl_s=st.sampled_from((2.0, NEVER_S)),
    )
    def keep(self, chain, owner, kind, ttl_s):
        tenant = self.whose(owner)
        wanted = self.model.pinnable(chain, kind, tenant)
        num_refused = len(self.model.prefix(chain)) - len(wanted)
        if num_refused and not wanted:
            with pytest.raises(PoolExhausted):
                self.pool.pin(chain, owner, kind, self.now_s + ttl_s, tenant=tenant)
            return multiple()
        grant = self.pool.pin(chain, owner, kind, self.now_s + ttl_s, tenant=tenant)
        assert (list(grant.slots), grant.num_refused, bool(grant.lease_id)) == (wanted, num_refused, bool(wanted))
        if not wanted:
            return multiple()
        self.model.hold(grant.lease_id, Held(owner, self.now_s + ttl_s, [], kind, tenant), wanted)
        return grant.lease_id

    @rule(lease_id=leases, chain=chains, owner=owners, ttl_s=st.integers(1, 5))
    def grow(self, lease_id, chain, owner, ttl_s):
        held = self.model.leases.get(lease_id)
        if held is None or held.owner != owner:
            with pytest.raises(LeaseReleased):
                self.pool.pin_prefix(chain, owner, self.now_s + ttl_s, lease_id)
            return
        wanted = self.model.pinnable(chain, held.kind, held.tenant)
        grant = self.pool.pin_prefix(chain, owner, self.now_s + ttl_s, lease_id)
        assert (grant.lease_id, list(grant.slots)) == (lease_id, wanted)
        self.model.hold(lease_id, held, wanted, SAVE_GAP_S)
        held.deadline_s = max(held.deadline_s, self.now_s + ttl_s)

    @rule(lease_id=leases, owner=owners)
    def release(self, lease_id, owner):
        held = self.model.leases.get(lease_id)
        mine = held is not None and held.owner == owner
        assert self.pool.release(lease_id, owner) == mine
        if mine:
            self.model.drop(lease_id)

    @rule(lease_id=leases, owner=owners, ttl_s=st.integers(0, 5))
    def renew(self, lease_id, owner, ttl_s):
        held = self.model.leases.get(lease_id)
        mine = held is not None and held.owner == owner
        assert self.pool.renew(lease_id, owner, self.now_s + ttl_s) == mine
        if mine:
            held.deadline_s = max(held.deadline_s, self.now_s + ttl_s)

    @rule(seconds=st.sampled_from((0.5, 1.0, 3.0)))
    def expire(self, seconds):
        self.model.now_s += seconds
        assert self.pool.expire(self.now_s) == self.model.expire(self.now_s)

    @rule(
        target=writes,
        chain=chains,
        owner=owners,
        needs_parent=st.booleans(),
        parts=st.sampled_from(((1, 0), (1, 0), (2, 0), (2, 1), (3, 1))),
        ttl_s=st.sampled_from((NEVER_S, NEVER_S, 2.0)),
        priority=priorities,
        priority_s=priority_times,
    )
    def prepare(
        self, chain, owner, needs_parent, parts=(1, 0), ttl_s=NEVER_S, priority=Priority.NORMAL, priority_s=NEVER_S
    ):
        model, hashes, (num_parts, part) = self.model, chain.hashes(), parts
        retention = Retention(priority, self.now_s + priority_s)
        terms = {
            "retention": retention, "tenant": self.whose(owner),
            "num_parts": num_parts, "part": part, "deadline_s": self.now_s + ttl_s,
            "parts_deadline_s": self.now_s + 4.0 if num_parts > 1 else NEVER_S,
        }  # fmt: skip
        parent = model.find(chain.parent) if chain.start else -1
        if chain.start and parent < 0 and needs_parent:
            with pytest.raises(ChainBroken):
                self.pool.prepare_store(chain, owner, **terms)
            return multiple()
        found, num_wanted, tenant = [model.find(block_hash) for block_hash in hashes], len(hashes), terms["tenant"]
        end, paid = model.payable(tenant, parent, found)
        hashes, found = hashes[:end], found[:end]
        kept = [slot for slot in (parent, *found) if slot >= 0 and model.blocks[slot].ready]
        model.pin(kept)
        missing = [i for i, slot in enumerate(found) if slot < 0]
        free = model.free_slots()
        num_over = model.num_over(tenant, len(missing))
        num_own = model.num_evictable(num_over, tenant)
        most = max(0, len(missing) - num_over + num_own)
        # What goes of the tenant's own is among what could go.
        num_short = most - num_own - len(free)
        num_others = model.num_evictable(num_own + num_short) - num_own if num_short > 0 else 0
        count = min(most, num_own + len(free) + num_others)
        refused_at = missing[count] if count < len(missing) else len(hashes)
        joined = [i for i in range(refused_at) if found[i] >= 0 and model.can_join(found[i], num_parts, part)]
        indexes = sorted([*missing[:count], *joined])

        ticket = self.pool.prepare_store(chain, owner, needs_parent=needs_parent, **terms)

        assert ticket.indexes == tuple(indexes)
        assert (ticket.num_resident, ticket.num_refused) == (refused_at - len(indexes), num_wanted - refused_at)
        slot_of = dict(zip(ticket.indexes, ticket.slots, strict=True))
        assert all(slot_of[i] == found[i] for i in joined), "ranks of one block write to one slot"
        taken = {slot_of[i] for i in missing[:count]}
        assert len(taken) == count
        assert model.may_evict(taken - free, num_own, tenant), "what was evicted is not what had to go first"
        num_gone = num_own + max(0, count - num_own - len(free))
        assert len(taken - free) == num_gone, "a block was evicted while a slot was free"
        for slot in taken - free:
            model.evict(slot)
        for i in missing[:count]:
            above = hashes[i - 1] if i else chain.parent
            block = Block(
                hashes[i], chain.namespace, above, num_parts, terms["parts_deadline_s"],
                retention=retention, tenant=tenant,
            )  # fmt: skip
            model.claim(slot_of[i], block)
            found[i] = slot_of[i]
        for i in indexes:
            model.blocks[found[i]].writers.add(part)
        touched = [*([parent] if parent >= 0 else []), *found[:refused_at]]
        model.touch(touched, SAVE_GAP_S)
        model.prefer(touched, retention)
        assert ticket.num_awaited == sum(not model.blocks[slot].ready for slot in found[:refused_at]) - len(indexes)
        assert ticket.num_clears == model.num_clears[chain.namespace]
        assert bool(ticket.write_id) == bool(indexes)
        if not indexes:
            model.unpin(kept)
            return multiple()
        model.writes[ticket.write_id] = Write(
            owner=owner, num_claimed=len(indexes), pending=list(ticket.slots), kept=kept, paid=paid, tenant=tenant,
            num_parts=num_parts, part=part, deadline_s=terms["deadline_s"],
        )  # fmt: skip
        return ticket.write_id

    @rule(chain=chains, owner=owners, priority=priorities, priority_s=priority_times)
    def store(self, chain, owner, priority=Priority.NORMAL, priority_s=NEVER_S):
        write_id = self.prepare(chain, owner, needs_parent=False, priority=priority, priority_s=priority_s)
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
        if write.num_parts > 1 and count is not None:
            with pytest.raises(InvalidRequest):
                self.pool.complete_store(write_id, owner, count=count)
            count = None
        # `count` is of the whole ticket; the model has only what is left of it.
        done = write.num_claimed - len(write.pending)
        more = len(write.pending) if count is None else max(0, count - done)
        assert self.pool.complete_store(write_id, owner, count=count) == self.model.publish(write_id, more)

    @rule(write_id=consumes(writes), owner=owners, quarantine=st.sampled_from(("", "", *READS)))
    def abort(self, write_id, owner, quarantine):
        write = self.model.writes.get(write_id)
        mine = write is not None and write.owner == owner
        if mine and write.num_parts > 1 and quarantine:
            with pytest.raises(InvalidRequest):
                self.pool.abort_store(write_id, owner, quarantine=quarantine)
            quarantine = ""
        expected = self.model.abort(write_id, quarantine) if mine else 0
        assert self.pool.abort_store(write_id, owner, quarantine=quarantine) == expected

    @rule(name=st.sampled_from(READS))
    def end_quarantine(self, name):
        assert self.pool.end_quarantine(name) == len(self.model.aside.pop(name, []))

    @precondition(lambda self: len(self.model.blocks) == self.num_slots)
    @rule(namespace=st.sampled_from(NAMESPACES))
    def clear(self, namespace):
        assert self.pool.clear(namespace) == self.model.clear(namespace)

    @rule(owner=owners)
    def release_owner(self, owner):
        leases = [i for i, held in self.model.leases.items() if held.owner == owner]
        writes = [i for i, write in self.model.writes.items() if write.owner == owner]
        self.model.end(leases, writes)
        assert self.pool.release_owner(owner) == len(leases) + len(writes)

    @rule(target=watches, chain=chains)
    def watch(self, chain):
        told: list[int] = []
        watch = self.model.watch(chain)
        watch_id = self.pool.watch(chain, told.append)
        self.waiting[watch_id] = (watch, told)
        return watch_id

    @rule(watch_id=watches)
    def end_watch(self, watch_id):
        self.pool.end_watch(watch_id)
        if watch_id in self.waiting:
            self.model.end_watch(self.waiting[watch_id][0])

    @invariant()
    def watchers_are_told_once_and_the_truth(self):
        for watch_id, (watch, told) in list(self.waiting.items()):
            assert told == ([watch.count] if self.model.look(watch).ended else [])
            if watch.ended:
                del self.waiting[watch_id]
                self.told.append(told)
        assert all(len(told) == 1 for told in self.told)

    @invariant()
    def agrees(self):
        self.pool.check_integrity()
        stats, model = self.pool.stats(), self.model
        ready = [slot for slot, block in model.blocks.items() if block.ready]
        assert (stats.num_free, stats.num_writing) == (len(model.free_slots()), len(model.blocks) - len(ready))
        assert stats.num_quarantined == sum(map(len, model.aside.values()))
        assert (stats.num_pinned, stats.num_idle) == (len(model.pinned()), len(ready) - len(model.pinned()))
        assert (stats.num_leases, stats.num_writes) == (len(model.leases), len(model.writes))
        num_soft_pinned = sum(block.soft > 0 for block in model.blocks.values())
        assert (stats.num_hard_pinned, stats.num_soft_pinned) == (len(model.hard_pinned()), num_soft_pinned)
        for tenant, counts in self.pool.tenants().items():
            assert (counts.num_slots, counts.num_pinned) == (model.held_by(tenant), len(model.pinned_by(tenant)))
            assert counts.num_slots <= model.quotas[tenant][0], "more than its quota"
        now = Counter(model.priority(block) for block in model.blocks.values() if block.findable)
        assert stats.num_low >= now[Priority.LOW]
        assert stats.num_high >= now[Priority.HIGH]
        for owner in ("p", "q"):
            held = [*model.leases.values(), *model.writes.values()]
            assert self.pool.holds(owner) == any(one.owner == owner for one in held)
        lives = tuple(model.lives.get(slot, 0) for slot in range(self.num_slots))
        assert self.pool.generations(tuple(range(self.num_slots))) == lives
        for present, block_hash in self.pool.drain_events():
            (self.replayed.add if present else self.replayed.remove)(block_hash)
        findable = {block.block_hash for block in model.blocks.values() if block.ready and block.findable}
        assert self.replayed == findable, "the events replayed are not what can be found"

    def teardown(self):
        assert set(self.pool.resident_hashes()) == self.replayed


class SharingMachine(PoolMachine):
    """The same with fewer kinds of calls, so that more of them are pins, parts, waiting, and what ends these."""

    lookup = grow = renew = use = end_quarantine = release_owner = None  # type: ignore[assignment]

    @rule(some=st.lists(PoolMachine.chains, min_size=3, max_size=4))
    def make_room(self, some):
        """Store more than there is room for."""
        for chain in some:
            self.store(chain, "p")

    @rule(target=PoolMachine.leases, chain=PoolMachine.chains, other=PoolMachine.chains)
    def keep_a_little(self, chain, other):
        self.store(chain, "q")
        return self.keep(chain, "q", PinKind.SOFT, NEVER_S)

    @rule(chain=PoolMachine.chains, other=PoolMachine.chains, some=st.lists(PoolMachine.chains, min_size=2, max_size=3))
    def keep_what_goes(self, chain, other, some):
        """End a preference when its block is gone and another is preferred, perhaps in the same slot."""
        lease_id = self.keep_a_little(chain, other)
        self.make_room(some)
        self.keep_a_little(other, chain)
        if isinstance(lease_id, int):
            self.release(lease_id, "q")

    @rule(target=PoolMachine.writes, chain=PoolMachine.chains, parts=st.sampled_from(((2, 0), (2, 1), (3, 0))))
    def write_a_part_twice(self, chain, parts):
        tickets = [self.prepare(chain, owner, False, parts) for owner in ("p", "q")]
        return multiple(*(write_id for write_id in tickets if isinstance(write_id, int)))

    @rule(chain=PoolMachine.chains)
    def wait_for_a_clearing(self, chain):
        self.prepare(chain, "p", needs_parent=False)
        self.watch(chain)
        self.clear(chain.namespace)


class PriorityMachine(PoolMachine):
    """Fewer kinds of calls and more slots, so that blocks of all priorities are here at once, and time passes."""

    num_slots = 6
    lookup = grow = renew = watch = end_watch = end_quarantine = release_owner = None  # type: ignore[assignment]

    @rule(tokens=st.text("xyz", min_size=1, max_size=4), priority=PoolMachine.priorities)
    def make_room(self, tokens, priority):
        """Let several blocks go at once."""
        self.store(chain_of(tokens), "q", priority, 2.0)

    @rule(some=st.lists(st.tuples(PoolMachine.chains, PoolMachine.priorities), min_size=2, max_size=4))
    def store_some(self, some):
        """Store what others store under another priority, for another time."""
        for at, (chain, priority) in enumerate(some):
            self.store(chain, "p", priority, (NEVER_S, 3.0, 5.0)[at % 3])

    @rule(seconds=st.sampled_from((1.0, 2.5)))
    def wait(self, seconds):
        """Let priorities end, and nothing else."""
        self.model.now_s += seconds


class TenantMachine(PoolMachine):
    """One owner is a tenant with quotas, the other one is shared; fewer kinds of calls, so that the quotas are met."""

    num_slots = 5
    quotas: ClassVar[dict[str, tuple[int, int]]] = {"a": (3, 1)}
    tenant_of: ClassVar[dict[str, str]] = {"p": "a"}
    lookup = renew = watch = end_watch = release_owner = None  # type: ignore[assignment]

    def tenants(self):
        limits = {name: TenantLimits(max_slots=slots, max_pinned=pins) for name, (slots, pins) in self.quotas.items()}
        return TenantTable(self.num_slots, limits)

    @rule(tokens=st.text("abxyz", min_size=1, max_size=4), owner=PoolMachine.owners)
    def scan(self, tokens, owner):
        """Let several blocks go at once, for one of the two."""
        self.store(chain_of(tokens), owner)


#: By uses and age, with estimates that cross: each class is the likeliest at some age, and none rises.
HAZARDS = [[9.0, 0.5, 0.4, 0.1], [8.0, 8.0, 0.2, 0.1], [2.0, 2.0, 2.0, 0.3], [1.0, 1.0, 1.0, 1.0]]
STEPS_S = (2.0, 4.0, 64.0)


def hazard_of(uses, age_s):
    """The table's value; an age on a step is of what follows."""
    return HAZARDS[uses - 1][sum(age_s >= step_s for step_s in STEPS_S)]


def learned(now_s, num_slots, *, crossing):
    policy = LearnedReuse(num_slots, now_s, num_ghosts=4096)
    if crossing:
        # The steps are edges of the policy's buckets.
        policy.hazards = [[hazard_of(uses, edge_s) for edge_s in EDGES_S[:-1]] for uses in (1, 2, 3, 4)]
    return policy


class LearnedMachine(PoolMachine):
    """Learned reuse, under estimates that make the order another one than that of touches."""

    num_slots = 7
    grow = renew = lookup = watch = end_watch = release_owner = None  # type: ignore[assignment]

    def policy(self):
        self.model.hazard = hazard_of
        return learned(lambda: self.model.now_s, self.num_slots, crossing=True)

    @rule(seconds=st.sampled_from((1.0, 2.5, 70.0)))
    def wait(self, seconds):
        """Let time pass without an end of what has deadlines, which `expire` brings."""
        self.model.now_s += seconds

    @rule(chain=PoolMachine.chains, num_times=st.integers(1, 3))
    def use_again(self, chain, num_times):
        """Make blocks of several classes and ages."""
        self.store(chain, "p")
        for _ in range(num_times):
            self.wait(1.0)
            self.release(self.pin(chain, "p", 1), "p")

    @rule(tokens=st.text("xyz", min_size=2, max_size=4))
    def make_room(self, tokens):
        """Let several blocks go at once."""
        self.store(chain_of(tokens), "q")

    @invariant()
    def uses_are_those_of_the_model(self):
        blocks = self.pool.table.eviction.policy.blocks
        found = blocks.uses[blocks.rows_of(SlotList.of(list(range(self.num_slots))))]
        assert all(found[slot] == block.uses for slot, block in self.model.blocks.items() if block.findable)


class UnlearnedMachine(LearnedMachine):
    """As long as nothing is learned, all that is allowed is the order of touches, as for LRU."""

    def policy(self):
        return learned(lambda: self.model.now_s, self.num_slots, crossing=False)


class LearnedSharingMachine(SharingMachine):
    """Pins, parts and waiting under learned reuse."""

    policy = LearnedMachine.policy


TestPoolMachine, TestSharingMachine = PoolMachine.TestCase, SharingMachine.TestCase
TestPriorityMachine, TestTenantMachine = PriorityMachine.TestCase, TenantMachine.TestCase
TestUnlearnedMachine, TestLearnedMachine = UnlearnedMachine.TestCase, LearnedMachine.TestCase
TestLearnedSharingMachine = LearnedSharingMachine.TestCase
TestPoolMachine.settings = TestSharingMachine.settings = TestUnlearnedMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    # Whether a mutant is caught needs no shortest example.
    phases=[Phase.generate] if os.environ.get("POOLCHECK_MUTANT") else tuple(Phase),
)
TestLearnedMachine.settings = TestLearnedSharingMachine.settings = TestPoolMachine.settings
TestPriorityMachine.settings = TestTenantMachine.settings = TestPoolMachine.settings

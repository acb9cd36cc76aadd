"""What must hold of a pool's slots between two calls. No locking here: the pool holds its lock."""

from __future__ import annotations

from collections import Counter

from kvstore.blocks.chain import HASH_BYTES
from kvstore.pool.slots import SlotTable


def check_slots(table: SlotTable, aside: set[int]) -> None:
    """Assert that each slot is in exactly one state and that counts, links and order agree with that.

    Args:
        table: all slots.
        aside: those that are quarantined.
    """
    spaces = [*table.spaces.values(), *table.cleared]
    #: Of what was cleared and not swept yet, too.
    ready = {s: own for space in spaces for own, s in space.ready.items() if table.space[s] is space}
    writing = {s: own for space in spaces for own, s in space.writing.items()}
    states = {
        "free": table._free, "writing": [*writing, *table.doomed], "quarantined": list(aside),
        "ready": [*ready, *table.unfindable],
    }  # fmt: skip
    listed = Counter(slot for slots in states.values() for slot in slots)
    assert listed == Counter(range(table.num_slots)), f"not in exactly one state: {states}"
    assert len(states["writing"]) == table.num_writing, "writing count"
    assert len(aside) == table.num_quarantined, "quarantine count"
    assert sum(refs > 0 for refs in table.ref_count) == table.num_pinned, "pinned count"
    assert min(table.ref_count) >= 0, "ref count below 0"
    pinned = {slot for slot, refs in enumerate(table.ref_count) if refs}
    assert pinned <= set(states["ready"]), "pinned but not ready"
    assert table.unfindable <= pinned, "ready, idle and not findable"
    assert {slot: own for slot, own in enumerate(table.block_hash) if own} == ready | writing, "index names another"
    assert set(table.eviction.soft_pins) <= set(ready), "soft pin of a block that is not there"
    namespaces = {s: space.namespace for s in ready if (space := table.space[s]) is not None}
    table.presence.check(own for slot, own in ready.items() if table.parent[slot] == namespaces[slot])
    for namespace, space in table.spaces.items():
        assert (space.namespace, space.is_cleared, space.unswept) == (namespace, False, None), "cleared and findable"
        assert len(space.ready.keys() | space.writing.keys()) == len(space), "ready and being written"
        assert all(table.space[slot] is space for slot in [*space.ready.values(), *space.writing.values()]), "space"
        _check_children(table, space.ready | space.writing, space.orphans, namespace)
    assert all(space.is_cleared for space in table.cleared), "swept and findable"
    assert not any(table.num_children[slot] for slot in {*range(table.num_slots)} - {*ready, *writing}), "children"
    findable = {own: slot for space in table.spaces.values() for own, slot in space.ready.items()}
    written = [slot for space in table.spaces.values() for slot in space.writing.values()]
    _check_runs(table, findable, written)
    table.eviction.check({s for s in findable.values() if not table.ref_count[s] and not table.num_children[s]})


def _check_children(table: SlotTable, slots: dict[bytes, int], orphans: Counter[bytes], namespace: bytes) -> None:
    children = Counter(table.parent[slot] for slot in slots.values() if table.parent[slot] != namespace)
    counted = {own: table.num_children[slot] for own, slot in slots.items() if table.num_children[slot]}
    assert not counted.keys() & orphans.keys(), "children counted twice"
    assert children == counted | orphans, f"children: {children}, counted {counted}, {orphans}"


def _check_runs(table: SlotTable, findable: dict[bytes, int], written: list[int]) -> None:
    for run in {run for slot in [*findable.values(), *written] if (run := table.run[slot]) is not None}:
        known = [run.data[at : at + HASH_BYTES] for at in range(0, run.num_ready * HASH_BYTES, HASH_BYTES)]
        assert [findable.get(own) for own in known] == run.slots[: run.num_ready], "a run knows too much"
    for own, slot in findable.items():
        run = table.run[slot]
        assert run is not None, "ready, and never claimed"
        assert run.slots[table.place[slot]] == slot, "a slot is not where its run has it"
        assert run.data[table.place[slot] * HASH_BYTES :][:HASH_BYTES] == own, "a run has another hash"

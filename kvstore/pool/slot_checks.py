"""Assert the invariants of a pool's slots between two calls. No locking here: the pool holds its lock."""

from __future__ import annotations

from collections import Counter

from kvstore.blocks.chain import HASH_BYTES
from kvstore.pool.block_index import BlockIndex, Space
from kvstore.pool.slots import SlotTable


def check_slots(table: SlotTable) -> None:
    """Assert that each slot is in exactly one state. Index, columns and eviction must agree on it."""
    ready, writing = check_index(table.index)
    columns = table.columns
    states = {
        "free": columns.free, "writing": [*writing, *columns.aborted], "ready": [*ready, *columns.cleared],
        "quarantined": [slot for slots in columns.quarantined.values() for slot in slots],
    }  # fmt: skip
    listed = Counter(slot for slots in states.values() for slot in slots)
    assert listed == Counter(range(table.num_slots)), f"not in exactly one state: {states}"
    assert len(states["writing"]) == columns.num_writing, "writing count"
    assert len(states["quarantined"]) == columns.num_quarantined, "quarantine count"
    pinned = {slot for slot, refs in enumerate(columns.ref_count) if refs}
    assert len(pinned) == columns.num_pinned, "pinned count"
    assert min(columns.ref_count, default=0) >= 0, "ref count below 0"
    assert pinned <= set(states["ready"]), "pinned but not ready"
    assert columns.cleared <= pinned, "cleared, idle and not free"
    assert set(table.eviction.soft_pins) <= set(ready), "soft pin of a block that is not there"
    if table.tenants is not None:
        table.tenants.check(columns.free)
    findable = {slot for space in table.index.spaces.values() for slot in space.ready.values()}
    table.eviction.check({slot for slot in findable - pinned if not table.index.num_children[slot]})


def check_index(index: BlockIndex) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Assert that index and columns agree; return the hashes by slot of (ready blocks, blocks being written)."""
    # With cleared spaces that are not swept yet.
    spaces = [*index.spaces.values(), *index.cleared]
    ready = {s: own for space in spaces for own, s in space.ready.items() if index.space[s] is space}
    writing = {s: own for space in spaces for own, s in space.writing.items()}
    assert {slot: own for slot, own in enumerate(index.block_hash) if own} == ready | writing, "index names another"
    blocks = ready | writing
    index.presence.check(own for slot, own in blocks.items() if index.parent[slot] == index.space[slot].namespace)
    for namespace, space in index.spaces.items():
        assert (space.namespace, space.is_cleared, space.unswept) == (namespace, False, None), "cleared and findable"
        assert len(space.ready.keys() | space.writing.keys()) == len(space), "ready and being written"
        assert all(index.space[slot] is space for slot in [*space.ready.values(), *space.writing.values()]), "space"
        _check_children(index, space)
    assert all(space.is_cleared for space in index.cleared), "swept and findable"
    slots_of_blocks = ready.keys() | writing.keys()
    assert not any(index.num_children[slot] for slot in {*range(len(index.space))} - slots_of_blocks), "children"
    _check_runs(index)
    return ready, writing


def _check_children(index: BlockIndex, space: Space) -> None:
    slots = space.ready | space.writing
    children = Counter(index.parent[slot] for slot in slots.values() if index.parent[slot] != space.namespace)
    counted = {own: index.num_children[slot] for own, slot in slots.items() if index.num_children[slot]}
    assert not counted.keys() & space.orphans.keys(), "children counted twice"
    counted |= {own: count for own, (count, _) in space.orphans.items()}
    assert children == counted, f"children: {children}, counted {counted}, {space.orphans}"
    # Else blocks could hang on each other in a circle: all of them have children, and none is ever evicted.
    for own, slot in slots.items():
        parent, depth = index.parent[slot], index.depth[slot]
        if parent in slots:
            assert index.depth[slots[parent]] < depth, f"block {own.hex()[:8]} is not below the one it hangs on"
        elif parent != space.namespace:
            assert space.orphans[parent][1] <= depth, f"orphan {own.hex()[:8]} has a smaller depth than is known"


def _check_runs(index: BlockIndex) -> None:
    findable = {own: slot for space in index.spaces.values() for own, slot in space.ready.items()}
    written = [slot for space in index.spaces.values() for slot in space.writing.values()]
    for run in {index.run[slot] for slot in [*findable.values(), *written]}:
        known = [run.data[at : at + HASH_BYTES] for at in range(0, run.num_ready * HASH_BYTES, HASH_BYTES)]
        assert [findable.get(own) for own in known] == run.slots[: run.num_ready], "a run knows too much"
    for own, slot in findable.items():
        run, place = index.run[slot], index.place[slot]
        assert run.slots[place : place + 1] == [slot], "a slot is not where its run has it"
        assert run.data[place * HASH_BYTES :][:HASH_BYTES] == own, "a run has another hash"

import numpy as np
import pytest

from kvstore.pool.slot_checks import check_slots
from kvstore.pool.slot_lists import SlotList
from kvstore.pool.slots import SlotTable

SPACE = b"n" * 32


def names(count: int, seed: int = 0) -> list[bytes]:
    return [bytes([seed, i]) * 16 for i in range(count)]


def claim(table: SlotTable, count: int, seed: int = 0) -> tuple[list[bytes], list[int], int]:
    """Claim a chain of slots and touch it."""
    hashes = names(count, seed)
    slots = table.claim(hashes, [SPACE, *hashes[:-1]], SPACE, np.arange(count)).slots
    return hashes[: len(slots)], slots, table.eviction.touched(SlotList.of(slots), is_use=True)


def ready(table: SlotTable, count: int, seed: int = 0) -> list[int]:
    """Claim and publish a chain of slots."""
    hashes, slots, stamp = claim(table, count, seed)
    table.publish(table.index.spaces[SPACE], hashes, slots, stamp)
    check_slots(table)
    return slots


def give_back(table: SlotTable, slot: int) -> None:
    table.abort([slot])
    table.columns.end_aborted([slot])


def test_claims_are_lowest_first_and_sorted():
    table = SlotTable(6)
    hashes, slots, _ = claim(table, 4)
    assert (hashes, slots) == (names(4), [0, 1, 2, 3])
    for slot in (2, 0, 3):
        give_back(table, slot)
    check_slots(table)
    assert claim(table, 2, seed=1)[1] == [0, 2]
    assert table.columns.num_writing == 3
    check_slots(table)


def test_claim_takes_free_slots_before_it_evicts():
    table = SlotTable(3)
    hashes = names(2)
    ready(table, 2)
    assert claim(table, 2, seed=1)[1] == [1, 2]
    assert table.num_evicted == 1
    assert table.index.space_of(SPACE).ready == {hashes[0]: 0}
    assert table.index.events.events == [(True, hashes), (False, hashes[1:])]
    check_slots(table)


def test_claim_gives_what_there_is():
    table = SlotTable(2)
    chain = SlotList.of(ready(table, 2))
    table.columns.pin(chain)
    stamp = table.eviction.touched(chain, is_use=True)
    assert claim(table, 3, seed=1)[1] == []
    table.unpin(chain.part(1, 2), stamp)
    assert claim(table, 3, seed=2)[1] == [1]
    check_slots(table)


def test_a_slot_that_cannot_be_found_is_freed_by_its_last_reader():
    table = SlotTable(1)
    chain = SlotList.of(ready(table, 1))
    table.columns.pin(chain)
    table.columns.pin(chain)
    stamp = table.eviction.touched(chain, is_use=True)
    assert [len(space) for space in table.index.detach(SPACE)] == [1]
    assert (table.sweep(4), table.sweep(4)) == (1, 0)
    table.unpin(chain, stamp)
    assert table.columns.num_free == 0
    table.unpin(chain, stamp)
    assert table.columns.num_free == 1
    check_slots(table)


def test_generations_grow_with_every_claim_and_only_then():
    """Rule 5, I9."""
    table = SlotTable(2)
    both = SlotList.of([0, 1])
    assert table.columns.lives(both) == bytes(8)
    ready(table, 2)
    assert table.columns.lives(both) == b"\1\0\0\0\1\0\0\0"
    claim(table, 1, seed=1)
    give_back(table, 1)
    assert table.columns.generation.tolist() == [1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.columns.ref_count.__setitem__(0, -1),
        lambda t: t.columns.ref_count.__setitem__(3, 1),
        lambda t: t.index.num_children.__setitem__(0, 0),
        lambda t: t.index.parent.__setitem__(1, SPACE),
        lambda t: t.index.depth.__setitem__(1, 0),
        lambda t: t.index.spaces[SPACE].ready.popitem(),
        lambda t: t.eviction.stamp.__setitem__(1, 0),
        lambda t: setattr(t.eviction.policy.log, "num_logged", 7),
        lambda t: t.columns.free.append(0),
        lambda t: t.columns.free.pop(),
        lambda t: t.columns.cleared.add(0),
        lambda t: t.columns.aborted.add(3),
        lambda t: t.eviction.soft_pinned([3]),
        lambda t: t.columns.quarantined.update(x=[0]),
        lambda t: t.index.place.__setitem__(1, 0),
        lambda t: t.index.presence.drop(names(1)[0]),
        lambda t: t.index.spaces[SPACE].writing.update({names(2)[0]: 0}),
        lambda t: t.index.block_hash.__setitem__(0, b"x" * 32),
        lambda t: setattr(t.columns, "num_writing", 1),
        lambda t: setattr(t.columns, "num_quarantined", 1),
        lambda t: setattr(t.columns, "num_pinned", 1),
    ],
)
def test_check_sees_damage(damage):
    table = SlotTable(4)
    ready(table, 2)
    damage(table)
    with pytest.raises(AssertionError):
        check_slots(table)


def test_links_are_counted_by_hash_so_that_a_parent_may_come_and_go():
    table = SlotTable(4)
    hashes, slots, stamp = claim(table, 3)
    give_back(table, slots[0])
    table.publish(table.index.spaces[SPACE], hashes[1:], slots[1:], stamp)
    check_slots(table)
    index = table.index
    assert (index.space_of(SPACE).orphans, list(index.num_children)) == ({hashes[0]: (1, 1)}, [0, 1, 0, 0])
    again = table.claim(hashes[:1], [SPACE], SPACE, np.zeros(1, np.int64)).slots
    table.publish(table.index.spaces[SPACE], hashes[:1], again, table.eviction.touched(SlotList.of(again), is_use=True))
    check_slots(table)
    assert (index.space_of(SPACE).orphans, list(index.num_children)) == ({}, [1, 1, 0, 0])
    claim(table, 2, seed=1)
    assert table.index.events.events[-1] == (False, hashes[2:]), "the leaf, although its root was touched last"

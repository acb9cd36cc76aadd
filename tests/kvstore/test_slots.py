import pytest

from kvstore.slots import SlotState, SlotTable


def ready(table: SlotTable, count: int, parent: int = -1) -> list[int]:
    """Claim and publish a chain of slots, the root most recent."""
    claimed, _ = table.claim(count)
    for index in claimed:
        slot = table.slots[index]
        slot.indexed, slot.parent = True, parent
        if parent >= 0:
            table.slots[parent].children.add(index)
        parent = index
    table.touch_all(claimed)
    for index in claimed:
        table.publish(index)
    table.check()
    return claimed


def test_claims_are_lowest_first_and_sorted():
    table = SlotTable(6)
    assert table.claim(4) == ([0, 1, 2, 3], [])
    for index in (2, 0, 3):
        table.free(index)
    table.check()
    assert table.claim(2) == ([0, 2], [])
    assert table.num_writing == 3


def test_claim_takes_free_slots_before_it_evicts():
    table = SlotTable(3)
    ready(table, 2)
    assert table.claim(2) == ([1, 2], [1])
    assert table.num_evicted == 1
    assert table.slots[1].state is SlotState.WRITING
    table.check()


def test_claim_gives_what_there_is():
    table = SlotTable(2)
    chain = ready(table, 2)
    table.pin_all(chain)
    assert table.claim(3) == ([], [])
    table.unpin(chain[1])
    assert table.claim(3) == ([1], [1])
    table.check()


def test_room_for_pins_counts_only_new_ones():
    table = SlotTable(4)
    chain = ready(table, 4)
    assert table.num_pinnable(chain, 2) == 2
    table.pin_all(chain[1:3])
    assert table.num_pinnable(chain, 2) == 0
    assert table.num_pinnable(chain[1:3], 2) == 2
    assert table.num_pinnable(chain, 3) == 3
    assert table.num_pinnable(chain, 4) == 4


def test_a_slot_that_cannot_be_found_is_freed_by_its_last_reader():
    table = SlotTable(1)
    ready(table, 1)
    table.pin(0)
    table.pin(0)
    table.slots[0].indexed = False
    table.unpin(0)
    assert table.slots[0].state is SlotState.READY
    table.unpin(0)
    assert table.slots[0].state is SlotState.FREE
    table.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: setattr(t.slots[0], "ref_count", -1),
        lambda t: setattr(t.slots[3], "ref_count", 1),
        lambda t: t.slots[0].children.clear(),
        lambda t: setattr(t.slots[1], "parent", -1),
        lambda t: setattr(t.slots[1], "indexed", False),
        lambda t: t._evictable.clear(),
        lambda t: t._free.append(0),
        lambda t: t._free.pop(),
        lambda t: setattr(t, "num_writing", 1),
        lambda t: setattr(t, "num_quarantined", 1),
        lambda t: setattr(t, "num_pinned", 1),
    ],
)
def test_check_sees_damage(damage):
    table = SlotTable(4)
    ready(table, 2)
    damage(table)
    with pytest.raises(AssertionError):
        table.check()

"""Places of slots: always a permutation, whatever a new store assigns."""

import random

from disk_made import record
from hypothesis import given
from hypothesis import strategies as st

from kvstore.disk.places import Places
from kvstore.disk.slot_file import neighbours


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_places_stay_a_permutation(num_slots: int, rng: random.Random):
    places, slots, wanted = Places(num_slots), list(range(num_slots)), list(range(num_slots))
    rng.shuffle(slots)
    rng.shuffle(wanted)
    assigned = {}
    for slot, place in list(zip(slots, wanted, strict=True))[: rng.randint(0, num_slots)]:
        places.assign(slot, record(place, generation=place + 1))
        assigned[slot] = place
        assert sorted(places.place) == list(range(num_slots))
        assert all(places.place[each] == at for each, at in assigned.items())
        assert all(places.record[each].place == at for each, at in assigned.items())


def test_generations_go_on_after_the_last_one():
    places = Places(3)
    places.assign(0, record(1, generation=41))
    places.assign(1, record(0, generation=7))
    assert list(places.take_generations(2)) == [42, 43]


def test_neighbours():
    """A10: what stands in groups comes out in the same groups."""
    assert neighbours([], 4) == []
    assert neighbours([3], 4) == [(0, 1)]
    assert neighbours([3, 4, 5, 9, 8, 1], 4) == [(0, 3), (3, 4), (4, 5), (5, 6)]
    assert neighbours([0, 1, 2, 3, 4], 2) == [(0, 2), (2, 4), (4, 5)]
    assert neighbours([5, 5], 4) == [(0, 1), (1, 2)]

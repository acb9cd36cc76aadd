"""Cuts of a prompt, found by probes: as a walk finds them, and how they differ where holders have holes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.remote.index.directory_index import DirectoryIndex
from kvstore.remote.index.prefixes import MOST_PROBES, cuts_of


def probed(held: list[set[int]], count: int, most_probes: int = MOST_PROBES):
    """Return (length by holder or None, number of probes) for holders with these blocks."""
    asked = list[int]()

    def holders(number: int) -> int:
        asked.append(number)
        return sum(1 << bit for bit, own in enumerate(held) if number in own)

    cuts = cuts_of(count, holders, most_probes)
    if cuts is None:
        return None, len(asked)
    return {bit: end for end, bits in cuts for bit in range(len(held)) if bits >> bit & 1}, len(asked)


def walked(held: list[set[int]], count: int):
    lengths = {bit: next((i for i in range(count) if i not in own), count) for bit, own in enumerate(held)}
    return {bit: length for bit, length in lengths.items() if length}


@given(st.integers(1, 1000), st.lists(st.integers(0, 1000), max_size=8))
def test_holders_without_holes_are_found_as_a_walk_finds_them(count, lengths):
    held = [set(range(min(length, count))) for length in lengths]
    assert probed(held, count)[0] == walked(held, count)


def test_a_holder_without_the_first_block_is_no_hole():
    tail, prefix = set(range(200, 900)), set(range(300))
    assert probed([tail, prefix], 1000)[0] == {1: 300}


@pytest.mark.parametrize("length", [0, 1, 2, 499, 500, 998, 999, 1000])
def test_a_thousand_blocks_take_a_dozen_probes(length):
    found, num_probes = probed([set(range(length))], 1000)
    assert found == ({0: length} if length else {})
    assert num_probes <= 12


def test_many_holders_with_one_cut_cost_as_much_as_one():
    assert probed([set(range(700))] * 60, 1000)[1] == probed([set(range(700))], 1000)[1]


@given(st.integers(2, 60), st.lists(st.sets(st.integers(0, 60)), min_size=1, max_size=4))
def test_with_holes_no_prefix_is_shorter_than_a_walk_says_and_each_ends_at_a_block_that_is_lacking(count, held):
    found, _ = probed(held, count)
    if found is None:
        return
    wanted = walked(held, count)
    assert found.keys() == wanted.keys()
    for bit, length in found.items():
        assert length >= wanted[bit]
        assert length - 1 in held[bit]
        assert length == count or length not in held[bit]


def test_a_hole_that_a_probe_meets_is_noticed():
    holed = set(range(1000)) - {499}
    assert probed([set(range(600))], 1000)[0] is not None
    assert probed([set(range(10)), holed], 1000)[0] is None
    island = set(range(100)) | set(range(700, 800))
    assert probed([island], 1000)[0] == {0: 100}
    assert probed([island, set(range(760))], 1000)[0] is None, "a probe for the other one meets the island"


def test_of_many_different_cuts_no_more_than_so_many_are_probed():
    found, num_probes = probed([set(range(10 * n)) for n in range(1, 100)], 1000, 20)
    assert (found, num_probes) == (None, 20)


def test_an_index_walks_where_probes_do_not_tell():
    index, hashes = DirectoryIndex(), [random.Random(n).randbytes(32) for n in range(1000)]
    index.add("short", hashes[:10])
    index.add("holed", [own for n, own in enumerate(hashes) if n != 499])
    assert index.locate(hashes) == [("holed", 499), ("short", 10)] == index.locate(b"".join(hashes))
    assert index.num_walked == 2
    index.forget("holed")
    assert index.locate(hashes) == [("short", 10)]
    assert index.num_walked == 2


def test_of_two_lives_of_a_node_the_longer_prefix_counts():
    index, hashes = DirectoryIndex(), [random.Random(n).randbytes(32) for n in range(100)]
    index.add("a", hashes[:70], life=1)
    index.add("a", hashes[:40], life=2)
    assert index.locate(hashes) == [("a", 70)]
    index.forget("a", life=1)
    assert index.locate(hashes) == [("a", 40)]

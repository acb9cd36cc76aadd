"""The index of a directory alone: prefixes, lives of nodes, and what forgetting costs."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.remote.index import directory_index
from kvstore.remote.index.directory_index import SWEEP_PLACES, DirectoryIndex
from kvstore.remote.index.hint_table import MAX_LOAD, HintTable
from poolcheck.chains import chain_of


def locate(index: DirectoryIndex, tokens: str) -> list[tuple[str, int]]:
    return index.locate(chain_of(tokens).hashes())


def num_places(index: DirectoryIndex) -> int:
    return index.num_bytes // 16


def test_prefixes_longest_first():
    index = DirectoryIndex()
    index.add("a", chain_of("uv").hashes())
    index.add("b", chain_of("uvwx").hashes())
    index.add("c", chain_of("uvw").hashes())
    index.add("d", chain_of("zz").hashes())
    assert locate(index, "uvwx") == [("b", 4), ("c", 3), ("a", 2)]
    assert locate(index, "uv") == [("a", 2), ("b", 2), ("c", 2)]
    assert locate(index, "q") == []
    assert locate(index, "") == []


def test_a_hole_ends_a_nodes_prefix():
    index, hashes = DirectoryIndex(), chain_of("uvwx").hashes()
    index.add("a", [hashes[0], hashes[2], hashes[3]])
    index.add("b", hashes[1:])
    assert index.locate(hashes) == [("a", 1)]


def test_removed_blocks_are_gone():
    index, hashes = DirectoryIndex(), chain_of("uvw").hashes()
    index.add("a", hashes)
    index.add("b", hashes)
    index.remove("a", hashes[1:])
    assert index.locate(hashes) == [("b", 3), ("a", 1)]
    index.remove("b", hashes)
    assert len(index) == 1
    index.remove("b", hashes)
    assert index.locate(hashes) == [("a", 1)]


def test_a_forgotten_node_leaves_nothing_and_its_bit_is_used_again():
    index, hashes = DirectoryIndex(), chain_of("uvw").hashes()
    index.add("a", hashes)
    index.add("b", hashes[:1])
    index.forget("a")
    index.forget("a")
    assert index.locate(hashes) == [("b", 1)]
    assert (len(index), index.nodes()) == (1, ["b"])
    index.add("c", hashes[1:])
    assert index.locate(hashes) == [("b", 1)], "the old entries of the bit are not the new node's"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("add", "remove", "forget")),
            st.sampled_from("abcd"),
            st.sets(st.integers(0, 4), max_size=5),
        ),
        max_size=30,
    )
)
def test_the_index_against_sets(steps):
    index, model, hashes = DirectoryIndex(), {}, chain_of("uvwxy").hashes()
    for verb, node, picks in steps:
        picked = [hashes[i] for i in picks]
        if verb == "forget":
            index.forget(node)
            model.pop(node, None)
        else:
            getattr(index, verb)(node, picked)
            held = model.setdefault(node, set())
            (held.update if verb == "add" else held.difference_update)(picked)
    lengths = {node: next((i for i, h in enumerate(hashes) if h not in held), 5) for node, held in model.items()}
    wanted = sorted(((n, c) for n, c in lengths.items() if c), key=lambda item: (-item[1], item[0]))
    assert index.locate(hashes) == wanted
    assert len(index) == len(set().union(*model.values()))
    assert index.nodes() == sorted(model)


def test_lives_of_a_node_do_not_touch_each_other():
    index, hashes = DirectoryIndex(), chain_of("uvw").hashes()
    index.add("a", hashes[:2], life=1)
    index.add("a", hashes[:1], life=2)
    assert index.locate(hashes) == [("a", 2)]
    index.remove("a", hashes, life=2)
    assert index.locate(hashes) == [("a", 2)]
    index.forget("a", life=1)
    assert index.locate(hashes) == []
    assert index.nodes() == ["a"]


def test_what_a_large_node_had_is_gone_at_once_and_taken_out_in_steps():
    index, hashes = DirectoryIndex(), [i.to_bytes(32, "little") for i in range(2 * SWEEP_PLACES + 10)]
    index.add("a", hashes)
    while index.is_sweeping:
        index.sweep()  # Moves what is left in an old table.
    index.add("b", hashes[:3])
    index.forget("a")
    assert index.locate(hashes) == [("b", 3)]
    assert index.is_sweeping
    index.add("c", hashes[1:])
    assert index.locate(hashes) == [("b", 3)], "its bit is not used again before its entries are out"
    num_steps = 0
    while index.is_sweeping:
        index.sweep()
        num_steps += 1
    assert num_steps == num_places(index) // SWEEP_PLACES - 1 > 1
    index.forget("c")
    while index.is_sweeping:
        index.sweep()
    assert len(index) == 3


def test_routers_ask_while_stores_come_and_go():
    index, hashes = DirectoryIndex(), [os.urandom(32) for _ in range(50)]
    for n in range(30):
        index.add(f"n{n}", hashes[: n + 5])
    stopping, errors, num_asked = threading.Event(), [], Counter()

    def ask():
        try:
            while not stopping.is_set():
                index.locate(hashes)
                index.nodes()
                num_asked["times"] += 1
        except Exception as error:  # noqa: BLE001 - told below.
            errors.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    router = threading.Thread(target=ask)
    router.start()
    try:
        for n in range(3000):
            index.forget(f"n{n % 30}")
            index.add(f"n{n % 30}", hashes[: n % 30 + 5])
    finally:
        sys.setswitchinterval(interval_s)
        stopping.set()
        router.join(10)
    assert errors == []
    assert num_asked["times"] > 0


def test_it_agrees_with_sets_while_tables_grow_move_and_are_swept():
    rng, index, model = random.Random(3), DirectoryIndex(), {}
    hashes = [rng.randbytes(32) for _ in range(12_000)]
    for step in range(400):
        node = f"n{rng.randrange(9)}"
        act, start = rng.random(), rng.randrange(len(hashes))
        picked = hashes[start : start + rng.choice((1, 30, 3000))]
        if act < 0.6:
            index.add(node, b"".join(picked))
            model.setdefault(node, set()).update(picked)
        elif act < 0.85:
            index.remove(node, b"".join(picked))
            model.setdefault(node, set()).difference_update(picked)
        elif act < 0.9:
            index.forget(node)
            model.pop(node, None)
        else:
            index.sweep(rng.choice((1, 500, 10_000)))
        run = hashes[start : start + rng.choice((1, 5, 1000))]
        lengths = {
            node: next((i for i, h in enumerate(run) if h not in held), len(run)) for node, held in model.items()
        }
        assert index.walk(b"".join(run)) == sorted(
            ((node, count) for node, count in lengths.items() if count), key=lambda item: (-item[1], item[0])
        ), step
        found = dict(index.locate(b"".join(run)))
        assert found.keys() == {node for node, count in lengths.items() if count}, step
        for node, count in found.items():
            # These nodes have holes: what is said may go on behind one, and ends where a block is lacking.
            assert count >= lengths[node], step
            assert run[count - 1] in model[node], step
            assert count == len(run) or run[count] not in model[node], step
    while index.is_sweeping:
        index.sweep()
    assert len(index) == len(set().union(*model.values()))


def test_a_bit_that_is_swept_while_the_table_grows_is_clean_when_it_is_used_again():
    index, rng = DirectoryIndex(), random.Random(5)
    hashes = [rng.randbytes(32) for _ in range(200_000)]
    common = hashes[:60_000]
    index.add("a", common)
    index.add("b", common)
    while index.is_sweeping:
        index.sweep()
    num_free = int(num_places(index) * MAX_LOAD) - len(index)
    index.forget("b")
    assert index.is_sweeping
    index.add("c", hashes[60_000:][: num_free - 10])
    index.add("c", common + hashes[-20_000:])  # Names what was b's, and needs a larger table.
    while index.is_sweeping:
        index.sweep()
    index.add("d", hashes[-1:])
    assert [each for each in common[::50] if ("d", 1) in index.locate([each])] == []


@pytest.fixture
def tables(monkeypatch):
    """The tables of indexes that are made here, where tables of 16,384 places are large."""
    monkeypatch.setattr(directory_index, "_LARGE_PLACES", 1 << 14)
    monkeypatch.setattr(directory_index, "_TOUCHED_PLACES", 1 << 9)
    made = []

    class Table(HintTable):
        def __init__(self, *args):
            super().__init__(*args)
            self.pieces, self.num_left = [], None
            made.append(self)

        def touch(self, num_places):
            before = self.num_untouched
            is_done = super().touch(num_places)
            self.pieces.append((before - self.num_untouched) / self.num_places)
            return is_done

        def add(self, keys, bits):
            if self.num_left is None:
                self.num_left = self.num_untouched
            super().add(keys, bits)

    monkeypatch.setattr(directory_index, "HintTable", Table)
    return made


def test_a_large_table_is_followed_by_one_whose_memory_was_touched_before_in_small_pieces(tables):
    index, model = DirectoryIndex(), set[bytes]()
    for n in range(1200):
        batch = random.Random(n).randbytes(32 * 100)
        index.add("a", batch)
        model.update(batch[at : at + 32] for at in range(0, len(batch), 32))
    followers = [table for table in tables if table.num_places > 1 << 14]
    assert len(followers) >= 3
    assert {table.num_left for table in followers} <= {0, None}, "at the first key, or it has none yet"
    assert max(piece for table in followers for piece in table.pieces) < 0.1
    assert len(index) == len(model)
    assert all(index.locate([own]) == [("a", 1)] for own in list(model)[::97])


def test_a_next_table_gets_wider_with_the_others(tables):
    index = DirectoryIndex()
    for n in range(96):
        index.add("a", random.Random(n).randbytes(32 * 100))
    assert tables[-1].pieces, "it waits for its first key"
    for n in range(70):
        index.add(f"n{n}", random.Random(2).randbytes(32))
    index.add("a", random.Random(300).randbytes(32 * 9000))
    assert tables[-1].num_left is not None
    assert len(index.locate(random.Random(2).randbytes(32))) == 71, "and the first node, which has that block, too"


def test_what_makes_a_large_table_wider_is_touched_in_steps_before_the_65th_life_comes(tables, monkeypatch):
    index, left = DirectoryIndex(), list[bool]()
    for n in range(56):
        index.add(f"n{n}", random.Random(n).randbytes(32 * 150))
    while index.is_sweeping:
        index.sweep()
    before = index.num_bytes
    assert not tables[-1].is_ready_to_widen
    index.add("n56", random.Random(1).randbytes(32))
    num_steps = 0
    while index.is_sweeping:
        index.sweep(100)
        num_steps += 1
    assert num_steps == tables[-1].num_places // (1 << 9)
    assert index.num_bytes == before * 3 // 2
    widen = HintTable.widen
    monkeypatch.setattr(
        HintTable, "widen", lambda table, num: left.append(table.is_ready_to_widen) or widen(table, num)
    )
    for n in range(57, 70):
        index.add(f"n{n}", random.Random(1).randbytes(32))
    assert left == [True]
    assert index.num_bytes == before * 3 // 2
    assert index.locate(random.Random(1).randbytes(32)) == sorted((f"n{n}", 1) for n in (1, *range(56, 70)))


def test_an_entry_for_more_lives_is_larger_so_there_are_fewer():
    index, hashes = DirectoryIndex(max_entries=90), [random.Random(n).randbytes(32) for n in range(100)]
    for n in range(70):
        index.add(f"n{n}", hashes[:1])
    index.add("a", hashes)
    assert (len(index), index.num_dropped) == (60, 40)


def test_no_call_moves_much_of_a_table_that_is_nearly_empty(monkeypatch):
    index, moved, entries = DirectoryIndex(), Counter(), HintTable.entries

    def count(table, start, stop):
        moved[step] += stop - start
        return entries(table, start, stop)

    index.add("large", random.Random(1).randbytes(32 * 100_000))
    while index.is_sweeping:
        index.sweep()
    index.forget("large")
    while index.is_sweeping:
        index.sweep()
    num_old = num_places(index)
    monkeypatch.setattr(HintTable, "entries", count)
    for step in range(1000):
        hashes = random.Random(step).randbytes(32 * 200)
        index.add("small", hashes)
        index.remove("small", hashes)
        if sum(moved.values()) >= num_old:
            break
    assert sum(moved.values()) >= num_old, "the old table was moved"
    assert max(moved.values()) <= num_old // 16


def test_hundreds_of_nodes_have_a_bit_each():
    index, hashes = DirectoryIndex(), [i.to_bytes(32, "little") for i in range(300)]
    for n in range(200):
        index.add(f"n{n:03}", hashes[: n + 1])
    assert index.locate(hashes) == [(f"n{n:03}", n + 1) for n in reversed(range(200))]
    for n in range(0, 200, 2):
        index.forget(f"n{n:03}")
    index.add("new", hashes)
    assert index.locate(hashes) == [("new", 300), *((f"n{n:03}", n + 1) for n in range(199, 0, -2))]


def test_a_full_index_notes_no_more_and_says_so():
    index, hashes = DirectoryIndex(max_entries=5), [i.to_bytes(32, "little") for i in range(8)]
    index.add("a", hashes[:4])
    index.add("b", hashes)
    assert index.locate(hashes) == [("b", 5), ("a", 4)]
    assert (len(index), index.num_dropped) == (5, 3)
    index.remove("b", hashes)
    index.add("b", hashes[4:])
    assert (len(index), index.num_dropped) == (5, 6)


def test_an_entry_takes_at_most_64_bytes():
    index = DirectoryIndex()
    for n in range(1, 40):
        index.add("a", random.Random(n).randbytes(32 * 5000))
        if not index.is_sweeping:
            assert index.num_bytes <= 64 * len(index)


def test_a_node_that_flaps_does_not_make_the_table_wider():
    index, hashes = DirectoryIndex(), [i.to_bytes(32, "little") for i in range(3 * SWEEP_PLACES)]
    index.add("a", hashes)
    while index.is_sweeping:
        index.sweep()
    before = index.num_bytes
    for life in range(1, 200):
        index.add("b", hashes[:1], life)
        index.forget("b", life)
    assert index.num_bytes == before
    assert index.locate(hashes) == [("a", len(hashes))]


def test_of_a_chain_that_has_no_room_the_end_is_left_out():
    index, hashes = DirectoryIndex(max_entries=50), [random.Random(n).randbytes(32) for n in range(100)]
    index.add("a", hashes)
    assert index.locate(hashes) == [("a", 50)]


def test_long_prompts_are_located_while_the_table_is_moved():
    index, rng = DirectoryIndex(), random.Random(1)
    prompt, lengths, num_moving = [rng.randbytes(32) for _ in range(500)], set(), 0
    index.add("a", prompt)
    index.add("b", prompt[:77])
    while num_moving < 20:
        index.add("c", [rng.randbytes(32) for _ in range(20)])
        num_moving += index.is_sweeping
        lengths.add(tuple(index.locate(prompt)))
    assert lengths == {(("a", 500), ("b", 77))}
    assert index.num_walked == 0

"""The index of a directory alone: prefixes, lives of nodes, and what forgetting costs."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvstore.remote.directory_index import SWEEP_BLOCKS, DirectoryIndex
from poolcheck.chains import chain_of


def locate(index: DirectoryIndex, tokens: str) -> list[tuple[str, int]]:
    return index.locate(chain_of(tokens).hashes())


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
    index, hashes = DirectoryIndex(), [i.to_bytes(32, "little") for i in range(2 * SWEEP_BLOCKS + 10)]
    index.add("a", hashes)
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
    assert num_steps == 2
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

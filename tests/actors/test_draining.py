"""Whom a drain asks to take chains, and what it says where nobody does; without Ray."""

from __future__ import annotations

import pytest

from kvstore.actors import draining
from kvstore.errors import StoreDraining

LEFT = {"num_leases": 0, "num_writes": 0, "num_handoffs": 0, "is_drained": True}


class Node:
    def __init__(self, chains=(), takes=0):
        self._chains, self._takes = list(chains), takes

    def begin_drain(self, max_bytes):
        return self._chains

    def tenants_of(self, chains):
        return [""] * len(chains)

    def adopt(self, chains, timeout_s, tenants):
        if isinstance(self._takes, Exception):
            raise self._takes
        return self._takes

    def drain(self, timeout_s):
        return LEFT


def drained(monkeypatch, chains, *others):
    monkeypatch.setattr(draining, "call", lambda what, method, *args, timeout_s: method(*args))
    nodes = {"a": Node(chains)} | {f"n{number}": Node(takes=takes) for number, takes in enumerate(others)}
    result = draining.drain_node("a", nodes, 1.0, 100)
    assert LEFT.items() <= result.items()
    return result["num_handed_over"], result["why_none"]


def test_a_node_that_takes_none_does_not_keep_the_next_one_from_being_asked(monkeypatch):
    assert drained(monkeypatch, [b"c"], 0, StoreDraining("it is drained"), 7, 9) == (7, "")


@pytest.mark.parametrize(
    ("chains", "others", "says"),
    [
        ([], [5], "the node has no blocks to hand over"),
        ([b"c"], [], "no other node has a store"),
        ([b"c"], [0], "node n0: no client with a namespace of these blocks has attached there"),
        ([b"c"], [StoreDraining("it is drained")], "node n0: it is drained"),
    ],
)
def test_where_nobody_takes_them_the_result_says_why(monkeypatch, chains, others, says):
    num_handed_over, why_none = drained(monkeypatch, chains, *others)
    assert num_handed_over == 0
    assert why_none.startswith(says)

"""A store that is not there yet, goes away, and comes back."""

from __future__ import annotations

import pytest
from router_made import SPACE, chain

from kvstore.errors import PeerLost, StoreNotRunning
from kvstore.integrations.serve.source import StoreSource, first_count, first_space
from kvstore.integrations.space_text import space_to_text


class Stores:
    """Opens stores, each of which gives some answers."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.opened = []

    def open(self, name, *, address, timeout_s):
        self.opened.append((name, address))
        return self

    def locate(self, hashes):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_store_is_opened_once_and_asked():
    stores = Stores([("n", 2)], [])
    source = StoreSource("mine", "host:1", stores.open)

    assert source.locate(chain(1, 2)) == [("n", 2)]
    assert source.locate(chain(1, 2)) == []
    assert stores.opened == [("mine", "host:1")]


def test_a_store_that_ended_is_opened_again_and_one_that_is_slow_is_not():
    stores = Stores(PeerLost("late"), StoreNotRunning("gone"), [("n", 1)])
    source = StoreSource("mine", None, stores.open)

    for error in (PeerLost, StoreNotRunning):
        with pytest.raises(error):
            source.locate(chain(1))
    assert source.locate(chain(1)) == [("n", 1)]
    assert len(stores.opened) == 2


def test_the_first_worker_that_knows_its_namespace_counts():
    assert first_space(["", space_to_text(SPACE)]) == SPACE
    assert first_space(["", "{}"]) is None
    assert first_space([]) is None


def test_the_worker_that_has_least_room_counts():
    assert first_count([0, 640, 320]) == 320
    assert first_count([0, None, True, "64"]) == 0
    assert first_count([]) == 0

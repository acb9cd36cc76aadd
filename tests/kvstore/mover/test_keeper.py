"""That there is one mover, and another when it does not come or goes. With processes: tests/faults."""

from __future__ import annotations

import threading

import pytest

from kvstore.errors import PeerLost, TransferTimeout
from kvstore.mover.keeper import MoverKeeper

CANNOT_BE_ENDED = TransferTimeout("hangs, and so does the cluster")


class Store:
    """What a keeper sees of its store, and movers that come up as they are told."""

    def __init__(self):
        self.ready, self.movers = threading.Event(), []
        self.coming_up, self.not_starting = [], []
        self.keeper = MoverKeeper("n", self.start, self.ready.wait, ready_within_s=0.05, pause_s=0.01)

    def start(self):
        assert not any(mover.runs for mover in self.movers), "two movers at once"
        if self.not_starting:
            raise self.not_starting.pop(0)
        self.movers.append(Started(self, self.coming_up.pop(0) if self.coming_up else "well"))
        return self.movers[-1]


class Started:
    def __init__(self, store, how):
        self.store, self.how, self.runs = store, how, True

    def wait_started(self, timeout_s):
        if isinstance(self.how, Exception):
            self.runs = False
            raise self.how
        if self.how == "well":
            self.store.ready.set()

    def kill(self):
        if self.how is CANNOT_BE_ENDED:
            raise PeerLost("the cluster cannot be asked")
        self.runs = False


@pytest.fixture(name="store")
def _store():
    made = Store()
    yield made
    made.keeper.stop()


@pytest.mark.parametrize("how", [PeerLost("died"), TransferTimeout("hangs"), "without a word"], ids=repr)
def test_one_that_does_not_come_up_is_ended_and_tried_again(store, how):
    """Also the first: it cannot connect while its store is stopped."""
    store.coming_up = [how, how]
    store.keeper.start()
    assert store.ready.wait(5)
    assert [mover.runs for mover in store.movers] == [False, False, True]


@pytest.mark.parametrize("error", [RuntimeError("the GCS is away"), PeerLost("the GCS is away")], ids=repr)
def test_one_that_cannot_be_started_is_tried_again_whatever_was_raised(store, error):
    store.not_starting = [error, error]
    store.keeper.start()
    assert store.ready.wait(5)
    assert [mover.runs for mover in store.movers] == [True]


@pytest.mark.parametrize("how", [RuntimeError("what nobody thought of"), CANNOT_BE_ENDED], ids=repr)
def test_one_that_fails_in_an_unforeseen_way_does_not_end_the_keeper(store, how):
    store.coming_up = [how]
    store.keeper.start()
    assert store.ready.wait(5)
    assert len(store.movers) == 2


def test_one_that_is_gone_is_replaced(store):
    store.keeper.start()
    assert store.ready.wait(5)
    store.movers[0].runs = False
    store.ready.clear()
    store.keeper.replace()
    assert [mover.runs for mover in store.movers] == [False, True]


def test_who_asks_for_another_while_there_is_one_gets_none(store):
    store.keeper.start()
    assert store.ready.wait(5)
    store.keeper.replace()
    assert len(store.movers) == 1


def test_after_the_end_there_is_none_and_none_is_started(store):
    store.keeper.start()
    assert store.ready.wait(5)
    store.keeper.stop()
    store.ready.clear()
    store.keeper.replace()
    assert [mover.runs for mover in store.movers] == [False]


def test_the_end_waits_for_no_pause(store):
    store.keeper._pause_s = 20.0
    store.ready.set()
    store.keeper.start()
    store.ready.clear()
    trying = threading.Thread(target=store.keeper.replace)
    trying.start()
    store.keeper.stop()
    trying.join(5)
    assert not trying.is_alive()

"""From a change of weights until the store was cleared an engine goes without the store."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from sides import request, scheduler_side


class Link:
    """To a store that is away until `is_away` is set to False."""

    def __init__(self):
        self.is_away, self.num_tries, self.num_cleared = True, 0, 0

    def clear(self):
        self.num_tries += 1
        self.num_cleared += not self.is_away
        return "no store could be asked; nothing was cleared" if self.is_away else ""

    def client(self):
        return None


@pytest.fixture
def closed(monkeypatch):
    """A scheduler's half with a thread, that was told of new weights while the store was away."""
    from kvstore.integrations.vllm import options, stats
    from kvstore.integrations.vllm.scheduler_side import lookups

    monkeypatch.setattr(lookups, "CLEAR_PAUSE_S", 0.01)
    made = scheduler_side()
    made.link = Link()
    made.begin(request("before"))
    thread = lookups.Lookups(made.link, options.Options(), stats.Stats(), threading.Event(), made.work)
    assert not made.reset()
    yield made
    thread.close()


def stored(question):
    """Answer that all of a prompt is stored."""
    question.num_blocks, question.done = len(question.hash_all()), True


def test_after_a_clearing_that_failed_nothing_is_loaded_or_saved_until_one_works(closed, eventually, caplog):
    """vLLM does not look at what its reset returns."""
    closed.lookups.ask = stored
    for name in ("before", "meanwhile"):
        asked = request(name, 64, kv_transfer_params={"do_remote_decode": True})
        assert closed.match(asked, 0) == (0, False)
        closed.allocated(asked, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 0)
    assert not closed.next_plan.loads
    assert not closed.tracked["before"].may_save
    assert "meanwhile" not in closed.tracked
    eventually(lambda: closed.link.num_tries > 3, 5)
    assert not closed.cleared.is_set()
    closed.link.is_away = False
    eventually(lambda: closed.cleared.is_set(), 5)
    assert closed.match(request("after", 64), 0) == (64, True)
    assert closed.tracked["after"].may_save
    said = [each.message for each in (*caplog.get_records("setup"), *caplog.records) if "this engine" in each.message]
    assert len(said) == 2, "one line when it closes, and one when it opens"
    assert "nothing was cleared" in said[0]
    assert closed.link.num_cleared == 1


def test_a_later_clearing_that_works_ends_the_tries_of_an_earlier_one(closed, eventually):
    eventually(lambda: closed.link.num_tries > 2, 5)
    closed.link.clear, clear = lambda: "", closed.link.clear
    assert closed.reset()
    assert closed.cleared.is_set()
    eventually(closed.work.empty, 5)
    closed.link.clear = clear
    num_tries = closed.link.num_tries
    time.sleep(0.1)
    assert closed.link.num_tries <= num_tries + 1


def test_saves_of_before_end_before_the_clearing_that_counts(closed, eventually):
    from kvstore.integrations.vllm.plan import WorkerReport

    closed.link.is_away, closed.tracked["before"].num_saves_open = False, 1
    assert closed.reset()
    assert closed.next_plan.drop_saves
    assert not closed.cleared.is_set()
    num_cleared = closed.link.num_cleared
    assert closed.match(request("meanwhile", 64), 0) == (0, False)
    closed.heard(set(), WorkerReport(num_drops=1))
    eventually(lambda: closed.cleared.is_set(), 5)
    assert closed.link.num_cleared > num_cleared


def test_new_weights_before_the_store_is_there_are_not_forgotten():
    """Beside other connectors the store is found in the first step; a trainer may replace the weights before that."""
    side = scheduler_side()
    side.is_open = False
    assert not side.reset()
    side.is_open = True
    assert side.match(request("first", 64), 0) == (0, False)
    assert "first" not in side.tracked
    assert side.work.get_nowait() is side.cleared, "the thread of lookups begins with it"


def test_what_vllm_keeps_of_before_in_its_own_cache_is_never_stored(closed, eventually):
    """Its own cache is not cleared while requests use blocks: it says so, and its callers do not look."""
    in_use = [3]
    closed.link.is_away = False
    closed.own_blocks = SimpleNamespace(num_gpu_blocks=10, get_num_free_blocks=lambda: 10 - in_use[0])
    assert not closed.reset()
    assert closed.link.num_cleared == 1, "others must not load what is stored"
    in_use[0] = 1  # vLLM's null block: all requests have ended, but what they left can still be hit.
    eventually(closed.work.empty, 5)
    assert closed.match(request("hits it", 64), 0) == (0, False)
    assert not closed.cleared.is_set()
    assert closed.reset()
    assert closed.cleared.is_set()

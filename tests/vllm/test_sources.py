"""Where loaded tokens come from, as vLLM counts its cache hits: by the tier that had each block at the lookup."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sides import SIZE, request, scheduler_side


class Blocks:
    """Of an engine, for a load of five stored blocks."""

    blocks = ((),)

    def get_block_ids(self):
        return (list(range(5)),)


@pytest.fixture
def side():
    """A scheduler's half whose store has two blocks in memory, one on disk, and two on another node."""

    class Lookups:
        num_unhashed_tokens = 0

        def ask(self, question):
            question.hash_all()
            question.num_local, question.num_here, question.num_blocks = 2, 3, 5
            question.done = True

    made = scheduler_side()
    made.lookups = Lookups()
    return made


def tokens(side, num_engine_tokens, num_tokens=None):
    """Plan a load of what the store has behind the engine's own; say where its tokens come from."""
    from kvstore.integrations.vllm.scheduler_side.tracked import tokens_by_tier

    asked = request(num_tokens=5 * SIZE + 3)
    found, _ = side.match(asked, num_engine_tokens)
    num_tokens = found if num_tokens is None else num_tokens
    side.allocated(asked, Blocks(), num_tokens)
    counts = tokens_by_tier(side.tracked[asked.request_id], SIZE, num_tokens)
    assert sum(counts.values()) == num_tokens
    assert all(counts.values())
    return counts


def test_each_block_counts_for_its_tier(side):
    assert tokens(side, 0) == {"HOST": 2 * SIZE, "DISK": SIZE, "P2P": 2 * SIZE}


def test_what_the_engine_has_itself_counts_for_none(side):
    assert tokens(side, SIZE) == {"HOST": SIZE, "DISK": SIZE, "P2P": 2 * SIZE}


def test_an_engine_that_has_part_of_a_tier(side):
    assert tokens(side, 2 * SIZE + 5) == {"DISK": SIZE - 5, "P2P": 2 * SIZE}


def test_a_load_that_is_shorter_than_what_was_found(side):
    assert tokens(side, 0, SIZE + 7) == {"HOST": SIZE + 7}


def test_what_is_handed_off_comes_from_another_engine():
    from kvstore.integrations.vllm.scheduler_side.tracked import Tracked, tokens_by_tier

    question = SimpleNamespace(num_local=4, num_here=4)
    tracked = Tracked(request(), question=question, is_fetching=True)
    assert tokens_by_tier(tracked, SIZE, 3 * SIZE) == {"P2P": 3 * SIZE}


def test_where_vllm_has_no_names_for_tiers_nothing_is_said(side, monkeypatch):
    from kvstore.integrations.vllm.scheduler_side import tracked

    tokens(side, 0)
    monkeypatch.setattr(tracked, "CacheHitSource", None)
    assert tracked.hits_by_source(side.tracked["r"], SIZE, 5 * SIZE) == {}


def test_the_names_are_those_of_vllm(side):
    """Releases without them, which never ask, leave this out."""
    names = pytest.importorskip("vllm.v1.metrics.cache_hit_source").CacheHitSource
    from kvstore.integrations.vllm.connector import RaykvConnector

    tokens(side, 0)
    connector = SimpleNamespace(scheduler_side=side, stats=side.stats)
    counts = RaykvConnector.get_external_cache_hit_sources(connector, side.tracked["r"].request, 5 * SIZE)
    assert counts == {names.HOST: 2 * SIZE, names.DISK: SIZE, names.P2P: 2 * SIZE}
    unknown = RaykvConnector.get_external_cache_hit_sources(connector, request("another"), 5 * SIZE)
    assert unknown == {}

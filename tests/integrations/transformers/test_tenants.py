"""Models of tenants and salts on one store: the same prompt is found by its own tenant and salt only."""

from __future__ import annotations

import pytest
import torch

GREEDY = {"max_new_tokens": 4, "do_sample": False}


def test_a_prompt_is_found_by_its_own_tenant_and_salt_only(build, tokens, wrap, private_store):
    prompt = tokens(50)
    alone = build().generate(prompt, **GREEDY)
    ways = [{"tenant": "b"}, {"tenant": "a"}, {}, {"tenant": "b", "salt": b"other"}, {"salt": b"other"}]
    wrapped = [wrap(build(), private_store, **way) for way in ways]
    assert len({cached.space.digest for cached in wrapped}) == len(ways)
    for cached in (*wrapped, *wrapped):
        assert torch.equal(cached.generate(prompt, **GREEDY), alone)
    # Each missed once, and found what it had saved itself the second time.
    assert [cached.stats.num_loaded_tokens for cached in wrapped] == [48] * len(ways)


def test_a_model_at_its_tenants_quota_saves_less_and_says_so(build, tokens, wrap, private_store):
    cached = wrap(build(), private_store, tenant="a")
    cached.generate(tokens(100), **GREEDY)
    assert (cached.stats.num_saved_blocks, cached.stats.num_refused_blocks) == (3, 3)
    said = private_store.cluster.nodes["a"].stats()["tenants"]["a"]
    assert said["num_refused_bytes"] == 3


def test_a_tenant_that_the_store_has_not_is_refused(build, wrap, private_store):
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match="it has a, b"):
        wrap(build(), private_store, tenant="c")

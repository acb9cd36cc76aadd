"""The settings of a router."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.integrations.serve.options import RouterOptions


def test_a_tokenizer_is_enough():
    assert RouterOptions.parse({"tokenizer": "x"}).store == "default"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "'tokenizer'"),
        ({"tokenizer": ""}, "'tokenizer'"),
        ({"tokenizer": "x", "speed": 1}, "'speed'"),
        ({"tokenizer": "x", "store": 5}, "'store'"),
        ({"tokenizer": "x", "block_size": 0}, "'block_size'"),
        ({"tokenizer": "x", "block_size": 16.0}, "'block_size'"),
        ({"tokenizer": "x", "store_wait_s": 0}, "'store_wait_s'"),
        ({"tokenizer": "x", "hint_ttl_s": float("nan")}, "'hint_ttl_s'"),
        ({"tokenizer": "x", "prefill_tokens_per_s": True}, "'prefill_tokens_per_s'"),
        ({"tokenizer": "x", "fetch_bytes_per_s": -1}, "'fetch_bytes_per_s'"),
        ({"tokenizer": "x", "evict_weight": -1}, "'evict_weight'"),
        ({"tokenizer": "x", "cache_tokens": 0}, "'cache_tokens'"),
        ({"tokenizer": "x", "cache_tokens": 1e4}, "'cache_tokens'"),
    ],
)
def test_a_setting_that_cannot_work_is_named(given, named):
    with pytest.raises(ConfigError, match=named):
        RouterOptions.parse(given)

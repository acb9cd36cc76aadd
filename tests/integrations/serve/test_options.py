"""The settings of a router."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from kvstore.errors import ConfigError
from kvstore.integrations.serve.options import RouterOptions, check_routers


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
        ({"tokenizer": "x", "space": "garbage"}, "'space'"),
        ({"tokenizer": "x", "store": "a/b c"}, "name"),
    ],
)
def test_a_setting_that_cannot_work_is_named(given, named):
    with pytest.raises(ConfigError, match=named):
        RouterOptions.parse(given)


ROUTERS = tuple(f"kvstore.integrations.serve{place}PrefixRouter" for place in (".", ":", ".router.", ".router:"))


def config(**router):
    return {"deployment_config": {"num_replicas": 1, "request_router_config": router}}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("place", ["prefill_config", "decode_config", "llm_configs"])
def test_options_that_a_router_would_refuse_are_found_in_the_arguments_of_a_builder(router, place):
    def args(**options):
        one = config(request_router_class=router, request_router_kwargs=options)
        return {place: [config(), one] if place == "llm_configs" else one}

    check_routers(args(tokenizer="x"))
    with pytest.raises(ConfigError, match="hint_ttl"):
        check_routers(args(tokenizer="x", hint_ttl=60))
    with pytest.raises(ConfigError, match="tokenizer"):
        check_routers({place: args()[place]})


@pytest.mark.parametrize(
    "wrong", [{"tokenizer": "x", "hint_ttl": 60}, {1: 2, "a": 3}, {None: 1}, 5, True, ["tokenizer"], "", ()]
)
def test_options_in_what_ray_makes_of_a_config_or_of_a_path_are_checked_too(wrong):
    made = SimpleNamespace(**config(request_router_class=ROUTERS[0], request_router_kwargs=wrong))
    router = SimpleNamespace(request_router_class=ROUTERS[0], request_router_kwargs=wrong)
    within = {"deployment_config": {"request_router_config": router}}
    for config_ in (made, within):
        with pytest.raises(ConfigError, match="request_router_kwargs"):
            check_routers({"decode_config": config_})
    with pytest.raises(ConfigError, match="request_router_kwargs"):
        check_routers({"llm_configs": ["/a/path"]}, {"/a/path": made}.get)


@pytest.mark.parametrize("of", [tuple, iter, deque, lambda configs: dict.fromkeys(range(1), configs[0]).values()])
def test_any_iterable_of_configs_is_checked_and_left_for_ray(of):
    wrong = config(request_router_class=ROUTERS[0], request_router_kwargs={"hint_ttl": 60})
    with pytest.raises(ConfigError, match="hint_ttl"):
        check_routers({"llm_configs": of([wrong])})
    right = config(request_router_class=ROUTERS[0], request_router_kwargs={"tokenizer": "x"})
    given = {"llm_configs": of([right]), "runner": 1}
    assert check_routers(given) == {"llm_configs": [right], "runner": 1}


@pytest.mark.parametrize("args", [None, ["x"], "x", 5])
def test_arguments_that_are_no_mapping_are_refused(args):
    with pytest.raises(ConfigError, match="args: wanted a mapping"):
        check_routers(args)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"prefill_config": config(request_router_class="ray.serve.Other", request_router_kwargs={"speed": 1})},
        {"prefill_config": "a path", "llm_configs": None},
        {"llm_configs": ["a path", {"deployment_config": None}], "decode_config": {"deployment_config": {}}},
    ],
)
def test_what_has_no_router_of_ours_is_left_to_ray(args):
    check_routers(args)

"""A copy of a model with short windows answers as a model that was made with them, and leaves the model alone."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
import transformers

from kvstore.integrations.transformers.cache.columns import new_cache, windows_of
from kvstore.integrations.transformers.cache.narrowed import narrowed

LOGITS = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@pytest.mark.parametrize(
    ("family", "attention"),
    [("Mistral", "sdpa"), ("Mistral", "eager"), ("Qwen2", "sdpa"), ("Gemma2", "eager"), ("Gemma3", "sdpa")],
)
def test_it_is_the_model_with_shorter_windows(build_windowed, tokens, family, attention):
    model = build_windowed(family, attn_implementation=attention)
    short = build_windowed(family, attn_implementation=attention, sliding_window=4)
    before, prompt = model.generate(tokens(40), **LOGITS), tokens(40)
    found, wanted = narrowed(model, 4).generate(prompt, **LOGITS), short.generate(prompt, **LOGITS)
    assert all(map(torch.equal, found.logits, wanted.logits))
    assert not torch.equal(found.logits[0], before.logits[0])
    assert all(map(torch.equal, model.generate(prompt, **LOGITS).logits, before.logits))


def test_it_shares_the_weights_and_changes_nothing_else(build_windowed):
    model = build_windowed("Gemma3")
    states = [(each, copy.copy(vars(each))) for each in (model.config, *model.modules())]
    made = narrowed(model, 4)
    assert [each.data_ptr() for each in made.parameters()] == [each.data_ptr() for each in model.parameters()]
    assert set(windows_of(new_cache(made))) == {4}
    assert set(windows_of(new_cache(model))) == {24}
    assert made.model.config is made.config
    for each, state in states:
        assert vars(each).keys() == state.keys()
        assert all(vars(each)[name] is value for name, value in state.items())


def test_a_window_that_is_shorter_stays(build_windowed):
    assert set(windows_of(new_cache(narrowed(build_windowed(sliding_window=3), 4)))) == {3}


class Renamed(transformers.MistralConfig):
    attribute_map: ClassVar = {"sliding_window": "window_tokens"}


def test_a_window_with_another_name_in_the_config(build_windowed):
    model = transformers.MistralForCausalLM(Renamed(**(build_windowed().config.to_dict() | {"window_tokens": 24})))
    assert set(windows_of(new_cache(model))) == {24}
    assert set(windows_of(new_cache(narrowed(model, 4)))) == {4}

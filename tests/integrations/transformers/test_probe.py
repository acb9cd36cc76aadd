"""A model is tried out when it is wrapped: what it makes of positions and padding lies in its own code."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from kvstore.errors import InvalidRequest, UnsupportedModel

GREEDY = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
PAD = 7


class DropsPositions(transformers.LlamaForCausalLM):
    """Counts positions from the first column, padding included, as HyperCLOVAX Vision does."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return super().prepare_inputs_for_generation(*args, **kwargs) | {"position_ids": None}


class CountsByTokens(transformers.LlamaForCausalLM):
    """Counts the tokens that are not the pad token, as Kosmos-2.5 does; those in the cache it takes for tokens."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return super().prepare_inputs_for_generation(*args, **kwargs) | {"position_ids": None}

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, cache=None, **kwargs):
        cache = past_key_values if cache is None else cache  # Its name varies.
        counted = input_ids.ne(PAD).long().cumsum(1) - 1 + cache.get_seq_length()
        return super().forward(input_ids, attention_mask, counted, cache, **kwargs)


class ThreePositions(transformers.LlamaForCausalLM):
    """Gives each token three positions, as models of images do."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        found = super().prepare_inputs_for_generation(*args, **kwargs)
        return found | {"position_ids": found["position_ids"][None].expand(3, -1, -1)}

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, cache=None, **kwargs):
        cache = past_key_values if cache is None else cache
        positions = None if position_ids is None else position_ids[0]
        return super().forward(input_ids, attention_mask, positions, cache, **kwargs)


class LooksAhead(transformers.LlamaForCausalLM):
    """Adds to each token a part of the next one, if that is in the same run."""

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        found = self.model.embed_tokens(input_ids)
        found[:, :-1] += 0.5 * found[:, 1:]
        return super().forward(inputs_embeds=found, **kwargs)


class BothWays(transformers.LlamaForCausalLM):
    """Attends to all tokens of a run, and says so in no config."""

    def forward(self, *args, **kwargs):
        self.config.is_causal = False
        try:
            return super().forward(*args, **kwargs)
        finally:
            del self.config.is_causal


@pytest.fixture
def make(build):
    def make(kind, **changes):
        model = build(**changes)
        made = kind(model.config).eval()
        made.load_state_dict(model.state_dict())
        return made

    return make


def padded(tokens):
    """Two prompts, the first one with padding; and their mask."""
    short, long = tokens(64), tokens(96, 9)
    rows = torch.cat([torch.cat([torch.full((1, 32), 3), short], 1), long])
    mask = torch.ones_like(rows)
    mask[0, :32] = 0
    return short, rows, mask


def test_no_padding_where_positions_are_dropped(make, wrap, tokens):
    model = make(DropsPositions)
    short, rows, mask = padded(tokens)
    cached = wrap(model)
    with pytest.raises(InvalidRequest, match="one length"):
        cached.generate(rows, attention_mask=mask, **GREEDY)
    for _ in range(2):
        answer, wanted = cached.generate(short, **GREEDY), model.generate(short, **GREEDY)
        assert torch.equal(answer.sequences, wanted.sequences)
        assert torch.allclose(answer.logits[0], wanted.logits[0], atol=1e-5)
    assert cached.stats.num_loaded_tokens == 48


def test_rows_without_positions_are_not_saved_where_one_has_padding(build, wrap, tokens):
    model = build()
    short, rows, mask = padded(tokens)
    cached = wrap(model, save_generated=True)
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda input_ids, **kwargs: (
        prepare(input_ids, **kwargs) | {"position_ids": None}
    )
    cached.generate(rows, attention_mask=mask, **GREEDY)
    assert cached.stats.num_saved_blocks == 0
    cached.generate(short, **GREEDY)
    assert cached.stats.num_saved_blocks == 4


@pytest.mark.parametrize("where", ["config", "generation_config"])
def test_positions_that_tokens_decide(make, wrap, store, where):
    model = make(CountsByTokens)
    getattr(model, where).pad_token_id = PAD
    with pytest.raises(UnsupportedModel, match="filled cache"):
        wrap(model)
    assert store.num_opened == 0


def test_several_positions_of_one_token(make, wrap):
    with pytest.raises(UnsupportedModel, match="M-RoPE"):
        wrap(make(ThreePositions))


@pytest.mark.parametrize("kind", [LooksAhead, BothWays])
def test_a_prefix_that_changes_with_what_comes_behind_it(make, wrap, store, kind):
    with pytest.raises(UnsupportedModel, match="tokens behind it"):
        wrap(make(kind, initializer_range=0.2))
    assert store.num_opened == 0


def test_attention_in_both_directions_in_half_precision(make, wrap):
    with pytest.raises(UnsupportedModel, match="tokens behind it"):
        wrap(make(BothWays, initializer_range=0.2).to(torch.bfloat16))


def test_it_costs_four_short_runs(build, wrap):
    model, seen = build(), []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True)
    wrap(model, model_id="hooked")
    assert len(seen) == 1 + 4, "one token for the shape of the KV, and four runs"
    assert sum(seen) < 80


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3", "GPTNeoX", "GPT2"])
def test_models_that_pass(build, wrap, tokens, family, dtype):
    _, rows, mask = padded(tokens)
    cached = wrap(build(family, dtype=dtype, initializer_range=0.2), model_id="random")
    cached.generate(rows, attention_mask=mask, **GREEDY)
    assert cached.stats.num_saved_blocks == 4 + 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_that_the_cache_has_and_the_masks_have_not(build, wrap, store, dtype):
    model = build("Llama", sliding_window=4096, dtype=dtype)  # As in a config that was another family's.
    with pytest.raises(UnsupportedModel, match="sliding window and its masks have none"):
        wrap(model)
    assert store.num_opened == 0
    assert model.config.sliding_window == 4096


def test_a_window_shorter_than_the_trial(build_windowed, wrap, tokens):
    for window in (2, 5, 8):
        model, (_, rows, mask) = build_windowed("Gemma3", sliding_window=window, initializer_range=0.2), padded(tokens)
        cached = wrap(model)
        for _ in range(2):
            answer = cached.generate(rows, attention_mask=mask, **GREEDY)
            assert torch.equal(answer.sequences, model.generate(rows, attention_mask=mask, **GREEDY).sequences)
        assert cached.stats.num_saved_blocks == 4 + 6
        assert cached.stats.num_loaded_tokens == 48 + 80


def test_nothing_of_it_stays(build, wrap):
    model = build()
    settings = {"num_beams": 3, "do_sample": True, "max_new_tokens": 50, "penalty_alpha": 0.5, "eos_token_id": 5}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    before, state = copy.deepcopy(vars(model.generation_config)), torch.get_rng_state()
    names = set(vars(model))
    wrap(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(model.generation_config) == before
    assert set(vars(model)) == names
    assert not model._forward_pre_hooks

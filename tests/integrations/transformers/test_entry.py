"""Nothing enters the store that is not KV of its prompt, whatever a caller or a decoding loop does."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import StoppingCriteria

from kvstore.errors import InvalidRequest
from kvstore.integrations.transformers import prompts as prompts_module
from kvstore.integrations.transformers.cache.columns import CACHE_NAME

BLOCK = 16
GREEDY = {"max_new_tokens": 12, "do_sample": False}
PLAIN = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
ASSISTANTS = {
    "prompt_lookup_num_tokens": lambda build: 3,
    "assistant_early_exit": lambda build: 1,
    "assistant_model": lambda build: build(seed=2),  # Which is no setting.
}


@pytest.fixture
def model(build):
    return build("Qwen2")


@pytest.fixture
def document(tokens):
    return tokens(160)


@pytest.fixture
def prompt(tokens, document):
    return torch.cat([document, tokens(48, 1)], 1)


@pytest.fixture
def is_right(model, wrap):
    """Whether another client that loads what is stored of a prompt gets the answer that it gets without a store."""

    def ask(prompt, least=0):
        with torch.random.fork_rng():
            alone, other = model.generate(prompt, **PLAIN), wrap(model)
            answer = other.generate(prompt, **PLAIN)
        assert other.stats.num_loaded_tokens >= least
        torch.testing.assert_close(torch.stack(answer.logits), torch.stack(alone.logits), rtol=1e-4, atol=1e-5)
        return torch.equal(answer.sequences, alone.sequences)

    return ask


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        *((kind, "argument") for kind in ASSISTANTS),
        *((kind, by) for kind in list(ASSISTANTS)[:2] for by in ("generation_config", "the model's own")),
    ],
)
def test_assisted_decoding_on_a_stored_prefix(build, wrap, model, document, prompt, is_right, kind, by):
    wrap(model).generate(document, max_new_tokens=2, do_sample=False)
    cached, options = wrap(model), {kind: ASSISTANTS[kind](build)}
    alone = model.generate(prompt, **GREEDY)
    if by == "generation_config":
        options = {"generation_config": model.generation_config.__class__(**options, **GREEDY)}
    elif by == "the model's own":
        model.generation_config.update(**options)
        options = GREEDY
    else:
        options |= GREEDY

    answer = cached.generate(prompt, **options)

    assert torch.equal(answer, alone)
    assert cached.stats.num_loaded_tokens == 0
    model.generation_config = model.generation_config.__class__(eos_token_id=None, pad_token_id=None)
    assert is_right(prompt, least=192), "what was computed with an assistant is saved, and right"


def test_a_setting_that_is_off_is_none(wrap, model, document):
    wrap(model).generate(document, **GREEDY)
    cached = wrap(model)
    cached.generate(document, prompt_lookup_num_tokens=None, assistant_model=None, token_healing=False, **GREEDY)
    assert cached.stats.num_loaded_tokens == 144


@pytest.mark.parametrize(
    "setting", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "high"}, {"num_beam_groups": 2, "num_beams": 4}]
)
def test_loops_from_elsewhere_are_refused(wrap, model, document, setting):
    with pytest.raises(InvalidRequest, match="another decoding loop"):
        wrap(model).generate(document, **setting, **GREEDY)


# Loops that nobody knows of yet.


def alter(model, change):
    """Change what a model's `generate` feeds, as decoding loops do."""
    prepare = model.prepare_inputs_for_generation

    def prepared(input_ids, **kwargs):
        found = prepare(input_ids, **kwargs)
        change(found, input_ids)
        return found

    model.prepare_inputs_for_generation = prepared


def all_once_more(found, input_ids):
    """Feeds the whole prompt on top of what is loaded, and cuts the cache to the right length behind it."""
    surplus = found[CACHE_NAME].get_seq_length() - (input_ids.shape[1] - 1)
    if surplus < 0:
        found["input_ids"] = input_ids
        found["position_ids"] = torch.arange(input_ids.shape[1])[None]
    elif surplus > 0:
        found[CACHE_NAME].crop(-surplus)


def a_place_too_far(found, input_ids):
    found["position_ids"] = found["position_ids"] + 1


def other_tokens(found, input_ids):
    found["input_ids"] = found["input_ids"].roll(1, 1)


def embeddings(found, input_ids):
    found["inputs_embeds"] = torch.zeros(*found.pop("input_ids").shape, 64)


def hidden_tokens(found, input_ids):
    mask = torch.ones_like(input_ids)
    mask[:, 5] = 0
    found["attention_mask"] = mask


def a_block_before(found, input_ids):
    for layer in range(3 if found[CACHE_NAME].get_seq_length() == 0 else 0):
        found[CACHE_NAME].update(torch.zeros(1, 2, BLOCK, 16), torch.zeros(1, 2, BLOCK, 16), layer)


def one_layer_more(found, input_ids):
    if found[CACHE_NAME].get_seq_length() == 0:
        found[CACHE_NAME].update(torch.zeros(1, 2, BLOCK, 16), torch.zeros(1, 2, BLOCK, 16), 2)


LOOPS = [all_once_more, a_place_too_far, other_tokens, embeddings, hidden_tokens, a_block_before, one_layer_more]


@pytest.mark.parametrize("change", LOOPS)
def test_a_loop_that_feeds_something_else_saves_nothing(wrap, model, prompt, is_right, caplog, change):
    odd = copy.deepcopy(model)
    cached = wrap(odd, save_generated=True)
    alter(odd, change)  # Wrapping it afterwards would be refused.
    with caplog.at_level(logging.WARNING, "kvstore"):
        for _ in range(1 if change is all_once_more else 2):
            cached.generate(prompt, **GREEDY)
    if change is not all_once_more:  # Which is right on an empty cache.
        assert cached.stats.num_saved_blocks == 0
        assert cached.stats.num_unsaved_blocks == 26
        assert "not saved" in caplog.text
    assert cached.stats.num_store_failures == 0
    assert is_right(prompt)


@pytest.mark.parametrize("change", [all_once_more, a_place_too_far, other_tokens, embeddings, hidden_tokens])
def test_a_loop_that_does_not_go_on_behind_what_is_loaded_is_refused(wrap, model, document, prompt, is_right, change):
    odd = copy.deepcopy(model)
    wrap(odd).generate(document, **GREEDY)
    cached = wrap(odd)
    alter(odd, change)
    with pytest.raises(InvalidRequest, match="loaded columns"):
        cached.generate(prompt, **GREEDY)
    assert cached.stats.num_saved_blocks == 0
    assert is_right(prompt, least=160)
    assert not odd._forward_pre_hooks


def test_an_unknown_assistant_is_seen_where_kv_enters(wrap, model, document, prompt, is_right, monkeypatch):
    monkeypatch.setattr(prompts_module, "_REFEED", ())
    wrap(model).generate(document, **GREEDY)
    cached = wrap(model)
    with pytest.raises(InvalidRequest, match="loaded columns"):
        cached.generate(prompt, prompt_lookup_num_tokens=3, **GREEDY)
    assert cached.stats.num_saved_blocks == 0
    assert is_right(prompt, least=160)


# What a caller may do beside it.


class Meanwhile(StoppingCriteria):
    """Does something once, when the first token is out and before the prompt is saved."""

    def __init__(self, act):
        self.act = act

    def __call__(self, input_ids, scores, **_):
        self.act()
        self.act = lambda: None
        return torch.zeros(len(input_ids), dtype=torch.bool)


def edited(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(2)


def slower_rope(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def windowed(model):
    model.config.sliding_window = 8


def in_half(model):
    model.to(torch.bfloat16)


def adapted(model):
    adapter = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.model.layers[1].self_attn.q_proj = adapter(64, 64).eval()


MODELS = [edited, slower_rope, windowed, in_half, adapted]


@pytest.mark.parametrize("change", [edited, slower_rope, windowed, adapted])
def test_a_model_that_changes_during_a_call_saves_nothing(wrap, model, prompt, is_right, change):
    odd = copy.deepcopy(model)
    cached = wrap(odd)
    assert cached.space == wrap(model).space
    cached.generate(prompt, stopping_criteria=[Meanwhile(lambda: change(odd))], **GREEDY)
    assert (cached.stats.num_saved_blocks, cached.stats.num_unsaved_blocks) == (0, 13)
    assert cached.stats.num_store_failures == 0
    assert is_right(prompt)


@pytest.mark.parametrize("change", MODELS)
def test_a_model_that_changed_between_two_calls_is_refused(wrap, model, prompt, is_right, change):
    odd = copy.deepcopy(model)
    cached = wrap(odd)
    cached.generate(prompt, **GREEDY)
    change(odd)
    with pytest.raises(Exception, match=r"new model|model_id") as caught:
        cached.generate(prompt, **GREEDY)
    assert type(caught.value).__name__ in ("InvalidRequest", "UnsupportedModel")
    assert is_right(prompt, least=192)


def test_the_returned_cache_is_the_callers(wrap, model, document, prompt, is_right):
    cached = wrap(model, save_generated=True)
    cached.generate(document, **GREEDY)
    returned = cached.generate(document, return_dict_in_generate=True, **GREEDY)[CACHE_NAME]
    returned.crop(-60)
    for layer in returned.layers:
        layer.keys.fill_(9.0)
    model.generate(prompt, **{CACHE_NAME: returned}, **GREEDY)
    assert is_right(prompt, least=160)
    with pytest.raises(InvalidRequest, match=CACHE_NAME):
        cached.generate(prompt, **{CACHE_NAME: returned}, **GREEDY)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True},
        {"prefill_chunk_size": 24},
        {"guidance_scale": 1.5, "negative_prompt_ids": torch.full((1, 9), 7)},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 1},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_every_way_to_decode_leaves_what_is_right(wrap, model, tokens, prompt, is_right, settings, num_rows):
    prompt = torch.cat([prompt, tokens(208, 7)])[:num_rows]
    cached, options = wrap(model), GREEDY | settings
    if "negative_prompt_ids" in options:
        options["negative_prompt_ids"] = options["negative_prompt_ids"].expand(num_rows, -1)
    answers = []
    for generate in (model.generate, cached.generate, cached.generate):
        torch.manual_seed(3)
        answers.append(generate(prompt, **options))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    assert (cached.stats.num_saved_blocks, cached.stats.num_unsaved_blocks) == (13 * num_rows, 0)
    for row in range(num_rows):
        assert is_right(prompt[row : row + 1], least=192)


def test_padded_rows_with_beams_leave_what_is_right(wrap, model, tokens, prompt, is_right):
    short = tokens(100, 5)
    rows = torch.cat([prompt, torch.nn.functional.pad(short, (108, 0))])
    mask = torch.ones_like(rows)
    mask[1, :108] = 0
    cached = wrap(model)
    for _ in range(2):
        answer = cached.generate(rows, attention_mask=mask, num_beams=2, pad_token_id=0, **GREEDY)
        assert torch.equal(answer, model.generate(rows, attention_mask=mask, num_beams=2, pad_token_id=0, **GREEDY))
    assert (cached.stats.num_saved_blocks, cached.stats.num_unsaved_blocks) == (13 + 6, 0)
    assert is_right(prompt, least=192)
    assert is_right(short, least=96)


def test_answers_are_looked_at_token_by_token_too(wrap, model, document, is_right):
    odd, long = copy.deepcopy(model), GREEDY | {"max_new_tokens": 40}

    def later(found, input_ids):
        if input_ids.shape[1] > 180:
            found["position_ids"] = found["position_ids"] + 1

    alter(odd, later)
    cached = wrap(odd, save_generated=True)
    turn = cached.generate(document, **long)
    assert cached.stats.num_saved_blocks == 10 + 1, "of 20 tokens of the answer"
    assert cached.stats.num_unsaved_blocks == 1
    assert is_right(turn, least=176)

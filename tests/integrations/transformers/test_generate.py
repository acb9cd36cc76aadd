"""Answers with a store are those without: cold, warm, from another node, in every shape that a prompt can have."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

BLOCK = 16
GREEDY = {"max_new_tokens": 8, "do_sample": False}
#: Prefill in steps of a block adds in one order, whatever was loaded: then equal means equal bits.
EXACT = GREEDY | {"prefill_chunk_size": BLOCK, "output_logits": True, "return_dict_in_generate": True}


def same_bits(one, other):
    return torch.equal(one.sequences, other.sequences) and all(map(torch.equal, one.logits, other.logits))


def loaded_by(cached, *args, **options):
    """Generate; returns the answer, and how many tokens the store gave."""
    before = cached.stats.num_loaded_tokens
    answer = cached.generate(*args, **options)
    return answer, cached.stats.num_loaded_tokens - before


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "GPTNeoX", "GPT2"])
def test_logits_are_the_same_bits_without_a_store_cold_warm_and_on_another_node(
    build, tokens, wrap, stores, family, attention
):
    models = [build(family) for _ in range(3)]
    for model in models:
        model.set_attn_implementation(attention)
    prompt = tokens(50)
    alone = models[0].generate(prompt, **EXACT)
    first, second, elsewhere = map(wrap, models, (stores["a"], stores["a"], stores["b"]))

    cold, num_cold = loaded_by(first, prompt, **EXACT)
    answers = [loaded_by(cached, prompt, **EXACT) for cached in (first, second, elsewhere)]

    assert num_cold == 0
    assert same_bits(cold, alone)
    for warm, num_loaded in answers:
        assert num_loaded == 48
        assert same_bits(warm, alone)
    assert [cached.stats.num_saved_blocks for cached in (first, second, elsewhere)] == [3, 0, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_the_same_bits_too(build, tokens, wrap, dtype):
    model, prompt = build(dtype=dtype), tokens(50)
    cached = wrap(model)
    assert cached.space.shape.dtype == dtype
    alone = model.generate(prompt, **EXACT)

    assert same_bits(cached.generate(prompt, **EXACT), alone)
    warm, num_loaded = loaded_by(cached, prompt, **EXACT)

    assert num_loaded == 48
    assert same_bits(warm, alone)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 130])
def test_every_length_of_prompt_loads_full_blocks_and_computes_the_last_token(build, tokens, wrap, length):
    model, prompt = build(), tokens(length)
    cached = wrap(model)
    plain = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
    alone = model.generate(prompt, **plain)

    cold, _ = loaded_by(cached, prompt, **plain)
    warm, num_loaded = loaded_by(cached, prompt, **plain)

    assert num_loaded == (length - 1) // BLOCK * BLOCK
    assert cached.stats.num_saved_blocks == length // BLOCK
    for answer in (cold, warm):
        assert torch.equal(answer.sequences, alone.sequences)
        # A prefill in one step adds in another order than one of the rest alone.
        torch.testing.assert_close(torch.stack(answer.logits), torch.stack(alone.logits), rtol=1e-5, atol=1e-5)


def test_a_shared_prefix_is_loaded_and_the_rest_is_computed_and_saved(build, tokens, wrap):
    model = build()
    cached = wrap(model)
    shared, one, other = tokens(40), tokens(30, seed=1), tokens(30, seed=2)
    cached.generate(torch.cat([shared, one], 1), **GREEDY)

    prompt = torch.cat([shared, other], 1)
    answer, num_loaded = loaded_by(cached, prompt, **EXACT)

    assert num_loaded == 32  # Two full blocks are the same; the third has tokens of both.
    assert same_bits(answer, model.generate(prompt, **EXACT))
    assert cached.stats.num_saved_blocks == 4 + 2


def test_a_small_staging_buffer_is_used_again_and_again(build, tokens, wrap):
    model, prompt = build(), tokens(200)
    cached = wrap(model, staging_bytes=2 * 12288)
    alone = model.generate(prompt, **EXACT)
    cached.generate(prompt, **EXACT)

    warm, num_loaded = loaded_by(cached, prompt, **EXACT)

    assert num_loaded == 192
    assert same_bits(warm, alone)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_any_block_size_will_do(build, tokens, wrap, block_size):
    model, prompt = build(), tokens(100)
    cached = wrap(model, block_size=block_size)
    exact = EXACT | {"prefill_chunk_size": block_size}
    cached.generate(prompt, **exact)

    warm, num_loaded = loaded_by(cached, prompt, **exact)

    assert num_loaded == 99 // block_size * block_size
    assert same_bits(warm, model.generate(prompt, **exact))


# Batches.


def padded(prompts, pad=0):
    """Return (input_ids, attention_mask) of rows that are padded on the left."""
    width = max(prompt.shape[1] for prompt in prompts)
    rows = [torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0), value=pad) for prompt in prompts]
    masks = [
        torch.nn.functional.pad(torch.ones_like(prompt), (width - prompt.shape[1], 0), value=0) for prompt in prompts
    ]
    return torch.cat(rows), torch.cat(masks)


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "GPT2"])
@pytest.mark.parametrize("lengths", [(50, 33, 7), (7, 50), (64, 64), (16, 17), (100, 20, 90)])
def test_rows_padded_on_the_left_each_get_their_own_kv(build, tokens, wrap, family, lengths):
    model, prompts = build(family), [tokens(length, seed) for seed, length in enumerate(lengths)]
    ids, mask = padded(prompts)
    cached = wrap(model)
    for prompt in prompts:
        cached.generate(prompt, **GREEDY)
    settings = GREEDY | {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    alone = model.generate(ids, attention_mask=mask, **settings)

    answer, num_loaded = loaded_by(cached, ids, attention_mask=mask, **settings)

    # The row that knows least, counted in columns, decides for all.
    width = max(lengths)
    columns = min(width - length + (length - 1) // BLOCK * BLOCK for length in lengths)
    assert num_loaded == sum(max(0, columns - (width - length)) for length in lengths)
    assert torch.equal(answer.sequences, alone.sequences)
    torch.testing.assert_close(torch.stack(answer.logits), torch.stack(alone.logits), rtol=1e-4, atol=1e-5)


def test_a_batch_saves_each_row_and_what_rows_share_once(build, tokens, wrap):
    model, shared = build(), tokens(32)
    rows = [torch.cat([shared, tokens(20, seed)], 1) for seed in (1, 2)] + [tokens(18, 3)]
    ids, mask = padded(rows)
    cached = wrap(model)
    cached.generate(ids, attention_mask=mask, pad_token_id=0, **GREEDY)
    assert cached.stats.num_saved_blocks == 3 + 1 + 1

    for row in rows:
        answer, num_loaded = loaded_by(cached, row, **GREEDY)
        assert num_loaded == (row.shape[1] - 1) // BLOCK * BLOCK
        assert torch.equal(answer, model.generate(row, **GREEDY))


def test_padding_is_inferred_as_generate_infers_it(build, tokens, wrap):
    model = build()
    ids, mask = padded([tokens(40), tokens(21, 1)])
    cached, settings = wrap(model), GREEDY | {"pad_token_id": 0}
    cached.generate(ids, attention_mask=mask, **settings)

    answer, num_loaded = loaded_by(cached, ids, **settings)

    assert num_loaded == 32 + 13  # Columns 0 to 31: all of the second row's padding, and 13 of its tokens.
    assert torch.equal(answer, model.generate(ids, **settings))


# What passes through.


class Streamer(BaseStreamer):
    def __init__(self, on_token=lambda: None):
        self.put_so_far, self.on_token, self.ended = [], on_token, False

    def put(self, value):
        self.put_so_far.append(value.flatten().tolist())
        if len(self.put_so_far) > 1:
            self.on_token()

    def end(self):
        self.ended = True


class StopAfter(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3, "max_new_tokens": 6, "do_sample": False},
        {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 6, "do_sample": False},
        {"num_return_sequences": 3, "do_sample": True, "temperature": 0.7, "max_new_tokens": 6},
        {"max_new_tokens": 1, "do_sample": False},
        {"max_length": 60, "do_sample": False, "repetition_penalty": 1.3},
    ],
)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_decoding_settings_pass_through(build, tokens, wrap, settings, num_rows):
    model, prompt = build(), torch.cat([tokens(50, seed) for seed in range(num_rows)])
    cached = wrap(model)
    answers = []
    for generate in (model.generate, cached.generate, cached.generate):
        torch.manual_seed(5)
        answers.append(generate(prompt, **settings))

    assert cached.stats.num_loaded_tokens == 48 * num_rows
    assert cached.stats.num_saved_blocks == 3 * num_rows
    assert torch.equal(answers[1], answers[0])
    assert torch.equal(answers[2], answers[0])


def test_streamers_stopping_criteria_and_generation_configs_pass_through(build, tokens, wrap):
    model, prompt = build(), tokens(50)
    cached = wrap(model)
    config = model.generation_config.__class__(max_new_tokens=20, do_sample=False)
    for _ in range(2):
        streamer = Streamer()
        answer = cached.generate(
            input_ids=prompt,
            generation_config=config,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([StopAfter(55)]),
        )
        assert answer.shape == (1, 55)
        assert streamer.ended
        assert [token for put in streamer.put_so_far for token in put] == answer[0].tolist()
    assert cached.stats.num_loaded_tokens == 48


@pytest.mark.parametrize("kind", ["assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"])
def test_assisted_decoding_passes_through(build, tokens, wrap, kind):
    model, prompt = build(), tokens(50)
    cached = wrap(model, save_generated=True)
    assistance = {kind: build(seed=2) if kind == "assistant_model" else 2}
    for _ in range(2):
        answer = cached.generate(prompt, **assistance, **GREEDY)
        assert torch.equal(answer, model.generate(prompt, **GREEDY))
    assert cached.stats.num_loaded_tokens == 0  # The whole prompt would be fed on top of it; see test_entry.py.
    assert cached.stats.num_saved_blocks == 3  # Of the prompt alone: the cache may end with rejected tokens.
    assert cached.stats.num_unsaved_blocks == 0


@pytest.mark.parametrize("by", ["call", "generation_config", "the model's own", "config"])
@pytest.mark.parametrize("kind", ["hidden_states", "attentions"])
def test_outputs_of_all_columns_are_whole(build, tokens, wrap, kind, by):
    model, prompt, wanted = build(attn_implementation="eager"), tokens(50), {f"output_{kind}": True}
    settings = {"return_dict_in_generate": True, **GREEDY}
    cached = wrap(model)
    cached.generate(prompt, **GREEDY)
    cached.close()
    if by == "call":
        settings |= wanted
    elif by == "generation_config":
        settings = {"generation_config": model.generation_config.__class__(**settings, **wanted)}
    elif by == "the model's own":
        model.generation_config.update(**wanted)
    else:
        setattr(model.config, f"output_{kind}", True)
    cached = wrap(model)
    for _ in range(2):
        answer, num_loaded = loaded_by(cached, prompt, **settings)
        alone = model.generate(prompt, **settings)
        assert num_loaded == 0
        assert torch.equal(answer.sequences, alone.sequences)
        if by != "config":  # generate itself hands none on then.
            for found, right in zip(answer[kind], alone[kind], strict=True):
                assert [each.shape for each in found] == [each.shape for each in right]
                assert all(map(torch.equal, found, right))
    assert cached.stats.num_unsaved_blocks == 0


@pytest.mark.parametrize("by", ["call", "generation_config", "the model's own"])
def test_the_default_cache_may_be_named(build, tokens, wrap, by):
    model, prompt, named, settings = build(), tokens(50), {"cache_implementation": "dynamic"}, dict(GREEDY)
    if by == "call":
        settings |= named
    elif by == "generation_config":
        settings = {"generation_config": model.generation_config.__class__(**settings, **named)}
    else:
        model.generation_config.update(**named)
    cached = wrap(model)
    alone = model.generate(prompt, **settings)
    assert torch.equal(cached.generate(prompt, **settings), alone)
    answer, num_loaded = loaded_by(cached, prompt, **settings)
    assert num_loaded == 48
    assert torch.equal(answer, alone)


def test_the_first_token_does_not_wait_for_the_save(build, tokens, wrap):
    cached = wrap(build())
    saved_at_token = []
    cached.generate(
        tokens(50), streamer=Streamer(lambda: saved_at_token.append(cached.stats.num_saved_blocks)), **GREEDY
    )
    assert saved_at_token == [0, *[3] * 7]


def test_blocks_of_the_answer_are_saved_when_asked_for(build, tokens, wrap):
    model, prompt = build(), tokens(50)
    without, cached = wrap(build(seed=2)), wrap(model, save_generated=True)
    long = GREEDY | {"max_new_tokens": 40}
    without.generate(prompt, **long)
    assert without.stats.num_saved_blocks == 3

    first = cached.generate(prompt, **long)
    assert cached.stats.num_saved_blocks == 5  # 89 of 90 tokens were computed.
    turn = torch.cat([first, tokens(9, 1)], 1)
    answer, num_loaded = loaded_by(cached, turn, **GREEDY)

    assert num_loaded == 80
    assert torch.equal(answer, model.generate(turn, **GREEDY))


def test_answers_of_a_padded_batch_are_saved_row_by_row(build, tokens, wrap):
    model = build()
    ids, mask = padded([tokens(50), tokens(21, 1)])
    cached = wrap(model, save_generated=True)
    answers = cached.generate(ids, attention_mask=mask, pad_token_id=0, **(GREEDY | {"max_new_tokens": 40}))

    for row, padding in ((0, 0), (1, 29)):
        turn = answers[row : row + 1, padding:]
        answer, num_loaded = loaded_by(cached, turn, **GREEDY)
        assert num_loaded == (turn.shape[1] - 1) // BLOCK * BLOCK
        assert torch.equal(answer, model.generate(turn, **GREEDY))


def test_threads_may_share_it(build, tokens, wrap):
    model = build()
    cached = wrap(model, staging_bytes=2 * 12288)
    prompts = [torch.cat([tokens(64), tokens(20, seed)], 1) for seed in range(1, 5)]
    expected = [model.generate(prompt, **GREEDY) for prompt in prompts]

    def ask(prompt):
        return cached.generate(prompt, **GREEDY)

    with ThreadPoolExecutor(4) as threads:
        # In rounds: a thread that falls behind would be passed by those that ask for its prompt again.
        rounds = [list(threads.map(ask, prompts, timeout=60)) for _ in range(3)]

    assert all(torch.equal(*pair) for answers in rounds for pair in zip(answers, expected, strict=True))
    assert cached.stats.num_requests == 12
    assert cached.stats.num_loaded_tokens >= 8 * 80  # From its second time on, a prompt finds all its full blocks.
    assert (cached.stats.num_store_failures, cached.stats.num_bypassed) == (0, 0)


@pytest.mark.parametrize("where", ["wrapped", "generated", "model"])
def test_inference_mode_anywhere(build, tokens, wrap, where):
    with torch.inference_mode(where == "model"):
        model = build()
    prompt = tokens(60)
    alone = model.generate(prompt, **GREEDY)
    with torch.inference_mode(where == "wrapped"):
        cached = wrap(model)
    for mode in (where == "generated", False, True, False):
        with torch.inference_mode(mode):
            assert torch.equal(cached.generate(prompt, **GREEDY), alone)
    assert (cached.stats.num_saved_blocks, cached.stats.num_loaded_tokens) == (3, 3 * 48)
    assert cached.stats.num_store_failures == 0


def test_a_compiled_model_shares_with_the_one_inside(build, tokens, wrap):
    model, prompt = build(), tokens(60)
    cached = wrap(torch.compile(model, backend="eager"))
    assert cached.space == wrap(model).space
    for _ in range(2):
        assert torch.equal(cached.generate(prompt, **GREEDY), model.generate(prompt, **GREEDY))
    assert (cached.stats.num_saved_blocks, cached.stats.num_loaded_tokens) == (3, 48)

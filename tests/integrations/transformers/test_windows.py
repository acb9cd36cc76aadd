"""Models with sliding windows: answers with a store are those without, from every tier, and attention costs the same.

The windows have 24 tokens, so most prompts are longer, and blocks before a window are saved and loaded, too.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvstore.errors import LayoutMismatch
from kvstore.integrations.transformers.cache.columns import CACHE_NAME, planes_of

BLOCK = 16
GREEDY = {"max_new_tokens": 8, "do_sample": False}
PLAIN = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
#: Prefill in steps of a block adds in one order, whatever was loaded: then equal means equal bits.
EXACT = PLAIN | {"prefill_chunk_size": BLOCK}


def same_bits(one, other):
    return torch.equal(one.sequences, other.sequences) and all(map(torch.equal, one.logits, other.logits))


def loaded_by(cached, *args, **options):
    """Generate; returns the answer, and how many tokens the store gave."""
    before = cached.stats.num_loaded_tokens
    answer = cached.generate(*args, **options)
    return answer, cached.stats.num_loaded_tokens - before


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Gemma2", "Gemma3", "GptOss"])
def test_the_same_bits_from_memory_from_a_peer_and_from_disk_after_a_restart(
    build_windowed, tokens, wrap, stores, tmp_path, wait_until, family
):
    model, prompt, cluster = build_windowed(family), tokens(100), stores["a"].cluster
    cluster.stop_node("a")
    on_disk = {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 4 << 20}
    on_disk |= {"capacity_bytes": 4 << 20, "block_bytes": 1 << 15}
    core = cluster.add("a", **on_disk)
    alone, first, elsewhere = model.generate(prompt, **EXACT), wrap(model), wrap(model, stores["b"])

    cold, num_cold = loaded_by(first, prompt, **EXACT)
    warm, num_warm = loaded_by(first, prompt, **EXACT)
    far, num_far = loaded_by(elsewhere, prompt, **EXACT)
    wait_until(lambda: core.state.disk.stats()["num_written"] == 6)
    first.close()
    elsewhere.close()
    for node_id in "ab":
        cluster.stop_node(node_id)
    core, again = cluster.add("a", **on_disk), wrap(model)
    wait_until(lambda: core.state.disk.stats()["num_restored"] == 6)
    restarted, num_restarted = loaded_by(again, prompt, **EXACT)

    assert [num_cold, num_warm, num_far, num_restarted] == [0, 96, 96, 96]
    assert core.state.disk.stats()["num_read"] == 6
    assert all(same_bits(answer, alone) for answer in (cold, warm, far, restarted))
    assert [cached.stats.num_saved_blocks for cached in (first, elsewhere)] == [6, 0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [1, 16, 23, 24, 25, 40, 100])
def test_prompts_around_the_length_of_a_window(build_windowed, tokens, wrap, length, attention):
    model, prompt = build_windowed(attn_implementation=attention), tokens(length)
    cached, alone = wrap(model), model.generate(prompt, **PLAIN)

    cold, _ = loaded_by(cached, prompt, **PLAIN)
    warm, num_loaded = loaded_by(cached, prompt, **PLAIN)

    assert same_bits(cold, alone), "attention got the tensors that it gets in transformers"
    assert num_loaded == (length - 1) // BLOCK * BLOCK
    assert cached.stats.num_saved_blocks == length // BLOCK
    assert torch.equal(warm.sequences, alone.sequences)
    torch.testing.assert_close(torch.stack(warm.logits), torch.stack(alone.logits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(build_windowed, tokens, wrap, dtype):
    model, prompt = build_windowed("Gemma3", dtype=dtype), tokens(100)
    cached, alone = wrap(model), model.generate(prompt, **EXACT)
    for num_wanted in (0, 96):
        answer, num_loaded = loaded_by(cached, prompt, **EXACT)
        assert num_loaded == num_wanted
        assert same_bits(answer, alone)


def test_a_window_is_part_of_the_name(build_windowed, wrap):
    spaces = [wrap(build_windowed(sliding_window=window)).space for window in (24, 24, 25, None)]
    assert spaces[0] == spaces[1]
    assert len({space.digest for space in spaces}) == 3


def test_a_shared_prefix_shorter_than_a_window(build_windowed, tokens, wrap):
    model, shared = build_windowed("Gemma2"), tokens(20)
    cached = wrap(model)
    cached.generate(torch.cat([shared, tokens(60, 1)], 1), **GREEDY)
    prompt = torch.cat([shared, tokens(60, 2)], 1)
    answer, num_loaded = loaded_by(cached, prompt, **EXACT)
    assert num_loaded == 16
    assert same_bits(answer, model.generate(prompt, **EXACT))
    assert cached.stats.num_saved_blocks == 5 + 4


@pytest.mark.parametrize("family", ["Mistral", "Gemma2"])
@pytest.mark.parametrize("lengths", [(50, 33, 7), (16, 17), (100, 20, 90)])
def test_rows_padded_on_the_left_each_get_their_own_kv(build_windowed, tokens, wrap, family, lengths):
    model, width = build_windowed(family), max(lengths)
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    ids = torch.cat([torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.stack([torch.arange(width).ge(width - length).long() for length in lengths])
    settings = PLAIN | {"attention_mask": mask, "pad_token_id": 0}
    cached, alone = wrap(model), model.generate(ids, **settings)

    cold = cached.generate(ids, **settings)
    warm, num_loaded = loaded_by(cached, ids, **settings)

    columns = min(width - length + (length - 1) // BLOCK * BLOCK for length in lengths)
    assert num_loaded == sum(max(0, columns - (width - length)) for length in lengths)
    assert cached.stats.num_saved_blocks == sum(length // BLOCK for length in lengths)
    assert same_bits(cold, alone)
    assert torch.equal(warm.sequences, alone.sequences)
    torch.testing.assert_close(torch.stack(warm.logits), torch.stack(alone.logits), rtol=1e-4, atol=1e-5)
    for prompt in prompts:
        answer, num_loaded = loaded_by(cached, prompt, **GREEDY)
        assert num_loaded == (prompt.shape[1] - 1) // BLOCK * BLOCK
        assert torch.equal(answer, model.generate(prompt, **GREEDY))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_return_sequences": 3, "do_sample": True, "temperature": 0.7},
        {"prefill_chunk_size": 24},
        {"prefill_chunk_size": 7, "num_beams": 2},
        {"guidance_scale": 1.5, "negative_prompt_ids": torch.full((2, 9), 7)},
        {"max_new_tokens": 1},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_decoding_settings_pass_through(build_windowed, tokens, wrap, settings):
    model, prompt = build_windowed(), torch.cat([tokens(100, seed) for seed in range(2)])
    cached, settings = wrap(model), GREEDY | {"max_new_tokens": 30} | settings
    answers = []
    for generate in (model.generate, cached.generate, cached.generate):
        torch.manual_seed(5)
        answers.append(generate(prompt, **settings))
    assert cached.stats.num_loaded_tokens == 2 * 96
    assert (cached.stats.num_saved_blocks, cached.stats.num_unsaved_blocks) == (2 * 6, 0)
    assert torch.equal(answers[1], answers[0])
    assert torch.equal(answers[2], answers[0])


@pytest.mark.parametrize("by", ["call", "the model's own"])
def test_the_name_of_a_cache_that_gemma_checkpoints_have_is_the_default(build_windowed, tokens, wrap, by):
    model, prompt, settings = build_windowed("Gemma2"), tokens(100), dict(EXACT)
    if by == "call":
        settings["cache_implementation"] = "hybrid"
    else:
        model.generation_config.cache_implementation = "hybrid"
    cached, alone = wrap(model), model.generate(prompt, **settings)
    for num_wanted in (0, 96):
        answer, num_loaded = loaded_by(cached, prompt, **settings)
        assert num_loaded == num_wanted
        assert same_bits(answer, alone)


@pytest.mark.parametrize("kind", ["assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"])
def test_assisted_decoding_takes_back_columns_and_saves_the_prompt(build_windowed, tokens, wrap, kind):
    model, prompt = build_windowed(), tokens(100)
    cached, settings = wrap(model, save_generated=True), GREEDY | {"max_new_tokens": 30}
    assistance = {kind: build_windowed(seed=2) if kind == "assistant_model" else 2}
    alone = model.generate(prompt, **settings)
    for _ in range(2):
        assert torch.equal(cached.generate(prompt, **assistance, **settings), alone)
    assert cached.stats.num_loaded_tokens == 0
    assert (cached.stats.num_saved_blocks, cached.stats.num_unsaved_blocks) == (6, 0)
    answer, num_loaded = loaded_by(cached, prompt, **settings)
    assert num_loaded == 96
    assert torch.equal(answer, alone)


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_blocks_of_answers_are_saved_row_by_row(build_windowed, tokens, wrap, family):
    model, ids = build_windowed(family), torch.cat([tokens(50), torch.nn.functional.pad(tokens(21, 1), (29, 0))])
    mask = torch.ones_like(ids)
    mask[1, :29] = 0
    cached, settings = wrap(model, save_generated=True), GREEDY | {"max_new_tokens": 40, "pad_token_id": 0}
    answers = cached.generate(ids, attention_mask=mask, **settings)
    assert (cached.stats.num_saved_blocks, cached.stats.num_unsaved_blocks) == (5 + 3, 0)
    for row, padding in ((0, 0), (1, 29)):
        turn = torch.cat([answers[row : row + 1, padding:], tokens(9, 2)], 1)
        answer, num_loaded = loaded_by(cached, turn, **GREEDY)
        assert num_loaded == (answers.shape[1] - padding - 1) // BLOCK * BLOCK
        assert torch.equal(answer, model.generate(turn, **GREEDY))


@pytest.mark.parametrize("saves_answer", [False, True])
def test_the_returned_cache_is_that_of_transformers(build_windowed, tokens, wrap, saves_answer):
    model, prompt = build_windowed("Gemma2"), tokens(100)
    cached = wrap(model, save_generated=saves_answer)
    wanted = model.generate(prompt, **EXACT)[CACHE_NAME]
    for _ in range(2):
        found = cached.generate(prompt, **EXACT)[CACHE_NAME]
        assert isinstance(found, DynamicCache)
        for one, other in zip(found.layers, wanted.layers, strict=True):
            assert isinstance(one, type(other))
            assert (one.is_sliding, one.get_seq_length()) == (other.is_sliding, other.get_seq_length())
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)


@pytest.mark.parametrize(("saves_answer", "num_kept"), [(False, 1), (True, 7)])
def test_columns_before_the_windows_are_kept_until_they_are_saved(build_windowed, tokens, wrap, saves_answer, num_kept):
    model, are_kept = build_windowed(), []

    def look(_, __, given):
        if given[CACHE_NAME].get_seq_length():
            try:
                are_kept.append(bool(planes_of(given[CACHE_NAME])))
            except LayoutMismatch:
                are_kept.append(False)

    model.register_forward_pre_hook(look, with_kwargs=True)
    cached = wrap(model, save_generated=saves_answer, model_id="hooked")
    are_kept.clear()
    output = cached.generate(tokens(100), **PLAIN)
    assert are_kept == [True] * num_kept + [False] * (7 - num_kept), "the prompt is saved behind the second token"
    with pytest.raises(LayoutMismatch):
        planes_of(output[CACHE_NAME])


def test_columns_that_a_loop_put_into_a_window_are_not_saved(build_windowed, tokens, wrap):
    model, prompt = build_windowed(), tokens(100)
    cached, prepare = wrap(model), model.prepare_inputs_for_generation

    def prepared(input_ids, **kwargs):
        for layer in kwargs[CACHE_NAME].layers:
            if not layer.get_seq_length():
                layer.update(*torch.zeros(2, 1, 2, BLOCK, 16))
        return prepare(input_ids, **kwargs)

    model.prepare_inputs_for_generation = prepared
    cached.generate(prompt, **GREEDY)
    assert (cached.stats.num_saved_blocks, cached.stats.num_unsaved_blocks) == (0, 6)

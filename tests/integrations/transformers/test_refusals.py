"""What cannot be shared is refused at once, with a type, and with what to do instead."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import DynamicCache

from kvstore.errors import ConfigError, InvalidRequest, UnsupportedModel
from kvstore.integrations.transformers.supported import check_version

GREEDY = {"max_new_tokens": 4, "do_sample": False}
SMALL = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
}  # fmt: skip


def make(name, **changes):
    kind, _, _ = name.partition(":")
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    config = config(**changes)
    return getattr(transformers, name.replace(":", ""))(config).eval()


DYNAMIC_ROPE = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
T5 = {"vocab_size": 211, "d_model": 32, "d_kv": 8, "num_layers": 1}
MAMBA = {"vocab_size": 211, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
BOTH_WAYS = {"is_causal": False}
BOTH_WAYS_IN_WINDOWS = {"use_bidirectional_attention": True, "sliding_window": 8, "initializer_range": 0.2}
CHUNKS = {"head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96}
WINDOWS = {"head_dim": 16, "sliding_window": 8, "vocab_size_per_layer_input": 211, "hidden_size_per_layer_input": 16}
SHARED = WINDOWS | {"num_kv_shared_layers": 1, "laurel_rank": 8, "activation_sparsity_pattern": None}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("T5:ForConditionalGeneration", T5, "encoder-decoder"),
        ("Mistral:ForCausalLM", SMALL | {"sliding_window": 1}, "DynamicSlidingWindowLayer.*windows of one token"),
        ("Llama4:ForCausalLM", SMALL | CHUNKS, "windows that the config calls sliding_window"),
        ("Gemma3n:ForCausalLM", SMALL | SHARED, "DummyLayer"),
        ("Gemma4:ForCausalLM", SMALL | WINDOWS | {"global_head_dim": 32}, "K and V of one shape"),
        ("Mamba:ForCausalLM", MAMBA, "Mamba"),
        ("DeepseekV3:ForCausalLM", SMALL | MLA, "K and V of one shape"),
        ("Llama:ForCausalLM", SMALL | DYNAMIC_ROPE, "dynamic"),
        ("Llama:ForCausalLM", SMALL | BOTH_WAYS, "is_causal=False"),
        ("Gemma3:ForCausalLM", SMALL | BOTH_WAYS_IN_WINDOWS, "depends on"),
        ("Gemma:ForCausalLM", SMALL | {"use_bidirectional_attention": True, "initializer_range": 0.2}, "depends on"),
        ("Doge:ForCausalLM", SMALL, "keep_window_size=2048"),
    ],
)
def test_models_whose_kv_has_no_blocks(wrap, store, name, settings, said):
    model = make(name, **settings)
    with pytest.raises(UnsupportedModel, match=said):
        wrap(model)
    assert store.num_opened == 0


def test_versions_that_do_not_go_on_from_a_filled_cache():
    for version in ("5.23.0", "5.24.0.dev0", "6.0.1"):
        check_version(version)
    for version in ("4.57.1", "5.0.0", "5.22.9"):
        with pytest.raises(ConfigError, match=version):
            check_version(version)


def test_rope_that_depends_on_the_length(wrap, build):
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    model = build(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors})
    with pytest.raises(UnsupportedModel, match=r"longrope.*how long"):
        wrap(model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_implementation": "static"}, "DynamicCache.*static"),
        ({"cache_implementation": "quantized"}, "quantized"),
        ({"use_cache": False}, "use_cache=False"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"cache": DynamicCache()}, "cache"),
        ({"inputs_embeds": torch.zeros(1, 40, 64)}, "inputs_embeds"),
        ({"position_ids": torch.arange(40)[None]}, "position_ids"),
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "pixel_values"),
        ({"token_type_ids": torch.zeros(1, 40).long()}, "token_type_ids"),
        ({"custom_generate": lambda *_, **__: None}, "custom_generate"),
        ({"input_ids": torch.ones(1, 40).long()}, "once"),
        ({"attention_mask": torch.ones(1, 39).long()}, "shape"),
        ({"attention_mask": torch.full((1, 40), 2)}, "0 for padding"),
        ({"attention_mask": torch.full((1, 40), -1)}, "0 for padding"),
        ({"attention_mask": torch.full((1, 40), 0.5)}, "0 for padding"),
        ({"attention_mask": torch.tensor([[1] * 39 + [0]])}, "left only"),
        ({"attention_mask": torch.tensor([[1] * 20 + [0] + [1] * 19])}, "left only"),
        ({"pad_token_id": 7}, r"input_ids.*pad_token_id \(7\) behind a token.*pass attention_mask"),
    ],
)
def test_arguments_that_would_change_kv_unseen(wrap, build, tokens, options, said):
    cached, prompt = wrap(build()), tokens(40)
    prompt[0, 20] = 7
    with pytest.raises(InvalidRequest, match=said):
        cached.generate(prompt, **(GREEDY | options))
    assert cached.stats.num_requests == 0


@pytest.mark.parametrize("prompt", [None, [[1, 2]], torch.ones(40).long(), torch.ones(1, 40), torch.ones(1, 0).long()])
def test_prompts_that_are_no_rows_of_tokens(wrap, build, prompt):
    with pytest.raises(InvalidRequest, match="input_ids"):
        wrap(build()).generate(prompt, **GREEDY)


def test_a_setting_of_the_models_own_generation_config_counts(wrap, build, tokens):
    model = build()
    model.generation_config.cache_implementation = "static"
    with pytest.raises(InvalidRequest, match="static"):
        wrap(model).generate(tokens(40), **GREEDY)


def test_a_generate_of_the_model_itself_with_a_static_cache_changes_nothing(wrap, build, tokens):
    model = build()
    cached = wrap(model)
    before = cached.generate(tokens(40), **GREEDY)
    model.generate(tokens(40), cache_implementation="static", **GREEDY)  # It notes the cache's length on the model.
    assert cached.generate(tokens(40), **GREEDY).equal(before)


def test_padding_where_the_model_counts_positions_by_itself(wrap, tokens):
    config = transformers.BloomConfig(
        vocab_size=211, hidden_size=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    model = transformers.BloomForCausalLM(config).eval()
    cached, prompts = wrap(model), torch.cat([tokens(40), tokens(40, 1)])
    mask = torch.ones_like(prompts)
    for _ in range(2):
        answer = cached.generate(prompts, attention_mask=mask, **GREEDY)
        assert torch.equal(answer, model.generate(prompts, attention_mask=mask, **GREEDY))
    assert cached.stats.num_loaded_tokens == 2 * 32
    mask[0, :5] = 0
    with pytest.raises(InvalidRequest, match="one length"):
        cached.generate(prompts, attention_mask=mask, **GREEDY)


def test_what_is_no_model_and_what_is_no_store(wrap, build, store):
    for given, on, said in (
        ("gpt2", store, "model: wanted"),
        (build().model, store, "model: wanted"),
        (build(), "default", "store: wanted"),
        (build(), None, "store: wanted"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            wrap(given, on)


def test_a_buffer_of_less_than_two_blocks(wrap, build, store):
    block_bytes = 12288
    for too_small in (0, 10, 2 * block_bytes - 1):
        with pytest.raises(ConfigError, match=f"staging_bytes.*{2 * block_bytes}"):
            wrap(build(), staging_bytes=too_small)
    assert store.num_opened == 0
    wrap(build(), staging_bytes=2 * block_bytes)


def test_inputs_that_a_generate_of_the_models_own_takes(wrap, build, tokens):
    class OfImages(transformers.LlamaForCausalLM):
        def generate(self, input_ids=None, pixel_values=None, **options):
            assert pixel_values is None
            return super().generate(input_ids, **options)

    cached, prompt = wrap(OfImages(build().config).eval()), tokens(40)
    with pytest.raises(InvalidRequest, match="pixel_values"):
        cached.generate(prompt, pixel_values=torch.zeros(1, 3, 8, 8), **GREEDY)
    cached.generate(prompt, **GREEDY)
    assert cached.stats.num_saved_blocks == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("load_timeout_s", value) for value in (float("nan"), -1, "a", 1e300, True)),
        *(("retry_s", value) for value in (float("nan"), -1, "a", None)),
        *(("staging_bytes", value) for value in (-1, 1 << 70)),
        *(("model_id", value) for value in (5, "", b"id")),
        ("save_generated", "yes"),
    ],
)
def test_an_option_that_cannot_work_is_refused_and_no_store_is_blamed(wrap, build, store, option, value):
    with pytest.raises(InvalidRequest, match=option):
        wrap(build(), **{option: value})
    assert store.num_opened == 0


@pytest.mark.parametrize("value", [float("nan"), "much", None])
def test_a_buffer_that_is_no_size(wrap, build, value):
    with pytest.raises(ConfigError, match="wanted a size"):
        wrap(build(), staging_bytes=value)


def test_a_buffer_may_be_given_in_words(wrap, build):
    wrap(build(), staging_bytes="1MiB")

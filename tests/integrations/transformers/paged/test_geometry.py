"""Which layers share page ids."""

from __future__ import annotations

import pytest
import transformers

from kvstore.errors import ConfigError, InvalidRequest, UnsupportedModel
from kvstore.integrations.transformers.paged import PagedKVCache
from kvstore.integrations.transformers.paged.geometry import read_groups

TINY = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def test_layers_are_grouped_by_what_they_see(build_once):
    assert [(group.layers, group.window_tokens) for group in read_groups(build_once("full"))[0]] == [((0, 1), None)]
    assert [(group.layers, group.window_tokens) for group in read_groups(build_once("window"))[0]] == [((0, 1), 24)]
    assert [(group.layers, group.window_tokens) for group in read_groups(build_once("both"))[0]] == [
        ((0,), None), ((1,), 24),
    ]  # fmt: skip


def test_a_group_has_the_shape_of_its_layers(build_once):
    (group,), device = read_groups(build_once("full"))
    shape = group.shape(16)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype) == (2, 2, 8, "float32")
    assert str(device) == "cpu"


def test_pages_have_the_dims_of_the_legend(build_once):
    cache = PagedKVCache(build_once("both"), page_size=4, num_pages=7, num_window_pages=5)
    assert [[list(tensor.shape) for tensor in tensors] for tensors in cache.tensors] == [
        [[2, 7, 4, 2, 8]], [[2, 5, 4, 2, 8]],
    ]  # fmt: skip
    assert cache.page_size == 4


def test_layers_without_k_and_v_are_refused():
    config = transformers.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(UnsupportedModel, match="supported are"):
        read_groups(transformers.MambaForCausalLM(config).eval())


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_models_with_experts_are_refused(family):
    more = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{family}Config")(**TINY, head_dim=8, **more)
    with pytest.raises(UnsupportedModel, match="dense"):
        read_groups(getattr(transformers, f"{family}ForCausalLM")(config).eval())


def test_a_model_in_training_mode_is_refused(build_once):
    model = build_once("full").train()
    try:
        with pytest.raises(InvalidRequest, match="eval"):
            PagedKVCache(model)
    finally:
        model.eval()


def test_a_window_of_the_config_that_the_masks_do_not_have_is_refused():
    config = transformers.LlamaConfig(**TINY, sliding_window=24)
    with pytest.raises(UnsupportedModel, match="masks have none"):
        PagedKVCache(transformers.LlamaForCausalLM(config).eval())


def test_what_is_no_model_with_generate_is_refused(build_once):
    for wrong in ("llama", build_once("full").model):
        with pytest.raises(InvalidRequest, match="generate"):
            PagedKVCache(wrong)


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        read_groups(transformers.T5ForConditionalGeneration(config).eval())


@pytest.mark.parametrize("sizes", [{"page_size": 0}, {"num_pages": 0}, {"align_tokens": 24}, {"align_tokens": 0}])
def test_sizes_that_cannot_work_are_refused(build_once, sizes):
    with pytest.raises(ConfigError):
        PagedKVCache(build_once("both"), **sizes)

"""Settings that cannot work are refused when the engine starts, with what to change."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def refusal(model, start_engine):
    """Starts an engine that must not start, and returns what it said."""
    from engines import EngineError

    def start(path=model, **settings):
        engine = start_engine(path, **settings)
        with pytest.raises(EngineError) as caught:
            engine.wait_started()
        return str(caught.value)

    return start


def test_no_store_of_that_name(refusal, connector, unit):
    said = refusal(block_size=unit, connector=connector(0, store="nobody"))
    assert "wanted the store 'nobody' on this node" in said
    assert "kvstore start" in said


def test_an_unknown_key(refusal, connector, unit):
    assert "unknown keys ['blocksize']; known are store, address" in refusal(connector=connector(0, blocksize=16))


def test_a_stored_block_that_does_not_fit(refusal, connector, unit):
    said = refusal(block_size=32, connector=connector(0, block_size=48))
    assert "wanted a multiple or a divisor of the engine's 32 tokens, got 48" in said


def test_blocks_too_large_for_the_stores_slots(refusal, connector, unit, first):
    # The store has cut its memory for blocks of the first engine.
    said = refusal(block_size=unit, connector=connector(0, block_size=8192))
    assert "block_bytes" in said


def test_a_stage_for_a_cache_that_is_on_no_gpu(refusal, connector, unit, device):
    if device == "cuda":
        pytest.skip("this engine is on a GPU")
    said = refusal(block_size=unit, connector=connector(0, handoff_staging=1 << 20))
    assert "kv_connector_extra_config['handoff_staging']: wanted an engine on a GPU, got a cache on cpu" in said


def test_a_hybrid_model(refusal, connector, unit, tmp_path):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, sliding_window=64, layer_types=["sliding_attention", "full_attention"],
        dtype="float32",
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    said = refusal(str(tmp_path), block_size=unit, connector=connector(0), disable_hybrid_kv_cache_manager=False)
    assert "hybrid" in said.lower()

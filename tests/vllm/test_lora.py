"""Adapters on real engines: what one adapter's requests stored is found by requests of the same adapter only."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two adapters with random weights, on what makes K and V; (name, number, path) of each."""
    import torch
    from safetensors.torch import save_file

    made = []
    for number, name in enumerate(("one", "other"), start=1):
        folder = tmp_path_factory.mktemp(name)
        (folder / "adapter_config.json").write_text(
            json.dumps(
                {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "v_proj"], "bias": "none"}
            )
        )
        generator = torch.Generator().manual_seed(number)
        weights = {}
        for layer in range(4):
            for module in ("k_proj", "v_proj"):
                at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{at}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.2
                weights[f"{at}.lora_B.weight"] = torch.randn(128, 8, generator=generator) * 0.2
        save_file(weights, folder / "adapter_model.safetensors")
        made.append((name, number, str(folder)))
    return made


@pytest.fixture(scope="module")
def engines(model, start_engine, connector, unit, device):
    if device == "cuda":
        pytest.skip("vLLM's kernels for adapters take 16-bit weights only, and this model has float32")
    settings = {"block_size": unit, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    made = {
        "plain": start_engine(model, **settings),
        "first": start_engine(model, connector=connector(0), **settings),
        "second": start_engine(model, connector=connector(1), **settings),
    }
    return {name: engine.wait_started() for name, engine in made.items()}


def test_each_adapter_finds_its_own_blocks_on_any_node_and_nobody_elses(engines, adapters, prompt_of, same, unit):
    tokens, full = prompt_of(5 * unit + 3, seed=40), 5 * unit
    ways = [{"lora": adapter} for adapter in adapters] + [{}]
    wanted = [engines["plain"].run([("plain", tokens, way)], cold=True)[0] for way in ways]
    assert len({tuple(answer["tokens"]) for answer in wanted}) == len(ways)

    for num_known, way in enumerate(ways):
        cold = engines["first"].run([("cold", tokens, way)])[0]
        same([cold], [wanted[num_known]])
        assert cold["num_cached"] == 0, f"blocks of another adapter were used, {way}"
    for name in ("first", "second"):
        assert engines[name].reset()
        # One at a time: in one batch this vLLM's CPU build mixes adapters up, without a connector too.
        warm = [engines[name].run([(f"{name} {at}", tokens, way)])[0] for at, way in enumerate(ways)]
        same(warm, wanted)
        assert [answer["num_cached"] for answer in warm] == [full] * len(ways)


def test_an_adapter_and_a_salt_are_both_kept_apart(engines, adapters, prompt_of, same, unit):
    tokens, way = prompt_of(4 * unit + 1, seed=41), {"lora": adapters[0], "salt": "tenant"}
    wanted = engines["plain"].run([("plain", tokens, way)], cold=True)
    engine = engines["first"]
    engine.run([("unsalted", tokens, {"lora": adapters[0]})])
    assert engine.reset()
    salted = engine.run([("salted", tokens, way)])
    same(salted, wanted)
    assert salted[0]["num_cached"] == 0
    assert engine.reset()
    again = engine.run([("again", tokens, way)])
    same(again, wanted)
    assert again[0]["num_cached"] == 4 * unit

"""Two models share KV exactly if nothing that KV depends on differs."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaForCausalLM

from kvstore.errors import InvalidRequest, StoreUnavailable, UnsupportedModel
from kvstore.integrations.transformers.identity import kv_shape, namespace_of, weights_digest

GREEDY = {"max_new_tokens": 4, "do_sample": False}


def test_the_shape_is_what_the_cache_holds(build, wrap):
    for family, heads, dim in (("Llama", 2, 16), ("GPTNeoX", 4, 16), ("GPT2", 4, 16)):
        shape = wrap(build(family)).space.shape
        assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, heads, dim)
        assert (shape.dtype, shape.block_size) == ("float32", 16)


def test_equal_models_share_and_unlike_ones_do_not(build, tokens, wrap):
    spaces = {
        name: wrap(build(**changes), **options).space.digest
        for name, changes, options in (
            ("one", {}, {}),
            ("again", {}, {}),
            ("other weights", {"seed": 2}, {}),
            ("other dtype", {"dtype": "bfloat16"}, {}),
            ("rope base", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}),
            ("rope scaling", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, {}),
            ("norm", {"rms_norm_eps": 1e-5}, {}),
            ("eager attention", {"attn_implementation": "eager"}, {}),
            ("salt", {}, {"salt": b"tenant"}),
            ("block size", {}, {"block_size": 8}),
            ("named", {}, {"model_id": "mine"}),
            ("named otherwise", {}, {"model_id": "yours"}),
        )
    }
    assert spaces.pop("again") == spaces["one"]
    assert len(set(spaces.values())) == len(spaces)


def test_any_byte_of_any_weight_counts(build):
    model = build()
    digests = {weights_digest(model)}
    with torch.no_grad():
        for weights in model.parameters():
            flat = weights.view(-1)
            flat[len(flat) // 3] += 1
            digests.add(weights_digest(model))
    model.model.rotary_emb.inv_freq[3] *= 1.01  # A buffer that is never saved.
    digests.add(weights_digest(model))
    assert len(digests) == 2 + sum(1 for _ in model.parameters())


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def tie(model, to):
    """Have the last layer attend with the weights of another one."""
    layers = model.model.layers
    for name in ATTENTION:
        getattr(layers[2].self_attn, name).weight = getattr(layers[to].self_attn, name).weight
    return model


def test_which_layers_are_tied_counts(build, tokens, wrap):
    one, other, prompt = tie(build(), 0), tie(build(), 1), tokens(40)
    cached = wrap(one)
    cached.generate(prompt, **GREEDY)
    apart = wrap(other)
    assert apart.space.digest != cached.space.digest
    assert torch.equal(apart.generate(prompt, **GREEDY), other.generate(prompt, **GREEDY))
    assert apart.stats.num_loaded_tokens == 0
    assert wrap(tie(build(), 0)).space == cached.space


def test_equal_weights_in_tensors_of_their_own_share_with_tied_ones(build):
    tied, copied = tie(build(), 0), build()
    copied.load_state_dict(tied.state_dict())
    assert weights_digest(copied) == weights_digest(tied)


def test_a_layer_that_is_tied_to_another_one_is_noticed(build, tokens, wrap):
    model, prompt = tie(build(), 1), tokens(40)
    cached = wrap(model)
    cached.generate(prompt, **GREEDY)
    tie(model, 0)
    with pytest.raises(InvalidRequest, match="changed or moved"):
        cached.generate(prompt, **GREEDY)


def test_what_a_model_does_changes_no_namespace(build, tokens):
    model = build()
    shape, _ = kv_shape(model, 16)
    before = namespace_of(model, shape, None, b"")
    model.generate(tokens(50), **GREEDY)
    model.train().eval()
    model.compile(backend="eager")
    model.generate(tokens(50), **GREEDY)
    assert namespace_of(model, shape, None, b"") == before


def test_a_model_that_was_saved_and_loaded_shares_with_itself(build, wrap, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype="float32").eval()
    loaded.config.dtype = model.config.dtype  # Only how it was asked for; the weights say what it is.
    assert wrap(loaded).space == wrap(model).space


def test_a_name_stands_for_the_weights_and_for_nothing_else(build, wrap):
    one, other = wrap(build(), model_id="mine"), wrap(build(seed=2), model_id="mine")
    assert one.space.digest == other.space.digest
    changed = wrap(build(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), model_id="mine")
    assert changed.space.digest != one.space.digest
    assert wrap(build("Qwen2"), model_id="mine").space.digest != one.space.digest


def test_weights_that_no_digest_sees_need_a_name(build, wrap):
    class Quantised(torch.nn.Parameter):
        """As quantisers' are: scales lie beside the bytes."""

    model = build()
    model.lm_head.weight = Quantised(model.lm_head.weight.detach())
    with pytest.raises(UnsupportedModel, match=r"lm_head.*pass model_id"):
        wrap(model)
    wrap(model, model_id="mine")


class Packed(torch.nn.Module):
    """Holds its weight as quantised layers do: in no parameter."""

    def __init__(self, inner, kind):
        super().__init__()
        self.kind, weight = kind, inner.weight.detach()
        if kind == "attribute":
            self.packed = weight
        elif kind == "object":
            self.packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(weight, 0.01, 0, torch.qint8))
        else:
            self.held = [weight]

    def get_extra_state(self):
        return self.held if self.kind == "extra state" else None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.kind != "extra state":
            destination.pop(prefix + "_extra_state")
        if self.kind == "state dict":
            destination[prefix + "packed"] = self.held[0]

    def forward(self, x):
        weight = (
            torch.ops.quantized.linear_unpack(self.packed)[0].dequantize()
            if self.kind == "object"
            else (self.packed if self.kind == "attribute" else self.held[0])
        )
        return torch.nn.functional.linear(x, weight)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["attribute", "object", "extra state", "state dict"])
def test_weights_that_are_no_parameters_need_a_name(build, wrap, store, kind):
    model = build()
    model.model.layers[1].self_attn.q_proj = Packed(model.model.layers[1].self_attn.q_proj, kind).eval()
    with pytest.raises(UnsupportedModel, match=r"layers.1.self_attn.q_proj.*pass model_id"):
        wrap(model)
    assert store.num_opened == 0
    wrap(model, model_id="mine")


@pytest.mark.filterwarnings("ignore")  # It is deprecated, and in use.
def test_activations_with_a_scale_of_all_tokens_are_refused(build, wrap):
    model = torch.ao.quantization.quantize_dynamic(build(), {torch.nn.Linear}, dtype=torch.qint8).eval()
    with pytest.raises(UnsupportedModel, match=r"q_proj of dynamic quantisation"):
        wrap(model, model_id="mine")


def test_changed_weights_are_noticed(build, tokens, wrap):
    model = build()
    cached, prompt = wrap(model), tokens(40)
    cached.generate(prompt, **GREEDY)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    with pytest.raises(InvalidRequest, match="changed or moved"):
        cached.generate(prompt, **GREEDY)
    cached.close()

    renewed = wrap(model)
    assert torch.equal(renewed.generate(prompt, **GREEDY), model.generate(prompt, **GREEDY))
    assert renewed.stats.num_loaded_tokens == 0


def test_other_weights_at_the_address_of_freed_ones_are_noticed(build, tokens, wrap):
    model, prompt = build(), tokens(40)
    weight = model.model.layers[0].self_attn.k_proj.weight
    memory = bytearray(weight.detach().numpy().tobytes())

    def read_in():
        """Gives the weight a storage of its own, at an address that others had."""
        weight.data = torch.empty(0)
        weight.data = torch.frombuffer(memory, dtype=torch.float32).view(-1, 64)

    read_in()
    cached = wrap(model)
    cached.generate(prompt, **GREEDY)
    before = (weight.data_ptr(), weight._version)
    memory[4:8] = bytes(4)
    read_in()
    assert (weight.data_ptr(), weight._version) == before
    with pytest.raises(InvalidRequest, match="changed or moved"):
        cached.generate(prompt, **GREEDY)


def test_weights_are_not_kept_in_memory(build, wrap):
    model = build()
    wrap(model)
    weight = model.model.layers[0].self_attn.k_proj.weight
    storage = StorageWeakRef(weight.untyped_storage())
    weight.data = torch.empty(0)
    assert storage.expired()


@pytest.mark.parametrize("is_whole", [True, False])
def test_writes_through_data_are_noticed(build, tokens, wrap, is_whole):
    model, prompt = build(), tokens(40)
    cached = wrap(model)
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight.data
        change = 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
        weight += change if is_whole else change.where(torch.arange(len(weight))[:, None] > len(weight) // 2, 0)
    with pytest.raises(InvalidRequest, match="changed or moved"):
        cached.generate(prompt, **GREEDY)
    assert cached.stats.num_saved_blocks == 0


def test_writes_to_any_row_of_weights_of_inference_mode_are_noticed(build, tokens, wrap):
    with torch.inference_mode():
        model = build()
    cached = wrap(model)
    cached.generate(tokens(40), **GREEDY)
    with torch.inference_mode():
        model.model.layers[0].mlp.down_proj.weight[5, 1:3] += 2
    with pytest.raises(InvalidRequest, match="changed or moved"):
        cached.generate(tokens(40), **GREEDY)


def test_a_weight_in_any_order_of_memory(build, tokens, wrap):
    model, prompt = build(), tokens(40)
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = weight.detach().t().contiguous().t()
    cached = wrap(model)
    cached.generate(prompt, **GREEDY)
    weight.data += 1
    with pytest.raises(InvalidRequest, match="changed or moved"):
        cached.generate(prompt, **GREEDY)


@pytest.mark.parametrize(
    "change", [lambda each: 2 * each, lambda each: each[:-1], lambda each: torch.cat([each, each])]
)
def test_a_buffer_outside_the_checkpoint_that_is_replaced_is_noticed(build, tokens, wrap, change):
    model, prompt = build(), tokens(40)
    cached = wrap(model)
    model.model.rotary_emb.inv_freq = change(model.model.rotary_emb.inv_freq)
    with pytest.raises(InvalidRequest, match="changed or moved"):
        cached.generate(prompt, **GREEDY)


def test_training_mode_autocast_and_closed_ones_are_refused(build, tokens, wrap):
    model, prompt = build(), tokens(40)
    cached = wrap(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InvalidRequest, match="autocast"):
        cached.generate(prompt, **GREEDY)
    model.train()
    for call in (lambda: cached.generate(prompt, **GREEDY), lambda: wrap(model)):
        with pytest.raises(InvalidRequest, match="training mode"):
            call()
    model.eval()
    cached.close()
    cached.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        cached.generate(prompt, **GREEDY)

"""The three lines of the documentation, in a real Ray cluster: two nodes, a process on each, bytes over NIXL."""

from __future__ import annotations

import sys

import pytest
import ray
import torch
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import kvstore
from kvstore.integrations.transformers import PrefixCachedModel

pytestmark = pytest.mark.ray

EXACT = {
    "max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": 16,
    "output_logits": True, "return_dict_in_generate": True,
}  # fmt: skip


class Reader:
    def __init__(self, store, make_model):
        torch.set_num_threads(1)
        self.store, self.make_model = store, make_model

    def generate(self, family, prompt):
        with PrefixCachedModel(self.make_model(family), self.store) as cached:
            answer = cached.generate(prompt, **EXACT)
            return answer.sequences, torch.stack(answer.logits), cached.stats


def make_model(family):
    import transformers

    torch.manual_seed(1)
    windows = {"sliding_window": 24} if family == "Mistral" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None, **windows,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.fixture
def store(ray_cluster):
    store = kvstore.start("16MiB", name="transformers")
    yield store
    store.stop()


@pytest.fixture
def reader(store, node_ids):
    """Another process with the same weights, on the node that is not this process's."""
    # Workers cannot import this file, so what it defines travels whole.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    where = NodeAffinitySchedulingStrategy(node_ids[1], soft=False)
    made = ray.remote(Reader).options(num_cpus=1, scheduling_strategy=where).remote(store, make_model)
    yield made
    ray.kill(made)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_a_process_on_another_node_loads_what_this_one_computed(store, reader, tokens):
    prompt, num_bytes = tokens(100), 0
    for family in ("Llama", "Mistral"):
        model = make_model(family)
        alone = model.generate(prompt, **EXACT)
        with PrefixCachedModel(model, store) as cached:
            cached.generate(prompt, **EXACT)
            assert cached.stats.num_saved_blocks == 6

        sequences, logits, stats = ray.get(reader.generate.remote(family, prompt), timeout=60)

        assert stats.num_loaded_tokens == 96
        assert (stats.num_store_failures, stats.num_saved_blocks) == (0, 0)
        assert torch.equal(sequences, alone.sequences)
        assert torch.equal(logits, torch.stack(alone.logits))
        moved = sum((node.get("nixl") or {}).get("num_bytes", 0) for node in store.stats()["nodes"].values())
        num_bytes += 6 * cached.space.shape.block_bytes
        assert moved == num_bytes

"""The three lines of the documentation, in a real Ray cluster: two nodes, a process on each, bytes over NIXL."""

from __future__ import annotations

import pytest
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

pytestmark = pytest.mark.ray

EXACT = {
    "max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": 16,
    "output_logits": True, "return_dict_in_generate": True,
}  # fmt: skip


class Reader:
    """Another process with the same weights."""

    def __init__(self, store, make_model):
        from kvstore.integrations.transformers import PrefixCachedModel

        torch.set_num_threads(1)
        self.cached = PrefixCachedModel(make_model(), store)

    def generate(self, prompt):
        answer = self.cached.generate(prompt, **EXACT)
        return answer.sequences, torch.stack(answer.logits), self.cached.stats

    def close(self):
        self.cached.close()


def make_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def two_nodes():
    """A Ray cluster of two nodes with a store, and the id of the node that is not this process's."""
    import sys

    import ray
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    import kvstore

    # Workers cannot import this file, so what it defines travels whole.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cluster = Cluster()
    try:
        for head_only in ({"include_dashboard": False}, {}):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20, **head_only)
        ray.init(cluster.address, namespace="raykv-tests", log_to_driver=False)
        cluster.wait_for_nodes(timeout=30)
        store = kvstore.start("16MiB", name="transformers", timeout_s=60)
        own = ray.get_runtime_context().get_node_id()
        yield store, next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != own)
        store.stop()
    finally:
        ray.shutdown()
        cluster.shutdown()
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_a_process_on_another_node_loads_what_this_one_computed(two_nodes, tokens):
    import ray

    from kvstore.integrations.transformers import PrefixCachedModel

    store, other_node = two_nodes
    where = NodeAffinitySchedulingStrategy(other_node, soft=False)
    reader = ray.remote(Reader).options(num_cpus=1, scheduling_strategy=where).remote(store, make_model)
    model, prompt = make_model(), tokens(100)
    alone = model.generate(prompt, **EXACT)
    with PrefixCachedModel(model, store) as cached:
        cached.generate(prompt, **EXACT)
        assert cached.stats.num_saved_blocks == 6

    sequences, logits, stats = ray.get(reader.generate.remote(prompt), timeout=60)

    assert stats.num_loaded_tokens == 96
    assert (stats.num_store_failures, stats.num_saved_blocks) == (0, 0)
    assert torch.equal(sequences, alone.sequences)
    assert torch.equal(logits, torch.stack(alone.logits))
    moved = sum((node.get("nixl") or {}).get("num_bytes", 0) for node in store.stats()["nodes"].values())
    assert moved == 6 * cached.space.shape.block_bytes
    ray.get(reader.close.remote(), timeout=30)

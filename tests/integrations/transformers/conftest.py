"""Small models with random weights, and the stores in one process of tests/kvstore."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parent.parent.parent / "kvstore" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("kvstore_cluster", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules.setdefault("kvstore_cluster", _MODULE)
_SPEC.loader.exec_module(_MODULE)
socket_folder, cluster_class = _MODULE.socket_folder, _MODULE.cluster_class

VOCAB = 211
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96}
#: No token ends an answer or is padding unless a test says so.
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
WINDOWED = {
    "Mistral": {"sliding_window": 24},  # all layers
    "Qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},  # all but the first
    "Gemma2": {},
    "Gemma3": {},
    "GptOss": {},
}
"""Families with sliding windows of 24 tokens, and the changes that turn them on."""
FAMILIES = {
    "Llama": GQA,
    "Qwen2": GQA,
    "Qwen3": GQA | {"head_dim": 16},
    "Mistral": GQA | {"sliding_window": None},
    "GPTNeoX": {"num_attention_heads": 4, "max_position_embeddings": 512},  # multi-head, rotary over a part
    "Gemma2": GQA | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},  # every second layer
    "Gemma3": GQA | {"head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 3},  # two of three layers
    "GptOss": GQA | {"head_dim": 16, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "vocab_size": VOCAB},  # learned positions
}


def build(family="Llama", seed=1, dtype="float32", **changes):
    """Return a model whose weights depend on the arguments alone."""
    import torch
    import transformers

    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    sizes = FAMILIES[family] if family == "GPT2" else SIZES | FAMILIES[family]
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")(
        **(sizes | TOKENS | changes)
    )
    torch.manual_seed(seed)
    return getattr(transformers, f"{family}{head}")(config).to(getattr(torch, dtype)).eval()


def build_windowed(family="Mistral", **changes):
    """Return a model with sliding windows of 24 tokens."""
    return build(family, **(WINDOWED[family] | changes))


def tokens(num_tokens, seed=0):
    """Return a prompt, [1, num_tokens]."""
    import torch

    return torch.randint(1, VOCAB, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


class LocalStore:
    """The store of one node of a cluster in this process, as `kvstore.start` would return it."""

    def __init__(self, cluster, node_id):
        self.cluster, self.node_id, self.num_opened = cluster, node_id, 0
        self.config = cluster.nodes[node_id].state.config

    def client(self, space, *, tenant=""):
        from kvstore.errors import StoreNotRunning

        if self.node_id not in self.cluster.nodes:
            raise StoreNotRunning(f"node {self.node_id!r} has no store")
        self.num_opened += 1
        return self.cluster.client(self.node_id, space, tenant)


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums of several threads may be added in another order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stores(cluster_class):
    """Two nodes with a store each; slots are large enough for every model here."""
    cluster = cluster_class()
    for node_id in "ab":
        cluster.add(node_id, capacity_bytes=4 << 20, block_bytes=1 << 15)
    yield {node_id: LocalStore(cluster, node_id) for node_id in "ab"}
    cluster.stop()


@pytest.fixture
def private_store(cluster_class):
    """One node of a store with private tenants."""
    cluster = cluster_class()
    tenants = {"a": {"max_bytes": 3 << 15}, "b": {}}
    cluster.add("a", capacity_bytes=4 << 20, block_bytes=1 << 15, tenants=tenants, private_tenants=True)
    yield LocalStore(cluster, "a")
    cluster.stop()


@pytest.fixture
def store(stores):
    return stores["a"]


@pytest.fixture
def wrap(store):
    """Wraps models around the first node's store unless another is named."""
    from kvstore.integrations.transformers import PrefixCachedModel

    opened = []

    def make(model, on=store, **options):
        opened.append(PrefixCachedModel(model, on, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture(name="build")
def _build():
    return build


@pytest.fixture(name="wait_until")
def _wait_until():
    return _MODULE.wait_until


@pytest.fixture(name="build_windowed")
def _build_windowed():
    return build_windowed


@pytest.fixture(name="tokens")
def _tokens():
    return tokens

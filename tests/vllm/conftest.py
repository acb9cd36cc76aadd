"""Real vLLM engines on a real store of two nodes. Without vLLM in this environment all tests here are skipped.

`pytest tests/vllm --device cuda` has their caches on a GPU, which all engines share; without it they are on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

OBJECT_STORE_BYTES = 80 << 20
NODE_MEMORY_BYTES = 1 << 40
VOCABULARY = 2048
HAS_VLLM = importlib.util.find_spec("vllm") is not None

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where vLLM's engines run")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's own are not ours
            if not HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason="vLLM is not in this environment; `make test-vllm` has it"))


@pytest.fixture(scope="session", autouse=HAS_VLLM)
def _environment(tmp_path_factory, device):
    """Before Ray or vLLM is imported."""
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
        os.environ.pop(name, None)
    os.environ.update(
        RAYKV_TEST_DEVICE=device,
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="INFO",
        # Otherwise the sampler is compiled in the middle of a step, for tens of seconds on a small machine.
        TORCH_COMPILE_DISABLE="1",
        # Its attention spins until all its threads are there; several engines share the cores of this machine.
        OMP_NUM_THREADS="1",
        TRITON_F32_DEFAULT="ieee",  # on a GPU; otherwise float32 is cut to ten bits of mantissa in its attention
        VLLM_CACHE_ROOT=f"{sys.prefix}/cache-of-tests",  # what it finds out of a model, in a process for each
        PYTHONPATH=f"{Path(__file__).parent}:{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}",
        HF_HUB_OFFLINE="1",
    )
    if not os.access(os.path.expanduser("~"), os.W_OK):
        os.environ["HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def device(request):
    """Where the engines run. Not an option where these tests are collected with all others."""
    return request.config.getoption("--device", "cpu")


@pytest.fixture(scope="session")
def unit(device):
    """The smallest block, in tokens, that this vLLM's attention takes."""
    if device == "cuda":
        return 16
    package = Path(importlib.util.find_spec("vllm").origin).parent
    found = re.search(r"MultipleOf\((\d+)\)", (package / "v1/attention/backends/cpu_attn.py").read_text())
    return int(found[1])


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A small Llama with random weights, the same ones every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = str(tmp_path_factory.mktemp("model"))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=8192, dtype="float32",
        initializer_range=0.1,  # wide, so that the answer hangs on all of the prompt
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def eagle_head(tmp_path_factory):
    """An EAGLE head for `model`, with random weights: a layer that reads a token beside the state of the one before."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("eagle")
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=8192, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    layer = {
        name.removeprefix("model."): weight
        for name, weight in load_file(folder / "model.safetensors").items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    layer["fc.weight"] = torch.randn(256, 512) * 0.02
    save_file(layer, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture(scope="session")
def cluster():
    """Two nodes of a Ray cluster on this machine."""
    import ray
    from engines import begin_importing
    from ray.cluster_utils import Cluster

    begin_importing()  # which takes longer than all that comes before the first engine
    cluster = Cluster()
    try:
        for only in ({"include_dashboard": False, "no_monitor": True}, {}):  # for the head
            cluster.add_node(
                num_cpus=2, memory=NODE_MEMORY_BYTES, object_store_memory=OBJECT_STORE_BYTES, include_log_monitor=False,
                **only,
            )  # fmt: skip
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes(timeout=30)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="session")
def store(cluster, unit):
    import kvstore

    # The largest stored block here; a token has 4 KiB. Each node store that starts writes to all of its memory once.
    store = kvstore.start("128MiB", block_bytes=2 * unit * 4096, lease_ttl_s=10.0)
    yield store
    store.stop()


@pytest.fixture(scope="session")
def node_ids(store):
    """The ids of both nodes."""
    return store.node_ids()


@pytest.fixture(scope="session")
def pool_of(store):
    """The counts of a node's pool."""

    def ask(node_id):
        return store.stats()["nodes"][node_id]["pool"]

    return ask


@contextlib.contextmanager
def _engines(tmp_path_factory):
    from engines import Engine

    started = []

    def start(model, **settings):
        log = tmp_path_factory.mktemp("engine") / "log"
        started.append(Engine(model, log, **settings))
        return started[-1]

    try:
        yield start
    finally:
        for engine in started:
            engine.begin_close()
        for engine in started:
            engine.close()


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory):
    """Starts engines; several at once come up together. All end with the module."""
    with _engines(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def _lasting(tmp_path_factory, model, connector, unit):
    """The engines that all modules share: starting one takes longer than most tests."""
    with _engines(tmp_path_factory) as start:
        made = {
            "plain": start(model, block_size=unit),
            "first": start(model, block_size=unit, connector=connector(0, portable=True)),
            "second": start(model, block_size=2 * unit, connector=connector(1, block_size=unit, portable=True)),
        }
        yield {name: engine.wait_started() for name, engine in made.items()}


@pytest.fixture(scope="session")
def plain(_lasting):
    """An engine without a store."""
    return _lasting["plain"]


@pytest.fixture(scope="session")
def first(_lasting):
    """An engine with small blocks, on the first node."""
    return _lasting["first"]


@pytest.fixture(scope="session")
def second(_lasting):
    """An engine with blocks twice as large, on the second node; stored blocks are the small ones."""
    return _lasting["second"]


@pytest.fixture(scope="session")
def connector(cluster, node_ids):
    """Makes the extra config of a connector on one of the nodes."""

    def make(node=0, **more):
        # On a busy machine an answer may take long, and is wanted all the same.
        waits = {"lookup_wait_s": 5.0, "load_timeout_s": 30.0}
        return {"address": cluster.address, "node_id": node_ids[node]} | waits | more

    return make


@pytest.fixture(scope="session")
def prompt_of():
    """Makes prompts of random tokens; another seed shares nothing."""
    import numpy as np

    def make(num_tokens, seed=0):
        return np.random.default_rng([seed, 7]).integers(0, VOCABULARY, num_tokens).tolist()

    return make


@pytest.fixture(scope="session")
def same():
    """Compares answers: tokens exactly, log probabilities as far as float32 goes."""

    def check(answers, wanted, max_diff=1e-3):
        for at, (answer, other) in enumerate(zip(answers, wanted, strict=True)):
            assert answer["tokens"] == other["tokens"], f"prompt {at}"
            diff = max(abs(a - b) for a, b in zip(answer["logprobs"], other["logprobs"], strict=True))
            assert diff <= max_diff, f"prompt {at}: log probabilities differ by {diff}"

    return check


@pytest.fixture(scope="session")
def eventually():
    """Waits until a function says something true."""
    import waiting

    return waiting.eventually


@pytest.fixture(scope="session")
def is_clean(store, node_ids, eventually):
    """Neither these engines nor the store hold anything any more."""

    def check(*engines, limit_s=30):
        for engine in engines:
            engine.settle()
            assert engine.tracked() == 0
            assert engine.blocks()[0] == engine.blocks()[1]

        def is_settled():
            nodes = store.stats()["nodes"]
            held = [nodes[node][f"num_handoff{what}"] for node in node_ids for what in ("s", "_slots", "_fetches")]
            keys = ("num_pinned", "num_leases", "num_writing", "num_quarantined")
            pools = [nodes[node]["pool"] for node in node_ids]  # None before a node has had a client.
            return not any(held + [pool[key] for pool in pools if pool is not None for key in keys])

        eventually(is_settled, limit_s)

    return check

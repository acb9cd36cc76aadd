"""The app of examples/serve_openai.py: a small model, its deployments on Ray Serve, and a store beside them.

Nothing is downloaded: weights are random with a fixed seed, and the tokenizer has one token for each character.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import string
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL_ID = "tiny-llama"
APP = "raykv"
BLOCK_SIZE = 32
MAX_TOKENS = 2048
HANDOFF_TTL_S = 10.0
ROUTERS = {
    "prefix": "kvstore.integrations.serve.PrefixRouter",
    "affinity": "ray.serve.llm.request_router.PrefixCacheAffinityRouter",
    "pow2": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "round robin": "ray.serve.experimental.round_robin_router:RoundRobinRouter",
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
INGRESS: dict[str, Any] = {
    "ingress_deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}},
    "ingress_cls_config": {"ingress_cls": "kvstore.integrations.serve.ingress.OpenAiErrors"},
}
_SPECIAL = ("<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """What to run.

    Args:
        folder: of the model, which `save_model` wrote.
        port: of the HTTP server.
        host: its address.
        replicas: of each deployment.
        one_deployment: engines that prefill and decode; otherwise a deployment for each.
        router: a key of ROUTERS.
        store: name of the store.
        save: what engines save: "prompt", "all" or "none".
        address: of the Ray cluster; None is one that this process starts for itself.
        engine: further arguments of vLLM, for every engine.
    """

    folder: str
    port: int = 8000
    host: str = "127.0.0.1"
    replicas: int = 1
    one_deployment: bool = False
    router: str = "prefix"
    store: str = "default"
    save: str = "prompt"
    address: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"


def private_environment(folder: str) -> None:
    """Keep this run apart from every other Ray of this machine; must come before Ray and vLLM are imported."""
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
        os.environ.pop(name, None)
    os.environ.update(RAY_TMPDIR=folder, RAY_AUTH_MODE="disabled")
    quiet_environment()


def quiet_environment() -> None:
    """Let nothing call home or download, and small engines share few cores."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # It would win over kv_cache_memory_bytes.
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", TORCH_COMPILE_DISABLE="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for work spin
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def save_model(folder: str) -> str:
    """Write a Llama with random weights, the same ones every time, and its tokenizer; returns the folder."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = [*_SPECIAL, "\n", *(char for char in string.printable if char.isprintable())]
    plain = Tokenizer(models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="<|end|>", additional_special_tokens=list(_SPECIAL[1:4])
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(texts), hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_TOKENS, dtype="float32", bos_token_id=None,
        eos_token_id=texts.index("<|end|>"),
        initializer_range=0.1,  # wide, so that the answer hangs on all of the prompt
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def llm_config(options: AppOptions, address: str) -> dict[str, Any]:
    """Return the LLMConfig of one deployment, whose engines find their Ray by its address."""
    router = {"request_router_class": ROUTERS[options.router]}
    if options.router == "prefix":
        router["request_router_kwargs"] = {"tokenizer": options.folder, "store": options.store}
    return {
        "model_loading_config": {"model_id": MODEL_ID, "model_source": options.folder},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 0.5}]},
        "deployment_config": {
            "num_replicas": options.replicas,
            "max_ongoing_requests": 64,
            "max_constructor_retry_count": 1,  # what fails once fails again, and each try takes a minute
            "ray_actor_options": {"num_cpus": 0.1},
            "request_router_config": router,
        },
        "log_engine_metrics": False,
        "engine_kwargs": {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": MAX_TOKENS,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": 128 << 20,
            "enable_prefix_caching": True,
            "enable_prompt_tokens_details": True,  # `cached_tokens` in every answer
            "kv_transfer_config": {
                "kv_connector": "RaykvConnector",
                "kv_connector_module_path": "kvstore.integrations.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "store": options.store,
                    "address": address,
                    "save": options.save,
                    # A decode engine that has a prompt itself does not fetch what was prefilled for it.
                    "handoff_ttl_s": HANDOFF_TTL_S,
                },
            },
            **options.engine,
        },
    }


def build(options: AppOptions, address: str) -> Any:
    """Return the Serve application, on the Ray at an address."""
    from ray.serve.llm import build_pd_openai_app

    from kvstore.integrations.serve import register

    if options.one_deployment:
        return build_models([llm_config(options, address)])
    register()
    both = {role: llm_config(options, address) for role in ("prefill_config", "decode_config")}
    return build_pd_openai_app({**both, **INGRESS})


def build_models(configs: Iterable[dict[str, Any]]) -> Any:
    """Return a Serve application of several models, each a deployment whose engines prefill and decode."""
    from ray.serve.llm import build_openai_app

    from kvstore.integrations.serve import register

    register()
    return build_openai_app({"llm_configs": list(configs), **INGRESS})


@contextlib.contextmanager
def running_store(options: AppOptions, capacity: str = "256MiB") -> Iterator[Any]:
    """Run a Ray of this process with a store in it, or use those at an address; yields the store."""
    import ray

    import kvstore

    if options.address is not None:
        ray.init(options.address, log_to_driver=False, configure_logging=False)
        store = kvstore.connect(options.store)
    else:
        ray.init(num_cpus=16, include_dashboard=False, object_store_memory=160 << 20, log_to_driver=False,
                 configure_logging=False)  # fmt: skip
        # Ray has handlers of its own, of which one ends this process without the clean-up below.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        store = kvstore.start(capacity, name=options.store)
    try:
        yield store
    finally:
        store.stop()
        ray.shutdown()


@contextlib.contextmanager
def telling(what: str, every_s: float = 15.0) -> Iterator[None]:
    """Say on stderr that something is under way, now and again until the body is done."""
    done = threading.Event()

    def tell() -> None:
        began_s = time.monotonic()
        print(f"{what}; this takes some minutes", file=sys.stderr, flush=True)
        while not done.wait(every_s):
            print(f"{what}, since {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def running_app(options: AppOptions, store: Any) -> Iterator[str]:
    """Run the app on a store; yields the URL of its API. Ends the app, and Serve if it began it."""
    from ray import serve

    for name in ("ray.serve", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    serve.start(http_options={"host": options.host, "port": options.port})
    try:
        with telling(f"the app is being deployed on the Ray at {store.address}"):
            serve.run(build(options, store.address), name=APP, route_prefix="/")
        yield options.url
    finally:
        if options.address is None:
            serve.shutdown()
        else:
            serve.delete(APP)

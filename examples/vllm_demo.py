"""What the examples with real vLLM share: an environment of their own, a small model, the connector's settings."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

VOCABULARY = 2048
MAX_LOGPROB_DIFF = 1e-3  # what float32 loses between a prompt in one step and the same in two


def need_vllm(target: str) -> None:
    """End the program where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit(f"vLLM is not installed in this environment; `make {target}` makes one and runs this example")


def private_environment(folder: str) -> None:
    """Keep this run apart from every other Ray of this machine; must come before Ray and vLLM are imported."""
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
        os.environ.pop(name, None)
    os.environ.update(RAY_TMPDIR=folder, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", VLLM_NO_USAGE_STATS="1")
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CONFIGURE_LOGGING="0")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no process for the engine besides the one that makes it
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # its sampler would be compiled in the middle of what is timed here
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # a GPU's attention otherwise cuts float32 to ten bits of mantissa
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not os.access(os.path.expanduser("~"), os.W_OK):
        os.environ["HOME"] = folder


def save_model(folder: str) -> str:
    """Write a Llama with random weights, the same ones every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048, dtype="float32",
        initializer_range=0.1,  # wide, so that the answer hangs on all of the prompt
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def smallest_block(device: str) -> int:
    """Return the tokens of the smallest block that this vLLM's attention takes; other blocks are its multiples."""
    if device == "cuda":
        return 16
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return min(int(getattr(size, "base", size)) for size in CPUAttentionBackend.get_supported_kernel_block_sizes())


def make_engine(
    model: str,
    block_size: int,
    stored_block_size: int = 0,
    address: str | None = None,
    device: str = "cpu",
    save: str = "prompt",
    handoff_staging: int = 0,
) -> Any:
    """Make an engine on the store; with a stored block size of its own it shares with engines of other ones.

    With `handoff_staging` so many bytes of a GPU pass hand-offs on.
    """
    from vllm import LLM, ModelRegistry
    from vllm.config import KVTransferConfig
    from vllm.model_executor.models.llama import LlamaForCausalLM

    # Otherwise vLLM asks what this model can do in a process of its own, which imports all of vLLM once more.
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    connector = KVTransferConfig(
        kv_connector="RaykvConnector",
        kv_connector_module_path="kvstore.integrations.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "address": address,
            "block_size": stored_block_size,
            "save": save,
            "portable": bool(stored_block_size) and device == "cpu",
            "handoff_staging": handoff_staging,
            # The defaults bound what a slow store costs a request; here every block is to be found.
            "lookup_wait_s": 10.0,
            "load_timeout_s": 60.0,
        },
    )
    # A GPU is shared with other engines; of its backends for float32 this one is fast.
    on_gpu = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
    return LLM(
        model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=block_size,
        max_model_len=2048, disable_log_stats=False, kv_transfer_config=connector,
        **(on_gpu if device == "cuda" else {}),
    )  # fmt: skip


def generate(
    engine: Any,
    tokens: list[int],
    *,
    num_tokens: int = 8,
    cold: bool = False,
    transfer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Answer a prompt; a cold one reads no cache. `transfer` are vLLM's kv_transfer_params."""
    from vllm import SamplingParams

    options = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, detokenize=False,
        skip_reading_prefix_cache=cold, extra_args={"kv_transfer_params": transfer} if transfer else None,
    )  # fmt: skip
    (output,) = engine.generate([{"prompt_token_ids": tokens}], options, use_tqdm=False)
    text = output.outputs[0]
    return {
        "tokens": list(text.token_ids),
        "logprobs": [step[token].logprob for step, token in zip(text.logprobs, text.token_ids, strict=True)],
        "num_cached": output.num_cached_tokens or 0,
        "first_token_s": output.metrics.first_token_latency,
        "transfer": output.kv_transfer_params,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers have the same tokens and, as far as float32 goes, log probabilities."""
    diffs = [abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True)]
    return one["tokens"] == other["tokens"] and max(diffs) <= MAX_LOGPROB_DIFF


def finish_saves(engine: Any) -> None:
    """Step an engine of this process until what it computed is stored; one in a process of its own does that itself."""
    core = engine.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        engine.llm_engine.step()

"""Real vLLM on the CPU: prompts computed cold, then warm from the store. The answers must be the same.

One engine with a small random Llama in float32, and a store on a Ray of its own. Each prompt is first computed in
full, which fills the store; then vLLM's own prefix cache is emptied and the prompt comes again; last, all prompts
come at once. Exits with 1 when a token differs, a log probability moves, or a block did not come from the store.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

BLOCK_SIZE = 32
VOCABULARY = 2048
NUM_OUTPUT_TOKENS = 8
MAX_LOGPROB_DIFF = 1e-3
SHARED = 8 * BLOCK_SIZE  # tokens of a prefix that three prompts have in common
PROMPTS = [  # name, tokens in common with others, tokens of its own, salt, blocks that must come from the store
    ("shorter than a block", 0, BLOCK_SIZE - 12, None, 0),
    ("one block exactly", 0, BLOCK_SIZE, None, 1),
    ("one token past a block", 0, BLOCK_SIZE + 1, None, 1),
    ("shared prefix, first", SHARED, 16 * BLOCK_SIZE + 5, None, 24),
    ("shared prefix, second", SHARED, 3 * BLOCK_SIZE, None, 11),
    ("second again, another tenant", SHARED, 3 * BLOCK_SIZE, "another tenant", 0),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one pass gave for one prompt; `first_s` is from the request to its first token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached_tokens: int
    first_s: float

    def max_logprob_diff(self, other: Answer) -> float:
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


def private_environment(folder: str) -> None:
    """Keep this run apart from every other Ray of this machine; must come before Ray and vLLM are imported."""
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
        os.environ.pop(name, None)
    os.environ.update(
        RAY_TMPDIR=folder,
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_STREAM="ext://sys.stderr",
        VLLM_NO_USAGE_STATS="1",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
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
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.1,  # wide, so that the answer hangs on all of the prompt
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_engine(model: str) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="RaykvConnector",
        kv_connector_module_path="vllm_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    return LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        async_scheduling=False,
        disable_log_stats=True,
        kv_transfer_config=connector,
    ).llm_engine


def run(engine: Any, prompts: list[dict[str, Any]], *, cold: bool = False) -> list[Answer]:
    """Give the engine these prompts at once; cold ones read no cache at all but fill them."""
    from vllm import SamplingParams

    options = SamplingParams(
        temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=0, detokenize=False,
        skip_reading_prefix_cache=cold,
    )  # fmt: skip
    begin, first_s, done = time.perf_counter(), {}, {}
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, options)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first_s.setdefault(output.request_id, time.perf_counter() - begin)
            if output.finished:
                done[output.request_id] = output
    answers = []
    for index in map(str, range(len(prompts))):
        text = done[index].outputs[0]
        logprobs = tuple(step[token].logprob for step, token in zip(text.logprobs, text.token_ids, strict=True))
        answers.append(
            Answer(
                tokens=tuple(text.token_ids),
                logprobs=logprobs,
                num_cached_tokens=done[index].num_cached_tokens or 0,
                first_s=first_s[index],
            )
        )
    return answers


def measure(engine: Any) -> list[dict[str, Any]]:
    """Run every prompt cold, warm, and warm together with all others; one row for each.

    Attention does not see the order of cached tokens, so blocks that came back in each other's place would change
    nothing while one prompt uses all of them. The shared prefix, used by prompts together, would show it.
    """
    import numpy as np

    random = np.random.default_rng(1)
    shared, own = random.integers(0, VOCABULARY, SHARED).tolist(), {}
    prompts: list[dict[str, Any]] = []
    for _, num_shared, num_own, salt, _ in PROMPTS:
        if salt is None:
            own[num_own] = random.integers(0, VOCABULARY, num_own).tolist()
        prompts.append(
            {"prompt_token_ids": shared[:num_shared] + own[num_own]} | ({"cache_salt": salt} if salt else {})
        )
    # The first step of each shape is slow. These prompts are nobody's prefix.
    for prompt in prompts:
        run(engine, [{"prompt_token_ids": random.permutation(prompt["prompt_token_ids"]).tolist()}], cold=True)

    cold, warm = [], []
    for prompt, (_, _, _, salt, _) in zip(prompts, PROMPTS, strict=True):
        # Another tenant's prompt is not computed in advance: it must find nothing of what the others left.
        cold += run(engine, [prompt], cold=True) if salt is None else [cold[-1]]
    for prompt in prompts:
        engine.reset_prefix_cache()
        warm += run(engine, [prompt])
    engine.reset_prefix_cache()
    together = run(engine, prompts)

    rows = []
    for (name, _, _, _, wanted), prompt, first, *others in zip(PROMPTS, prompts, cold, warm, together, strict=True):
        num_found = -(-others[0].num_cached_tokens // BLOCK_SIZE)
        diff = max(other.max_logprob_diff(first) for other in others)
        identical = all(other.tokens == first.tokens for other in others) and diff <= MAX_LOGPROB_DIFF
        rows.append(
            {
                "prompt": name,
                "num_tokens": len(prompt["prompt_token_ids"]),
                "cold_first_token_s": round(first.first_s, 5),
                "warm_first_token_s": round(others[0].first_s, 5),
                "num_blocks_from_store": num_found,
                "num_blocks_wanted": wanted,
                "max_logprob_diff": diff,
                "identical": identical,
                "ok": identical and num_found == wanted,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="vLLM, cold and warm from the store")
    for name in ("prompt", "tokens", "cold ms", "warm ms", "blocks from store", "identical"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    for row in rows:
        table.add_row(
            row["prompt"],
            str(row["num_tokens"]),
            f"{row['cold_first_token_s'] * 1e3:.1f}",
            f"{row['warm_first_token_s'] * 1e3:.1f}",
            f"{row['num_blocks_from_store']} of {row['num_blocks_wanted']}",
            "yes" if row["identical"] else "NO",
        )
    Console().print(table)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the rows as one JSON list.")
def main(as_json: bool) -> None:
    """Compare vLLM's answers cold and warm from the store."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit("vLLM is not installed in this environment; `make example-vllm` makes one and runs this example")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the clean-up runs
    folder = tempfile.mkdtemp(prefix="rk", dir="/tmp")  # short: a socket's path ends at 107 bytes
    private_environment(folder)
    import kvstore

    store = engine = None
    try:
        with Console(stderr=True).status("starting a store on a Ray of its own") as status:
            store = kvstore.start("256MiB")
            status.update("starting vLLM")
            engine = make_engine(save_model(f"{folder}/model"))
            status.update("running the prompts")
            rows = measure(engine)
    finally:
        if engine is not None:
            engine.engine_core.shutdown()
        if store is not None:
            store.stop()
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print(json.dumps(rows))
    else:
        show(rows)
    if not all(row["ok"] for row in rows):
        sys.exit("an answer changed, or blocks did not come from the store")


if __name__ == "__main__":
    main()

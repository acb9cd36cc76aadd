"""Real vLLM on the CPU: prompts computed cold, then warm from the store. The answers must be the same.

A store on a Ray of its own, and one engine with a small random Llama in float32, on a GPU with --device cuda. Each
prompt is first computed, which fills the store; then vLLM's own prefix cache is emptied and the prompt comes again.
Exits with 1 when a token or a log probability differs, or a block did not come from the store.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from vllm_demo import (
    VOCABULARY,
    finish_saves,
    generate,
    make_engine,
    need_vllm,
    private_environment,
    same,
    save_model,
)

BLOCK_SIZE = 32
LENGTHS = {"shorter than a block": 20, "one block exactly": 32, "one token past it": 33, "some pages": 1_000}


def measure(engine: Any) -> list[dict[str, Any]]:
    """Run every prompt cold and warm; one row for each."""
    import numpy as np

    random, rows = np.random.default_rng(1), []
    for name, num_tokens in LENGTHS.items():
        generate(engine, random.integers(0, VOCABULARY, num_tokens).tolist())  # the first step of each shape is slow
        prompt = random.integers(0, VOCABULARY, num_tokens).tolist()
        cold = generate(engine, prompt)
        finish_saves(engine)
        engine.reset_prefix_cache()
        warm = generate(engine, prompt)
        row = {
            "prompt": name,
            "num_tokens": num_tokens,
            "num_tokens_from_store": warm["num_cached"],
            "cold_first_token_s": cold["first_token_s"],
            "warm_first_token_s": warm["first_token_s"],
            "identical": same(cold, warm),
        }
        rows.append(row | {"ok": row["identical"] and warm["num_cached"] == num_tokens // BLOCK_SIZE * BLOCK_SIZE})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="vLLM, cold and warm from the store")
    for name in ("prompt", "tokens", "from the store", "cold ms", "warm ms", "identical"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    for row in rows:
        times = [f"{row[key] * 1e3:.1f}" for key in ("cold_first_token_s", "warm_first_token_s")]
        numbers = [str(row["num_tokens"]), str(row["num_tokens_from_store"])]
        table.add_row(row["prompt"], *numbers, *times, "yes" if row["identical"] else "NO")
    Console().print(table)


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as one JSON list.")
def main(device: str, as_json: bool) -> None:
    """Compare vLLM's answers cold and warm from the store."""
    need_vllm("example-vllm")
    folder = tempfile.mkdtemp(prefix="rk", dir="/tmp")  # short: a socket's path ends at 107 bytes
    private_environment(folder)
    import ray

    import kvstore

    store = engine = None
    try:
        store = kvstore.start("256MiB")
        address = ray.get_runtime_context().gcs_address
        engine = make_engine(save_model(f"{folder}/model"), BLOCK_SIZE, address=address, device=device)
        rows = measure(engine)
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
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

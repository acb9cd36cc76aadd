"""Prefill and decode with real vLLM on two Ray nodes of this machine, with the store between them.

The decode engine has blocks twice as large as those of the prefill engine: 16 and 32 tokens, or what this vLLM's
attention takes. Prompts are prefilled on one node, which
saves them; the decode engine on the other finds them, fetches what it lacks over NIXL, and goes on. Every answer is
compared with one that the decode engine computed from nothing. Exits with 1 when one differs, or came from nowhere.

With --handoff nothing is saved: the prefill engine's answer has a ticket, and with that the decode engine fetches them,
on a GPU through its memory. With --both that is done first, and then everything once more through the store,
with new engines in the same processes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import click
from prefill_decode import two_nodes
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
    smallest_block,
)

START_S, CALL_S = 240.0, 120.0
STAGING_BYTES = 64 << 20  # of a GPU, through which hand-offs go
SYSTEM = 256  # tokens that conversations have in common


def prompts(block_size: int) -> list[tuple[str, int, int]]:
    """Return (name, tokens in common, tokens of its own) of each."""
    return [
        ("shorter than a block", 0, 10),
        ("one block exactly", 0, block_size),
        ("one token past it", 0, block_size + 1),
        ("some pages", 0, 1_000),
        ("a conversation", SYSTEM, 60),
        ("another one", SYSTEM, 100),
    ]


class Worker:
    """An actor with an engine in it, or one after the other: importing vLLM takes longer than making an engine."""

    def __init__(self, model: str, num_stored_in_block: int, device: str) -> None:
        self._model, self._num_stored_in_block, self._device = model, num_stored_in_block, device
        self._stored = smallest_block(device)
        self._engine: Any = None

    def start(self, handoff: bool) -> None:
        self._engine = make_engine(
            self._model, self._num_stored_in_block * self._stored, stored_block_size=self._stored, device=self._device,
            save="none" if handoff else "prompt",
            handoff_staging=STAGING_BYTES if handoff and self._device == "cuda" else 0,
        )  # fmt: skip

    def stop(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()
        self._engine = None

    def stored_block_size(self) -> int:
        return self._stored

    def prefill(self, tokens: list[int], handoff: bool) -> dict[str, Any]:
        answer = generate(self._engine, tokens, num_tokens=1, transfer={"do_remote_decode": True} if handoff else None)
        if not handoff:
            finish_saves(self._engine)
        return answer

    def decode(self, tokens: list[int], transfer: dict[str, Any] | None) -> dict[str, Any]:
        # With this newer vLLMs say how much the prefill engine found, and not how much came here.
        come_here = {key: of for key, of in (transfer or {}).items() if key != "remote_prefill_cached_tokens"}
        return generate(self._engine, tokens, transfer=come_here)

    def alone(self, tokens: list[int]) -> dict[str, Any]:
        return generate(self._engine, tokens, cold=True)


def run(model: str, device: str, ways: tuple[bool, ...]) -> dict[bool, list[dict[str, Any]]]:
    """Send every prompt through two engines, anew for each way: by hand-offs or not; one row for each prompt."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import kvstore

    with two_nodes() as nodes:
        store = kvstore.start("256MiB")
        try:
            workers = [
                ray.remote(Worker)
                .options(num_cpus=0.5, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
                .remote(model, num_stored_in_block, device)
                for node, num_stored_in_block in zip(nodes, (1, 2), strict=True)
            ]
            return {handoff: serve(workers, handoff) for handoff in ways}
        finally:
            store.stop()


def serve(workers: list[Any], handoff: bool) -> list[dict[str, Any]]:
    """Start an engine on each node, and send every prompt through both; one row for each."""
    import numpy as np
    import ray

    ray.get([worker.start.remote(handoff) for worker in workers], timeout=START_S)
    prefill, decode = workers
    stored = ray.get(prefill.stored_block_size.remote(), timeout=CALL_S)
    random = np.random.default_rng(1)
    # The first steps of an engine are slow. This prompt is nobody's prefix.
    ray.get(
        [worker.alone.remote(random.integers(0, VOCABULARY, 300).tolist()) for worker in workers],
        timeout=CALL_S,
    )
    system = random.integers(0, VOCABULARY, SYSTEM).tolist()
    rows = []
    for name, num_shared, num_own in prompts(stored):
        tokens = system[:num_shared] + random.integers(0, VOCABULARY, num_own).tolist()
        first = ray.get(prefill.prefill.remote(tokens, handoff), timeout=CALL_S)
        answer = ray.get(decode.decode.remote(tokens, first["transfer"]), timeout=CALL_S)
        alone = ray.get(decode.alone.remote(tokens), timeout=CALL_S)
        wanted = len(tokens) // stored * stored
        identical = same(answer, alone) and first["tokens"] == answer["tokens"][:1]
        rows.append(
            {
                "prompt": name,
                "handoff": handoff,
                "num_tokens": len(tokens),
                "num_tokens_found": answer["num_cached"],
                "first_token_s": answer["first_token_s"],
                "alone_first_token_s": alone["first_token_s"],
                "identical": identical,
                "ok": identical and answer["num_cached"] == wanted,
            }
        )
    ray.get([worker.stop.remote() for worker in workers], timeout=CALL_S)
    return rows


def show(rows: list[dict[str, Any]], way: str) -> None:
    table = Table(title=f"vLLM: prefilled on one node, decoded on the other, {way}")
    for name in ("prompt", "tokens", "found", "TTFT ms", "without ms", "identical"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    for row in rows:
        times = [f"{row[key] * 1e3:.1f}" for key in ("first_token_s", "alone_first_token_s")]
        numbers = [str(row["num_tokens"]), str(row["num_tokens_found"])]
        table.add_row(row["prompt"], *numbers, *times, "yes" if row["identical"] else "NO")
    Console().print(table)


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="A GPU is shared.")
@click.option("--handoff", is_flag=True, help="Pass blocks on with tickets, not through the store.")
@click.option("--both", is_flag=True, help="First with tickets, then through the store, with engines anew.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as one JSON list.")
def main(device: str, handoff: bool, both: bool, as_json: bool) -> None:
    """Prefill with one vLLM engine, decode with another."""
    need_vllm("demo-vllm")
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        private_environment(folder)
        rows_of = run(save_model(f"{folder}/model"), device, (True, False) if both else (handoff,))
    rows = [row for of_way in rows_of.values() for row in of_way]
    if as_json:
        print(json.dumps(rows))
    else:
        for by_handoff, of_way in rows_of.items():
            show(of_way, "by hand-off" if by_handoff else "through the store")
    if not all(row["ok"] for row in rows):
        sys.exit("an answer changed, or blocks were not found")


if __name__ == "__main__":
    main()

"""Which share of prompts is in a cache, by how Ray Serve's router chooses replicas: the same requests for each router.

    make bench-serve ARGS="--requests 96 --replicas 2 --json"

Several groups of requests share a system prompt each. A replica's cache holds some of the groups, not all. Without
--store the engines' own caches are all there is: the share shows what routers do. With --store all replicas share one
store, and blocks of it count as cached, too; then the first tokens and the blocks from the store are the difference.
With --simulated the replicas are those of serve_simulated.py, which start in seconds. Each router has an app of its
own, with empty caches. Prints one table, or with --json one document.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

CALL_S = 300.0
WORDS = ("night", "train", "lamp", "coast", "sister", "count", "field", "clock", "plum", "gate", "water", "tower")
#: Answers, the seconds that all took, and blocks that came from the store.
Found = tuple[list[dict[str, float]], float, int]
DEFAULTS = ("prefix", "affinity", "round robin")


def requests(num_groups: int, num_requests: int, system_tokens: int, own_tokens: int, seed: int) -> list[str]:
    """Return prompts in the order of asking; a token is a character."""
    dice = random.Random(seed)

    def text(num_tokens: int) -> str:
        words: list[str] = []
        while sum(map(len, words)) + len(words) < num_tokens:
            words.append(dice.choice(WORDS))
        return " ".join(words)[:num_tokens]

    systems = [text(system_tokens) for _ in range(num_groups)]
    prompts = [systems[number % num_groups] + text(own_tokens) for number in range(num_requests)]
    dice.shuffle(prompts)
    return prompts


async def ask_all(url: str, prompts: Sequence[str], num_at_once: int, num_tokens: int) -> list[dict[str, float]]:
    """Ask all prompts; returns tokens, cached tokens and the time to the first token of each."""
    import openai
    from serve_app import MODEL_ID

    gate = asyncio.Semaphore(num_at_once)
    client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=CALL_S, max_retries=0)

    async def ask(prompt: str) -> dict[str, float]:
        async with gate:
            began_s, first_s, usage = time.perf_counter(), 0.0, None
            stream = await client.completions.create(
                model=MODEL_ID, prompt=prompt, max_tokens=num_tokens, temperature=0, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for chunk in stream:
                first_s = first_s or time.perf_counter() - began_s
                usage = chunk.usage or usage
            cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
            return {"num_tokens": usage.prompt_tokens, "num_cached": cached or 0, "first_token_s": first_s}

    async with client:
        return list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))


def measure(router: str, settings: dict[str, Any], prompts: Sequence[str]) -> dict[str, Any]:
    """Ask everything of replicas that a router chooses, and return a row."""
    import serve_app

    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        serve_app.private_environment(folder)
        folder = serve_app.save_model(f"{folder}/model")
        run = with_simulated if settings["simulated"] else with_vllm
        rows, seconds, num_hits = run(router, folder, settings, prompts)
    times_ms = [row["first_token_s"] * 1e3 for row in rows]
    num_tokens = sum(row["num_tokens"] for row in rows)
    return {
        "router": router,
        "num_requests": len(rows),
        "cached_share": round(sum(row["num_cached"] for row in rows) / num_tokens, 4),
        "num_blocks_of_store": num_hits,
        "first_token_p50_ms": round(float(np.percentile(times_ms, 50)), 1),
        "first_token_p90_ms": round(float(np.percentile(times_ms, 90)), 1),
        "tokens_per_s": round(num_tokens / seconds, 1),
    }


def with_vllm(router: str, folder: str, settings: dict[str, Any], prompts: Sequence[str]) -> Found:
    """Ask real engines over HTTP; returns answers, seconds, and blocks that came from the store."""
    import serve_app

    options = serve_app.AppOptions(
        folder=folder, port=settings["port"], replicas=settings["replicas"], one_deployment=True, router=router,
        save="prompt" if settings["store"] else "none", engine={"kv_cache_memory_bytes": settings["cache_mib"] << 20},
    )  # fmt: skip
    with serve_app.running_store(options) as store, serve_app.running_app(options, store) as url:
        asyncio.run(ask_all(url, warm_up(settings), 2, 4))
        began_s = time.perf_counter()
        rows = asyncio.run(ask_all(url, prompts, settings["at_once"], settings["answer_tokens"]))
        seconds = time.perf_counter() - began_s
        hits = [node["traffic"]["hit_blocks"]["memory"] for node in store.stats()["nodes"].values()]
    return rows, seconds, sum(hits)


def with_simulated(router: str, folder: str, settings: dict[str, Any], prompts: Sequence[str]) -> Found:
    """Ask replicas that only take time; returns answers, seconds, and 0."""
    import ray
    import serve_app
    from ray import serve

    from benchmarks import serve_simulated

    config: dict[str, Any] = {"request_router_class": serve_app.ROUTERS[router]}
    if router == "prefix":
        config["request_router_kwargs"] = {
            "tokenizer": folder, "store": None, "prefill_tokens_per_s": settings["tokens_per_s"],
        }  # fmt: skip
    num_blocks = (settings["cache_mib"] << 20) // serve_simulated.SHAPE.block_bytes
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        made = serve.deployment(serve_simulated.Engine).options(
            num_replicas=settings["replicas"], max_ongoing_requests=64, request_router_config=config,
            ray_actor_options={"num_cpus": 0.1},
        )  # fmt: skip
        handle = serve.run(made.bind(num_blocks, settings["tokens_per_s"]), route_prefix=None)
        asyncio.run(serve_simulated.ask_all(handle, warm_up(settings), 2))
        began_s = time.perf_counter()
        rows = asyncio.run(serve_simulated.ask_all(handle, prompts, settings["at_once"]))
        return rows, time.perf_counter() - began_s, 0
    finally:
        serve.shutdown()
        ray.shutdown()


def warm_up(settings: dict[str, Any]) -> list[str]:
    """Return prompts that are nobody's prefix: first steps are slow, and a router has to load its tokenizer."""
    return [f"{number}: " + "so that no voice is cold. " * 8 for number in range(settings["warm_up"])]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name == "router" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=None if sys.stdout.isatty() else 130).print(table)


@click.command()
@click.option("--routers", default=",".join(DEFAULTS), show_default=True, help="Comma-separated; `pow2` is Ray's own.")
@click.option("--replicas", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--groups", type=click.IntRange(min=1), default=8, show_default=True, help="System prompts.")
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=96, show_default=True)
@click.option("--system-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--own-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--answer-tokens", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--at-once", type=click.IntRange(min=1), default=4, show_default=True)
@click.option(
    "--cache-mib",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Of each engine; a token of the model has 4 KiB.",
)
@click.option(
    "--warm-up", type=click.IntRange(min=0), default=16, show_default=True, help="Requests before those that count."
)
@click.option("--store", is_flag=True, help="All replicas share one store.")
@click.option("--simulated", is_flag=True, help="Replicas that compute nothing, but take a prompt's time.")
@click.option(
    "--tokens-per-s",
    type=click.FloatRange(min=0, min_open=True),
    default=5_000.0,
    show_default=True,
    help="Of simulated replicas.",
)
@click.option("--port", type=click.IntRange(1, 65_535), default=8000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True)
@click.option("--output", type=click.Path(dir_okay=False), help="Write the document to this file as well.")
def main(routers: str, as_json: bool, output: str | None, **settings: Any) -> None:
    """Measure routers beside each other."""
    os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    prompts = requests(
        settings["groups"], settings["num_requests"], settings["system_tokens"], settings["own_tokens"],
        settings["seed"],
    )  # fmt: skip
    rows = []
    for router in routers.split(","):
        rows.append(measure(router.strip(), settings, prompts))
        click.echo(json.dumps(rows[-1]), err=True)
    document = as_document({"benchmark": "serve_routing", **provenance(), "settings": settings, "rows": rows})
    if output:
        Path(output).write_text(document, encoding="utf-8")
    if as_json:
        print(document, end="")
    else:
        show(rows)


if __name__ == "__main__":
    main()

"""What routers of Ray Serve choose, by hit rate and spread of load: many seeds and mixes of requests in seconds.

    .venv-serve/bin/python -m benchmarks.serve_choices --json

The routers are the real ones, and choose for real. Replicas and time are simulated: a replica computes its prompts one
after the other and evicts the least recently used blocks, and nobody waits for it. No Ray runs. Each mix
(benchmarks/serve_mixes.py) is asked of each router with the same seeds. Prints one table, or with --json one document.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.serve_mixes import MIXES, Ask, Stream
from kvstore import KVShape, Namespace
from kvstore.integrations.space_text import space_to_text
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Ray Serve's own modules
    from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
    from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
    from ray.serve.experimental.round_robin_router import RoundRobinRouter
    from ray.serve.request_router import PendingRequest

    from kvstore.integrations.serve.router import PrefixRouter

BLOCK_SIZE = 32
SHAPE = KVShape(num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32", block_size=BLOCK_SIZE)
SPACE = Namespace(model="simulated", shape=SHAPE)
DEPLOYMENT = DeploymentID(name="Model", app_name="app")
SETTLE_S = 30.0


@dataclass
class Replica:
    """A replica as a router sees it, and what it does: one prompt after the other, least recently used blocks go.

    Args:
        name: of the replica.
        num_blocks: that its cache holds.
        tokens_per_s: how fast it computes prompts.
        answer_tokens_per_s: how fast it answers, many at once.
    """

    name: str
    num_blocks: int
    tokens_per_s: float
    answer_tokens_per_s: float
    free_s: float = 0.0
    queue_len: int = 0
    num_asked: int = 0
    num_computed: int = 0
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    max_ongoing_requests: int = 1_000
    multiplexed_model_ids: frozenset[str] = frozenset()
    availability_zone: None = None
    node_id: str = "node"

    def __post_init__(self) -> None:
        self.replica_id = ReplicaID(unique_id=self.name, deployment_id=DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len

    def take(self, ask: Ask, now_s: float) -> tuple[int, float, float]:
        """Compute a prompt; returns its cached tokens, when its first token comes, and when its answer ends."""
        num_tokens = len(ask.prompt)
        chain = SPACE.block_hashes(list((ask.prompt + ask.answer).encode())).hashes()
        asked = chain[: num_tokens // BLOCK_SIZE]
        cached = next((count for count, block in enumerate(asked) if block not in self.cache), len(asked))
        num_cached = min(cached * BLOCK_SIZE, num_tokens - 1)  # The last token is always computed.
        for block in reversed(chain):  # The root was used last.
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.num_blocks:
            self.cache.popitem(last=False)
        self.num_asked += 1
        self.num_computed += num_tokens - num_cached
        self.free_s = max(self.free_s, now_s) + (num_tokens - num_cached) / self.tokens_per_s
        return num_cached, self.free_s, self.free_s + len(ask.answer) / self.answer_tokens_per_s


class Ours(PrefixRouter):
    """PrefixRouter on simulated time, with a tokenizer that has one token for each character."""

    clock_s = 0.0

    def _now_s(self) -> float:
        return self.clock_s

    def _load_tokenizer(self) -> Any:
        return lambda text, add_special_tokens=True: {"input_ids": list(text.encode())}


class TreeActor:
    """Ray's tree of prefixes in this process; its methods are called as those of an actor."""

    def __init__(self) -> None:
        self._tree = PrefixTree()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._tree, name))


#: Class and arguments of each router. `affinity` has Ray's defaults, by which no load counts.
ROUTERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "round robin": (RoundRobinRouter, {}),
    "pow2": (PowerOfTwoChoicesRequestRouter, {}),
    "affinity": (prefix_aware_router.PrefixCacheAffinityRouter, {}),
    "affinity, threshold 4": (prefix_aware_router.PrefixCacheAffinityRouter, {"imbalanced_threshold": 4}),
    "prefix": (
        Ours,
        {"tokenizer": "letters", "store": None, "space": space_to_text(SPACE), "tokenize_wait_s": SETTLE_S},
    ),
}


@contextlib.contextmanager
def no_cluster() -> Iterator[None]:
    """Let `ray.get` of the affinity router return what the tree said: there is no actor here."""
    kept, prefix_aware_router.ray = prefix_aware_router.ray, SimpleNamespace(get=lambda value: value)
    try:
        yield
    finally:
        prefix_aware_router.ray = kept


async def make_router(kind: str, replicas: Sequence[Replica]) -> Any:
    """Return a router of some replicas, ready to choose."""
    router_class, kwargs = ROUTERS[kind]
    router = router_class(
        deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    if kind.startswith("affinity"):
        kwargs = {**kwargs, "tree_actor": TreeActor()}
    if kind.startswith("prefix"):
        # What it learns from real engines: how much their caches hold. Each prompt is read, however busy this machine.
        one = replicas[0]
        known = {"cache_tokens": one.num_blocks * BLOCK_SIZE, "prefill_tokens_per_s": one.tokens_per_s}
        kwargs = {**kwargs, **known, "tokenize_wait_s": SETTLE_S}
    router.initialize_state(**kwargs)
    router.update_replicas(list(replicas))
    async with asyncio.timeout(SETTLE_S):
        while kind.startswith("prefix") and router._tokenizer.get() is None:
            await asyncio.sleep(0.001)
    return router


async def choose(router: Any, replicas: Sequence[Replica], pending: PendingRequest) -> Replica:
    """Return the replica that a router takes, as Ray Serve goes through its ranks."""
    for each in replicas:
        router.on_new_queue_len_info(each.replica_id, each.queue_len)
    for rank in await router.choose_replicas(list(replicas), pending):
        chosen = await router._select_from_candidate_replicas(rank, 0)
        if chosen is not None:
            return chosen
    raise RuntimeError("no replica takes the request")


async def simulate(kind: str, streams: Sequence[Stream], settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Ask all streams of replicas that a router chooses; returns what came of it."""
    random.seed(seed)  # Ray's routers take the process's dice.
    dice = random.Random(seed)
    replicas = [
        Replica(f"r{number}", settings["cache_blocks"], settings["tokens_per_s"], settings["answer_tokens_per_s"])
        for number in range(settings["replicas"])
    ]
    router = await make_router(kind, replicas)
    numbers = itertools.count()
    #: (when, number, stream, or the request that ends then and its replica)
    events: list[tuple[float, int, int, tuple[str, Replica] | None]] = []
    positions = [0] * len(streams)
    for index in range(len(streams)):
        heapq.heappush(events, (dice.expovariate(1 / settings["think_s"]), next(numbers), index, None))
    first_s, num_cached, num_tokens = [], 0, 0
    while events:
        now_s, _, index, ended = heapq.heappop(events)
        router.clock_s = now_s
        if ended is not None:
            request, replica = ended
            replica.queue_len -= 1
            router.on_request_completed(replica.replica_id, request)
            now_s += dice.expovariate(1 / settings["think_s"])
            heapq.heappush(events, (now_s, next(numbers), index, None))
            continue
        if positions[index] == len(streams[index]):
            continue
        ask = streams[index][positions[index]]
        positions[index] += 1
        request = f"i{next(numbers)}"
        pending = PendingRequest(
            args=[SimpleNamespace(prompt=ask.prompt)], kwargs={},
            metadata=RequestMetadata(request_id=request, internal_request_id=request),
        )  # fmt: skip
        replica = await choose(router, replicas, pending)
        router.on_request_routed(pending, replica.replica_id, None)
        replica.queue_len += 1
        cached, token_s, end_s = replica.take(ask, now_s)
        first_s.append(token_s - now_s)
        num_cached, num_tokens = num_cached + cached, num_tokens + len(ask.prompt)
        heapq.heappush(events, (end_s, next(numbers), index, (request, replica)))
    computed = [each.num_computed for each in replicas]
    return {
        "cached_share": num_cached / num_tokens,
        "busiest_to_mean": max(computed) / (sum(computed) / len(computed)),
        "most_asked_to_mean": max(each.num_asked for each in replicas) / (len(first_s) / len(replicas)),
        "first_token_p50_ms": float(np.percentile(first_s, 50)) * 1e3,
        "first_token_p90_ms": float(np.percentile(first_s, 90)) * 1e3,
    }


def measure(kind: str, mix: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Simulate a router and a mix with each seed, and return a row: means, and the range of the hit rate."""
    found = []
    for seed in range(1, settings["seeds"] + 1):
        streams = MIXES[mix](settings["num_requests"], settings["streams"], seed)
        found.append(asyncio.run(simulate(kind, streams, settings, seed)))
    shares = [each["cached_share"] for each in found]
    return {
        "mix": mix,
        "router": kind,
        "cached_share": round(float(np.mean(shares)), 4),
        "least_cached_share": round(min(shares), 4),
        "most_cached_share": round(max(shares), 4),
        **{
            name: round(float(np.mean([each[name] for each in found])), digits)
            for name, digits in (
                ("busiest_to_mean", 3),
                ("most_asked_to_mean", 3),
                ("first_token_p50_ms", 1),
                ("first_token_p90_ms", 1),
            )
        },
        "cached_shares": [round(share, 4) for share in shares],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table()
    names = [name for name in rows[0] if name != "cached_shares"]
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name in ("mix", "router") else "right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


@click.command()
@click.option("--routers", default=";".join(ROUTERS), show_default=True, help="Separated by semicolons.")
@click.option("--mixes", default=",".join(MIXES), show_default=True)
@click.option("--replicas", type=click.IntRange(min=1), default=4, show_default=True)
@click.option(
    "--streams",
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    help="Clients, each with one request at a time.",
)
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=1200, show_default=True)
@click.option(
    "--think-s",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Mean time between an answer and the next request.",
)
@click.option(
    "--cache-blocks",
    type=click.IntRange(min=1),
    default=160,
    show_default=True,
    help=f"Of each replica; {BLOCK_SIZE} tokens each.",
)
@click.option(
    "--tokens-per-s",
    type=click.FloatRange(min=0, min_open=True),
    default=2_500.0,
    show_default=True,
    help="How fast a replica computes prompts.",
)
@click.option("--answer-tokens-per-s", type=click.FloatRange(min=0, min_open=True), default=100.0, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--json", "as_json", is_flag=True)
@click.option("--output", type=click.Path(dir_okay=False), help="Write the document to this file as well.")
def main(routers: str, mixes: str, as_json: bool, output: str | None, **settings: Any) -> None:
    """Measure what routers choose."""
    rows = []
    with no_cluster():
        for mix in mixes.split(","):
            for kind in routers.split(";"):
                rows.append(measure(kind.strip(), mix.strip(), settings))
                click.echo(json.dumps(rows[-1]), err=True)
    document = as_document({"benchmark": "serve_choices", **provenance(), "settings": settings, "rows": rows})
    if output:
        Path(output).write_text(document, encoding="utf-8")
    if as_json:
        print(document, end="")
    else:
        show(rows)


if __name__ == "__main__":
    main()

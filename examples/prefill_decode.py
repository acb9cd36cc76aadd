"""Disaggregated prefill and decode on two Ray nodes of this machine, with the store between them.

A prefill worker on one node saves the KV of prompts; a decode worker on the other finds it, the node stores
fetch it over NIXL, and only what is missing is computed. What an engine still has in its own pages, it does not
ask for. Every answer is compared with one computed without any cache: KV, logits and tokens must be the same to
the last bit (demo_engine.py says how that can be), or this program exits with 1. With --device cuda the engines'
caches are on a GPU, which both workers share.

With --handoff nothing is stored: the prefill worker publishes the blocks of each prompt, its ticket goes to the decode
worker with the request, and that one fetches them, through host memory or, with --device cuda and two GPUs, straight
from one GPU to the other. With two GPUs that is what --device cuda does unless --store is given. With --both it is done
first, and then everything once more with the store, between the same workers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from demo_prompts import DOCUMENT, REQUESTS, WARM_UP, Request, encode
from demo_table import show
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import kvstore

START_S = 120.0
CALL_S = 60.0
CLASSES = {
    "peer": "num_full_peer_hits",
    "engine": "num_engine_hits",
    "own": "num_local_hits",
    "mixed": "num_mixed_hits",
    "partial": "num_partial_hits",
    "miss": "num_misses",
    "too short": "num_too_short",
}
REQUIRED = ("peer", "engine", "own", "mixed", "partial", "miss")
#: Nobody looks at a dashboard, reads workers' logs here or adds nodes.
NODE = {"include_log_monitor": False}
HEAD = {**NODE, "include_dashboard": False, "no_monitor": True}
#: A hand-off brings all full blocks that the engine has not, or is an error.
HANDOFF_REQUIRED = ("peer", "engine", "mixed", "too short")


def private_environment(folder: str) -> None:
    """Keep this run apart from every other Ray of this machine; must run before Ray is imported."""
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE"):
        os.environ.pop(name, None)
    os.environ.update(RAY_TMPDIR=folder, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not os.access(os.path.expanduser("~"), os.W_OK):
        os.environ["HOME"] = folder


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Run two Ray nodes and connect to them; all their processes are gone afterwards. Yields the node ids."""
    # In /tmp whatever TMPDIR says: Ray's sockets lie deep below, and a socket's path ends at 107 bytes.
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        private_environment(folder)
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            nodes = [
                cluster.add_node(num_cpus=1, object_store_memory=80 << 20, **options).node_id
                for options in (HEAD, NODE)
            ]
            ray.init(cluster.address, namespace="raykv-demo", log_to_driver=False, configure_logging=False)
            # Ray has handlers of its own, of which one ends this process without the clean-up below.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            cluster.wait_for_nodes(timeout=START_S)
            yield nodes
        finally:
            ray.shutdown()
            cluster.shutdown()


class Worker:
    """A worker of demo_engine.py, which only the process that it works in has to import, torch and transformers too."""

    def __init__(self, kind: str, *args: Any) -> None:
        import demo_engine

        store, device, peers = args
        self._worker = getattr(demo_engine, kind)(store, demo_engine.EngineOptions(device=device), peers)

    def do(self, verb: str, *args: Any) -> Any:
        return getattr(self._worker, verb)(*args)


class Demo:
    """The two workers, and the answers that later requests build on."""

    def __init__(self, store: Any, nodes: list[str], device: str, handoff: bool) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._get = ray.get
        devices, peers = [device, device], [None, None]
        if handoff and device == "cuda":
            # The one that publishes attaches first; the other one then warms up the lane from there.
            devices, peers = ["cuda:0", f"cuda:{min(1, num_gpus() - 1)}"], [(), (nodes[0],)]
        workers = []
        kinds = ("PrefillWorker", "DecodeWorker")
        for kind, node, place, others in zip(kinds, nodes, devices, peers, strict=True):
            pinned = NodeAffinitySchedulingStrategy(node, soft=False)
            worker = ray.remote(Worker).options(num_cpus=1, scheduling_strategy=pinned)
            workers.append(worker.remote(kind, store, place, others).do)
            if others is not None:
                ray.get(workers[-1].remote("ready"), timeout=START_S)
        self.prefill, self.decode = workers
        self.conversations: dict[str, list[int]] = {}

    def wait_ready(self) -> None:
        """Wait for both models, which must be one."""
        models = self._get([self.prefill.remote("ready"), self.decode.remote("ready")], timeout=START_S)
        if models[0] != models[1]:
            raise click.ClickException("the two workers built different weights from one seed")

    def serve(self, request: Request, num_tokens: int, handoff: bool) -> dict[str, Any]:
        """Send one request through both workers; returns its row of the table."""
        prompt = [*self.conversations.get(request.after or "", ()), *encode(request.text)]
        prefilled = {"all": prompt, "document": encode(DOCUMENT), "none": []}[request.prefilled]
        if request.forgets:
            self._get(self.decode.remote("forget"), timeout=CALL_S)
        # Neither touches what the other measures, so both may run at once: two cores, a thread each.
        reference = self.decode.remote("answer_without_cache", prompt, num_tokens)
        if handoff:
            prefill = self.prefill.remote("prefill_and_hand_off", prompt)
        else:
            prefill = self.prefill.remote("prefill", prefilled)
        _, made = self._get([reference, prefill], timeout=CALL_S)
        ticket, saved = (made, {}) if handoff else (None, made)
        row = self._get(self.decode.remote("answer", prompt, num_tokens, handoff, ticket), timeout=CALL_S)
        if ticket is not None and not row.pop("used_ticket"):
            self._get(self.prefill.remote("withdraw", ticket, prompt), timeout=CALL_S)  # The engine had all of it.
        self.conversations[request.title] = prompt + row.pop("answer")
        same = row["kv_identical"] and row["logits_identical"] and row["tokens_identical"]
        return {
            "request": request.title,
            "hit": hit_class(row),
            **row,
            "prefill_node": saved,
            "identical": same,
        }

    def forget(self) -> None:
        """Begin without pages of earlier requests."""
        self._get([self.prefill.remote("forget"), self.decode.remote("forget")], timeout=CALL_S)

    def close(self) -> None:
        """Let the workers give back what they hold."""
        self._get([self.prefill.remote("close"), self.decode.remote("close")], timeout=CALL_S)


def hit_class(row: dict[str, Any]) -> str:
    """Return which key of CLASSES a request belongs to."""
    wanted = row["num_blocks"]
    counts = {name: row[f"num_blocks_{name}"] for name in ("engine", "own", "peer")}
    if wanted == 0:
        return "too short"
    if sum(counts.values()) < wanted:
        return "partial" if any(counts.values()) else "miss"
    sources = [name for name, count in counts.items() if count]
    return sources[0] if len(sources) == 1 else "mixed"


def num_gpus() -> int:
    """Return how many GPUs this process may use."""
    import torch

    return torch.cuda.device_count()


def nixl_bytes(store: Any) -> int:
    """Return how many bytes of blocks NIXL says that it has read, on all nodes; what only warmed a lane is none."""
    nodes = store.stats()["nodes"].values()
    return sum((node.get("nixl") or {}).get("num_bytes", 0) - node["num_lane_warm_up_bytes"] for node in nodes)


def summarize(rows: list[dict[str, Any]], num_nixl_bytes: int, required: tuple[str, ...] = REQUIRED) -> dict[str, Any]:
    """Return the counts of a run, and what is wrong with it."""
    hits = [row["hit"] for row in rows]
    problems = [
        f"{row['request']}: {name.removesuffix('_identical')} differs from the run without a store"
        for row in rows
        for name in ("kv_identical", "logits_identical", "tokens_identical")
        if not row[name]
    ]
    problems += [f"no request was of the class {name!r}" for name in required if name not in hits]
    counted = sum(row["nixl_bytes"] + row["prefill_node"].get("nixl_bytes", 0) for row in rows)
    if num_nixl_bytes == 0:
        problems.append("NIXL moved no bytes")
    elif num_nixl_bytes != counted:
        problems.append(f"NIXL counts {num_nixl_bytes} bytes, the loads report {counted}")
    return {
        "num_requests": len(rows),
        "num_identical": sum(row["identical"] for row in rows),
        **{key: hits.count(name) for name, key in CLASSES.items()},
        "nixl_bytes": num_nixl_bytes,
        "routes": sorted({row["route"] for row in rows if row.get("route")}),
        "problems": problems,
    }


def run(lane: str, num_tokens: int, capacity: str, device: str, ways: tuple[bool, ...]) -> list[dict[str, Any]]:
    """Serve all requests, once for each way: by hand-offs or not. Returns what --json prints of each."""
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    results = []
    with progress:
        bar = progress.add_task("starting two Ray nodes", total=3 + len(ways) * (len(REQUESTS) + 1))
        with two_nodes() as nodes:
            progress.update(bar, advance=1, description="starting the store")
            store = kvstore.start(capacity, lane=lane, timeout_s=START_S)
            progress.update(bar, advance=1, description="building the models")
            demo = Demo(store, nodes, device, any(ways))
            demo.wait_ready()
            for handoff in ways:
                # The first steps of a process and the first READ of a connection are slower than all others.
                progress.update(bar, advance=1, description="warming up")
                demo.serve(Request(title="warm-up", text=WARM_UP), 4, handoff)
                demo.forget()
                before, rows = nixl_bytes(store), []
                for request in REQUESTS:
                    progress.update(bar, advance=1, description=request.title)
                    rows.append(demo.serve(request, num_tokens, handoff))
                required = HANDOFF_REQUIRED if handoff else REQUIRED
                summary = summarize(rows, nixl_bytes(store) - before, required)
                settings = {"lane": lane, "device": device, "handoff": handoff, "num_new_tokens": num_tokens}
                results.append({**settings, "rows": rows, "summary": summary})
            progress.update(bar, advance=1, description="stopping")
            demo.close()
            store.stop()
    return results


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--lane", type=click.Choice(["default", "tcp"]), default="default", show_default=True)
@click.option("--new-tokens", type=click.IntRange(1, 256), default=16, show_default=True)
@click.option("--capacity", default="128MiB", show_default=True, help="Memory for blocks on each node.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--handoff/--store",
    default=None,
    help="Hand the blocks of each prompt to the decode worker, or store them. Default: hand off between two GPUs.",
)
@click.option("--both", is_flag=True, help="Hand off, then store; JSON is a list of both.")
def main(
    as_json: bool, lane: str, new_tokens: int, capacity: str, device: str, handoff: bool | None, both: bool
) -> None:
    if handoff is None:
        handoff = device == "cuda" and num_gpus() > 1
    try:
        results = run(lane, new_tokens, capacity, device, (True, False) if both else (handoff,))
    except kvstore.KVStoreError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        print(json.dumps(results if both else results[0]))
    else:
        for result in results:
            show(result)
    problems = [problem for result in results for problem in result["summary"]["problems"]]
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

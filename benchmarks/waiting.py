"""Loads of one client at once, beside fetches of early tickets that wait for blocks which nobody publishes yet.

Two node stores and their movers are processes of this machine. A reader has everything that it loads in its own node's
memory. In turns, 64 loads are asked for at once while 64 fetches of tickets of the other node wait, and right after
such fetches have ended. Times are from the call of a load to the callback of its job; percentiles are of the loads of
one round, and their medians over the rounds are told, beside the 99th percentile of all loads of all rounds.

Run: `python benchmarks/waiting.py [--json] [--rounds N]`. Prints a table, or with --json one object with the rows
{waiting, num_rounds, p50_ms, p99_ms, pooled_p99_ms}, how much longer each p99 is beside the fetches, and the machine
and commit they were measured on.
"""

from __future__ import annotations

import argparse
import gc
import logging
import threading
import time
from typing import Any

import numpy as np
import torch

from kvstore.actors.plain_nodes import plain_nodes
from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.config import StoreConfig
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

SHAPE = KVShape(num_layers=4, num_kv_heads=4, head_dim=64, dtype="bfloat16", block_size=16)
NUM_AT_ONCE, BLOCKS_PER_LOAD = 64, 8
NUM_ENGINE_BLOCKS = 2 * NUM_AT_ONCE * BLOCKS_PER_LOAD
TIMEOUT_S = 60.0


def connect(control_path: str) -> Client:
    client = Client(control_path, Namespace(model="waiting", shape=SHAPE))
    dims = (2, NUM_ENGINE_BLOCKS, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
    client.register_kv_caches([torch.ones(dims, dtype=torch.bfloat16) for _ in range(SHAPE.num_layers)])
    return client


def blocks_of(index: int) -> range:
    return range(index * BLOCKS_PER_LOAD, (index + 1) * BLOCKS_PER_LOAD)


def load_all(reader: Client, chains: list[BlockHashes]) -> list[float]:
    """Ask for all loads at once; returns how long each took, in seconds."""
    took_s: list[float] = []
    ended = threading.Event()

    def note(began_s: float) -> None:
        took_s.append(time.perf_counter() - began_s)
        if len(took_s) == len(chains):
            ended.set()

    jobs = []
    for index, chain in enumerate(chains):
        began_s = time.perf_counter()
        jobs.append(reader.load(chain, blocks_of(index), timeout_s=TIMEOUT_S))
        jobs[-1].add_done_callback(lambda _, began_s=began_s: note(began_s))
    assert ended.wait(TIMEOUT_S)
    assert all(job.result(0).num_blocks == BLOCKS_PER_LOAD for job in jobs)
    return took_s


def measure(num_rounds: int) -> dict[int, list[list[float]]]:
    took_s: dict[int, list[list[float]]] = {0: [], NUM_AT_ONCE: []}
    with plain_nodes(StoreConfig(name="waiting", capacity_bytes=256 << 20)) as nodes:
        source, reader = (connect(node.control_path) for node in nodes)
        tokens = np.random.default_rng(1).integers(0, 1000, (NUM_AT_ONCE, BLOCKS_PER_LOAD * SHAPE.block_size))
        chains = [reader.space.block_hashes(each) for each in tokens]
        for index, chain in enumerate(chains):
            assert reader.save(chain, blocks_of(index)).result(TIMEOUT_S).num_blocks == BLOCKS_PER_LOAD
        gc.freeze()  # As engines do: a full collection of all that torch made takes longer than any round.
        for number in range(num_rounds + 1):
            for num_waiting in (0, NUM_AT_ONCE):
                # Before both turns the same was done: what differs is only that the fetches still wait.
                tickets = [source.prepare_ticket(1) for _ in range(NUM_AT_ONCE)]
                fetches = [
                    reader.fetch(ticket, [NUM_ENGINE_BLOCKS - 1 - index], timeout_s=TIMEOUT_S)
                    for index, ticket in enumerate(tickets)
                ]
                wait_for(lambda: nodes[1].ask("stats", TIMEOUT_S)["num_handoff_fetches"] == NUM_AT_ONCE)
                if not num_waiting:
                    end(source, tickets, fetches)
                time.sleep(0.05)  # The last questions, or answers, are on their way to the other node.
                loads_s = load_all(reader, chains)
                if num_waiting:
                    assert not any(fetch.done() for fetch in fetches)
                    end(source, tickets, fetches)
                if number:  # The first round is to warm up.
                    took_s[num_waiting].append(loads_s)
        reader.close()
        source.close()
    return took_s


def end(source: Client, tickets: list[Any], fetches: list[Any]) -> None:
    """Take the tickets back, and have the fetches find that out."""
    for ticket in tickets:
        source.withdraw(ticket)
    assert all(fetch.result(TIMEOUT_S).num_blocks == 0 for fetch in fetches)


def wait_for(condition: Any) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=300, help="fewer let one bad round decide the pooled p99")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)  # Each ticket that is taken back is a line, here and in the stores.
    took_s = measure(arguments.rounds)
    rows = [
        {
            "waiting": waiting,
            "num_rounds": len(rounds),
            "p50_ms": round(1e3 * float(np.median(np.percentile(rounds, 50, axis=1))), 3),
            "p99_ms": round(1e3 * float(np.median(np.percentile(rounds, 99, axis=1))), 3),
            "pooled_p99_ms": round(1e3 * float(np.percentile(rounds, 99)), 3),
        }
        for waiting, rounds in took_s.items()
    ]
    ratios = {
        f"{name}_ratio": round(rows[1][f"{name}_ms"] / rows[0][f"{name}_ms"], 3) for name in ("p99", "pooled_p99")
    }
    if arguments.json:
        print(as_document({"benchmark": "waiting", **provenance(), "rows": rows, **ratios}), end="")
        return
    print(f"{'fetches that wait':>18} {'rounds':>7} {'p50 ms':>9} {'p99 ms':>9} {'pooled p99 ms':>14}")
    for row in rows:
        times = f"{row['p50_ms']:9.3f} {row['p99_ms']:9.3f} {row['pooled_p99_ms']:14.3f}"
        print(f"{row['waiting']:18} {row['num_rounds']:7} {times}")
    print("beside them, times that without: " + ", ".join(f"{name} {ratio}" for name, ratio in ratios.items()))


if __name__ == "__main__":
    main()

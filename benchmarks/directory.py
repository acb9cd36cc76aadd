"""The directory's index with the blocks of many nodes: memory, and what a prompt, a batch and a lost node cost.

Every node has `--blocks` blocks that no other has: that takes the most memory. All numbers are of the index in its
process; the network and the messages come on top.

- announce: batches of 16,384 hashes, as stores send them; a full announcement of one node is a resync.
- locate: the nodes that have a prompt of 1,000 blocks, of which one node has all, and one has half.
- forget: a node vanishes; its bits are removed in steps, and the longest step is what a question may wait.

Run: `python -m benchmarks.directory [--nodes N] [--blocks N] [--json] [--output FILE]`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.blocks.chain import HASH_BYTES
from kvstore.remote.announcements import PIECE_BLOCKS
from kvstore.remote.index.directory_index import DirectoryIndex
from kvstore.replay.files import write_whole
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

NUM_PROMPT_BLOCKS = 1000
NUM_QUESTIONS = 400


def hashes_of(node: int, start: int, count: int) -> bytes:
    """Random bytes that are the same for each call: what a hash looks like."""
    rng = np.random.Philox(key=node)
    rng.advance(start * HASH_BYTES // 32)
    return np.random.Generator(rng).bytes(count * HASH_BYTES)


def announce(index: DirectoryIndex, node: int, num_blocks: int, life: int = 0) -> list[float]:
    """Add all blocks of a node; returns the seconds of each batch."""
    seconds = []
    for start in range(0, num_blocks, PIECE_BLOCKS):
        batch = hashes_of(node, start, min(PIECE_BLOCKS, num_blocks - start))
        began_s = time.perf_counter()
        index.add(f"node-{node}", batch, life)
        seconds.append(time.perf_counter() - began_s)
    return seconds


def locate(index: DirectoryIndex, num_nodes: int, num_blocks: int) -> list[float]:
    """Ask for prompts that one node has whole, and another one half; returns the seconds of each question."""
    rng, seconds = np.random.default_rng(1), []
    for _ in range(NUM_QUESTIONS):
        node = int(rng.integers(num_nodes))
        start = int(rng.integers(max(1, num_blocks // PIECE_BLOCKS))) * PIECE_BLOCKS
        prompt = hashes_of(node, start, NUM_PROMPT_BLOCKS)
        half = prompt[: len(prompt) // 2]
        index.add("half", half)
        began_s = time.perf_counter()
        found = index.locate(prompt)
        seconds.append(time.perf_counter() - began_s)
        assert found == [(f"node-{node}", NUM_PROMPT_BLOCKS), ("half", NUM_PROMPT_BLOCKS // 2)]
        index.remove("half", half)
    return seconds


def sweep(index: DirectoryIndex) -> list[float]:
    """Do all steps that are left; returns the seconds of each."""
    seconds = []
    while index.is_sweeping:
        began_s = time.perf_counter()
        index.sweep()
        seconds.append(time.perf_counter() - began_s)
    return seconds


def spread(name: str, seconds: list[float]) -> dict[str, Any]:
    """Return a row of times."""
    p50, p99 = np.percentile(seconds, (50, 99))
    times = {"p50_ms": p50, "p99_ms": p99, "most_ms": max(seconds), "sum_s": sum(seconds) / 1e3}
    return {"what": name, "num_calls": len(seconds), **{key: round(value * 1e3, 4) for key, value in times.items()}}


def measure(num_nodes: int, num_blocks: int) -> dict[str, Any]:
    """Return all rows."""
    index = DirectoryIndex()
    announced = [second for node in range(num_nodes) for second in announce(index, node, num_blocks)]
    num_entries, num_bytes = len(index), index.num_bytes
    rows = [spread("announce a batch", announced), spread("locate a prompt", locate(index, num_nodes, num_blocks))]
    rows.append(spread("resync a batch", announce(index, 0, num_blocks, life=1)))
    began_s = time.perf_counter()
    index.forget("node-0", 0)
    rows.append(spread("forget a node, a step", [time.perf_counter() - began_s, *sweep(index)]))
    rows.append(spread("locate a prompt afterwards", locate(index, num_nodes, num_blocks)))
    return {
        "num_nodes": num_nodes,
        "num_blocks_per_node": num_blocks,
        "num_entries": num_entries,
        "bytes_per_entry": round(num_bytes / num_entries, 1),
        "entries_per_s": round(num_entries / sum(announced)),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of each node")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    result = measure(args.nodes, args.blocks)
    document = as_document({**result, **provenance()})
    if args.output:
        write_whole(args.output, document)
    if args.json:
        print(document, end="")
        return
    print(f"{result['num_entries']:,} entries, {result['bytes_per_entry']} bytes each")
    for row in result["rows"]:
        print(f"{row['what']:28} {row['num_calls']:6} calls, p50 {row['p50_ms']:.3f} ms, p99 {row['p99_ms']:.3f} ms")


if __name__ == "__main__":
    main()

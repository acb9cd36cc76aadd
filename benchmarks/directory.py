"""A directory of several shards with the blocks of many nodes: memory, messages, and what each call costs a shard.

Every node has `--blocks` blocks that no other has, in chains of `--chain` blocks: that takes the most memory. A chain
is in the shard of its root. Shards do not share anything, so they are measured one after the other, and memory is that
of one. All times are inside the shard's process: a batch is decoded and taken in, as a shard does with a message. The
network comes on top.

- announce: batches of 16,384 hashes, as stores send them, one node after the other.
- locate: prompts of 1,000 blocks, of which one node has all, and another one half; once by probes, once by a walk.
- resync: one node announces everything anew beside what is known of it.
- forget: a node vanishes; its bits are removed in steps, and the longest step is what a question may wait.
- restart: a shard that knows nothing is filled by full announcements of all nodes, in turns, while prompts are located
  between the batches.

Run: `python -m benchmarks.directory [--nodes N] [--blocks N] [--shards S] [--measured N] [--json] [--output FILE]`.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.blocks.chain import HASH_BYTES, root_key_of
from kvstore.blocks.codec import encode
from kvstore.remote.announcements import PIECE_BLOCKS, Batch, decode_batch
from kvstore.remote.index.directory_index import DirectoryIndex
from kvstore.remote.shards.placing import shard_of
from kvstore.replay.files import write_whole
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

NUM_PROMPT_BLOCKS = 1000
NUM_QUESTIONS = 400


@dataclass(frozen=True)
class Cluster:
    """What the nodes have.

    Args:
        num_nodes: each with other blocks.
        num_blocks: of a node, in whole chains.
        num_chain_blocks: of each chain.
        num_shards: of the directory.
    """

    num_nodes: int
    num_blocks: int
    num_chain_blocks: int
    num_shards: int

    def chain(self, node: int, number: int, count: int | None = None) -> bytes:
        """Return the first hashes of a chain: random bytes that are the same for each call."""
        rng = np.random.Generator(np.random.Philox(key=node << 32 | number))
        return rng.bytes((self.num_chain_blocks if count is None else count) * HASH_BYTES)

    def chains_of(self, node: int, shard: int) -> list[int]:
        """Return the numbers of a node's chains that a shard knows."""
        numbers = range(self.num_blocks // self.num_chain_blocks)
        return [
            at for at in numbers if shard_of(root_key_of(self.chain(node, at, 1)), self.num_shards) in (shard, None)
        ]

    def batches(self, node: int, shard: int) -> Iterator[bytes]:
        """Yield the messages of a node's full announcement to a shard."""
        left, numbers = b"", self.chains_of(node, shard)
        for at in numbers:
            left += self.chain(node, at)
            while len(left) >= PIECE_BLOCKS * HASH_BYTES or (at == numbers[-1] and left):
                piece, left = left[: PIECE_BLOCKS * HASH_BYTES], left[PIECE_BLOCKS * HASH_BYTES :]
                yield encode(Batch(sequence=1, begins=False, ends=False, added=piece, removed=b"", versions={}))


def take_in(index: DirectoryIndex, node: int, message: bytes, life: int = 0) -> float:
    """Decode a batch and add it; returns the seconds."""
    began_s = time.perf_counter()
    index.add(f"node-{node}", decode_batch(message).added, life)
    return time.perf_counter() - began_s


def announce(cluster: Cluster, shard: int, index: DirectoryIndex, node: int, life: int = 0) -> list[float]:
    """Take in all batches of a node; returns the seconds of each."""
    return [take_in(index, node, message, life) for message in cluster.batches(node, shard)]


def locate(cluster: Cluster, shard: int, index: DirectoryIndex) -> tuple[list[float], list[float]]:
    """Ask for prompts that one node has whole, and another one half; returns the seconds by probes and of walks."""
    rng, probed, walked = np.random.default_rng(1), list[float](), list[float]()
    numbers = [cluster.chains_of(node, shard) for node in range(cluster.num_nodes)]
    for _ in range(NUM_QUESTIONS):
        node = int(rng.integers(cluster.num_nodes))
        if not numbers[node]:
            continue
        prompt = cluster.chain(node, int(rng.choice(numbers[node])))[: NUM_PROMPT_BLOCKS * HASH_BYTES]
        count = len(prompt) // HASH_BYTES
        half = prompt[: count // 2 * HASH_BYTES]
        index.add("half", half)
        for ask, seconds in ((index.locate, probed), (index.walk, walked)):
            began_s = time.perf_counter()
            found = ask(prompt)
            seconds.append(time.perf_counter() - began_s)
            assert found == [(f"node-{node}", count), ("half", count // 2)]
        index.remove("half", half)
    return probed, walked


def sweep(index: DirectoryIndex) -> list[float]:
    """Do all steps that are left; returns the seconds of each."""
    seconds = []
    while index.is_sweeping:
        began_s = time.perf_counter()
        index.sweep()
        seconds.append(time.perf_counter() - began_s)
    return seconds


def restart(cluster: Cluster, shard: int) -> tuple[list[float], list[float]]:
    """Fill a shard by all nodes in turns; returns the seconds of each batch, and of questions between them."""
    index, taken, asked = DirectoryIndex(), list[float](), list[float]()
    coming = {node: cluster.batches(node, shard) for node in range(cluster.num_nodes)}
    while coming:
        for node, batches in list(coming.items()):
            message = next(batches, None)
            if message is None:
                del coming[node]
                continue
            taken.append(take_in(index, node, message))
            prompt = decode_batch(message).added[: NUM_PROMPT_BLOCKS * HASH_BYTES]
            began_s = time.perf_counter()
            found = index.locate(prompt)
            asked.append(time.perf_counter() - began_s)
            assert found == [(f"node-{node}", len(prompt) // HASH_BYTES)]
    return taken, asked


def spread(name: str, shard: int, seconds: list[float]) -> dict[str, Any]:
    """Return a row of times."""
    p50, p99 = np.percentile(seconds, (50, 99))
    times = {"p50_ms": p50, "p99_ms": p99, "most_ms": max(seconds), "sum_s": sum(seconds) / 1e3}
    times = {key: round(value * 1e3, 4) for key, value in times.items()}
    return {"shard": shard, "what": name, "num_calls": len(seconds), **times}


def measure_shard(cluster: Cluster, shard: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what one shard has, and its rows."""
    index, nodes = DirectoryIndex(), range(cluster.num_nodes)
    announced = [second for node in nodes for second in announce(cluster, shard, index, node)]
    sweep(index)  # Moves what is left in an old table.
    size = {"shard": shard, "num_entries": len(index), "num_bytes": index.num_bytes, "num_batches": len(announced)}
    size["bytes_per_entry"] = round(index.num_bytes / max(1, len(index)), 1)
    probed, walked = locate(cluster, shard, index)
    rows = {"announce a batch": announced, "locate a prompt": probed, "walk a prompt": walked}
    rows["resync a batch"] = announce(cluster, shard, index, 0, life=1)
    began_s = time.perf_counter()
    index.forget("node-0", 0)
    rows["forget a node, a step"] = [time.perf_counter() - began_s, *sweep(index)]
    rows["locate a prompt afterwards"], _ = locate(cluster, shard, index)
    del index
    rows["restart, a batch"], rows["restart, a prompt between"] = restart(cluster, shard)
    return size, [spread(name, shard, seconds) for name, seconds in rows.items() if seconds]


def measure(cluster: Cluster, num_measured: int) -> dict[str, Any]:
    """Return sizes and rows of the first shards."""
    sizes, rows = list[dict[str, Any]](), list[dict[str, Any]]()
    for shard in range(min(num_measured, cluster.num_shards)):
        size, more = measure_shard(cluster, shard)
        sizes.append(size)
        rows += more
    return {
        "num_nodes": cluster.num_nodes,
        "num_blocks_per_node": cluster.num_blocks,
        "num_chain_blocks": cluster.num_chain_blocks,
        "num_shards": cluster.num_shards,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "shards": sizes,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=20_000, help="of each node")
    parser.add_argument("--chain", type=int, default=NUM_PROMPT_BLOCKS, help="blocks of a chain")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--measured", type=int, default=64, help="measure only the first so many shards")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    result = measure(Cluster(args.nodes, args.blocks, args.chain, args.shards), args.measured)
    document = as_document({**result, **provenance()})
    if args.output:
        write_whole(args.output, document)
    if args.json:
        print(document, end="")
        return
    for size in result["shards"]:
        print(f"shard {size['shard']}: {size['num_entries']:,} entries, {size['bytes_per_entry']} bytes each")
    for row in result["rows"]:
        times = f"p50 {row['p50_ms']:.3f} ms, p99 {row['p99_ms']:.3f} ms, most {row['most_ms']:.3f} ms"
        print(f"{row['shard']} {row['what']:28} {row['num_calls']:6} calls, {times}, {row['sum_s']:.1f} s")


if __name__ == "__main__":
    main()

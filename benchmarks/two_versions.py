"""This version against another one, call by call in turns, so that a machine that gets slower slows both.

Each version runs two node stores and their movers for each size of blocks, as processes of its own, and is measured
through its public calls alone. In a round each version makes each call once, or many times and the median counts where
it takes microseconds; which version is first alternates. The figure of a call is the median over the rounds of the time
that this version takes over that of the other, with its quartiles. Both versions are started anew several times,
because the same code can be a tenth slower or faster from one start to the next.

Run: `python benchmarks/two_versions.py FOLDER [--lane LANE] [--starts N] [--rounds N] [--json]`, with a checkout of the
other version in FOLDER. Rows are {call, this_us, other_us, ratio, ratio_from, ratio_to}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
TIMEOUT_S = 60.0
LOAD_BYTES = 64 << 20
#: Bytes of a block -> (layers, KV heads, head dim), 16 tokens, bfloat16.
SHAPES = {64 << 10: (16, 1, 64), 512 << 10: (32, 4, 64), 2 << 20: (32, 8, 128)}
#: Calls that take microseconds are made so often in a round; the median counts.
NUM_SMALL = 60


def timed(call: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


class Reader:
    """What is measured with blocks of one size: loads from the other node, and calls about a few blocks of this one."""

    def __init__(self, nodes: list[Any], block_bytes: int) -> None:
        import torch

        import kvstore

        layers, heads, dim = SHAPES[block_bytes]
        shape = kvstore.KVShape(num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype="bfloat16", block_size=16)
        self.space = kvstore.Namespace(model=f"turns-{block_bytes}", shape=shape)
        self.num_blocks, self.name = LOAD_BYTES // block_bytes, f"{block_bytes >> 10} KiB"
        self.clients = [kvstore.Client(node.control_path, self.space) for node in nodes]
        for client in self.clients:
            cache = torch.ones(self.num_blocks, heads, layers, 2, 16, dim, dtype=torch.bfloat16)
            client.register_kv_caches(cache, axes="BHLPTD")

    def chain(self, number: int, num_blocks: int) -> Any:
        import numpy as np

        return self.space.block_hashes(np.arange(num_blocks * 16, dtype=np.int64) + number * (1 << 17))

    def load(self, number: int) -> dict[str, float]:
        source, reader = self.clients
        chain = self.chain(number, self.num_blocks)
        assert source.save(chain, range(self.num_blocks)).result(TIMEOUT_S).num_written == self.num_blocks
        until_s = time.monotonic() + TIMEOUT_S
        while reader.lookup(chain).num_blocks < self.num_blocks:
            assert time.monotonic() < until_s, "the directory did not hear of a save"

        def load() -> None:
            result = reader.load(chain, range(self.num_blocks)).result(TIMEOUT_S)
            assert result.num_peer == self.num_blocks, result

        return {f"load, {self.name} blocks of a peer": timed(load)}

    def small(self, number: int) -> dict[str, float]:
        _, reader = self.clients
        few, many = self.chain(20_000, 16), self.chain(20_001, 128)
        for chain in (few, many):
            reader.save(chain, range(len(chain))).result(TIMEOUT_S)
        seen: dict[str, list[float]] = {}
        for index in range(NUM_SMALL):
            fresh = self.chain(1000 + number * NUM_SMALL + index, 16)

            calls: dict[str, Callable[[], Any]] = {
                "lookup, 128 blocks": lambda: reader.lookup(many),
                "lease and release, 128 blocks": lambda: reader.lease(many).release(),
                "load, 16 blocks here": lambda: reader.load(few, range(16)).result(TIMEOUT_S),
                "save, 16 blocks": lambda fresh=fresh: reader.save(fresh, range(16)).result(TIMEOUT_S),
                "save, 16 blocks that are here": lambda: reader.save(few, range(16)).result(TIMEOUT_S),
            }
            for name, call in calls.items():
                seen.setdefault(name, []).append(timed(call))
        return {name: statistics.median(times) for name, times in seen.items()}


def serve(lane: str) -> None:
    """Measure a round for each line of the standard input."""
    import torch

    from kvstore import StoreConfig
    from kvstore.actors.plain_nodes import plain_nodes

    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    with contextlib.ExitStack() as running:
        readers = []
        for block_bytes in SHAPES:
            config = StoreConfig(name=f"turns-{block_bytes}", capacity_bytes=8 * LOAD_BYTES, lane=lane)
            readers.append(Reader(running.enter_context(plain_nodes(config)), block_bytes))
        for number, _ in enumerate(sys.stdin):
            seen = readers[len(readers) // 2].small(number)
            for reader in readers:
                seen.update(reader.load(number))
            print(json.dumps(seen), file=answers, flush=True)


@contextlib.contextmanager
def version(folder: Path, lane: str) -> Iterator[Callable[[], dict[str, float]]]:
    """Run the version in a folder, and yield a call that measures a round of it, in seconds by call."""
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, __file__, "--serve", lane]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        assert process.stdin is not None, "made with a pipe"
        assert process.stdout is not None, "made with a pipe"

        def measure() -> dict[str, float]:
            process.stdin.write("\n")
            process.stdin.flush()
            if not (line := process.stdout.readline()):
                raise SystemExit(f"the version in {folder} ended; what it said stands above")
            return json.loads(line)

        yield measure


def in_turns(this: Path, other: Path, lane: str, num_starts: int, num_rounds: int) -> list[dict[str, Any]]:
    rounds: list[dict[str, dict[str, float]]] = []
    for start in range(num_starts):
        with version(this, lane) as of_this, version(other, lane) as of_other:
            for number in range(num_rounds + 1):
                turns = [("this", of_this), ("other", of_other)]
                seen = {name: measure() for name, measure in (turns if number % 2 else reversed(turns))}
                if number:  # The first round connects and warms up.
                    rounds.append(seen)
                text = f"\rstart {start + 1} of {num_starts}, round {number} of {num_rounds} "
                print(text, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = []
    for call in rounds[0]["this"]:
        ratios = [seen["this"][call] / seen["other"][call] for seen in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        micros = {name: round(1e6 * statistics.median(seen[name][call] for seen in rounds), 1) for name in seen}
        rows.append(
            {
                "call": call,
                "this_us": micros["this"],
                "other_us": micros["other"],
                "ratio": round(middle, 3),
                "ratio_from": round(low, 3),
                "ratio_to": round(high, 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a checkout of the other version")
    parser.add_argument("--lane", choices=("default", "tcp"), default="default")
    parser.add_argument("--starts", type=int, default=5, help="how often both versions are started")
    parser.add_argument("--rounds", type=int, default=8, help="rounds after each start")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--serve", metavar="LANE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if arguments.folder is None or not (arguments.folder / "kvstore").is_dir():
        parser.error(f"wanted a folder with a checkout of raykv, got {arguments.folder}")
    for option, least in (("starts", 1), ("rounds", 2)):
        if (number := getattr(arguments, option)) < least:
            parser.error(f"--{option}: wanted {least} or more, got {number}")
    rows = in_turns(HERE, arguments.folder.resolve(), arguments.lane, arguments.starts, arguments.rounds)
    if arguments.json:
        sys.path.insert(0, str(HERE))
        from kvstore.tools.documents import as_document
        from kvstore.tools.provenance import commit, provenance

        about = {
            "lane": arguments.lane,
            "num_starts": arguments.starts,
            "num_rounds": arguments.rounds,
            "other_commit": commit(arguments.folder),
        }
        print(as_document({"benchmark": "two versions", **provenance(), **about, "rows": rows}), end="")
        return
    print(f"{'call':<34} {'this us':>10} {'other us':>10} {'ratio':>7} {'quartiles':>14}")
    for row in rows:
        quartiles = f"{row['ratio_from']:.3f}-{row['ratio_to']:.3f}"
        print(
            f"{row['call']:<34} {row['this_us']:>10.1f} {row['other_us']:>10.1f} {row['ratio']:>7.3f} {quartiles:>14}"
        )


if __name__ == "__main__":
    main()

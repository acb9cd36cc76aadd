"""What a message costs: it is made, encoded and decoded, in this version and in another one, in turns.

Each figure is the median over the turns of a process of each version; `read_us` has the arrays of the message read
through numpy as well, as its receiver does. FOLDER is a checkout of the other version,
commit 81b490b or a later one: earlier ones have no kvstore/blocks/codec.py.

Run: `python benchmarks/codec.py [FOLDER] [--turns N] [--json]`. Rows are {message, version, us, read_us}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
NUM_CALLS, NUM_REPEATS = 5000, 7
KEY, EPOCH = bytes(range(32)), b"epoch678"

#: Message -> (makes, encodes and decodes it; reads its arrays).
Calls = dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]


def nothing(message: Any) -> None:
    """Read no arrays: there are none."""


def make_calls() -> Calls:
    import numpy as np

    from kvstore.blocks.codec import encode
    from kvstore.blocks.grants import Grant, StoreTicket
    from kvstore.blocks.indexes import ints_in, pack_ints
    from kvstore.rpc.handoff_messages import FetchRequest, decode_fetch
    from kvstore.rpc.messages import Progress, decode_grant, decode_progress, decode_ticket

    def fetch() -> FetchRequest:
        return FetchRequest(
            key=KEY, namespace=KEY, epoch=EPOCH, node_id="b" * 56, num_blocks=128, ttl_s=30.0, timeout_s=60.0,
            from_slab=1, slab=2, generation=3, is_early=True,
        )  # fmt: skip

    def ticket(count: int) -> Callable[[], Any]:
        packed, lives = pack_ints(range(count)), bytes(4 * count)
        return lambda: decode_ticket(
            encode(
                StoreTicket(
                    write_id=7, packed_indexes=packed, packed_slots=packed, num_resident=0,
                    num_refused=0, num_clears=1, generations=lives, epoch=EPOCH,
                )
            )
        )  # fmt: skip

    def read(made: StoreTicket) -> None:
        for packed in (made.packed_indexes, made.packed_slots):
            ints_in(packed).astype(np.int64)

    packed, slots = pack_ints(range(128)), np.arange(128, dtype=np.int32)
    return {
        "fetch": (lambda: decode_fetch(encode(fetch())), nothing),
        "ticket, 128 blocks": (ticket(128), read),
        "ticket, 2048 blocks": (ticket(2048), read),
        "grant, 128 blocks": (
            lambda: decode_grant(encode(Grant(7, packed, bytes(512), 0, EPOCH))),
            lambda grant: ints_in(grant.packed_slots).astype(np.int64),
        ),
        "progress, 128 blocks": (
            lambda: decode_progress(encode(Progress(7, 0, slots.tobytes()))),
            lambda progress: progress.slots.astype(np.int64),
        ),
    }


def measure() -> dict[str, list[float]]:
    found = {}
    for name, (call, read) in make_calls().items():

        def call_and_read(call: Callable[[], Any] = call, read: Callable[[Any], Any] = read) -> None:
            read(call())

        times = [min(timeit.repeat(each, number=NUM_CALLS, repeat=NUM_REPEATS)) for each in (call, call_and_read)]
        found[name] = [1e6 * seconds / NUM_CALLS for seconds in times]
    return found


def measured_in(folder: Path) -> dict[str, list[float]]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, __file__, "--measure"]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True, timeout=300)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a checkout of the other version")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure()))
        return
    folders = {"this": HERE} | ({"other": arguments.folder.resolve()} if arguments.folder else {})
    turns = [{name: measured_in(folder) for name, folder in folders.items()} for _ in range(arguments.turns)]
    rows = []
    for message in turns[0]["this"]:
        for name in folders:
            us, read_us = (statistics.median(turn[name][message][i] for turn in turns) for i in range(2))
            rows.append({"message": message, "version": name, "us": round(us, 2), "read_us": round(read_us, 2)})
    if arguments.json:
        sys.path.insert(0, str(HERE))
        from kvstore.tools.documents import as_document
        from kvstore.tools.provenance import commit, provenance

        about = {"benchmark": "codec", **provenance(), "num_turns": arguments.turns}
        if arguments.folder:
            about["other_commit"] = commit(arguments.folder)
        print(as_document({**about, "rows": rows}), end="")
        return
    print(f"{'message':<22} {'version':<8} {'us':>7} {'and read':>9}")
    for row in rows:
        print(f"{row['message']:<22} {row['version']:<8} {row['us']:>7.2f} {row['read_us']:>9.2f}")


if __name__ == "__main__":
    main()

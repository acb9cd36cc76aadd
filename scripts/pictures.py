"""Make docs/pictures: `kvstore top` and `kvstore inspect` of a real store on two nodes, under some load.

    .venv/bin/python scripts/pictures.py [--seconds 40]

The load is small, and made up: conversations that grow, on either node, with some hand-offs, pins and priorities. On
one node the tenant "batch", which has a quota of memory, saves prompts that never come again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

import kvstore
from kvstore.actors.bench.cluster import private_nodes
from kvstore.errors import KVStoreError
from kvstore.tools.inspection.tables import show_chain, show_handoffs, show_leases, show_namespaces, show_tenants
from kvstore.tools.top import rows_of, table_of

FOLDER = Path(__file__).resolve().parents[1] / "docs/pictures"
#: 128 KiB a block: a memory of 32 MiB has room for 256, so blocks are evicted, and read from disk and peers.
SHAPE = kvstore.KVShape(num_layers=8, num_kv_heads=4, head_dim=64, dtype="bfloat16", block_size=16)
NUM_ENGINE_BLOCKS, LONGEST = 64, 48
TENANTS = {"batch": {"max_bytes": "8MiB"}, "chat": {"max_bytes": "30MiB", "max_handoffs": 200}}
#: Rich's picture without the fonts that it would have a reader fetch from elsewhere.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


@dataclass(frozen=True)
class Demo:
    """A store under load, until its context ends."""

    store: Any
    space: kvstore.Namespace
    clients: list[kvstore.Client]
    chain: Callable[[int, int], Any]


def chain(space: kvstore.Namespace, conversation: int, num_blocks: int) -> Any:
    """Return the hashes of a conversation's first blocks; all begin with the same four."""
    tokens = np.random.default_rng(conversation).integers(0, 30_000, LONGEST * SHAPE.block_size)
    tokens[: 4 * SHAPE.block_size] = 7
    return space.block_hashes(tokens[: num_blocks * SHAPE.block_size])


def converse(space: kvstore.Namespace, clients: list[kvstore.Client], at: int, ends: threading.Event) -> None:
    """Load what is stored of a conversation and save the rest, one turn after the other, about ten a second."""
    random_turns, mine, lengths = random.Random(at), clients[at], dict[int, int]()
    while not ends.wait(0.08):
        conversation = min(int(random_turns.paretovariate(0.7)), 40)
        length = lengths[conversation] = min(lengths.get(conversation, 6) + 4, LONGEST)
        hashes, blocks = chain(space, conversation, length), list(range(length))
        with contextlib.suppress(KVStoreError):  # The disk, or a pool full of pins: a turn without the store.
            mine.load(hashes, blocks).result(20)
            mine.save(hashes, blocks, priority="low" if conversation > 20 else "normal").result(20)
            if random_turns.random() < 0.2:
                ticket = mine.publish(blocks[:8])
                if random_turns.random() < 0.8:
                    clients[1 - at].fetch(ticket, list(range(56, 64))).result(20)
        if length == LONGEST and random_turns.random() < 0.5:
            lengths.pop(conversation)


def scan(space: kvstore.Namespace, client: kvstore.Client, ends: threading.Event) -> None:
    """Save a prompt of 24 blocks that nobody asks for again, about four times a second."""
    number = 1_000_000
    while not ends.wait(0.25):
        number += 1
        tokens = np.random.default_rng(number).integers(0, 30_000, 24 * SHAPE.block_size)
        with contextlib.suppress(KVStoreError):
            client.save(space.block_hashes(tokens), list(range(24))).result(20)


@contextlib.contextmanager
def demo() -> Iterator[Demo]:
    """Run a store on two Ray nodes of its own, and the load on both."""
    with contextlib.ExitStack() as undo:
        nodes = undo.enter_context(private_nodes(2))
        disk = undo.enter_context(tempfile.TemporaryDirectory(prefix="raykv-demo-", dir="/var/tmp"))
        more = {"disk_path": disk, "disk_capacity": "96MiB", "lease_ttl_s": 20.0, "tenants": TENANTS}
        store = undo.enter_context(contextlib.closing(kvstore.start("32MiB", name="demo", **more)))
        undo.callback(store.destroy)
        space = kvstore.Namespace(model="demo", shape=SHAPE)
        clients = [undo.enter_context(store.client(space, node_id=node, tenant="chat")) for node in nodes]
        scanner = undo.enter_context(store.client(space, node_id=nodes[0], tenant="batch"))
        for client in (*clients, scanner):
            size = (2, NUM_ENGINE_BLOCKS, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
            client.register_kv_caches([torch.zeros(size, dtype=torch.bfloat16) for _ in range(SHAPE.num_layers)])
        ends = threading.Event()
        threads = [threading.Thread(target=converse, args=(space, clients, at, ends)) for at in (0, 1)]
        threads.append(threading.Thread(target=scan, args=(space, scanner, ends)))
        for thread in threads:
            thread.start()
        try:
            yield Demo(store, space, clients, lambda number, length: chain(space, number, length))
        finally:
            ends.set()
            for thread in threads:
                thread.join(60)


def picture(name: str, title: str, show: Callable[[Console], None], width: int = 150) -> None:
    """Write what is shown on a console as docs/pictures/NAME.svg."""
    console = Console(record=True, width=width, force_terminal=True, highlight=False, file=io.StringIO())
    show(console)
    svg = console.export_svg(title=title, code_format=FORMAT, unique_id=f"raykv-{name}")
    (FOLDER / f"{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def main() -> None:
    """Run the load, and make the pictures at its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    seconds = parser.parse_args().seconds
    FOLDER.mkdir(exist_ok=True)
    with demo() as it:
        time.sleep(seconds)
        before = it.store.stats()
        time.sleep(5.0)
        rows = rows_of(before, it.store.stats())
        picture("top", "kvstore top", lambda console: console.print(table_of("demo", rows, console)), 170)
        hot = it.chain(1, LONGEST)
        pinned, leases = it.clients[0].pin(hot[:8]), [client.lease(hot[:16], ttl_s=60.0) for client in it.clients]
        soft = it.clients[1].pin(it.chain(2, 24), soft=True, ttl_s=600.0)
        found = {
            "namespaces": it.store.inspect("namespaces", prefix=it.space.digest.hex()[:6]),
            "chain": it.store.inspect("chain", chain=hot),
            "leases": it.store.inspect("leases", limit=6),
            "handoffs": it.store.inspect("handoffs", limit=6),
        }
        tenants = it.store.stats()["nodes"]
        it.clients[0].unpin(pinned)
        it.clients[1].unpin(soft)
        for lease in leases:
            lease.release()
    prefix = it.space.digest.hex()[:6]
    picture(
        "inspect-namespace", f"kvstore inspect namespace {prefix}",
        lambda console: show_namespaces("demo", found["namespaces"], has_details=True, console=console),
    )  # fmt: skip
    picture(
        "inspect-chain", f"kvstore inspect chain --hash {hot[-1].hex()[:8]}...",
        lambda console: show_chain(hot, found["chain"], console),
    )  # fmt: skip
    picture(
        "inspect-lease", "kvstore inspect lease --limit 6",
        lambda console: show_leases("demo", found["leases"], console), 190,
    )  # fmt: skip
    picture(
        "inspect-handoff", "kvstore inspect handoff --limit 6",
        lambda console: show_handoffs("demo", found["handoffs"], console), 170,
    )  # fmt: skip
    picture("inspect-tenant", "kvstore inspect tenant", lambda console: show_tenants("demo", tenants, console))


if __name__ == "__main__":
    main()

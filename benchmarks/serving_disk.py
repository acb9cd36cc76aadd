"""What a disk tier costs new prompts, and what it gives old ones: the part "disk" of `benchmarks.serving`.

Two stores of the same memory, one of them with a disk tier, and two engines at each: of equal engines one may be some
per cent slower for its whole life. New prompts come in pairs: the second one is timed, while the blocks of the first
are being written. Then the prompts that memory has forgotten are asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import click
import numpy as np

from benchmarks.serving_engine import BLOCK_SIZE, VOCABULARY, Engines
from benchmarks.serving_report import Rows, spread
from kvstore import Store

WAYS = ("memory", "disk")
ENGINES = tuple(f"{way} {number}" for number in (1, 2) for way in WAYS)
#: Memory holds so many of the longest prompts, and the disk all.
NUM_IN_MEMORY, DISK_BYTES = 5, 12 << 30
#: Of one token of the model, in all layers.
TOKEN_BYTES = {"bfloat16": 24 << 10, "float32": 48 << 10}
#: Rounds of the longest prompts that memory may still hold at the end, so their prompts are not asked again.
NUM_LEFT_OUT = 3
_WRITTEN_S = 60.0


def first_tokens(
    engines: Engines, stores: Mapping[str, Store], num_tokens: int, rounds: int, num_left_out: int,
    say: Callable[[str], None],
) -> Rows:  # fmt: skip
    """Time prompts of one length: new ones with both engines, then old ones with the one that has a disk tier.

    Args:
        engines: those of ENGINES.
        stores: of each of WAYS; nobody else uses it.
        num_tokens: of each prompt.
        rounds: pairs of prompts, one to get warm not counted.
        num_left_out: of these the last ones, whose prompts are not asked again.
        say: told how far it is.
    """
    random, times = np.random.default_rng([4, num_tokens]), {name: [] for name in (*ENGINES, "old")}
    asked = []
    for number in range(-1, rounds):
        say(f"disk tier: {num_tokens} tokens, round {number + 1} of {rounds}")
        prompts = random.integers(0, VOCABULARY, (2, 2, num_tokens)).tolist()
        for name in ENGINES if number % 2 else ENGINES[::-1]:
            way, engine = name.split()
            first, second = prompts[int(engine) - 1]
            engines.ask(name, "first_token", first, True)
            answer = engines.ask(name, "first_token", second, True)
            engines.ask(name, "settle")
            _await_written(stores[way])
            if number >= 0:
                times[name].append(answer["first_token_s"])
        if number >= 0:
            asked.append(prompts[0][1])
    wanted = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    old = asked[: len(asked) - num_left_out]
    for number, prompt in enumerate(old):
        say(f"disk tier: {num_tokens} tokens from disk, {number + 1} of {len(old)}")
        engines.ask("disk 1", "reset")
        num_read = _disk(stores["disk"], "num_read")
        answer = engines.ask("disk 1", "first_token", prompt)
        num_blocks = _disk(stores["disk"], "num_read") - num_read
        if answer["num_cached"] < wanted or num_blocks < wanted // BLOCK_SIZE:
            raise click.ClickException(f"wanted {wanted} tokens from disk, got {num_blocks} blocks of it: {answer}")
        times["old"].append(answer["first_token_s"])
    at: dict[str, Any] = {"what": "disk tier", "num_tokens": num_tokens}
    return [
        *({**at, "way": name, "state": "cold", **spread(times[name])} for name in ENGINES),
        *([{**at, "way": "disk 1", "state": "from disk", **spread(times["old"])}] if old else []),
    ]


def _disk(store: Store, key: str) -> int:
    return sum((node["disk"] or {}).get(key, 0) for node in store.stats()["nodes"].values())


def _await_written(store: Store) -> None:
    """Wait until a store has written what was saved, so that it is not written while another engine is timed."""
    deadline_s = time.monotonic() + _WRITTEN_S
    while _disk(store, "num_unwritten"):
        if time.monotonic() > deadline_s:
            raise click.ClickException(f"wanted all blocks written within {_WRITTEN_S} s; is the disk very slow?")
        time.sleep(0.05)

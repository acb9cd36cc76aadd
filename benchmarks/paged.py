"""Times of the paged prefix cache, beside SGLang's UnifiedRadixCache where that can be imported.

Index only: no KV is computed or copied. Both caches get the same prompts, encoded once as each wants them (bytes of
uint32; array("q")). The calls of one round alternate between the caches. Rows:

- insert: take pages for a whole prompt, and insert it.
- match_lock: find and lock a whole prompt, and list its pages (here: `acquire` and `pages`; SGLang: `match_prefix`,
  `inc_lock_ref` and `path_device_indices`).
- unlock: give the lock back.
- evict: free all pages of the tree, and give them back to the allocator.

`edges` is how many edges of the tree the prompt takes: one, or as many as a conversation whose every turn has another
branch beside it. Its insert is that of all branches. Times are in microseconds: median, least and greatest.

Run: `python -m benchmarks.paged [--tokens N] [--pages A,B] [--edges A,B] [--rounds N] [--json] [--output FILE]`.
SGLang needs an environment of its own beside this package's: sglang and what it imports.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvstore.paged.cache import PagedPrefixCache
from kvstore.paged.tokens import encode_tokens
from kvstore.replay.files import write_whole
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

CALLS = ("insert", "match_lock", "unlock", "evict")
Rows = list[dict[str, Any]]


class Driver(Protocol):
    """One cache under measurement; keys are prompts in the form that it wants."""

    name: str

    def encode(self, tokens: list[int]) -> Any: ...
    def insert(self, key: Any) -> None: ...
    def match_lock(self, key: Any) -> tuple[Any, int]: ...
    def unlock(self, handle: Any) -> None: ...
    def evict(self, num_tokens: int) -> None: ...


class Ours:
    """This project's cache."""

    name = "raykv"

    def __init__(self, page_size: int, num_tokens: int) -> None:
        self._cache = PagedPrefixCache(page_size, -(-num_tokens // page_size))
        self._page_size = page_size

    def encode(self, tokens: list[int]) -> Any:
        return encode_tokens(tokens)

    def insert(self, key: Any) -> None:
        request = self._cache.acquire(key, reserve_last_token=False)
        request.extend(key.num_tokens - request.num_tokens)
        request.insert(key)
        request.release()

    def match_lock(self, key: Any) -> tuple[Any, int]:
        request = self._cache.acquire(key, reserve_last_token=False)
        return request, len(request.pages()) * self._page_size

    def unlock(self, handle: Any) -> None:
        handle.release()

    def evict(self, num_tokens: int) -> None:
        self._cache.evict(num_tokens // self._page_size)


def make_prompts(num_tokens: int, num_edges: int, page_size: int, seed: int) -> list[list[int]]:
    """Return prompts, the longest last: each of the others leaves it at another place, one page long."""
    rng = np.random.default_rng(seed)
    longest = rng.integers(0, 150_000, num_tokens).tolist()
    turn = num_tokens // num_edges // page_size * page_size
    others = [
        [*longest[: at * turn], *rng.integers(150_000, 151_000, page_size).tolist()] for at in range(1, num_edges)
    ]
    return [*others, longest]


def timed(call: Callable[[], Any], into: list[float]) -> Any:
    begin = time.perf_counter()
    result = call()
    into.append((time.perf_counter() - begin) * 1e6)
    return result


def run_round(driver: Driver, prompts: list[list[int]], times: dict[str, list[float]]) -> None:
    """Fill a cache, use it and empty it; the first call of each kind is timed."""
    keys = [driver.encode(tokens) for tokens in prompts]
    timed(lambda: [driver.insert(key) for key in keys], times["insert"])
    handle, num_found = timed(lambda: driver.match_lock(keys[-1]), times["match_lock"])
    if num_found != len(prompts[-1]):
        raise SystemExit(f"{driver.name}: wanted {len(prompts[-1])} tokens, found {num_found}")
    timed(lambda: driver.unlock(handle), times["unlock"])
    timed(lambda: driver.evict(sum(map(len, prompts))), times["evict"])


def measure(drivers: list[Driver], num_tokens: int, page_size: int, num_edges: int, num_rounds: int) -> Rows:
    """Return a row for each cache and call."""
    times: dict[str, dict[str, list[float]]] = {each.name: {call: [] for call in CALLS} for each in drivers}
    for number in range(num_rounds + 2):
        prompts = make_prompts(num_tokens, num_edges, page_size, number)
        for driver in drivers if number % 2 else reversed(drivers):
            run_round(driver, prompts, times[driver.name])
    return [
        {
            "call": call,
            "page_size": page_size,
            "num_tokens": num_tokens,
            "edges": num_edges,
            "cache": driver.name,
            "us": round(statistics.median(kept), 1),
            "least_us": round(min(kept), 1),
            "greatest_us": round(max(kept), 1),
        }
        for call in CALLS
        for driver in drivers
        if (kept := times[driver.name][call][2:])  # The first two rounds warm up.
    ]


def make_drivers(page_size: int, num_tokens: int) -> tuple[list[Driver], str]:
    """Return the caches, and why SGLang's is not among them, if so."""
    drivers: list[Driver] = [Ours(page_size, num_tokens)]
    try:
        from benchmarks.paged_sglang import make_all

        drivers += make_all(page_size, num_tokens)
    except ImportError as error:
        return drivers, f"without SGLang: {error}"
    return drivers, ""


def numbers(text: str) -> list[int]:
    """Return the integers of a comma list."""
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the prompt")
    parser.add_argument("--pages", type=numbers, default=[1, 16], help="page sizes, in tokens")
    parser.add_argument("--edges", type=numbers, default=[1, 32], help="of the tree that the prompt takes")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--output", type=Path, help="also write that object to this file")
    arguments = parser.parse_args()
    rows, note = [], ""
    for page_size in arguments.pages:
        drivers, note = make_drivers(page_size, 2 * arguments.tokens)
        for num_edges in arguments.edges:
            rows += measure(drivers, arguments.tokens, page_size, num_edges, arguments.rounds)
    document = as_document({"benchmark": "paged", **provenance(), "note": note, "rows": rows})
    if arguments.json:
        print(document, end="")
    else:
        print(note)
        for row in rows:
            print(
                "{call:<11}page {page_size:<4}edges {edges:<4}{cache:<16}{us:>10.1f} us, least {least_us:.1f}".format(
                    **row
                )
            )
    if arguments.output:
        write_whole(arguments.output, document)


if __name__ == "__main__":
    main()

"""Replicas for benchmarks/serve_routing.py that compute nothing: each has a cache of blocks, and takes a prompt's time.

They start in seconds and need no vLLM, and a prompt takes the same time on any machine. Ray Serve and its routers are
real.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvstore import KVShape, Namespace
from kvstore.integrations.space_text import space_to_text

BLOCK_SIZE = 32
SHAPE = KVShape(num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32", block_size=BLOCK_SIZE)
SPACE = Namespace(model="simulated", shape=SHAPE)


class Engine:
    """One replica: prompts are computed one after the other, and the least recently used blocks are evicted.

    Args:
        num_blocks: that its cache holds.
        tokens_per_s: how fast it computes prompts.
    """

    def __init__(self, num_blocks: int, tokens_per_s: float) -> None:
        self._num_blocks, self._tokens_per_s = num_blocks, tokens_per_s
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._turn = asyncio.Lock()

    async def completions(self, request: Any) -> dict[str, int]:
        """Return how many tokens a prompt has, and how many of them were cached."""
        tokens = list(request.prompt.encode())
        chain = SPACE.block_hashes(tokens).hashes()
        async with self._turn:
            cached = next((count for count, block in enumerate(chain) if block not in self._cache), len(chain))
            num_cached = min(cached * BLOCK_SIZE, len(tokens) - 1)  # The last token is always computed.
            await asyncio.sleep((len(tokens) - num_cached) / self._tokens_per_s)
            for block in reversed(chain):  # The root was used last.
                self._cache[block] = None
                self._cache.move_to_end(block)
            while len(self._cache) > self._num_blocks:
                self._cache.popitem(last=False)
        return {"num_tokens": len(tokens), "num_cached": num_cached}

    async def collective_rpc(self, method: str) -> list[str] | list[int]:
        """Return what the workers of an engine say of their namespace, and of their cache."""
        return [space_to_text(SPACE)] if method == "raykv_space" else [self._num_blocks * BLOCK_SIZE]


async def ask_all(handle: Any, prompts: Sequence[str], num_at_once: int) -> list[dict[str, float]]:
    """Ask all prompts; returns tokens, cached tokens and the time to the first token of each."""
    gate = asyncio.Semaphore(num_at_once)

    async def ask(prompt: str) -> dict[str, float]:
        async with gate:
            began_s = time.perf_counter()
            answer = await handle.completions.remote(SimpleNamespace(prompt=prompt))
            return {**answer, "first_token_s": time.perf_counter() - began_s}

    return list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))

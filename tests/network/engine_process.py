"""An engine on one machine of a cluster, told what to do: one JSON object a line, answered likewise.

    python engine_process.py NUM_BLOCKS

Its blocks are stamped from their hashes, and every byte of what a load calls usable is compared.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import torch

import kvstore

SHAPE = kvstore.KVShape(num_layers=4, num_kv_heads=4, head_dim=64, dtype="bfloat16", block_size=16)
SPACE = kvstore.Namespace(model="m", shape=SHAPE)
POISON = 0x5A5A
WAIT_S = 60.0


class Engine:
    def __init__(self, num_blocks: int) -> None:
        dims = (2, num_blocks, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
        self.layers = [torch.zeros(dims, dtype=torch.bfloat16) for _ in range(SHAPE.num_layers)]
        self.bits = [layer.view(torch.int16).numpy() for layer in self.layers]
        self.store = kvstore.connect(timeout_s=WAIT_S)
        self.client = None

    def open(self) -> str:
        """Attach to this machine's store, again if it has another life."""
        if self.client is not None:
            self.client.close()
        self.client = self.store.client(SPACE)
        self.client.register_kv_caches(self.layers)
        return self.client.node_id

    @staticmethod
    def hashes(seed: int, num_blocks: int):
        return SPACE.block_hashes(np.arange(num_blocks * SHAPE.block_size) + 1_000_000 * (seed + 1))

    @staticmethod
    def stamp(block_hash: bytes) -> np.ndarray:
        size = (SHAPE.num_layers, 2, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
        return np.random.default_rng(list(block_hash[:8])).integers(-(2**15), 2**15, size, np.int16)

    def save(self, seed: int, num_blocks: int) -> int:
        hashes = self.hashes(seed, num_blocks)
        for block, block_hash in enumerate(hashes):
            for bits, stamped in zip(self.bits, self.stamp(block_hash), strict=True):
                bits[:, block] = stamped
        return self.client.save(hashes, list(range(num_blocks))).result(WAIT_S).num_written

    def load(self, seed: int, num_blocks: int, timeout_s: float | None = None) -> dict[str, object]:
        """Load over poisoned blocks; returns what was usable, how much of that was wrong, and how long it took."""
        hashes = self.hashes(seed, num_blocks)
        for bits in self.bits:
            bits[:, :num_blocks] = POISON
        began_s = time.monotonic()
        try:
            result = self.client.load(hashes, list(range(num_blocks)), timeout_s=timeout_s).result(WAIT_S)
        except kvstore.KVStoreError as error:
            took_s = time.monotonic() - began_s
            return {"num_blocks": 0, "num_wrong": 0, "why": [type(error).__name__], "took_s": took_s}
        took_s = time.monotonic() - began_s
        num_wrong = 0
        for block, block_hash in enumerate(list(hashes)[: result.num_blocks]):
            found = np.stack([bits[:, block] for bits in self.bits])
            num_wrong += not np.array_equal(found, self.stamp(block_hash))
        why = sorted({failure.reason.value for failure in result.failed})
        return {"num_blocks": result.num_blocks, "num_wrong": num_wrong, "why": why, "took_s": took_s}


def main() -> None:
    # Ray prints messages of its own, which are no answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine(int(sys.argv[1]))
    print(json.dumps({"is": engine.open()}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"is": getattr(engine, question.pop("do"))(**question)}
        except kvstore.KVStoreError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

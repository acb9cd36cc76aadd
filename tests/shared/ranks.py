"""Ranks of an engine, each in a process of its own, forked from one that has imported torch, which takes seconds.

What a rank does is in `Rank`; `RankProcess` is one of its processes, which may hold ranks of several engines.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from inner_parts import parts_of

from kvstore.blocks.part import as_part
from kvstore.client.client import Client

POISON = 0x5A5A
#: Blocks of the longest chain; an engine's caches have room for four times as many.
NUM_BLOCKS = 12
_ANSWER_S = 60.0


class Rank:
    """One rank of an engine: its heads of its layers, in blocks of its own size and order of dims; scales if any."""

    def __init__(self, control_path: str, space: Any, part: Any, block_size: int, axes: str) -> None:
        self.space, self.size = space, block_size
        self.client = Client(control_path, space, part)
        self.layers, self.heads = as_part(part).ranges(space.shape)
        num_blocks = 4 * NUM_BLOCKS * space.shape.block_size // block_size
        dims = {"P": 2, "B": num_blocks, "T": block_size, "H": len(self.heads), "D": space.shape.head_dim}
        caches = [torch.zeros([dims[axis] for axis in axes], dtype=torch.bfloat16) for _ in self.layers]
        sides = {
            side.name: [torch.zeros(num_blocks, block_size, len(self.heads)) for _ in self.layers]
            for side in space.shape.sides
        }
        axes_of_sides = dict.fromkeys(sides, "BTH")
        self.client.register_kv_caches(caches, axes, side_caches=sides, side_axes=axes_of_sides)
        # By plane, block, token and head, whatever the order in memory; scales have one plane.
        views = [cache.view(torch.int16).permute([axes.index(axis) for axis in "PBTHD"]) for cache in caches]
        flat = [rows.view(torch.int16) for tensors in sides.values() for rows in tensors]
        scales = [rows.view(1, num_blocks, block_size, len(self.heads), 2) for rows in flat]
        self.bits = [view.numpy() for view in [*views, *scales]]
        self.ids = np.random.default_rng(block_size).permutation(num_blocks).tolist()

    def node_id(self) -> str:
        return self.client.node_id

    def engine_blocks(self, hashes: Any) -> list[int]:
        return self.ids[: -(-len(hashes) * self.space.shape.block_size // self.size)]

    def stamped(self, hashes: Any, skip: int = 0) -> list[np.ndarray]:
        """What this rank's caches hold with these blocks in them, poison elsewhere; bits depend on the hash alone."""
        shape, found = self.space.shape, [np.full_like(bits, POISON) for bits in self.bits]
        kinds = [(2, shape.head_dim), *[(1, 2) for _ in shape.sides]]
        for index, block_hash in enumerate(hashes):
            rng, whole = np.random.default_rng(list(block_hash[:8])), []
            for planes, dim in kinds:
                dims = (shape.num_layers, planes, shape.block_size, shape.num_kv_heads, dim)
                drawn = rng.integers(-(2**15), 2**15, dims, np.int16)
                whole += [drawn[layer] for layer in self.layers]
            for at in range(shape.block_size):
                token = index * shape.block_size + at
                if token >= skip:
                    for bits, drawn in zip(found, whole, strict=True):
                        own = drawn[:, at, self.heads.start : self.heads.stop]
                        bits[:, self.ids[token // self.size], token % self.size] = own
        return found

    def fill(self, found: list[np.ndarray]) -> None:
        for bits, wanted in zip(self.bits, found, strict=True):
            bits[:] = wanted

    def save(self, hashes: Any) -> Any:
        self.fill(self.stamped(hashes))
        return self.client.save(hashes, self.engine_blocks(hashes)).result(30)

    def save_and_hang(self, hashes: Any) -> None:
        """Claim slots, and be stuck in the copy into them."""

        def hang(*args: Any) -> None:
            time.sleep(120)

        parts_of(self.client).copier.into_slots = hang
        self.client.save(hashes, self.engine_blocks(hashes)).result(None)

    def load(self, hashes: Any, skip: int = 0) -> Any:
        """Load over poison; every bit of the caches is as it should be, also where nothing is loaded."""
        self.fill([np.full_like(bits, POISON) for bits in self.bits])
        result = self.client.load(hashes, self.engine_blocks(hashes), skip).result(30)
        if result.num_blocks == len(hashes):
            for bits, wanted in zip(self.bits, self.stamped(hashes, skip), strict=True):
                assert np.array_equal(bits, wanted)
        return result

    def close(self) -> None:
        self.client.close()


class RankProcess:
    """A process with ranks in it, by the name of their engine."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "kvstore.client.client"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, engine: str, verb: str, *args: Any) -> Callable[[], Any]:
        """Have a rank do something, or be made with "open"; returns what waits for the answer."""
        self._pipe.send((engine, verb, args))
        return self._answer

    def kill(self) -> None:
        """End the process, in the middle of whatever it does."""
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10)
        self._pipe.close()

    def _answer(self) -> Any:
        assert self._pipe.poll(_ANSWER_S), f"no answer within {_ANSWER_S} s"
        is_right, answer = self._pipe.recv()
        assert is_right, answer
        return answer


def _serve(pipe: Connection) -> None:
    ranks: dict[str, Rank] = {}
    while True:
        try:
            engine, verb, args = pipe.recv()
        except EOFError:
            return
        try:
            if verb == "open":
                ranks[engine] = Rank(*args)
                answer = ranks[engine].client.node_id
            else:
                answer = getattr(ranks[engine], verb)(*args)
            pipe.send((True, answer))
        except Exception:  # noqa: BLE001 - told to whoever asked.
            pipe.send((False, traceback.format_exc()))

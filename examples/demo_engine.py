"""A very small serving engine for examples/prefill_decode.py: a Llama with a paged KV cache on the CPU or a GPU.

Why outputs can be identical to the last bit. Floating-point sums depend on their order, and a matrix product
over 800 rows adds in another order than one over 32: prefill the same prompt in one step or in many, and KV
differs by about 1e-6. So prefill always runs in steps of exactly one block, counted from the first token, with
one thread. Then the KV of a block depends on nothing but the tokens up to its end: not on who computed it, nor
on what came after it in that prompt, nor on how much was found in a store. Whatever is left after the last full
block (or the last token again, when nothing is) is one more step, and gives the logits of the first new token.
A store may keep full prompt blocks only: those of an answer were computed token by token, so the next turn's
prefill computes them anew. On a GPU the same holds where torch is told to be deterministic.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from demo_prompts import BLOCK_SIZE
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvstore

SHAPE = kvstore.KVShape(num_layers=8, num_kv_heads=4, head_dim=64, dtype="float32", block_size=BLOCK_SIZE)
NUM_BLOCKS = 128
JOB_TIMEOUT_S = 30.0

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, each [1, num_kv_heads, num_tokens, head_dim]."""


def build_model() -> LlamaForCausalLM:
    """Return the same model in every process: random weights, fixed seed."""
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        head_dim=SHAPE.head_dim,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=8,
        num_key_value_heads=SHAPE.num_kv_heads,
        max_position_embeddings=NUM_BLOCKS * BLOCK_SIZE,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


def digest_of(model: LlamaForCausalLM) -> str:
    """Return a digest of the weights: workers with other weights get another namespace, so never a hit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two float32 tensors hold the same bits: unlike ==, tells -0.0 from 0.0."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def cache_of(layers: Layers) -> DynamicCache:
    """Return what transformers computes with, holding these layers."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def layers_of(cache: DynamicCache, num_tokens: int) -> Layers:
    """Return the first tokens' KV; growing the cache later leaves it as it is."""
    return [(layer.keys[..., :num_tokens, :], layer.values[..., :num_tokens, :]) for layer in cache.layers]


class PagedCache:
    """An engine's paged KV cache: one tensor per layer, [2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim]."""

    def __init__(self, device: str = "cpu") -> None:
        dims = (2, NUM_BLOCKS, BLOCK_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim)
        self.tensors = [torch.full(dims, torch.nan, device=device) for _ in range(SHAPE.num_layers)]
        # In no order, as the blocks of a cache that has been in use for a while.
        self._free = random.Random(1).sample(range(NUM_BLOCKS), NUM_BLOCKS)

    def take(self, num_blocks: int) -> list[int]:
        """Return ids of blocks to use."""
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        assert len(taken) == num_blocks, f"wanted {num_blocks} blocks, {len(taken)} are free"
        return taken

    def give_back(self, block_ids: list[int]) -> None:
        """Take blocks back, poisoned, so that a byte that a load forgets cannot go unnoticed."""
        for tensor in self.tensors:
            tensor[:, block_ids] = torch.nan
        self._free += block_ids

    def scatter(self, block_ids: list[int], layers: Layers) -> None:
        """Write the KV of whole blocks."""
        for tensor, planes in zip(self.tensors, layers, strict=True):
            for plane, rows in enumerate(planes):
                tensor[plane, block_ids] = rows[0].transpose(0, 1).unflatten(0, (-1, BLOCK_SIZE))

    def gather(self, block_ids: list[int]) -> Layers:
        """Return a copy of the KV of whole blocks, contiguous."""

        def rows(plane: torch.Tensor) -> torch.Tensor:
            return plane[block_ids].flatten(0, 1).transpose(0, 1).unsqueeze(0).contiguous()

        return [(rows(tensor[0]), rows(tensor[1])) for tensor in self.tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one run of a request computed.

    Args:
        tokens: chosen greedily.
        logits: those that each was chosen by, [num_tokens, vocab_size].
        first_token_s: seconds from the request's arrival to its first token.
    """

    tokens: list[int]
    logits: torch.Tensor
    first_token_s: float


class Engine:
    """Model, paged cache and the client of this node's store; the two workers below are made of it.

    With `peers`, nodes to fetch from, hand-offs go from GPU to GPU where they can.
    """

    def __init__(self, store: Any, device: str = "cpu", peers: tuple[str, ...] | None = None) -> None:
        torch.set_num_threads(1)  # Sums of several threads may be added in another order.
        torch.set_grad_enabled(False)
        if device != "cpu":
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # What cuBLAS needs for the same.
            torch.use_deterministic_algorithms(True)
        self.device = device
        self.model = build_model().to(device)
        self.space = kvstore.Namespace(model="demo-llama", revision=digest_of(self.model), shape=SHAPE)
        self.pages = PagedCache(device)
        self.client = store.client(self.space)
        self.client.register_kv_caches(self.pages.tensors)
        if peers is not None:
            self.client.attach_handoff("64MiB", peers)

    def ready(self) -> str:
        """Return the namespace's digest, by which the driver sees that both workers hold one model."""
        return self.space.digest.hex()

    def close(self) -> None:
        """Give everything back to the store."""
        self.client.close()

    def step(self, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
        """Run the model on the next tokens, which the cache then holds; returns the last one's logits."""
        output = self.model(
            torch.tensor([tokens], device=self.device), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[0, -1]

    def compute_blocks(self, tokens: list[int], cache: DynamicCache) -> int:
        """Compute the full blocks that the cache lacks, one step each; returns how many those were."""
        starts = range(cache.get_seq_length(), len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE)
        for start in starts:
            self.step(tokens[start : start + BLOCK_SIZE], cache)
        return len(starts)

    def generate(self, prompt: list[int], cache: DynamicCache, num_tokens: int, arrived_s: float) -> Answer:
        """Compute what is left of the prompt, at least its last token, and go on greedily."""
        known = cache.get_seq_length()
        if known == len(prompt):
            known -= 1
            cache = cache_of(layers_of(cache, known))
        logits = [self.step(prompt[known:], cache)]
        tokens = [int(logits[0].argmax())]
        first_token_s = time.perf_counter() - arrived_s
        while len(tokens) < num_tokens:
            logits.append(self.step(tokens[-1:], cache))
            tokens.append(int(logits[-1].argmax()))
        return Answer(tokens=tokens, logits=torch.stack(logits), first_token_s=first_token_s)

    def load(self, hashes: kvstore.BlockHashes) -> tuple[list[int], kvstore.LoadResult]:
        """Bring the stored prefix of a prompt into blocks of the paged cache; they belong to the caller."""
        found = hashes[: self.client.lookup(hashes).num_blocks]
        block_ids = self.pages.take(len(found))
        result = self.client.load(found, block_ids).result(JOB_TIMEOUT_S)
        # A load is not all or nothing: what it did not deliver is computed like any miss.
        self.pages.give_back(block_ids[result.num_blocks :])
        return block_ids[: result.num_blocks], result


class PrefillWorker(Engine):
    """Computes the KV of prompts and saves it."""

    def prefill(self, prompt: list[int]) -> dict[str, float]:
        """Make all full blocks of a prompt findable; returns what that took."""
        arrived_s = time.perf_counter()
        hashes = self.space.block_hashes(prompt)
        block_ids, loaded = self.load(hashes)
        cache = cache_of(self.pages.gather(block_ids)) if block_ids else DynamicCache()
        num_computed = self.compute_blocks(prompt, cache)
        if num_computed:
            first = len(block_ids) * BLOCK_SIZE
            block_ids += self.pages.take(num_computed)
            fresh = [(keys[..., first:, :], values[..., first:, :]) for keys, values in layers_of(cache, len(prompt))]
            self.pages.scatter(block_ids[-num_computed:], fresh)
            self.client.save(hashes, block_ids).result(JOB_TIMEOUT_S)
        self.pages.give_back(block_ids)
        return {
            "num_blocks_reused": loaded.num_blocks,
            "num_blocks_computed": num_computed,
            "seconds": time.perf_counter() - arrived_s,
        }

    def prefill_and_hand_off(self, prompt: list[int]) -> kvstore.HandoffTicket | None:
        """Compute all full blocks of a prompt and publish them for one decode worker; None when there are none."""
        cache = DynamicCache()
        num_blocks = self.compute_blocks(prompt, cache)
        if num_blocks == 0:
            return None
        block_ids = self.pages.take(num_blocks)
        self.pages.scatter(block_ids, layers_of(cache, num_blocks * BLOCK_SIZE))
        ticket = self.client.publish(block_ids)
        self.pages.give_back(block_ids)  # Poisoned: what is published is a copy.
        return ticket


class DecodeWorker(Engine):
    """Answers prompts: once without any store, as the measure of all, and once with it."""

    def answer_without_store(self, prompt: list[int], num_tokens: int) -> None:
        """Compute prompt and answer from nothing, in the same steps, and remember KV and logits."""
        cache, arrived_s = DynamicCache(), time.perf_counter()
        num_blocks = self.compute_blocks(prompt, cache)
        self._reference_layers = layers_of(cache, num_blocks * BLOCK_SIZE) if num_blocks else []
        self._reference = self.generate(prompt, cache, num_tokens, arrived_s)

    def fetch(self, ticket: kvstore.HandoffTicket | None) -> tuple[list[int], kvstore.LoadResult]:
        """Bring handed-off blocks into blocks of the paged cache; they belong to the caller."""
        if ticket is None:
            return [], kvstore.LoadResult(num_blocks=0)
        block_ids = self.pages.take(ticket.num_blocks)
        result = self.client.fetch(ticket, block_ids).result(JOB_TIMEOUT_S)
        self.pages.give_back(block_ids[result.num_blocks :])
        return block_ids[: result.num_blocks], result

    def answer(
        self, prompt: list[int], num_tokens: int, handoff: bool = False, ticket: kvstore.HandoffTicket | None = None
    ) -> dict[str, object]:
        """Answer with the store's help, or from a hand-off; then compare with the run above and an ordinary one.

        The ordinary run prefills the whole prompt in one step, which is the fastest way there is without a
        store. It is what time to first token is compared with; its logits differ by rounding, its tokens may not.
        """
        arrived_s = time.perf_counter()
        hashes = self.space.block_hashes(prompt)
        block_ids, loaded = self.fetch(ticket) if handoff else self.load(hashes)
        layers = self.pages.gather(block_ids) if block_ids else []
        cache = cache_of(layers)
        num_computed = self.compute_blocks(prompt, cache)
        cached = self.generate(prompt, cache, num_tokens, arrived_s)
        self.pages.give_back(block_ids)
        ordinary = self.generate(prompt, DynamicCache(), num_tokens, time.perf_counter())
        num_known = len(block_ids) * BLOCK_SIZE
        same_kv = all(
            same_bits(loaded_plane, computed_plane[..., :num_known, :])
            for loaded_pair, computed_pair in zip(layers, self._reference_layers, strict=False)
            for loaded_plane, computed_plane in zip(loaded_pair, computed_pair, strict=True)
        )
        return {
            "num_prompt_tokens": len(prompt),
            "num_blocks": len(hashes),
            "num_blocks_own": loaded.num_local,
            "num_blocks_peer": loaded.num_peer,
            "num_blocks_recomputed": num_computed,
            "not_loaded_because": loaded.failed[0].detail if loaded.failed else "",
            "route": getattr(loaded, "route", ""),
            "nixl_bytes": loaded.num_bytes,
            "nixl_gb_per_s": loaded.num_bytes / loaded.read_s / 1e9 if loaded.num_bytes else 0.0,
            "ttft_cached_s": cached.first_token_s,
            "ttft_uncached_s": ordinary.first_token_s,
            "kv_identical": same_kv,
            "logits_identical": same_bits(cached.logits, self._reference.logits),
            "tokens_identical": cached.tokens == self._reference.tokens == ordinary.tokens,
            "answer": cached.tokens,
        }

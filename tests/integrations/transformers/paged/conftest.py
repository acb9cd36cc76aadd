"""Tiny engines of pages, and what transformers' own cache computes."""

from __future__ import annotations

import pytest
import torch

STEP = 16
FAMILIES = {
    "full": ("Llama", {}),
    "window": ("Mistral", {"sliding_window": 24}),
    "both": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
}


class Small:
    """A model with pages, and optionally the store of a node."""

    def __init__(self, model, store=None, *, page_size=16, num_pages=64, **options):
        from kvstore.integrations.transformers.paged import PagedKVCache, PagedRunner, PagedStore

        self.model = model
        sizes = {"page_size": page_size, "num_pages": num_pages, "align_tokens": 16, "step_tokens": STEP}
        self.cache = PagedKVCache(model, **{**sizes, **options})
        for tensors in self.cache.tensors:
            for tensor in tensors:
                tensor.fill_(torch.nan)  # What is read before it is written shows itself.
        self.runner = PagedRunner(self.cache)
        self.store = None if store is None else PagedStore(store, self.cache)
        self.index = self.cache.index

    def prefill(self, request, tokens, piece=10_000):
        """Compute what the request lacks, in pieces; returns the last token's logits."""
        while True:
            known = request.num_tokens
            stop = min(known + piece, len(tokens))
            request.extend(stop - known)
            logits = self.runner.run(request, tokens[:stop], known)
            request.insert(tokens[:stop], stop)
            request.trim_windows(stop)
            if stop == len(tokens):
                return logits[-1]

    def fill(self, tokens, saves=True):
        """Let others find a prompt."""
        request = self.index.acquire(tokens)
        known = request.num_tokens
        request.extend(len(tokens) - known)
        self.runner.run(request, tokens, known)
        request.insert(tokens)
        if saves:
            for job in self.store.save(request, tokens, len(tokens)):
                job.result(10)
        request.trim_windows(len(tokens))
        request.release()

    def forget(self):
        for group in range(len(self.index.groups)):
            self.index.evict(10_000, group)
        for group, tensors in enumerate(self.cache.tensors):
            assert self.index.stats()[group].num_free == self.index.stats()[group].num_pages
            for tensor in tensors:
                tensor.fill_(torch.nan)

    def close(self):
        self.index.check_integrity()
        if self.store is not None:
            self.store.close()


def plain_logits(model, tokens):
    """Logits of the last token with transformers' own cache, in steps of the same rows."""
    from transformers import DynamicCache

    from kvstore.integrations.transformers.cache.columns import CACHE_NAME

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for start in range(0, len(tokens), STEP):
            rows = tokens[start : start + STEP]
            padded = torch.tensor([[*rows, *[0] * (STEP - len(rows))]], device=model.device)
            logits = model(padded, **{CACHE_NAME: cache}).logits[0, len(rows) - 1]
    return logits


def same(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.fixture(scope="module")
def build_once():
    from functools import cache

    import transformers

    @cache
    def make(kind, device="cpu"):
        family, changes = FAMILIES[kind]
        torch.manual_seed(3)
        config = getattr(transformers, f"{family}Config")(
            vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None, **changes,
        )  # fmt: skip
        return getattr(transformers, f"{family}ForCausalLM")(config).eval().to(device)

    return make


@pytest.fixture
def small(build_once):
    made = []

    def make(kind="full", store=None, device="cpu", **options):
        made.append(Small(build_once(kind, device), store, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(name="plain_logits")
def _plain_logits():
    return plain_logits


@pytest.fixture(name="same")
def _same():
    return same

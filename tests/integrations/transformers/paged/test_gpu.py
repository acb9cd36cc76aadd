"""On a GPU the kernels of index.cu make slots of pages; bits are the same there if torch is deterministic."""

from __future__ import annotations

import random

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("transformers", reason="needs transformers")  # Where there is a GPU, it may not be.

PROMPT = random.Random(6).choices(range(211), k=100)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["full", "window", "both"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_logits_are_those_of_transformers_own_cache(small, plain_logits, same, kind, page_size):
    engine = small(kind, device="cuda", page_size=page_size, num_pages=320 // page_size)
    for num_tokens in (1, 17, 48, 100):
        request = engine.index.acquire(PROMPT[:num_tokens])
        logits = engine.prefill(request, PROMPT[:num_tokens])
        request.release()
        assert same(logits, plain_logits(engine.model, PROMPT[:num_tokens]))


def test_what_one_engine_saved_another_loads(small, store, plain_logits, same):
    writer, reader = small("both", store, device="cuda"), small("both", store, device="cuda")
    writer.fill(PROMPT)
    request = reader.index.acquire(PROMPT)
    assert reader.store.load(request, PROMPT).num_tokens == 96
    assert same(reader.prefill(request, PROMPT), plain_logits(reader.model, PROMPT))
    request.release()

"""Pages in a store are found by the model that computed them only, and by no other weights of the same engine."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
import transformers

from kvstore.errors import InvalidRequest
from kvstore.integrations.transformers.paged import PagedStore
from tests.integrations.transformers.paged.conftest import Small

PROMPT = random.Random(4).choices(range(211), k=150)
SLOW_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def build(seed=3, **changes):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def engine(store):
    made = []

    def make(model, **options):
        made.append(Small(model, store, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def loaded_by(engine):
    """Return how many tokens came from the store, and the logits."""
    request = engine.index.acquire(PROMPT)
    try:
        brought = engine.store.load(request, PROMPT)
        request.insert(PROMPT, min(request.num_tokens, len(PROMPT)))
        return brought.num_tokens, engine.prefill(request, PROMPT)
    finally:
        request.release()


def other_weights(model):
    with torch.no_grad():
        for each, new in zip(model.parameters(), build(9).parameters(), strict=True):
            each.copy_(new)


@pytest.mark.parametrize(
    "changes", [{"seed": 9}, {"rope_parameters": SLOW_ROPE}, {"rms_norm_eps": 0.1}, {"attn_implementation": "eager"}]
)
def test_another_model_finds_nothing(engine, plain_logits, same, changes):
    engine(build()).fill(PROMPT)
    other = engine(build(**changes))
    num_tokens, logits = loaded_by(other)
    assert num_tokens == 0
    assert same(logits, plain_logits(other.model, PROMPT))
    num_tokens, _ = loaded_by(engine(build()))
    assert num_tokens == 144


def test_other_weights_in_the_same_engine(engine, store, plain_logits, same):
    one = engine(build())
    one.fill(PROMPT)
    other_weights(one.model)
    one.index.clear()
    for _ in range(2):  # The second time it finds its own pages.
        num_tokens, logits = loaded_by(one)
        assert num_tokens == 0
        assert same(logits, plain_logits(one.model, PROMPT))
    one.fill(PROMPT)
    one.store.close()
    with pytest.raises(InvalidRequest, match=r"call cache\.index\.clear"):
        PagedStore(store, one.cache)
    one.index.clear()
    one.store = PagedStore(store, one.cache)
    assert loaded_by(one)[0] == 0, "nothing was saved in between"
    one.index.clear()
    one.fill(PROMPT)
    one.index.clear()
    num_tokens, logits = loaded_by(one)
    assert num_tokens == 144
    assert same(logits, plain_logits(one.model, PROMPT))
    assert loaded_by(engine(build()))[0] == 144, "the old weights still have theirs"


def test_a_store_is_made_for_a_cache_without_requests(engine, store):
    one = engine(build())
    one.store.close()
    request = one.index.acquire(PROMPT)
    with pytest.raises(InvalidRequest, match="1 requests"):
        PagedStore(store, one.cache)
    request.release()
    one.store = PagedStore(store, one.cache)


@pytest.mark.parametrize("how", ["training mode", "autocast", "a hook"])
def test_what_a_writer_computes_otherwise_is_not_shared(engine, caplog, plain_logits, same, how):
    writer, reader = engine(build(attention_dropout=0.5)), engine(build(attention_dropout=0.5))
    if how == "training mode":
        writer.model.train()
    if how == "a hook":
        writer.model.model.layers[0].register_forward_hook(lambda _, __, output: output * 2)
    request = writer.index.acquire(PROMPT)
    with torch.autocast("cpu", dtype=torch.bfloat16) if how == "autocast" else contextlib.nullcontext():
        if how != "autocast":  # Where pages and KV are of two dtypes.
            writer.prefill(request, PROMPT)
        else:
            request.extend(len(PROMPT))
        assert writer.store.save(request, PROMPT, len(PROMPT)) == ()
        assert writer.store.publish(request, PROMPT, len(PROMPT)) is None
    assert "nothing is loaded, saved or handed off" in caplog.text
    request.release()
    num_tokens, logits = loaded_by(reader)
    assert num_tokens == 0
    assert same(logits, plain_logits(reader.model, PROMPT))


def test_a_ticket_brings_nothing_to_a_model_that_changed(engine):
    writer, reader = engine(build()), engine(build())
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)
    ticket = writer.store.publish(request, PROMPT, len(PROMPT))
    request.release()
    other_weights(reader.model)
    request = reader.index.acquire(PROMPT)
    assert reader.store.fetch(request, PROMPT, ticket).num_tokens == 0
    request.release()


def test_a_name_stands_for_the_weights(store, engine):
    stores = []
    for seed in (3, 9):
        one = engine(build(seed))
        stores.append(PagedStore(store, one.cache, model_id="mine"))
    assert stores[0].spaces == stores[1].spaces
    for each in stores:
        each.close()

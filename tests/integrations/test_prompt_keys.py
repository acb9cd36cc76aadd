"""Hashes of prompts with a salt; tests/vllm compares them with those of an engine."""

from __future__ import annotations

from kvstore import KVShape, Namespace
from kvstore.integrations.prompt_keys import named_keys, text_hashes

SPACE = Namespace(model="m", shape=KVShape(num_layers=1, num_kv_heads=1, head_dim=8, dtype="uint8", block_size=4))
TOKENS = list(range(10))


def test_without_a_salt_the_tokens_alone_count():
    assert text_hashes(SPACE, TOKENS) == text_hashes(SPACE, TOKENS, "") == SPACE.block_hashes(TOKENS)


def test_a_salt_changes_every_block_and_a_prompt_without_a_block_has_none():
    salted = text_hashes(SPACE, TOKENS, "s")

    assert len(salted) == 2
    assert not set(salted) & set(text_hashes(SPACE, TOKENS)) | set(salted) & set(text_hashes(SPACE, TOKENS, "t"))
    assert len(text_hashes(SPACE, [1, 2], "s")) == 0


def test_only_the_first_block_has_the_salt_and_every_block_the_adapter():
    assert named_keys(0, lora="a", salt="s") == [("lora", "a"), ("salt", "s")]
    assert named_keys(1, lora="a", salt="s") == [("lora", "a")]


def test_a_router_asks_for_no_block_of_another_tenant_or_salt():
    """What it asks the directory, and what it expects by hints, goes by these hashes alone."""
    shape = SPACE.shape
    spaces = [SPACE, *(Namespace(model="m", shape=shape, tenant=name) for name in ("a", "b"))]
    spaces += [Namespace(model="m", shape=shape, salt=salt) for salt in (b"a", b"b")]
    spaces += [Namespace(model="m", shape=shape, salt=b"a", tenant="a")]
    found = [set(text_hashes(space, TOKENS, salt)) for space in spaces for salt in (None, "s", "t")]
    assert len(set().union(*found)) == sum(map(len, found)) == 2 * len(found)

"""Everything that vLLM counts as part of a block's content changes its hash; where it begins in the engine does not."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import kvstore  # noqa: E402

TOKENS = list(range(100))


@pytest.fixture(scope="module")
def space():
    shape = kvstore.KVShape(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", block_size=16)
    return kvstore.Namespace(model="m", shape=shape)


@pytest.fixture(scope="module")
def hashes_of(space):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvstore.integrations.vllm.scheduler_side.keys import PromptHashes

    def make(tokens=TOKENS, **more):
        request = Request(
            request_id="r", prompt_token_ids=tokens, sampling_params=SamplingParams(), pooling_params=None, **more
        )
        return PromptHashes(space, request).all()

    return make


def lora(name, number=1):
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, "/nowhere")


def image(name, offset=20, length=30):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    where = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=where)


def test_the_same_request_has_the_same_hashes(hashes_of, space):
    assert hashes_of() == hashes_of() == space.block_hashes(TOKENS)
    assert hashes_of(lora_request=lora("a"), cache_salt="s") == hashes_of(lora_request=lora("a", 2), cache_salt="s")


@pytest.mark.parametrize("num_tokens", [0, 15, 16, 1023, 1024, 1025, 1040, 5000])
def test_a_long_prompt_has_the_hashes_that_it_has_at_once(hashes_of, space, num_tokens):
    tokens = list(range(num_tokens))
    assert hashes_of(tokens) == space.block_hashes(tokens)


@pytest.mark.parametrize("salt", [None, "", "a tenant"])
@pytest.mark.parametrize("num_tokens", [0, 15, 16, 100])
def test_a_router_without_vllm_makes_the_same_hashes(hashes_of, space, num_tokens, salt):
    from kvstore.integrations.prompt_keys import text_hashes

    tokens = list(range(num_tokens))
    assert text_hashes(space, tokens, salt) == hashes_of(tokens, cache_salt=salt)


def test_each_kind_of_content_changes_every_hash_from_where_it_begins(hashes_of):
    embeds = torch.ones(100, 8)
    other = embeds.clone()
    other[50] += 1
    variants = {
        "tokens": (hashes_of(), 0),
        "lora": (hashes_of(lora_request=lora("a")), 0),
        "another lora": (hashes_of(lora_request=lora("b")), 0),
        "salt": (hashes_of(cache_salt="a"), 0),
        "another salt": (hashes_of(cache_salt="b"), 0),
        "salt and lora": (hashes_of(cache_salt="a", lora_request=lora("b")), 0),
        "the other way round": (hashes_of(cache_salt="b", lora_request=lora("a")), 0),
        "image": (hashes_of(mm_features=[image("a")]), 1),
        "another image": (hashes_of(mm_features=[image("b")]), 1),
        "at another place": (hashes_of(mm_features=[image("a", 21)]), 1),
        "embeddings": (hashes_of(None, prompt_embeds=embeds), 0),
        "other embeddings": (hashes_of(None, prompt_embeds=other), 3),
    }
    for name, (hashes, _) in variants.items():
        for other_name, (others, _) in variants.items():
            if name != other_name:
                assert hashes[-1] != others[-1], f"{name} and {other_name}"
    plain = variants["tokens"][0]
    for name in ("image", "another image", "at another place"):
        hashes, first = variants[name]
        assert plain.common_prefix(hashes) == first, name
    assert variants["embeddings"][0].common_prefix(variants["other embeddings"][0]) == 3
    assert all(variants[name][0].common_prefix(plain) == 0 for name in variants if "salt" in name or "lora" in name)


def test_each_kind_of_content_behind_the_full_blocks_counts_there(space):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvstore.integrations.vllm.scheduler_side.keys import tail_digest

    def tail(tokens=TOKENS, **more):
        made = Request(
            request_id="r", prompt_token_ids=tokens, sampling_params=SamplingParams(), pooling_params=None, **more
        )
        return tail_digest(space, made)

    embeds = torch.ones(100, 8)
    other, early = embeds.clone(), embeds.clone()
    other[98] += 1
    early[50] += 1
    variants = [
        tail(), tail([*TOKENS[:-1], 5]), tail(TOKENS[:-1]), tail([*TOKENS, 0]), tail([0] * 99), tail([0] * 100),
        tail(TOKENS[:96]), tail(lora_request=lora("a")), tail(lora_request=lora("b")),
        tail(mm_features=[image("a", 90)]), tail(mm_features=[image("b", 90)]), tail(mm_features=[image("a", 91)]),
        tail(mm_features=[image("b", 10), image("a", 97, 2)]), tail(mm_features=[image("b", 10), image("c", 97, 2)]),
        tail(None, prompt_embeds=embeds), tail(None, prompt_embeds=other), tail(None, prompt_embeds=embeds[:99]),
    ]  # fmt: skip
    assert len(set(variants)) == len(variants)
    assert tail() == tail(), "nothing of the process"
    assert tail(mm_features=[image("a", 10)]) == tail(), "what is before is in the hashes of the blocks"
    assert tail(None, prompt_embeds=embeds) == tail(None, prompt_embeds=early)
    short = [tail(TOKENS[:10]), tail(TOKENS[:10], cache_salt="a"), tail(TOKENS[:10], cache_salt="b")]
    assert len(set(short)) == 3, "a prompt without a full block has its salt here"


def test_an_answer_continues_the_prompt(hashes_of, space):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvstore.integrations.vllm.scheduler_side.keys import hash_blocks

    request = Request(
        request_id="r", prompt_token_ids=TOKENS[:40], sampling_params=SamplingParams(), pooling_params=None,
        lora_request=lora("a"), cache_salt="s",
    )  # fmt: skip
    prompt = hash_blocks(space, request, TOKENS[:40])
    answer = hash_blocks(space, request, TOKENS[32:96], prompt)
    whole = hashes_of(TOKENS[:96], lora_request=lora("a"), cache_salt="s")
    assert kvstore.BlockHashes.join(prompt, answer) == whole

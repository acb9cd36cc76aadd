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


def image(name, offset=20, length=30, *, pixels=0.0, data=None):
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    where = PlaceholderRange(offset=offset, length=length)
    values = {"pixel_values": torch.full((3, 4), pixels, dtype=torch.bfloat16)} if data is None else data
    elements = {key: MultiModalFieldElem(data=value, field=MultiModalBatchedField()) for key, value in values.items()}
    item = MultiModalKwargsItem(elements) if elements else None
    return MultiModalFeatureSpec(data=item, modality="image", identifier=name, mm_position=where)


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
        return tail_digest(space, made, {})

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


def test_a_name_that_a_client_gave_to_a_medium_is_not_its_content(hashes_of, space):
    found = {
        "one": hashes_of(mm_features=[image("mine")]),
        "another under its name": hashes_of(mm_features=[image("mine", pixels=1.0)]),
        "of another shape": hashes_of(mm_features=[image("mine", data={"pixel_values": torch.zeros(4, 3).bfloat16()})]),
        "of another dtype": hashes_of(mm_features=[image("mine", data={"pixel_values": torch.zeros(3, 4).half()})]),
        "of another kind": hashes_of(mm_features=[image("mine", data={"embeds": torch.zeros(3, 4).bfloat16()})]),
        "under another name": hashes_of(mm_features=[image("yours")]),
        "the second is another": hashes_of(mm_features=[image("mine"), image("b", 60, 10, pixels=1.0)]),
        "the second": hashes_of(mm_features=[image("mine"), image("b", 60, 10)]),
    }
    assert len({hashes[-1] for hashes in found.values()}) == len(found)
    assert found["one"] == hashes_of(mm_features=[image("mine")])
    assert found["one"].common_prefix(found["another under its name"]) == 1, "the text before it is the same"
    assert found["the second"].common_prefix(found["the second is another"]) == 3


def test_of_media_that_overlap_each_counts(hashes_of):
    """As a video and its sound do; vLLM's own keys of a block name the first alone."""

    def both(first, second, at=12):
        return hashes_of(mm_features=[image("a", 10, 60, pixels=first), image("b", at, 56, pixels=second)])

    found = [both(0.0, 0.0), both(1.0, 0.0), both(0.0, 1.0), both(1.0, 1.0), both(0.0, 0.0, at=13)]
    assert len({hashes[0] for hashes in found}) == len(found)
    assert found[0] == both(0.0, 0.0)


def test_a_name_is_enough_where_the_operator_says_so(space):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvstore.integrations.vllm.scheduler_side.keys import PromptHashes

    def trusted(name, **more):
        asked = Request("r", TOKENS, SamplingParams(), None, mm_features=[image(name, **more)])
        return PromptHashes(space, asked, {0: b""}).all()

    assert trusted("mine") == trusted("mine", pixels=1.0) == trusted("mine", data={})
    assert trusted("mine") != trusted("yours")


@pytest.mark.parametrize("data", [{}, {"address": 4096, "monotonic_id": 7}, {"pixel_values": None}], ids=str)
def test_media_without_their_data_are_never_the_same(hashes_of, data):
    from kvstore.integrations.vllm.scheduler_side.keys import has_content

    assert not has_content([image("mine"), image("mine", data=data)])
    one, other = (hashes_of(mm_features=[image("mine", data=data)]) for _ in range(2))
    assert one.common_prefix(other) == 1


def test_a_medium_is_read_once(space, monkeypatch):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvstore.integrations.vllm.scheduler_side import keys

    read, digest = [], keys.digest_of
    monkeypatch.setattr(keys, "digest_of", lambda feature: (read.append(feature), digest(feature))[1])
    asked, media = Request("r", list(range(2000)), SamplingParams(), None, mm_features=[image("a", 0, 1900)]), {}
    first = keys.PromptHashes(space, asked, media).all()
    assert keys.PromptHashes(space, asked, media).all() == first
    assert len(read) == 1


def test_the_mask_and_the_dtype_of_embeddings_count(hashes_of):
    embeds = torch.ones(100, 8)
    masks = [None, [True] * 40 + [False] * 60, [False] * 40 + [True] * 60]
    found = [hashes_of(TOKENS, prompt_embeds=embeds, prompt_is_token_ids=mask) for mask in masks]
    assert len({hashes[-1] for hashes in found}) == 3
    for dtype in (torch.float16, torch.bfloat16):
        found.append(hashes_of(None, prompt_embeds=torch.zeros(100, 8, dtype=dtype)))
    assert len({hashes[-1] for hashes in found}) == 5, "zeros have the same bytes"

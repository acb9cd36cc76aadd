"""Two engines share KV exactly if nothing that it depends on differs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest


@pytest.fixture
def space():
    """What is tested. Imported where warnings of vLLM's own imports are none of ours."""
    from kvstore.integrations.vllm import space

    return space


@pytest.fixture
def digest(space):
    """Makes an engine's settings, and returns the digest of its namespace."""
    import torch
    from transformers import LlamaConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvstore.integrations.vllm.options import Options

    def make(name="org/model", *, max_model_len=1024, draft=None, options=None, code=None, media=None, **settings):
        load = settings.pop("load", "auto")
        config = LlamaConfig(**settings)
        model = SimpleNamespace(
            model=name, revision=None, hf_overrides=None, dtype=torch.float32, quantization=None, use_mla=False,
            get_total_num_kv_heads=lambda: 2, hf_config=config, hf_text_config=config, max_model_len=max_model_len,
            code_revision=code, multimodal_config=SimpleNamespace(**media) if media is not None else None,
        )  # fmt: skip
        engine = SimpleNamespace(
            model_config=model,
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            speculative_config=SimpleNamespace(model=draft),
            load_config=SimpleNamespace(load_format=load),
        )
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
        tensors = [torch.empty(2, 4, 16, 2, 16)] * 2
        return space.make_space(engine, spec, Options(**options or {}), tensors, "").digest

    return make


def longrope(kind="longrope", original=256, **more):
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    scaling = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": original} | factors
    return {"head_dim": 16, "max_position_embeddings": 1024, "rope_parameters": scaling} | more


def test_factors_of_a_longrope_are_chosen_by_the_longest_sequence(digest):
    short, long = digest(max_model_len=256, **longrope()), digest(max_model_len=257, **longrope())
    assert short != long
    assert digest(max_model_len=128, **longrope()) == short
    assert digest(max_model_len=1024, **longrope()) == long
    assert digest(max_model_len=256) == digest(max_model_len=1024), "of other models the length decides nothing"


@pytest.mark.parametrize("where", ["scaling", "by kind of layer", "config", "nowhere"])
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_wherever_a_config_says_so(space, where, kind):
    fields = {"type" if where == "scaling" else "rope_type": kind}
    config = SimpleNamespace()
    if where in ("scaling", "by kind of layer"):
        fields["original_max_position_embeddings"] = 256
    if where == "config":
        config.original_max_position_embeddings = 256
    if where == "scaling":
        config.rope_scaling = fields
    else:
        config.rope_parameters = {"full_attention": fields} if where == "by kind of layer" else fields
    found = [
        space._length_of_rope(SimpleNamespace(hf_text_config=config, max_model_len=length)) for length in (256, 1024)
    ]
    assert found == (["longrope 256", "longrope 1024"] if where == "nowhere" else ["short", "long"])


def test_a_folder_is_named_by_its_place(digest, tmp_path, monkeypatch):
    found = {}
    for name in ("one", "two"):
        (tmp_path / name / "model").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        found[name] = digest("./model")
        assert found[name] == digest(str(tmp_path / name / "model"))
        assert digest(draft="./model") == digest(draft=str(tmp_path / name / "model"))
        found[f"{name}, drafted"] = digest(draft="./model")
        found["named"] = digest("./model", options={"model": "mine"})
    (tmp_path / "link").symlink_to(tmp_path / "one")
    monkeypatch.chdir(tmp_path / "link")
    assert digest("model") == found["one"]
    assert digest(options={"model": "mine"}) == found["named"]
    found["no folder"] = digest()
    assert len(set(found.values())) == len(found)


def test_the_revision_of_a_models_code_counts(digest):
    assert len({digest(), digest(code="a"), digest(code="b")}) == 3


@pytest.mark.parametrize("has_media", [True, False])
@pytest.mark.parametrize("has_prefix_caching", [True, False])
@pytest.mark.parametrize("gib", [0, 0.5, 4])
def test_media_have_names_where_vllm_makes_them_of_their_content(space, has_media, has_prefix_caching, gib):
    media = SimpleNamespace(mm_processor_cache_gb=gib) if has_media else None
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        cache_config=SimpleNamespace(enable_prefix_caching=has_prefix_caching),
    )
    assert space.has_names_of_media(config) == (not has_media or has_prefix_caching or gib > 0)


def test_the_config_counts(digest):
    found = {
        json.dumps(changes): digest(**changes)
        for changes in ({}, {"rms_norm_eps": 1e-3}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    }
    assert len(set(found.values())) == len(found)
    for changes in ({"dtype": "bfloat16"}, {"num_labels": 3}, {"name_or_path": "/elsewhere"}):
        assert digest(**changes) == found["{}"], "of the head, or of the place"


def test_how_media_are_processed_counts(digest):
    settings = {"mm_processor_kwargs": None, "media_io_kwargs": {}, "video_pruning_rate": None}
    plain = digest(media=settings)
    assert plain == digest(), "of text alone it is the same model"
    assert digest(media=settings | {"mm_processor_kwargs": {"device": "cuda"}}) == plain
    changes = [
        {"mm_processor_kwargs": {"max_pixels": 4096}},
        {"mm_processor_kwargs": {"max_pixels": 8192, "device": "cuda"}},
        {"media_io_kwargs": {"video": {"num_frames": 40}}},
        {"video_pruning_rate": 0.5},
    ]
    assert len({plain, *(digest(media=settings | change) for change in changes)}) == 5


def test_weights_that_are_made_up_are_none_of_the_model(digest):
    assert digest(load="safetensors") == digest()
    assert digest(load="dummy") != digest()


def test_engines_with_other_salts_share_nothing(digest):
    digests = [digest(options={"salt": salt}) for salt in ("", "a", "b")]
    assert len(set(digests)) == 3
    assert digest(options={"salt": "a"}) == digests[1]
    assert digest(options={"tenant": "a"}) == digests[0], "only a store with private tenants keeps them apart"

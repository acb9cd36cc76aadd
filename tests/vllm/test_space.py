"""Two engines share KV exactly if nothing that it depends on differs."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture
def space():
    """What is tested. Imported where warnings of vLLM's own imports are none of ours."""
    from kvstore.integrations.vllm import space

    return space


def save_config(folder, **more):
    """Write a model's config without weights."""
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "dtype": "float32",
    }  # fmt: skip
    LlamaConfig(**(sizes | more), architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(folder):
    """Makes vLLM's config of an engine from its arguments."""
    from vllm.engine.arg_utils import EngineArgs

    def make(model=folder, **args):
        fixed = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256, "block_size": 16}
        return EngineArgs(model=model, **(fixed | args)).create_engine_config()

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield make


@pytest.fixture(scope="module")
def plain(made):
    """A config of which no test changes a field."""
    return made()


@pytest.fixture(scope="module")
def spec():
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def make(kind=FullAttentionSpec, **more):
        return kind(**({"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32} | more))

    return make


@pytest.fixture
def digest(space, spec):
    """Returns the digest of the namespace of an engine with some config."""
    import torch

    from kvstore.integrations.vllm.options import Options

    def of(config, **options):
        tensors = [torch.empty(2, 4, 16, 2, 16)] * (2 // config.parallel_config.pipeline_parallel_size)
        return space.make_space(config, spec(), Options(num_layer_groups=2, **options), tensors, "").digest

    return of


def changed(config, path, value):
    """Set one field of a config, where its arguments need a machine or a file that is not here."""
    *owners, name = path.split(".")
    for owner in owners:
        config = getattr(config, owner)
    object.__setattr__(config, name, value)


#: Arguments of an engine that change KV.
OTHER_ARGUMENTS = [
    {"dtype": "float32"},
    {"kv_cache_dtype": "fp8"},
    {"max_model_len": 512},
    {"load_format": "dummy"},
    {"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "s3://bucket/base/model.tensors"}},
    {"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "s3://bucket/tuned/model.tensors"}},
    {"ignore_patterns": ["adapter*"]},
    {"code_revision": "a"},
    {"code_revision": "b"},
    {"trust_remote_code": True},
    {"model_impl": "transformers"},
    {"hf_overrides": {"rms_norm_eps": 1e-3}},
    {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
    {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
    {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor"}},
    {"quantization": "online", "quantization_config": {"linear": "fp8_per_block"}},
    {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor", "ignore": ["re:.*"]}},
    {"additional_config": {"something": "of a platform"}},
]
#: Fields, with other values, that change KV.
OTHER_FIELDS = [
    ("model_config.model_class_overrides", {"LlamaForCausalLM": "my_package:MyLlama"}),
    ("model_config.hf_config._commit_hash", "a" * 40),
    ("model_config.hf_config._commit_hash", "b" * 40),
    ("model_config.revision", "v2"),
    ("model_config.model_weights", "s3://bucket/model"),
    ("model_config.disable_sliding_window", True),
    ("model_config.config_format", "mistral"),
    ("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    ("attention_config.use_prefill_query_quantization", True),
    ("kernel_config.moe_backend", "marlin"),
    ("parallel_config.worker_cls", "my_package.MyWorker"),
    ("device_config.device_type", "cuda"),
]
#: Arguments of an engine that change no KV beyond rounding.
SAME_ARGUMENTS = [
    {"block_size": 32},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"gpu_memory_utilization": 0.5},
    {"num_gpu_blocks_override": 100},
    {"max_num_seqs": 3, "max_num_batched_tokens": 777},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    {"enable_prefix_caching": False},
    {"prefix_caching_hash_algo": "sha256_cbor"},
    {"seed": 7},
    {"enforce_eager": False},
    {"compilation_config": {"mode": 0}},
    {"attention_backend": "TORCH_SDPA"},
    {"served_model_name": "another"},
    {"generation_config": "vllm", "override_generation_config": {"temperature": 0.5}},
    {"enable_prompt_embeds": True},
    {"max_logprobs": 3, "logprobs_mode": "raw_logits"},
    {"tokenizer_mode": "slow"},
    {"hf_overrides": {"rms_norm_eps": 1e-6}},  # what the config says already
    {"hf_overrides": lambda config: config},
    {"disable_log_stats": True},
    {"download_dir": "/elsewhere"},
    {"enable_sleep_mode": False, "allowed_local_media_path": "/media"},
    {"master_port": 12345},
]


def test_what_changes_kv_counts(made, plain, digest):
    found = {"plain": digest(plain)}
    for arguments in OTHER_ARGUMENTS:
        found[str(arguments)] = digest(made(**arguments))
    for path, value in OTHER_FIELDS:
        config = copy.deepcopy(plain)
        changed(config, path, value)
        found[f"{path}={value}"] = digest(config)
    assert len(set(found.values())) == len(found), sorted(found.items(), key=lambda item: item[1])


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_what_an_engine_does_for_others_does_not_count(made, plain, digest, role):
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="RaykvConnector", kv_connector_module_path="kvstore.integrations.vllm", kv_role=role
    )
    assert digest(made(kv_transfer_config=transfer)) == digest(plain)


@pytest.mark.parametrize("arguments", SAME_ARGUMENTS, ids=" ".join)
def test_what_changes_no_kv_does_not_count(made, plain, digest, arguments):
    assert digest(made(**arguments)) == digest(plain)


@pytest.mark.parametrize("config", ["cache_config", "model_config", "parallel_config"])
def test_a_field_of_a_newer_vllm_counts(made, digest, config):
    found = {digest(made())}
    for value in (1, 2):
        engine = made()
        own = getattr(engine, config)
        own.__class__ = dataclasses.make_dataclass(type(own).__name__, [("new", int, 1)], bases=(type(own),))
        own.new = value
        found.add(digest(engine))
    assert len(found) == 3


@pytest.mark.parametrize("library", ["vllm", "torch", "transformers"])
def test_another_release_of_what_computes_the_model_shares_nothing(plain, digest, monkeypatch, library):
    before = digest(plain)
    monkeypatch.setattr(f"{library}.__version__", "99.0")
    assert digest(plain) != before


def test_a_draft_with_kv_of_its_own_counts(made, digest, tmp_path):
    found = [digest(made())]
    for name, eps in (("one", 1e-6), ("other", 1e-3)):
        save_config(tmp_path / name, rms_norm_eps=eps)
        draft = {"method": "draft_model", "model": str(tmp_path / name), "num_speculative_tokens": 2}
        found.append(digest(made(speculative_config=draft)))
        assert digest(made(speculative_config=draft | {"num_speculative_tokens": 3})) == found[-1]
    assert len(set(found)) == 3


def test_adapters_count_by_what_they_change(made, digest):
    lora = digest(made(enable_lora=True, max_lora_rank=8))
    assert lora == digest(made(enable_lora=True, max_lora_rank=16, max_loras=2, max_cpu_loras=4))
    assert lora != digest(made(enable_lora=True, lora_target_modules=["q_proj"]))


def test_a_folder_is_named_by_its_place(made, digest, tmp_path, monkeypatch):
    found = {}
    for name in ("one", "two"):
        save_config(tmp_path / name / "model")
        monkeypatch.chdir(tmp_path / name)
        found[name] = digest(made("./model"))
        assert found[name] == digest(made(str(tmp_path / name / "model")))
        found["named"] = digest(made("./model"), model="mine")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    monkeypatch.chdir(tmp_path / "link")
    assert digest(made("model")) == found["one"]
    assert digest(made(), model="mine") == found["named"]
    assert len(set(found.values())) == 3
    config = made()
    changed(config, "model_config.hf_config._commit_hash", "a" * 40)
    assert digest(config, model="mine") == found["named"], "an operator's name says which weights these are"


def test_the_commit_of_the_weights_counts_where_the_config_names_none(made, digest, tmp_path, monkeypatch):
    """Of models in Mistral's format vLLM's config has no commit, and `main` moves."""
    from huggingface_hub import constants

    repo, found = tmp_path / "models--org--m", []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = made()
    changed(config, "model_config.model", "org/m")
    for commit in ("1" * 40, "2" * 40, "1" * 40):
        (repo / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (repo / "snapshots" / commit / "params.json").write_text("{}")
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / "main").write_text(commit)
        found.append(digest(config))
    assert found[0] == found[2] != found[1]


def test_labels_of_a_head_and_the_dtype_of_the_files_do_not_count(made, digest, tmp_path):
    one = digest(made(save_config(tmp_path / "one"), dtype="float32"), model="mine")
    changes = {"dtype": "bfloat16", "num_labels": 3}
    assert digest(made(save_config(tmp_path / "two", **changes), dtype="float32"), model="mine") == one


def test_another_process_makes_the_same(made, digest, folder):
    """Sets and hashes of text have another order there."""
    config = made()
    config.additional_config = {"names": {f"name {number}" for number in range(20)}, "kind": dict, 3: (1, 2)}
    code = (
        "import sys, torch; from types import SimpleNamespace as N\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.v1.kv_cache_interface import FullAttentionSpec\n"
        "from kvstore.integrations.vllm import options, space\n"
        "config = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=256,\n"
        "    block_size=16).create_engine_config()\n"
        "config.additional_config = {3: (1, 2), 'kind': dict, 'names': {f'name {number}' for number in range(20)}}\n"
        "spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)\n"
        "tensors = [torch.empty(2, 4, 16, 2, 16)] * 2\n"
        "print(space.make_space(config, spec, options.Options(num_layer_groups=2), tensors, '').digest.hex())\n"
    )
    environment = os.environ | ENVIRONMENT | {"PYTHONHASHSEED": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code, folder], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert run.stdout.split()[-1] == digest(config).hex()


def test_what_has_no_form_of_its_own_is_refused_in_words(made, digest):
    from kvstore.errors import ConfigError

    config = made()
    config.additional_config = {"made": object()}
    with pytest.raises(ConfigError, match=r"additional_config\['made'\] of type object; leave it out"):
        digest(config)


def test_how_media_are_processed_counts(made, digest):
    from vllm.config.multimodal import MultiModalConfig

    def of(**settings):
        config = made()
        config.model_config.multimodal_config = MultiModalConfig(**settings)
        return digest(config)

    found = [
        of(),
        of(mm_processor_kwargs={"max_pixels": 4096}),
        of(mm_processor_kwargs={"max_pixels": 8192}),
        of(media_io_kwargs={"video": {"num_frames": 40}}),
        of(video_pruning_rate=0.5),
        of(language_model_only=True),
    ]
    assert len(set(found)) == len(found)
    assert of(mm_processor_cache_gb=0, limit_per_prompt={"image": 3}, skip_mm_profiling=True) == found[0]


def test_engines_with_other_salts_share_nothing(plain, digest):
    digests = [digest(plain, salt=salt) for salt in ("", "a", "b")]
    assert len(set(digests)) == 3
    assert digest(plain, salt="a") == digests[1]
    assert digest(plain, tenant="a") == digests[0], "only a store with private tenants keeps them apart"


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


def check(space, config, spec):
    from kvstore.integrations.vllm.options import Options

    return space.check_engine(config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]), Options())


def test_specs_are_accepted_by_what_their_fields_say(space, spec, plain):
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from kvstore.errors import ConfigError

    for good in (spec(), spec(sliding_window=64), spec(MLAAttentionSpec, num_kv_heads=1)):
        assert check(space, plain, good) is good
    for said, bad in (
        ("head_size_v=32", spec(head_size_v=32)),
        ("state_content_bytes=584", spec(state_content_bytes=584)),
        ("num_head_slots=4", spec(num_head_slots=4)),
        ("compress_ratio=4", spec(MLAAttentionSpec, num_kv_heads=1, compress_ratio=4)),
        ("model_version='deepseek_v4'", spec(MLAAttentionSpec, num_kv_heads=1, model_version="deepseek_v4")),
    ):
        with pytest.raises(ConfigError, match=said):
            check(space, plain, bad)


@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
def test_pooling_that_needs_all_tokens_at_once_is_refused(space, spec, made, pooling):
    from vllm.config import PoolerConfig

    from kvstore.errors import ConfigError

    config = made(runner="pooling", convert="embed", pooler_config=PoolerConfig(seq_pooling_type=pooling))
    if pooling == "LAST":
        assert check(space, config, spec())
        return
    with pytest.raises(ConfigError, match="vLLM itself caches no prefixes"):
        check(space, config, spec())


def test_attention_in_both_directions_is_refused(space, spec, plain):
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match="attention in both directions"):
        check(space, plain, spec(non_causal=True))


def test_the_counted_settings_can_be_read(plain):
    """For an operator who asks why two engines share nothing: they are in the log at the level DEBUG."""
    from kvstore.integrations.vllm.identity import counted_settings

    found = json.loads(counted_settings(plain, {"order": ""}, None))
    assert found["model_config"]["hf_config"]["rms_norm_eps"] == 1e-6
    assert "tensor_parallel_size" not in found["parallel_config"]

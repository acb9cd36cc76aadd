"""What of vLLM's settings makes an engine's KV different: every one, but those listed here."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from kvstore.errors import ConfigError

#: By class, then by reason: settings that change no KV beyond rounding. A setting that is not here counts, also one of
#: a vLLM that this list does not know yet: then engines share less than they could, and never more.
HARMLESS: dict[str, dict[str, str]] = {
    "VllmConfig": {
        "when tokens are computed, and how many at once": "scheduler_config",
        "the same operations in other kernels, fused, compiled or captured": """
            compilation_config optimization_level performance_mode""",
        "made of the model's files and ModelConfig's quantization settings, which count": "quant_config",
        "where KV, events, weights and media are sent, or wait": """
            kv_transfer_config kv_events_config ec_transfer_config offload_config""",
        "new weights are told by reset_prefix_cache": "weight_transfer_config",
        "what is made of the model's output": "structured_outputs_config reasoning_config",
        "what is measured and logged, how it ends, and a random name": """
            observability_config profiler_config logging_config shutdown_timeout instance_id""",
    },
    "ModelConfig": {
        "counted as weights: see `place_of`": "model model_weights",
        "what it names is read into hf_config, which counts": "hf_overrides hf_config_path",
        "tokens count, not what makes them": """
            tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin renderer_num_workers""",
        "what is made of the model's output": """
            logprobs_mode max_logprobs logits_processors generation_config override_generation_config pooler_config
            enable_return_routed_experts return_sampling_mask use_fp64_gumbel""",
        "random numbers of sampling; weights of the load format dummy have a seed of their own": "seed",
        "the same operations in other kernels, compiled or captured": "enforce_eager disable_cascade_attn",
        "names, rights and secrets": """
            served_model_name hf_token allowed_local_media_path allowed_media_domains allow_deprecated_quantization""",
        "what a request may bring; it counts in the request's hashes": "enable_prompt_embeds",
        "how memory is given back": """
            enable_sleep_mode sleep_mode_backend sleep_preserve_parameter_names sleep_mode_offload_cudagraph
            enable_cumem_allocator enable_nccl_comm_suspend""",
        "a draft's limit, which is the target's": "spec_target_max_model_len",
    },
    "MultiModalConfig": {
        "what a request may bring; it counts in the request's hashes": "limit_per_prompt enable_mm_embeds",
        "how media are kept, named and passed between processes": """
            mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_hasher_algorithm
            mm_tensor_ipc mm_ipc_gpu_memory_gb""",
        "the same operations, split otherwise or in other kernels": "mm_encoder_tp_mode mm_encoder_attn_backend",
        "what the prompt's text becomes, and how the start is measured": "interleave_mm_strings skip_mm_profiling",
    },
    "CacheConfig": {
        "the stored block's size counts in the shape, and its order by itself": """
            block_size user_specified_block_size _block_size_resolved effective_attention_block_size hash_block_size
            cache_hit_alignment_tokens kv_cache_layout""",
        "how much is kept, and how it is found again": """
            gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks num_gpu_blocks_override num_cpu_blocks
            kv_cache_size_tokens kv_cache_max_concurrency enable_prefix_caching prefix_caching_hash_algo
            prefix_match_unit prefix_cache_retention_interval swap_space""",
        "where KV or weights wait": "kv_offloading_size kv_offloading_backend cpu_offload_gb",
    },
    "ParallelConfig": {
        "the same sums, split over other workers": """
            tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_size_local world_size nnodes
            enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy
            enable_elastic_ep all2all_backend disable_custom_all_reduce disable_nccl_for_dp_synchronization enable_dbo
            ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold dp_sync_interval
            elastic_ep_max_dp_size""",
        "of context parallelism, which is refused": """
            cp_kv_cache_interleave_size dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate
            _allow_auto_resolve_cp_interleave_size""",
        "which worker this is": """
            rank node_rank data_parallel_rank data_parallel_rank_local data_parallel_index assigned_physical_gpu_ids
            _api_process_count _api_process_rank""",
        "addresses, ports, and how processes begin": """
            master_addr master_port data_parallel_master_ip data_parallel_master_port data_parallel_rpc_port
            _data_parallel_master_port_list _coord_store_port data_parallel_backend data_parallel_external_lb
            data_parallel_hybrid_lb distributed_executor_backend max_parallel_loading_workers numa_bind
            numa_bind_nodes numa_bind_cpus placement_group ray_runtime_env ray_workers_use_nsight
            distributed_timeout_seconds cpu_distributed_timeout_seconds enable_fault_tolerance
            fault_tolerance_config""",
    },
    "LoadConfig": {
        "where and how fast the same files are read": """
            download_dir device pt_load_map_location use_tqdm_on_load safetensors_load_strategy
            safetensors_prefetch_num_threads safetensors_prefetch_block_size""",
    },
    "TensorizerConfig": {
        "secrets, and how fast the same file is read": """
            s3_access_key_id s3_secret_access_key encryption_keyfile num_readers verify_hash""",
    },
    "LoRAConfig": {
        "how many adapters there may be, and how they are split": """
            max_lora_rank max_loras max_cpu_loras max_lora_cls_labels fully_sharded_loras specialize_active_lora""",
    },
    "AttentionConfig": {
        "the same attention in other kernels": """
            backend backend_per_kind mla_prefill_backend minimax_m3_msa_decode_backend flash_attn_version
            flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph flex_attn_block_m
            flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size use_prefill_decode_attention
            use_trtllm_attention sparse_mla_force_mqa""",
    },
    "KernelConfig": {
        "the same operations in other kernels, and their warm-up": """
            ir_op_priority enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup""",
    },
    "SpeculativeConfig": {
        "counted by draft_model_config": "model",
        "the target counts by itself": "target_model_config target_parallel_config",
        "how many tokens are drafted and which are taken; only right ones have KV that is kept": """
            num_speculative_tokens num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min
            rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length draft_sample_method
            dspark_draft_topk enable_adaptive_verification suffix_decoding_max_tree_depth
            suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob""",
        "the same operations, split otherwise or in other kernels": """
            enforce_eager attention_backend draft_tensor_parallel_size tensor_parallel_size draft_parallel_config
            disable_padded_drafter_batch use_local_argmax_reduction""",
    },
    "a model's own config": {
        "origin, labels of a head, and the dtype of its files; the engine's dtype counts": """
            _name_or_path transformers_version _commit_hash id2label label2id dtype torch_dtype""",
    },
}


def counted_settings(config: Any, more: Mapping[str, Any], weights: str | None) -> str:
    """Return all settings that count as text: the same in every process with the same settings.

    Args:
        config: vLLM's.
        more: what counts besides it.
        weights: the operator's name for them, in place of where they come from.

    Raises:
        ConfigError: a setting has no form that is the same in every process.
    """
    counted = plain(config, "VllmConfig") | dict(more)
    counted["versions"] = {library.__name__: str(library.__version__) for library in (vllm, torch, transformers)}
    if weights is not None:
        counted["model_config"]["weights"] = weights
    return json.dumps(counted, sort_keys=True)


def place_of(model: Any) -> str:
    """Return the name or URI of a model's weights, or a local folder's real path: elsewhere a relative one is another.

    Of weights in an object store vLLM's `model` is a folder of this machine.
    """
    name = str(getattr(model, "model_weights", None) or model.model)
    return os.path.realpath(name) if os.path.exists(name) else name


def commits_of(model: Any) -> list[str | None]:
    """Return which commit of the hub a model's name means: of its config, and of its own files in the hub's cache.

    Only the latter is known of models in Mistral's format, and the config may be another model's.
    """
    found = [getattr(getattr(model, "hf_config", None), "_commit_hash", None)]
    name, revision = str(model.model), getattr(model, "revision", None)
    for file in () if os.path.exists(name) else ("config.json", "params.json"):
        with contextlib.suppress(HFValidationError):  # No name of the hub.
            path = try_to_load_from_cache(name, file, revision=revision)
            found += [Path(path).parent.name] if isinstance(path, str) else []
    return found


def plain(value: Any, where: str) -> Any:
    """Return a value in a form for JSON that is the same in every process.

    Args:
        value: of a setting, or of a request's media.
        where: its name, for the error.

    Raises:
        ConfigError: it has no such form.
    """
    if isinstance(value, Enum):
        return [type(value).__qualname__, value.name]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | torch.device | os.PathLike):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.Tensor):
        as_bytes = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return [str(value.dtype), list(value.shape), sha256(as_bytes.numpy().data).hexdigest()]
    if isinstance(value, transformers.PretrainedConfig):
        return plain(_counted("a model's own config", value.to_dict()), where)
    if is_dataclass(value):
        kind = type(value).__name__
        own = _counted(kind, {each.name: getattr(value, each.name, None) for each in fields(value)})
        if kind == "ModelConfig":  # A name of the hub means the commit that it had when it was read.
            own["weights"] = [place_of(value), *commits_of(value)]
        return {name: plain(each, f"{where}.{name}") for name, each in own.items()}
    if isinstance(value, Mapping):
        pairs = [[plain(key, where), plain(each, f"{where}[{key!r}]")] for key, each in value.items()]
        return dict(pairs) if all(isinstance(key, str) for key in value) else sorted(pairs, key=json.dumps)
    if isinstance(value, list | tuple | Set):
        found = [plain(each, where) for each in value]
        return sorted(found, key=json.dumps) if isinstance(value, Set) else found
    raise ConfigError(
        f"RaykvConnector: wanted settings that can be written down the same way in every process, got {where} of type "
        f"{type(value).__qualname__}; leave it out, or give it as text, numbers, lists and dicts"
    )


def _counted(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    left_out = {name for listed in HARMLESS[kind].values() for name in listed.split()} if kind in HARMLESS else set()
    return {name: value for name, value in settings.items() if name not in left_out}

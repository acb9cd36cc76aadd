"""The namespace of an engine's blocks, the part of them that a worker holds, and start-up checks of both."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.part import Part
from kvstore.blocks.shape import KVShape, Planes
from kvstore.errors import ConfigError, LayoutMismatch
from kvstore.integrations.vllm.options import Options

_NOT_OF_KV = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id", "_commit_hash")
"""Config keys that change no KV: a model's origin and the labels of its head. `_variant` has the dtype by itself."""


def check_engine(config: Any, kv_cache_config: Any, options: Options) -> Any:
    """Refuse an engine whose KV the store cannot hold yet; returns the spec of its one KV cache group.

    Raises:
        ConfigError: a setting or model does not work; the message says which one and what to change.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise ConfigError(
            f"RaykvConnector: wanted a model with one KV cache group, got {len(groups)} ({', '.join(kinds)}); hybrid "
            "models do not work yet. Where only sliding windows make it one, --disable-hybrid-kv-cache-manager helps"
        )
    spec = groups[0].kv_cache_spec
    # Subclasses hold other data as well, or free blocks while the store still reads them.
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise ConfigError(
            f"RaykvConnector: wanted full attention or MLA, got {type(spec).__name__}; such models do not work yet"
        )
    mode = getattr(spec, "kv_quant_mode", None)
    if getattr(mode, "is_per_token_head", False) or getattr(config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "RaykvConnector: wanted a KV cache whose scales come with the weights, got scales that are found while it "
            "runs and are not stored; set another --kv-cache-dtype, or leave out --calculate-kv-scales"
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"RaykvConnector: wanted {name}=1, got {getattr(parallel, name)}; set it to 1")
    stored, engine = options.block_size or int(spec.block_size), int(spec.block_size)
    if stored % engine and engine % stored:
        raise ConfigError(
            f"kv_connector_extra_config['block_size']: wanted a multiple or a divisor of the engine's {engine} tokens, "
            f"got {stored}; set a divisor of both engines' sizes to share between them"
        )
    return spec


def has_names_of_media(config: Any) -> bool:
    """Return whether equal media identifiers mean equal media in all engines.

    vLLM hashes media only for its prefix cache or its media cache. Without both it drops names that users gave, and
    numbers media instead, from the start in each process. Two engines can then use one name for different media.
    """
    media = getattr(config.model_config, "multimodal_config", None)
    if media is None or getattr(config.cache_config, "enable_prefix_caching", False):
        return True
    return float(getattr(media, "mm_processor_cache_gb", 0) or 0) > 0


def part_of(config: Any, tp_rank: int, pp_rank: int) -> tuple[Part, bool]:
    """Return a worker's part of every block, and whether this worker saves it.

    With more ranks than KV heads, several ranks hold the same heads: all of them load, the first one saves.

    Raises:
        ConfigError: the number of ranks does not divide that of heads, nor the number of heads that of ranks.
    """
    parallel, num_heads = config.parallel_config, _num_kv_heads(config)
    tp_size, pp_size = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    if num_heads % tp_size and tp_size % num_heads:
        raise ConfigError(
            f"RaykvConnector: wanted a tensor-parallel size that divides the {num_heads} KV heads or is a multiple of "
            f"them, got {tp_size}; choose another --tensor-parallel-size"
        )
    num_parts = min(tp_size, num_heads)
    num_alike = tp_size // num_parts
    return Part(tp_rank // num_alike, num_parts, pp_rank, pp_size), tp_rank % num_alike == 0


def in_order_of_layers(caches: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine's tensors sorted by layer; a tensor that several layers share comes once."""

    def numbers(name: str) -> tuple[list[int], str]:
        return [int(digits) for digits in re.findall(r"\d+", name)], name

    found: dict[tuple[int, tuple[int, ...]], tuple[str, Any]] = {}
    for name in sorted(caches, key=numbers):
        tensor = caches[name]
        found.setdefault((tensor.data_ptr(), tuple(tensor.shape)), (name, tensor))
    return dict(found.values())


def planes_of(tensors: Sequence[Any], spec: Any) -> Planes:
    """Return how K and V share an engine's tensors.

    Raises:
        LayoutMismatch: the last dim is neither a row of K or V, nor a row of both.
    """
    if isinstance(spec, MLAAttentionSpec):
        return Planes.SINGLE
    dims, head_dim = list(tensors[0].shape), int(spec.head_size)
    if dims[-1] == head_dim:
        return Planes.KV_SPLIT
    if dims[-1] == 2 * head_dim:
        return Planes.KV_PACKED
    raise LayoutMismatch(
        f"RaykvConnector: wanted tensors with rows of {head_dim} or {2 * head_dim} elements, got {dims}; this "
        "attention backend's layout is not known, choose another with --attention-backend"
    )


def make_space(config: Any, spec: Any, options: Options, tensors: Sequence[Any], order: str) -> Namespace:
    """Return the namespace of an engine's blocks, derived from a worker's tensors.

    Args:
        config: vLLM's.
        spec: of the one KV cache group.
        options: the user's.
        tensors: the registered ones, one per layer.
        order: name of the order inside a block, "" for rows of tokens.

    Raises:
        ConfigError, LayoutMismatch: the store cannot hold the blocks; the message says what to change.
    """
    model, parallel = config.model_config, config.parallel_config
    pp_size = int(parallel.pipeline_parallel_size)
    engine_size = int(spec.block_size)
    block_size = options.block_size or engine_size
    if order and block_size % engine_size:
        raise ConfigError(
            f"kv_connector_extra_config['block_size']: wanted a multiple of the engine's {engine_size} tokens, got "
            f"{block_size}: the attention kernel {order!r} of this CPU orders a block as a whole; set 'portable' to "
            "true, on all engines that share, to store tokens"
        )
    shape = KVShape(
        num_layers=len(tensors) * pp_size,
        num_kv_heads=_num_kv_heads(config),
        head_dim=int(spec.head_size),
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=block_size,
        planes=planes_of(tensors, spec),
        num_layer_groups=options.num_layer_groups or pp_size,
    )
    return Namespace(
        model=options.model or _place_of(model.model),
        revision=str(getattr(model, "revision", None) or ""),
        quantization=_variant(config, f"{order} {engine_size}" if order else ""),
        shape=shape,
        salt=options.salt.encode(),
    )


def _num_kv_heads(config: Any) -> int:
    model = config.model_config
    return 1 if getattr(model, "use_mla", False) else int(model.get_total_num_kv_heads())


def _variant(config: Any, order: str) -> str:
    """Return, as text, every setting besides the name that makes the KV different."""
    model = config.model_config
    overrides = getattr(model, "hf_overrides", None) or {}
    if callable(overrides):
        raise ConfigError(
            "RaykvConnector: wanted hf_overrides as a dict, got a function, whose effect on KV cannot be told; pass a "
            "dict, or name the result with kv_connector_extra_config['model']"
        )
    draft = getattr(config, "speculative_config", None)
    hf_config = getattr(model, "hf_config", None)
    settings = hf_config.to_dict() if hf_config is not None else {}
    kept = {key: value for key, value in settings.items() if key not in _NOT_OF_KV}
    fields = {
        "cache": str(config.cache_config.cache_dtype),
        "dtype": str(model.dtype),
        "weights": str(model.quantization or ""),
        "code": str(getattr(model, "code_revision", None) or ""),
        "overrides": overrides,
        "media": _settings_of_media(model),
        # vLLM can invent weights for a benchmark; they are not those of the model that it names.
        "dummy": str(getattr(getattr(config, "load_config", None), "load_format", "")) == "dummy",
        "order": order,
        "draft": _place_of(getattr(draft, "model", None) or ""),
        "config": sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest(),
        "rope": _length_of_rope(model),
    }
    return json.dumps(fields, sort_keys=True, default=str)


def _settings_of_media(model: Any) -> dict[str, Any]:
    """Return the settings with which media become model input; vLLM's media names cover the raw media only."""
    media = getattr(model, "multimodal_config", None)
    kwargs = dict(getattr(media, "mm_processor_kwargs", None) or {})
    kwargs.pop("device", None)  # Only says where this is done.
    found = {
        "processor": kwargs,
        "io": getattr(media, "media_io_kwargs", None) or {},
        "pruning": getattr(media, "video_pruning_rate", None) or 0.0,
    }
    return {name: value for name, value in found.items() if value}


def _place_of(name: Any) -> str:
    """Return a model's name, or a local folder's real path: a relative path names other folders elsewhere."""
    return os.path.realpath(name) if os.path.exists(str(name)) else str(name)


def _length_of_rope(model: Any) -> str:
    """Return which LongRoPE factors the engine uses; it chooses them for all tokens by its longest sequence."""
    config = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        fields = getattr(config, name, None)
        for each in (fields, *fields.values()) if isinstance(fields, dict) else ():
            if isinstance(each, dict) and {each.get("rope_type"), each.get("type")} & {"longrope", "su"}:
                found.append(each)
    if not found:
        return ""
    name, longest = "original_max_position_embeddings", int(model.max_model_len)
    limits = {int(each.get(name) or getattr(config, name, 0) or 0) for each in found}
    if 0 in limits:  # The limit is unknown, but engines with the same longest sequence choose alike.
        return f"longrope {longest}"
    return " ".join("long" if longest > limit else "short" for limit in sorted(limits))

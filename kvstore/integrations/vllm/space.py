"""The namespace of an engine's blocks, the part of them that a worker holds, and start-up checks of both."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.part import Part
from kvstore.blocks.shape import KVShape, Planes
from kvstore.errors import ConfigError, LayoutMismatch
from kvstore.integrations.vllm.identity import counted_settings, place_of
from kvstore.integrations.vllm.options import Options

logger = logging.getLogger(__name__)

#: Of the fields of a KV cache spec, those that say what the store reads elsewhere, or how pages lie in memory.
_KNOWN_OF_SPEC = (
    "block_size", "num_kv_heads", "head_size", "dtype", "kv_quant_mode", "cache_dtype_str", "sliding_window",
    "attention_chunk_size", "page_size_padded", "alignment", "indexes_kv_by_block_stride",
)  # fmt: skip


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
    # With rswa_window, tokens of an answer look back otherwise than the same tokens in a prompt.
    is_causal = not getattr(spec, "non_causal", False) and getattr(config.model_config, "rswa_window", None) is None
    if not is_causal or not getattr(config.model_config, "is_prefix_caching_supported", True):
        raise ConfigError(
            "RaykvConnector: wanted a model whose KV of a token depends on the tokens before it alone, and that can go "
            "on behind a prefix, got one for which vLLM itself caches no prefixes (attention in both directions, or "
            "pooling over all tokens, as MEAN and CLS); run it without --kv-transfer-config"
        )
    if unknown := _unknown_of_spec(spec):
        raise ConfigError(
            f"RaykvConnector: wanted a KV cache of plain K and V, or of MLA, got {type(spec).__name__} with "
            f"{', '.join(unknown)}; such models do not work yet"
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
    counted = counted_settings(config, {"order": f"{order} {engine_size}" if order else ""}, options.model)
    logger.debug("settings that count in the namespace: %s", counted)
    return Namespace(
        model=options.model or place_of(model),
        revision=str(getattr(model, "revision", None) or ""),
        quantization=sha256(counted.encode()).hexdigest(),
        shape=shape,
        salt=options.salt.encode(),
    )


def _num_kv_heads(config: Any) -> int:
    model = config.model_config
    return 1 if getattr(model, "use_mla", False) else int(model.get_total_num_kv_heads())


def _unknown_of_spec(spec: Any) -> list[str]:
    """Return the fields of a spec, with their values, that say something of the cache that is not known here."""
    plain = {
        "head_size_v": (spec.head_size, 0) if isinstance(spec, MLAAttentionSpec) else (spec.head_size,),
        "num_head_slots": (None, spec.num_kv_heads),
    }
    values = {each.name: (getattr(spec, each.name), plain.get(each.name, (each.default,))) for each in fields(spec)}
    return [
        f"{name}={value!r}"
        for name, (value, known) in values.items()
        if name not in _KNOWN_OF_SPEC and value not in known
    ]

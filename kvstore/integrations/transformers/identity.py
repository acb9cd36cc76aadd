"""The identity of a model's KV: the shape of a block, and a namespace that no other weights have."""

from __future__ import annotations

import copy
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from typing import Any

import torch

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.errors import ConfigError, InvalidRequest, UnsupportedModel
from kvstore.integrations.transformers.cache.columns import kinds_without_blocks, new_cache
from kvstore.integrations.transformers.kinds import name_of
from kvstore.integrations.transformers.modules import configs_in, configs_of, modules_digest, sources_of
from kvstore.integrations.transformers.tensors import tensor_digest

SUPPORTED = (
    "supported are decoder-only models in eval mode whose DynamicCache has a plain DynamicLayer or a "
    "DynamicSlidingWindowLayer per layer: full attention or a sliding window of two or more tokens in every layer, K "
    "and V of one shape, all on one device"
)

_ROPE_OF_LENGTH = ("dynamic", "longrope")
"""Kinds of RoPE whose angles for the first tokens change when the sequence gets long."""

_NOT_OF_KV = ("_name_or_path", "transformers_version", "architectures", "id2label", "label2id")
"""Keys of a config that say where a model came from or what its head is called, and change no KV."""

_ATTENTION = re.compile(r"(paged\|)?(eager|sdpa|flex_attention|flash_attention_\d+)")
"""Names of transformers' own ways to compute the same attention; any other name is a function of the user."""

_QUANTISES_ALL_TOKENS = ("torch.ao.nn.quantized.dynamic", "torch.nn.quantized.dynamic")
"""Modules with one scale for the activations of all tokens that they are given at once."""

_OLDEST = (5, 23)
"""Earlier versions of `generate` do not go on from a filled cache in every mode: 5.0 computes chunks from 0 again."""


def check_version(version: str) -> None:
    """Refuse versions of transformers that are not known to continue from a filled cache in every mode.

    Raises:
        ConfigError: it is older than 5.23.
    """
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ConfigError(
            f"wanted transformers {'.'.join(map(str, _OLDEST))} or newer, got {version}, whose generate may compute a "
            "loaded prefix again and answer wrongly; pip install '.[transformers]' in a checkout of raykv"
        )


def check_supported(model: Any) -> None:
    """Refuse models whose KV of a prefix depends on more than the tokens of that prefix.

    Raises:
        UnsupportedModel: it is such a model; the message says what is supported.
    """
    config = model.config
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"wanted a decoder-only model, got the encoder-decoder {type(model).__name__}; {SUPPORTED}"
        )
    _check_causal(config)
    _check_chunks(config.get_text_config(decoder=True))
    if found := sorted(kind for kind in _rope_kinds(config) if any(name in kind for name in _ROPE_OF_LENGTH)):
        raise UnsupportedModel(
            f"wanted a RoPE whose angles depend on the position alone, got rope_type {found[0]!r}: KV of a prefix "
            "then depends on how long the whole sequence is, so it cannot be shared; 'default', 'linear', 'yarn' and "
            "'llama3' can"
        )
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_QUANTISES_ALL_TOKENS):
            raise UnsupportedModel(
                f"wanted activations that depend on the tokens before them alone, got {name} of dynamic quantisation, "
                "whose scale is that of all tokens of a batch; quantise the weights alone"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModel(
                f"wanted modules of Python, got {name} of TorchScript, of which the code cannot be told from other "
                "code; wrap the model as it was before"
            )
    check_unadapted(model)


def _check_causal(config: Any) -> None:
    """Refuse models whose config says that a token's KV depends on later tokens."""
    for each in (config, config.get_text_config(decoder=True)):
        if not getattr(each, "is_causal", True):
            raise UnsupportedModel(
                "wanted attention to earlier tokens alone, got a config with is_causal=False: KV of a prefix then "
                "depends on the tokens behind it, so it cannot be shared; leave is_causal out, or call model.generate"
            )
        # By config, since the probe would see it only in prompts longer than the window; the default is 2048.
        if (size := getattr(each, "keep_window_size", None)) is not None:
            raise UnsupportedModel(
                f"wanted full attention in every layer, got {type(each).__name__} with keep_window_size={size}: in "
                f"prompts of more than {size} tokens the model chooses which tokens to attend to among all of them, "
                "later ones too, so KV of a prefix cannot be shared; call model.generate"
            )


def _check_chunks(config: Any) -> None:
    """Refuse attention in chunks: transformers gives it the same cache layers as sliding windows."""
    kinds = getattr(config, "layer_types", None)
    layers = getattr(config, "per_layer_config", (config,))
    sizes = sorted({getattr(layer, "attention_chunk_size", None) or 0 for layer in layers} - {0})
    if "chunked_attention" in kinds if kinds else sizes:
        raise UnsupportedModel(
            f"wanted full attention or a sliding window in every layer, got {type(config).__name__} with attention in "
            f"chunks (attention_chunk_size={', '.join(map(str, sizes))}), which is not supported yet; {SUPPORTED}"
        )


def check_unadapted(model: Any) -> None:
    """Refuse models with PEFT adapters: the active ones can change from call to call, unseen.

    Raises:
        UnsupportedModel: a module of PEFT is in the model.
    """
    found = next((module for module in model.modules() if type(module).__module__.split(".")[0] == "peft"), None)
    if found is not None:
        raise UnsupportedModel(
            f"wanted plain weights, got a PEFT adapter ({type(found).__name__}) in {type(model).__name__}; merge it "
            "(model.merge_and_unload()) and wrap the merged model, whose weights get a namespace of their own"
        )


def kv_shape(model: Any, block_size: int) -> tuple[KVShape, torch.device]:
    """Return the shape of a model's blocks, found by running the model on one token.

    Configs name heads and dims in a dozen ways; the tensors that come out cannot be wrong.

    Returns:
        The stored block, and the device of the KV.

    Raises:
        UnsupportedModel: the cache is of a kind that has no blocks, or its layers differ.
    """
    cache = new_cache(model)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            model(input_ids=token, past_key_values=cache, use_cache=True)
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"wanted a model that takes input_ids and past_key_values, but {type(model).__name__} said: {error}; "
            f"{SUPPORTED}"
        ) from error
    layers = cache.layers
    kinds = kinds_without_blocks(cache)
    if kinds or not layers:
        raise UnsupportedModel(
            f"wanted full attention or a sliding window in every layer, got {', '.join(kinds) or 'no layers'} in the "
            f"cache of {type(model).__name__} (linear attention, indexes, layers that share KV, and windows of one "
            f"token have no blocks to store yet); {SUPPORTED}"
        )
    planes = {_describe(plane) for layer in layers for plane in (layer.keys, layer.values)}
    if len(planes) != 1:
        raise UnsupportedModel(
            f"wanted K and V of one shape, dtype and device in all layers, got {len(planes)} kinds: "
            f"{'; '.join(sorted(map(str, planes)))}; {SUPPORTED}"
        )
    keys = layers[0].keys
    if keys is None or keys.dim() != 4 or tuple(keys.shape[::2]) != (1, 1):
        raise UnsupportedModel(
            f"wanted K as [batch, heads, tokens, head_dim], got {_describe(keys)} after one token; {SUPPORTED}"
        )
    shape = KVShape(
        num_layers=len(layers),
        num_kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        dtype=str(keys.dtype).removeprefix("torch."),
        block_size=block_size,
    )
    return shape, keys.device


def namespace_of(model: Any, shape: KVShape, model_id: str | None, salt: bytes) -> Namespace:
    """Return the namespace of a model: its class, config with RoPE scaling, modules, weights and block shape.

    By default all bytes of all weights count (`weights_digest`). A name and a revision are not enough: weights are
    fine-tuned, merged or quantised under one name. A sample of them could miss an edit of a few rows, and then one
    model would answer with the KV of another. Machines may share too little: a buffer computed at start-up, such as
    RoPE's frequencies, may differ in its last bit.

    Args:
        model: the model.
        shape: of its blocks.
        model_id: the user's name of exactly these weights, in every process that shares. It replaces the digests of
            weights and sources, and the caller is responsible for both. All else counts as before.
        salt: keeps tenants apart.

    Raises:
        UnsupportedModel: no digest can be taken of the weights, or of the source of a class; pass model_id.
    """
    fields: dict[str, Any] = {
        "class": name_of(type(model)),
        "config": config_of(model),
        "modules": modules_digest(model),
    }
    if model_id is None:
        fields["sources"] = sources_of(model)
    config = sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    weights = weights_digest(model) if model_id is None else f"id:{model_id}"
    return Namespace(model=f"transformers:{weights}", revision=config, shape=shape, salt=salt)


def weights_digest(model: Any) -> str:
    """Return SHA-256 over names, dtypes, shapes and all bytes of a model's parameters and buffers, in hex.

    Every name counts, also if a tensor has several: otherwise models with differently tied layers would have one
    digest. Takes as long as a few threads need to hash each tensor once. Weights on a GPU are copied to the host in
    pieces.

    Raises:
        UnsupportedModel: a weight is not in memory, or its bytes are not all of its content; pass model_id then.
    """
    named = sorted(
        chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)),
        key=lambda pair: pair[0],
    )
    _check_no_more(model)
    first = {id(tensor): (name, tensor) for name, tensor in reversed(named)}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="raykv-digest") as threads:
        digests = dict(zip(first, threads.map(lambda pair: tensor_digest(*pair), first.values()), strict=True))
    return sha256(json.dumps([(name, digests[id(tensor)]) for name, tensor in named]).encode()).hexdigest()


def _check_no_more(model: Any) -> None:
    """Refuse models with state besides their parameters and buffers, such as packed weights of quantised layers."""
    kinds = (torch.Tensor, torch.ScriptObject)
    tensors = {id(each) for each in chain(model.parameters(), model.buffers())}
    found = [
        f"{name}.{attribute}" if name else attribute
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        for each in (value if isinstance(value, tuple) else (value,))
        if isinstance(each, kinds) and id(each) not in tensors
    ]
    names = {name for kind in (model.named_parameters, model.named_buffers) for name, _ in kind(remove_duplicate=False)}
    if found := found or sorted(set(model.state_dict()) - names):
        raise UnsupportedModel(
            f"wanted weights that are parameters and buffers, got {len(found)} others ({found[0]} is one), of which no "
            "digest can be taken; pass model_id= with a name that only these weights have"
        )


def config_of(model: Any) -> dict[str, Any]:
    """Return the settings that can change KV, of a model's config and of other configs in its modules."""
    found, seen = _fields_of(model.config), {id(each) for each in configs_in(model.config)}
    others = []
    for config in configs_of(model):
        if id(config) not in seen:
            seen.add(id(config))
            others.append(_fields_of(config))
    return found | ({"of modules": others} if others else {})


def _fields_of(config: Any) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    except Exception as error:  # Values of a config may be anything, with their own repr or to_dict.
        raise UnsupportedModel(
            f"wanted a config whose settings JSON can hold, got {_unlike_json(config)}, and to_json_string of "
            f"{type(config).__name__} said {type(error).__name__}; take it out of the config, which is in every id"
        ) from error
    configs = (config, config.get_text_config(decoder=True))
    attention = {str(getattr(config, "_attn_implementation", None) or "eager") for config in configs}
    others = sorted(name for name in attention if not _ATTENTION.fullmatch(name))
    return {key: value for key, value in fields.items() if key not in _NOT_OF_KV} | (
        {"attention": others} if others else {}
    )


def _unlike_json(config: Any) -> str:
    """Return the name and class of the first setting without which JSON can hold the others."""
    for name, value in vars(config).items():
        others = copy.copy(config)
        try:
            delattr(others, name)
            others.to_json_string(use_diff=False)
        except Exception:  # noqa: BLE001 - JSON cannot hold another setting, or the config needs this one.
            continue
        return f"{name} of {type(value).__name__}"
    return "several that it cannot"


def _rope_kinds(config: Any) -> list[str]:
    """Return all rope types that a config names: for all layers, or one for each kind of layer."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        fields = getattr(config.get_text_config(decoder=True), name, None)
        for each in (fields, *fields.values()) if isinstance(fields, dict) else ():
            if isinstance(each, dict):
                found += [str(each[key]) for key in ("rope_type", "type") if key in each]
    return found


def _describe(plane: torch.Tensor | None) -> tuple[object, ...]:
    return () if plane is None else (tuple(plane.shape), str(plane.dtype), str(plane.device))


def check_mode(model: Any) -> None:
    """Refuse a model whose KV would be random, or of another dtype than its own.

    Raises:
        InvalidRequest: it is in training mode, or autocast is on.
    """
    training = [name or type(model).__name__ for name, part in model.named_modules() if part.training]
    if training:
        raise InvalidRequest(
            f"wanted a model in eval mode, got {len(training)} parts of it in training mode ({training[0]} is one), "
            "whose KV is random; call model.eval()"
        )
    if torch.is_autocast_enabled(model.device.type):
        raise InvalidRequest(
            "wanted KV in the model's own dtype, got autocast on; load the model in that dtype, or leave the context"
        )

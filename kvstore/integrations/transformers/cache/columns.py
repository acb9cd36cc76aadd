"""Empty caches for `generate`, and the KV of all columns of a filled one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore.blocks.shape import KVShape
from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers.cache.window_layer import KeptWindowLayer
from kvstore.integrations.transformers.supported import SUPPORTED

CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""The argument of models and of `generate` for a cache; transformers 5.24 has another name for it than 5.23."""

Planes = list[tuple[torch.Tensor, torch.Tensor]]
"""(K, V) of each layer, [rows, heads, columns, head_dim]."""


def new_cache(model: Any) -> DynamicCache:
    """Return an empty cache as `generate` makes it, whose sliding-window layers keep all columns."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for index, layer in enumerate(cache.layers):
        # With a window of one token, transformers hands out other columns than it masks.
        if type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1:
            cache.layers[index] = KeptWindowLayer(layer.sliding_window)
    return cache


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a cache that the model has filled with one token.

    Configs name heads and dims in a dozen ways; the tensors that come out cannot be wrong.

    Raises:
        UnsupportedModel: the model takes no tokens, or a layer of its cache is of a kind that has no blocks.
    """
    cache = new_cache(model)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            model(input_ids=token, use_cache=True, **{CACHE_NAME: cache})
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"wanted a model that takes input_ids and a cache, but {type(model).__name__} said: {error}; {SUPPORTED}"
        ) from error
    kinds = kinds_without_blocks(cache)
    if kinds or not cache.layers:
        raise UnsupportedModel(
            f"wanted full attention or a sliding window in every layer, got {', '.join(kinds) or 'no layers'} in the "
            f"cache of {type(model).__name__} (linear attention, indexes, layers that share KV, and windows of one "
            f"token have no blocks to store yet); {SUPPORTED}"
        )
    return list(cache.layers)


def shape_of(layers: Sequence[Any], block_size: int) -> KVShape:
    """Return the shape of blocks of these layers, each filled with one token.

    Raises:
        UnsupportedModel: they differ, or their K has other dims than batch, heads, tokens and head_dim.
    """
    planes = [plane for layer in layers for plane in (layer.keys, layer.values)]
    found = {() if each is None else (tuple(each.shape), str(each.dtype), str(each.device)) for each in planes}
    keys = layers[0].keys
    if len(found) != 1 or keys is None or keys.dim() != 4 or tuple(keys.shape[::2]) != (1, 1):
        raise UnsupportedModel(
            "wanted K and V of one shape, dtype and device in all layers, as [batch, heads, tokens, head_dim], got "
            f"{len(found)} kinds after one token: {'; '.join(sorted(map(str, found)))}; {SUPPORTED}"
        )
    return KVShape(
        num_layers=len(layers),
        num_kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        dtype=str(keys.dtype).removeprefix("torch."),
        block_size=block_size,
    )


def kinds_without_blocks(cache: DynamicCache) -> list[str]:
    """Return the names of a cache's layers whose KV cannot be cut into blocks."""
    kinds = {type(layer) for layer in cache.layers}
    return sorted(kind.__name__ for kind in kinds if kind not in (DynamicLayer, KeptWindowLayer))


def num_columns(cache: DynamicCache) -> int:
    """Return how many columns every layer holds; 0 if layers differ, or one is of a kind without blocks."""
    if kinds_without_blocks(cache):
        return 0
    counts = {
        layer.num_columns() if isinstance(layer, KeptWindowLayer) else int(layer.get_seq_length())
        for layer in cache.layers
    }
    return counts.pop() if len(counts) == 1 else 0


def planes_of(cache: DynamicCache) -> Planes:
    """Return the KV of all columns; for full attention the cache's own tensors, valid until it is next used.

    Raises:
        LayoutMismatch: a layer has no longer all of its columns; nothing changed.
    """
    return [
        layer.whole() if isinstance(layer, KeptWindowLayer) else (layer.keys, layer.values) for layer in cache.layers
    ]


def windows_of(cache: DynamicCache) -> list[int]:
    """Return the tokens in the window of each layer that has one."""
    return [layer.sliding_window for layer in cache.layers if isinstance(layer, KeptWindowLayer)]


def keep_windows_only(cache: DynamicCache) -> None:
    """Give up the columns before the windows: the cache then takes the memory that it takes in transformers."""
    for layer in cache.layers:
        if isinstance(layer, KeptWindowLayer):
            layer.forget()

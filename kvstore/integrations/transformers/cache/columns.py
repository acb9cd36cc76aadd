"""Empty caches for `generate`, and the KV of all columns of a filled one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore.integrations.transformers.cache.window_layer import KeptWindowLayer

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

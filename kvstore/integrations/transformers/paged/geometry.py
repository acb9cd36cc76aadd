"""Which layers of a transformers model share page ids, and the shape of their KV."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore.blocks.shape import KVShape
from kvstore.errors import InvalidRequest, UnsupportedModel
from kvstore.integrations.transformers.identity import check_mode, check_supported
from kvstore.integrations.transformers.probe import can_pad

SUPPORTED = "supported are dense decoder-only models of layers with full attention or with a sliding window"

_EXPERTS = re.compile(r"moe|expert", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of a model that see equally many tokens, and so need the same pages.

    Args:
        layers: their places in the model, in order.
        window_tokens: tokens that a token sees, itself included; None for all.
        num_kv_heads: KV heads of each layer.
        head_dim: elements of one K or V row.
        dtype: name of the element type.
    """

    layers: tuple[int, ...]
    window_tokens: int | None
    num_kv_heads: int
    head_dim: int
    dtype: str

    def shape(self, block_size: int) -> KVShape:
        """Return the shape of this group's stored blocks of `block_size` tokens."""
        return KVShape(
            num_layers=len(self.layers),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            block_size=block_size,
        )


def read_groups(model: Any) -> tuple[tuple[LayerGroup, ...], torch.device]:
    """Return the groups of a model's layers, found by running the model on one token, and the device of its KV.

    Raises:
        UnsupportedModel: a layer keeps something else than K and V of full or sliding attention, layers of one kind
            differ in shape, KV depends on more than the tokens before it, or the model has experts.
        InvalidRequest: this is no model with `generate`, it is in training mode, or autocast is on.
    """
    if not isinstance(model, GenerationMixin):
        raise InvalidRequest(f"model: wanted a transformers model with generate, got a {type(model).__name__}")
    check_supported(model)
    check_mode(model)
    for name, module in model.named_modules():
        if _EXPERTS.search(type(module).__name__):
            raise UnsupportedModel(
                f"wanted a dense model, got {name}, a {type(module).__name__}, in {type(model).__name__}: how many "
                "rows an expert gets depends on the other rows of a step, so bits of KV would depend on padding; "
                f"{SUPPORTED}"
            )
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache, use_cache=True)
    found: dict[int | None, list[int]] = {}
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.keys is None:
            raise UnsupportedModel(
                f"wanted K and V in every layer, got a {type(layer).__name__} in layer {index} of "
                f"{type(model).__name__}; {SUPPORTED}"
            )
        found.setdefault(getattr(layer, "sliding_window", None), []).append(index)
    if not found:
        raise UnsupportedModel(f"wanted a cache with layers, got none from {type(model).__name__}; {SUPPORTED}")
    # Layers that see all tokens first: their pages are the whole of a request.
    groups = [_group(model, cache, window, found[window]) for window in sorted(found, key=lambda window: window or -1)]
    device = cache.layers[0].keys.device
    can_pad(model, device)  # It refuses models whose KV depends on more than the tokens before it; nothing is padded.
    return tuple(groups), device


def _group(model: Any, cache: DynamicCache, window: int | None, layers: list[int]) -> LayerGroup:
    planes = [plane for index in layers for plane in (cache.layers[index].keys, cache.layers[index].values)]
    kinds = {(tuple(plane.shape), plane.dtype, plane.device) for plane in planes}
    if len(kinds) != 1 or planes[0].dim() != 4:
        raise UnsupportedModel(
            f"wanted K and V of one shape, dtype and device in all layers with a window of {window}, got "
            f"{'; '.join(sorted(map(str, kinds)))} in {type(model).__name__}; {SUPPORTED}"
        )
    _, num_kv_heads, _, head_dim = planes[0].shape
    return LayerGroup(
        layers=tuple(layers),
        window_tokens=window,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(planes[0].dtype).removeprefix("torch."),
    )

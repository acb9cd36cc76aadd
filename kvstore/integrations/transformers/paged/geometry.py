"""Which layers of a transformers model share page ids, and the shape of their KV."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvstore.blocks.shape import KVShape
from kvstore.errors import UnsupportedModel
from kvstore.integrations.transformers.cache.columns import layers_of, shape_of
from kvstore.integrations.transformers.probe import can_pad
from kvstore.integrations.transformers.supported import check_mode, check_supported

_EXPERTS = re.compile(r"moe|expert", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of a model that see equally many tokens, and so need the same pages.

    Args:
        layers: their places in the model, in order.
        window_tokens: tokens that a token sees, itself included; None for all.
        token_shape: of their KV of one token.
    """

    layers: tuple[int, ...]
    window_tokens: int | None
    token_shape: KVShape

    def shape(self, block_size: int) -> KVShape:
        """Return the shape of this group's stored blocks of `block_size` tokens."""
        return replace(self.token_shape, block_size=block_size)


def read_groups(model: Any) -> tuple[tuple[LayerGroup, ...], torch.device]:
    """Return the groups of a model's layers, found by running the model on one token, and the device of its KV.

    Raises:
        UnsupportedModel: a layer keeps something else than K and V of full or sliding attention, layers of one kind
            differ in shape, KV depends on more than the tokens before it, or the model has experts.
        InvalidRequest: this is no model with `generate`, it is in training mode, or autocast is on.
        ConfigError: transformers is too old.
    """
    check_supported(model)
    check_mode(model)
    for name, module in model.named_modules():
        if _EXPERTS.search(type(module).__name__):
            raise UnsupportedModel(
                f"wanted a dense model, got {name}, a {type(module).__name__}, in {type(model).__name__}: how many "
                "rows an expert gets depends on the other rows of a step, so bits of KV would depend on padding; "
                "supported are dense decoder-only models of layers with full attention or with a sliding window"
            )
    layers, found = layers_of(model), dict[int | None, list[int]]()
    for index, layer in enumerate(layers):
        found.setdefault(getattr(layer, "sliding_window", None), []).append(index)
    # Layers that see all tokens first: their pages are the whole of a request.
    groups = tuple(
        LayerGroup(
            layers=tuple(found[window]),
            window_tokens=window,
            token_shape=shape_of([layers[index] for index in found[window]], 1),
        )
        for window in sorted(found, key=lambda window: window or -1)
    )
    device = layers[0].keys.device
    can_pad(model, device)  # It refuses models whose KV depends on more than the tokens before it; nothing is padded.
    return groups, device

"""Which models are supported: those whose KV of a prefix depends on the tokens of that prefix alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import GenerationMixin

from kvstore.errors import ConfigError, InvalidRequest, UnsupportedModel

SUPPORTED = (
    "supported are decoder-only models in eval mode whose DynamicCache has a plain DynamicLayer or a "
    "DynamicSlidingWindowLayer per layer: full attention or a sliding window of two or more tokens in every layer, K "
    "and V of one shape, all on one device"
)

_ROPE_OF_LENGTH = ("dynamic", "longrope")
"""Kinds of RoPE whose angles for the first tokens change when the sequence gets long."""

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
    """Refuse what is no model of transformers, and models whose KV of a prefix depends on more than its tokens.

    Raises:
        InvalidRequest: it has no `generate` of transformers.
        UnsupportedModel: it is such a model; the message says what is supported.
        ConfigError: transformers is too old.
    """
    check_version(transformers.__version__)
    if not isinstance(model, GenerationMixin):
        raise InvalidRequest(f"model: wanted a transformers model with generate, got a {type(model).__name__}")
    config, text = model.config, model.config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"wanted a decoder-only model, got the encoder-decoder {type(model).__name__}; {SUPPORTED}"
        )
    for each in (config, text):
        is_causal, size = getattr(each, "is_causal", True), getattr(each, "keep_window_size", None)
        # The size by config, since a trial would see it only in prompts longer than that; the default is 2048.
        if not is_causal or size is not None:
            raise UnsupportedModel(
                f"wanted attention to all earlier tokens and no later ones, got {type(each).__name__} with "
                f"is_causal={is_causal}, keep_window_size={size}: later tokens decide what a token attends to, so KV "
                "of a prefix cannot be shared; call model.generate"
            )
    rope = f"{getattr(text, 'rope_parameters', None)} {getattr(text, 'rope_scaling', None)}"
    if found := [kind for kind in _ROPE_OF_LENGTH if kind in rope]:
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

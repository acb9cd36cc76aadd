"""The models of the examples: random weights from a fixed seed, so that nothing has to be downloaded."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

VOCAB_SIZE = 4096
_SIZES = {
    "demo": {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    "tiny": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
}
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    # Every layer has a window: of a stored block and a token, where a load of whole blocks ends at a window's begin.
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 33}),
    # Every second layer has one.
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 40, "query_pre_attn_scalar": 64}),
}


def build_model(kind: str = "llama", size: str = "demo") -> Any:
    """Return the same model in every process: random weights, fixed seed."""
    torch.manual_seed(20)
    config, model, options = KINDS[kind]
    return model(config(**_COMMON, **_SIZES[size], **options)).eval()


def digest_of(model: Any) -> str:
    """Return a digest of the weights: workers with other weights get another namespace, so never a hit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a run without any cache computed.

    Args:
        tokens: of the answer, chosen greedily.
        logits: that each was chosen by, [num_tokens, vocab_size].
        layers: K and V of each layer, each [1, H, tokens, D]: of all tokens, or of the last ones, with padding.
        num_tokens: position of their end.
    """

    tokens: list[int]
    logits: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    num_tokens: int


def answer_from_nothing(model: Any, prompt: list[int], num_tokens: int, step_tokens: int) -> Reference:
    """Compute prompt and answer with transformers' own cache, in the steps of `PagedRunner`.

    Nothing of raykv is used. The cache holds the tokens before the step; a step that is not full yet is computed again
    for the next token.
    """
    device = model.device
    cache, tokens, logits = DynamicCache(config=model.config.get_text_config(decoder=True)), list(prompt), []
    start = 0
    while len(logits) < num_tokens:
        rows = tokens[start : start + step_tokens]
        stepped = copy.copy(cache)
        stepped.layers = [copy.copy(layer) for layer in cache.layers]  # A step makes new tensors, and changes none.
        padded = [*rows, *[0] * (step_tokens - len(rows))]
        output = model(
            input_ids=torch.tensor([padded], device=device),
            position_ids=torch.arange(start, start + step_tokens, device=device)[None],
            past_key_values=stepped,
            use_cache=True,
        )
        if start + len(rows) == len(tokens):
            logits.append(output.logits[0, len(rows) - 1])
            tokens.append(int(logits[-1].argmax()))
        if len(rows) == step_tokens:
            cache, start = stepped, start + step_tokens
    layers = [(layer.keys, layer.values) for layer in stepped.layers]
    return Reference(
        tokens=tokens[len(prompt) :], logits=torch.stack(logits), layers=layers, num_tokens=stepped.get_seq_length()
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two float32 tensors hold the same bits: unlike ==, tells -0.0 from 0.0."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))

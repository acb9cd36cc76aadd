"""A trial of a model when it is wrapped: is the KV of a prefix the same, however a prompt gets into the cache?

A model handles positions, masks and padding in its own code. Some models drop the positions that `generate` counts, or
count them again from the tokens that look like padding. No config says so; a run on a few tokens shows it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig

from kvstore.errors import InvalidRequest, UnsupportedModel
from kvstore.integrations.transformers.cache.columns import CACHE_NAME, new_cache, planes_of, windows_of
from kvstore.integrations.transformers.cache.narrowed import narrowed
from kvstore.integrations.transformers.prompts import Prompts
from kvstore.integrations.transformers.supported import SUPPORTED
from kvstore.integrations.transformers.witness import Witness

_NUM_PADDING, _NUM_FIRST, _NUM_FRESH = 7, 5, 4
"""Numbers of padding columns, ordinary prefix tokens, and columns computed behind a filled cache."""

_WINDOW = 4
"""Most tokens in a sliding window of the trial, so that it shows what happens behind a window."""

_ENDS = ("pad_token_id", "eos_token_id", "bos_token_id")
"""Settings of the tokens that may be taken for padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """K and V of each layer, [heads, columns, head_dim], and logits of the first new token if rounding is small."""

    planes: list[torch.Tensor]
    logits: list[torch.Tensor]
    cache: DynamicCache


def can_pad(model: Any, device: torch.device) -> bool:
    """Run a model four times on a dozen tokens, with short sliding windows if it has any, and compare KV and logits.

    Afterwards RNG states, settings and hooks are as before.

    Args:
        model: as `generate` runs it, with full attention or a sliding window in every layer.
        device: of its KV.

    Returns:
        Whether a row that is padded on the left has the KV that it has without padding.

    Raises:
        UnsupportedModel: a prompt computed behind a filled cache gets other KV than in one run, or the model computes
            other tokens or positions than those of the prompt.
    """
    model = _with_short_windows(model)
    long = torch.tensor([_tokens_of(model)], device=model.device)
    short = long[:, :-_NUM_FRESH]
    num_first = short.shape[1]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        # KV in a cache was computed before the rest of the prompt was known. So the prefix is run alone, and the rest
        # behind its KV. Columns cut out of a run of the whole prompt would have seen the rest.
        whole, alone = _run(model, long), _run(model, short)
        if whole and alone and not _are_alike(model, [each[:, :num_first] for each in whole.planes], alone.planes):
            raise UnsupportedModel(
                f"wanted KV that depends on the tokens before it alone, but in {type(model).__name__} the KV of a "
                "prefix changes with the tokens behind it (as with attention in both directions, or where the length "
                f"of a prompt counts); call model.generate, which shares nothing; {SUPPORTED}"
            )
        going_on = alone and _run(model, long, filled=alone)
        if not (whole and alone and going_on) or not _are_alike(
            model, *([*(plane[:, num_first:] for plane in each.planes), *each.logits] for each in (going_on, whole))
        ):
            raise UnsupportedModel(
                f"wanted KV that depends on the tokens before it alone, but {type(model).__name__} computes a prompt "
                "otherwise behind a filled cache than in one run, or gives its tokens other positions than 0, 1, 2.. "
                "(as M-RoPE does, or counting those that look like padding), or its cache has a sliding window and its "
                f"masks have none; {SUPPORTED}"
            )
        padded = _run(model, torch.nn.functional.pad(short, (_NUM_PADDING, 0), value=int(short[0, 0])), _NUM_PADDING)
        return padded is not None and _are_alike(
            model, [*(each[:, _NUM_PADDING:] for each in padded.planes), *padded.logits], [*alone.planes, *alone.logits]
        )


def _with_short_windows(model: Any) -> Any:
    """Return the model, or a copy whose sliding windows are shorter than the trial.

    In some models the cache has windows and the masks do not. In a prompt shorter than the window nothing shows that.
    """
    if not windows_of(new_cache(model)):
        return model
    model = narrowed(model, _WINDOW)
    if (longest := max(windows_of(new_cache(model)))) > _WINDOW:
        raise UnsupportedModel(
            f"wanted sliding windows that the config calls sliding_window, got one of {longest} tokens from elsewhere "
            f"in {type(model).__name__}, so it cannot be tried out on a few tokens; {SUPPORTED}"
        )
    return model


def _tokens_of(model: Any) -> list[int]:
    """Return a few ordinary tokens, twice each token that may be taken for padding, and a few ordinary ones again."""
    text = model.config.get_text_config(decoder=True)
    named = [
        (name, each)
        for config in (model.generation_config, text, model.config)
        for name, value in vars(config).items()
        if "token" in name and ("_id" in name or "_index" in name)
        for each in (value if isinstance(value, list | tuple) else [value])
        if type(each) is int
    ]
    num_tokens = int(getattr(model.get_input_embeddings(), "num_embeddings", 0) or text.vocab_size)
    special = sorted({each for name, each in named if name in _ENDS and 0 <= each < num_tokens})[:4]
    # Spread over the vocabulary, the same ones each time; without those that stand for images and the like.
    taken = {each for _, each in named}
    ordinary = [each for at in range(200) if (each := (11 + 7919 * at) % num_tokens) not in taken]
    ordinary = (ordinary or [0]) * (_NUM_FIRST + _NUM_FRESH)
    return [*ordinary[:_NUM_FIRST], *sorted(special * 2), *ordinary[_NUM_FIRST : _NUM_FIRST + _NUM_FRESH]]


def _run(model: Any, row: torch.Tensor, num_padding: int = 0, filled: _Run | None = None) -> _Run | None:
    """Compute a prompt as `generate` does; None if the model computed something else.

    With an earlier run, `filled`, its columns are taken from its cache.
    """
    cache, num_filled = new_cache(model), 0
    if filled is not None:
        num_filled = row.shape[1] - _NUM_FRESH
        for layer, (keys, values) in enumerate(planes_of(filled.cache)):
            cache.update(keys.clone(), values.clone(), layer)
    mask = torch.ones_like(row)
    mask[:, :num_padding] = 0
    prompts = Prompts(
        input_ids=row,
        attention_mask=mask,
        num_padding=(num_padding,),
        num_copies=1,
        follows_rows=True,
        may_load=True,
    )
    # A shallow copy, so that the model's own generation settings do not change the run.
    bare = copy.copy(model)
    bare.generation_config = GenerationConfig(
        max_new_tokens=1, do_sample=False, num_beams=1, num_return_sequences=1, pad_token_id=0
    )
    settings = {"attention_mask": mask.clone(), "return_dict_in_generate": True, "output_logits": True}
    try:
        with Witness(bare, cache, prompts, num_filled, sees_answer=False) as witness:
            output = bare.generate(row.clone(), **{CACHE_NAME: cache}, **settings)
    except InvalidRequest:  # Raised by the witness.
        return None
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise UnsupportedModel(
            f"wanted a model that generates from tokens alone, but {type(model).__name__} said: {error}; {SUPPORTED}"
        ) from error
    if witness.num_right() < row.shape[1]:
        return None
    planes = [plane[0] for pair in planes_of(cache) for plane in pair]
    return _Run(planes=planes, logits=[output.logits[0][None]] if _is_exact(planes[0]) else [], cache=cache)


def _is_exact(plane: torch.Tensor) -> bool:
    return torch.finfo(plane.dtype).eps < 1e-5


def _are_alike(model: Any, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether columns of KV, and logits, are the same but for rounding: runs of other lengths add in another order.

    Every column counts: a model that looks one token ahead gets only the last one wrong. In half precision, or with a
    router of experts, rounding may change a few columns; then more than half of them have to agree.
    """
    has_experts = any("expert" in name.lower() or "moe" in name.lower() for name, _ in model.named_modules())
    needs_all, limit = _is_exact(found[0]) and not has_experts, max(0.01, 8 * torch.finfo(found[0].dtype).eps)
    for one, other in zip(found, wanted, strict=True):
        error = torch.linalg.vector_norm(one.double() - other.double(), dim=(0, 2))
        is_alike = torch.le(error, limit * torch.linalg.vector_norm(other.double(), dim=(0, 2)) + 1e-9)
        if int(is_alike.sum()) < (len(is_alike) if needs_all else len(is_alike) // 2 + 1):
            return False
    return True

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
from kvstore.integrations.transformers.cache.columns import new_cache, planes_of, windows_of
from kvstore.integrations.transformers.cache.narrowed import narrowed
from kvstore.integrations.transformers.identity import SUPPORTED
from kvstore.integrations.transformers.prompts import Prompts
from kvstore.integrations.transformers.witness import Witness

_NUM_PADDING, _NUM_FIRST, _NUM_FRESH = 7, 5, 4
"""Numbers of padding columns, ordinary prefix tokens, and columns computed behind a filled cache."""

_WINDOW = 4
"""Most tokens in a sliding window of the trial, so that it shows what happens behind a window."""


@dataclass(frozen=True, slots=True)
class _Run:
    """KV of each layer, [rows, heads, columns, head_dim] in float64, and logits of the first new token."""

    planes: list[torch.Tensor]
    logits: torch.Tensor
    cache: DynamicCache


def can_pad(model: Any, device: torch.device) -> bool:
    """Run a model five times on a dozen tokens, with short sliding windows if it has any, and compare KV and logits.

    Afterwards RNG states, settings and hooks are as before.

    Args:
        model: as `generate` runs it, with full attention or a sliding window in every layer.
        device: of its KV.

    Returns:
        Whether a row that is padded on the left has the KV that it has alone.

    Raises:
        UnsupportedModel: a prompt computed behind a filled cache gets other KV than in one run, or the model computes
            other tokens or positions than those of the prompt.
    """
    model = _with_short_windows(model)
    tokens, special = _tokens_of(model)
    first, fresh = tokens[:_NUM_FIRST], tokens[_NUM_FIRST : _NUM_FIRST + _NUM_FRESH]
    long = torch.tensor([[*first, *special, *fresh]], device=model.device)
    short = long[:, :-_NUM_FRESH]
    has_experts = any("expert" in name.lower() or "moe" in name.lower() for name, _ in model.named_modules())
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        # KV in a cache was computed before the rest of the prompt was known. So the prefix is run alone, and the rest
        # behind its KV. Columns cut out of a run of the whole prompt would have seen the rest.
        whole, alone = _run(model, long, torch.ones_like(long)), _run(model, short, torch.ones_like(short))
        if whole is not None and alone is not None and not _is_prefix(alone, whole, has_experts=has_experts):
            raise UnsupportedModel(
                f"wanted KV that depends on the tokens before it alone, but in {type(model).__name__} the KV of a "
                "prefix changes with the tokens behind it (as with attention in both directions, or where the length "
                f"of a prompt counts); call model.generate, which shares nothing; {SUPPORTED}"
            )
        going_on = None if alone is None else _run(model, long, torch.ones_like(long), alone)
        if whole is None or alone is None or going_on is None or not _are_alike(going_on, whole, 0, 0, long.shape[1]):
            raise UnsupportedModel(
                f"wanted KV that depends on the tokens before it alone, but {type(model).__name__} computes a prompt "
                "otherwise behind a filled cache than in one run, or gives its tokens other positions than 0, 1, 2.. "
                "(as M-RoPE does, or counting those that look like padding), or its cache has a sliding window and its "
                f"masks have none; {SUPPORTED}"
            )
        width = short.shape[1] + _NUM_PADDING
        rows = torch.full((2, width), tokens[-1], dtype=long.dtype, device=model.device)
        mask = torch.zeros_like(rows)
        for row, prompt in enumerate((short, long)):
            rows[row, width - prompt.shape[1] :], mask[row, width - prompt.shape[1] :] = prompt[0], 1
        padded = _run(model, rows, mask)
        going_on = None if padded is None else _run(model, rows, mask, padded)
        if padded is None or going_on is None:
            return False
        return all(
            _are_alike(found, wanted, row, width - num_tokens, num_tokens)
            for found in (padded, going_on)
            for row, (wanted, num_tokens) in enumerate(((alone, short.shape[1]), (whole, long.shape[1])))
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


def _tokens_of(model: Any) -> tuple[list[int], list[int]]:
    """Return a few ordinary tokens, and twice each token that may be taken for padding."""
    text = model.config.get_text_config(decoder=True)
    configs = (model.generation_config, text, model.config)
    embeddings = model.get_input_embeddings()
    num_tokens = int(getattr(embeddings, "num_embeddings", 0) or text.vocab_size)
    ids: dict[str, set[int]] = {"": set()}
    for config in configs:
        for name, value in vars(config).items():
            if "token" in name and ("_id" in name or "_index" in name):
                found = value if isinstance(value, list | tuple) else [value]
                ids.setdefault(name, set()).update(each for each in found if type(each) is int)
    special = sorted({each for name in ("pad_token_id", "eos_token_id", "bos_token_id") for each in ids.get(name, ())})
    taken = set().union(*ids.values())
    # Spread over the vocabulary, the same ones each time.
    ordinary = [each for at in range(200) if (each := (11 + 7919 * at) % num_tokens) not in taken]
    while len(ordinary) < 14:
        ordinary += ordinary or [0]
    return ordinary[:14], [each for each in special[:4] if 0 <= each < num_tokens for _ in range(2)]


def _run(model: Any, rows: torch.Tensor, mask: torch.Tensor, filled: _Run | None = None) -> _Run | None:
    """Compute prompts as `generate` does; None if the model computed something else.

    With an earlier run, `filled`, all but the last few columns are taken from its cache.
    """
    cache, num_filled = new_cache(model), 0
    if filled is not None:
        num_filled = rows.shape[1] - _NUM_FRESH
        for layer, (keys, values) in enumerate(planes_of(filled.cache)):
            cache.update(keys[:, :, :num_filled].clone(), values[:, :, :num_filled].clone(), layer)
    num_padding = tuple((mask == 0).sum(1).tolist())
    prompts = Prompts(
        input_ids=rows, attention_mask=mask, num_padding=num_padding, num_copies=1, follows_rows=True, may_load=True
    )
    # A shallow copy, so that the model's own generation settings do not change the run.
    bare = copy.copy(model)
    bare.generation_config = GenerationConfig(
        max_new_tokens=1, do_sample=False, num_beams=1, num_return_sequences=1, pad_token_id=0
    )
    settings = {"attention_mask": mask.clone(), "return_dict_in_generate": True, "output_logits": True}
    try:
        with Witness(bare, cache, prompts, num_filled, sees_answer=False) as witness:
            output = bare.generate(rows.clone(), past_key_values=cache, **settings)
    except InvalidRequest:  # Raised by the witness.
        return None
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise UnsupportedModel(
            f"wanted a model that generates from tokens alone, but {type(model).__name__} said: {error}; {SUPPORTED}"
        ) from error
    if witness.num_right() < rows.shape[1]:
        return None
    planes = [plane.double() for pair in planes_of(cache) for plane in pair]
    return _Run(planes, output.logits[0].double(), cache)


def _is_prefix(alone: _Run, whole: _Run, *, has_experts: bool) -> bool:
    """Whether a prefix that was run alone has the KV that it has in the run of a longer prompt.

    Every column counts: a model that looks one token ahead gets only the last one wrong. In half precision, or with a
    router of experts, rounding may change a few columns; then more than half of them have to agree.
    """
    num_tokens, limit, is_exact = alone.planes[0].shape[2], *_precision(alone)
    for one, other in zip(whole.planes, alone.planes, strict=True):
        is_alike = _alike_columns(one[0, :, :num_tokens], other[0], limit)
        num_wanted = num_tokens if is_exact and not has_experts else num_tokens // 2 + 1
        if int(is_alike.sum()) < num_wanted:
            return False
    return True


def _are_alike(found: _Run, wanted: _Run, row: int, begin: int, num_tokens: int) -> bool:
    """Whether a row's tokens from column `begin` on have the KV and logits of a run of them alone.

    Other batches are summed in another order. More than half of the compared columns of a plane must agree, so that a
    token sent to another expert by rounding is no difference; logits count where rounding is small.
    """
    limit, is_exact = _precision(wanted)
    pairs = [
        (one[row, :, begin : begin + num_tokens], other[0, :, :num_tokens])
        for one, other in zip(found.planes, wanted.planes, strict=True)
    ]
    if is_exact:
        pairs.append((found.logits[row, None, None], wanted.logits[0, None, None]))
    # Only new columns: loaded ones show nothing.
    last = slice(-min(_NUM_FRESH, num_tokens), None)
    for one, other in pairs:
        is_alike = _alike_columns(one, other, limit)[last]
        if 2 * int(is_alike.sum()) <= len(is_alike):
            return False
    return True


def _precision(run: _Run) -> tuple[float, bool]:
    """Return how far KV may be off by rounding, and whether rounding is small."""
    precision = torch.finfo(run.cache.layers[0].keys.dtype).eps
    return max(0.01, 8 * precision), precision < 1e-5


def _alike_columns(one: torch.Tensor, other: torch.Tensor, limit: float) -> torch.Tensor:
    """Return for each column of [heads, columns, dim] whether it is the same but for rounding."""
    error: torch.Tensor = torch.linalg.vector_norm(one - other, dim=(0, 2))
    size: torch.Tensor = torch.linalg.vector_norm(other, dim=(0, 2))
    return torch.le(error, limit * size + 1e-9)

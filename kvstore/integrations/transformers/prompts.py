"""Reading the arguments of `generate`: which rows of tokens a call has, and whether their KV can be shared."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from kvstore.errors import InvalidRequest

_INPUTS = ("attention_mask", "logits_to_keep", "tokenizer", "assistant_tokenizer")
"""Arguments that are allowed besides those of `generate` itself and settings; they change no KV."""

_REFEED = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "token_healing")
"""Settings with which `generate` does not continue behind a filled cache, or changes the prompt itself."""

_OF_ALL_COLUMNS = ("output_hidden_states", "output_attentions")
"""Outputs for each column of a run: those of loaded columns would be missing."""

_DEFAULT_CACHE = (None, "dynamic", "hybrid")
"""Names of the default cache; many Gemma checkpoints have "hybrid", which generate has come to ignore."""

_OTHER_LOOPS = ("penalty_alpha", "dola_layers", "constraints", "force_words_ids")
"""Settings with which `generate` runs a loop from elsewhere, as custom_generate does."""

_REFUSED = {
    "past_key_values": "the cache is made here; leave it out",
    "cache": "the cache is made here; leave it out",
    "inputs_embeds": "embeddings name no tokens; pass input_ids",
    "position_ids": "positions are those of the attention mask; leave them out",
    "custom_generate": "another decoding loop may use the cache in another way; call model.generate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The rows of one `generate` call.

    Args:
        input_ids: [num_rows, width], as the caller passed them, padding included.
        attention_mask: [num_rows, width] of 0 (padding on the left) and 1.
        num_padding: padding tokens of each row.
        num_copies: rows of the cache for each row of the prompt: beams, or returned sequences.
        follows_rows: whether row r of the cache is row r of the answer, token by token.
        may_load: whether decoding can continue from a filled cache. It cannot if assisted decoding feeds the whole
            prompt again, or if hidden states or attentions of all columns are wanted.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    num_padding: tuple[int, ...]
    num_copies: int
    follows_rows: bool
    may_load: bool

    @property
    def width(self) -> int:
        """Columns of the prompt, padding included."""
        return int(self.input_ids.shape[1])

    def tokens(self, row: int) -> torch.Tensor:
        """Return the tokens of a row without its padding, on the CPU."""
        return self.input_ids[row, self.num_padding[row] :].cpu()


def read_prompts(
    model: Any, inputs: torch.Tensor | None, options: dict[str, Any], *, can_pad: bool = True
) -> tuple[Prompts, dict[str, Any]]:
    """Read a call's arguments.

    Args:
        model: whose `generate` is called.
        inputs: the first positional argument.
        options: all keyword arguments.
        can_pad: whether padding leaves the model's KV as it is; see `probe`.

    Returns:
        The prompts, and the keyword arguments that `generate` gets besides them and the cache.

    Raises:
        InvalidRequest: an argument makes KV depend on more than the tokens before it, or needs another cache.
    """
    options = dict(options)
    named = options.pop("input_ids", None)
    if (inputs is None) == (named is None):
        raise InvalidRequest("wanted input_ids, once: as the first argument or by name")
    input_ids = named if inputs is None else inputs
    is_ids = isinstance(input_ids, torch.Tensor) and input_ids.dim() == 2 and not input_ids.is_floating_point()
    if not is_ids or 0 in input_ids.shape:
        got = list(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise InvalidRequest(f"input_ids: wanted a tensor of token ids, [batch, tokens], got {got}")
    _check_options(options)
    settings = [options.get("generation_config"), model.generation_config]

    def setting(name: str) -> Any:
        found = (options.get(name), *(getattr(each, name, None) for each in settings))
        return next((value for value in found if value is not None), None)

    if setting("cache_implementation") not in _DEFAULT_CACHE or setting("use_cache") is False:
        raise InvalidRequest(
            f"wanted the default DynamicCache, got cache_implementation={setting('cache_implementation')!r}, "
            f"use_cache={setting('use_cache')!r}; leave both out: static, offloaded and quantised caches have no "
            "blocks to store yet"
        )
    found = [name for name in _OTHER_LOOPS if setting(name)]
    if found := found or (["num_beam_groups"] if (setting("num_beam_groups") or 1) > 1 else []):
        raise InvalidRequest(
            f"{found[0]}: wanted greedy or beam search or sampling, got a setting with which generate runs another "
            f"decoding loop, which may use the cache in another way; leave {found[0]} out (also of the "
            "generation_config), or call model.generate, which shares nothing"
        )
    if setting("cache_implementation") is not None:
        options["cache_implementation"] = None  # The default, but `generate` allows no name of it beside a cache.
    mask, pad_id = options.pop("attention_mask", None), None
    if mask is None:
        pad_id, eos = setting("pad_token_id"), setting("eos_token_id")
        # As `generate` infers it: padding is masked unless the pad token also ends sequences.
        ends = pad_id is None or pad_id in (eos if isinstance(eos, list | tuple) else [eos])
        mask = torch.ones_like(input_ids) if ends else input_ids.ne(pad_id).to(input_ids.dtype)
    padding = _padding(mask, input_ids, pad_id)
    if any(padding) and not (can_pad and "position_ids" in inspect.signature(model.forward).parameters):
        raise InvalidRequest(
            f"wanted prompts of one length: {type(model).__name__} takes no position_ids, or makes nothing of them, so "
            "padding may move the positions of tokens, and with them their KV; generate for one prompt at a time"
        )
    copies = max(setting("num_beams") or 1, setting("num_return_sequences") or 1)
    is_assisted = options.get("assistant_model") is not None or _is_on_anywhere(_REFEED, options, settings)
    configs = (model.config, model.config.get_text_config(decoder=True))
    wants_all_columns = _is_on_anywhere(_OF_ALL_COLUMNS, options, [*settings, *configs])
    prompts = Prompts(
        # Copies: other holders of the caller's tensors may change them meanwhile.
        input_ids=input_ids.clone(),
        attention_mask=mask.clone(),
        num_padding=padding,
        num_copies=copies,
        follows_rows=copies == 1 and not is_assisted,
        may_load=not (is_assisted or wants_all_columns),
    )
    return prompts, options


def _is_on_anywhere(names: tuple[str, ...], options: dict[str, Any], settings: list[Any]) -> bool:
    """Whether the call or any of the settings turns one of these on, no matter which of them would win."""
    return any(
        getattr(each, name, None) not in (None, False)
        for name in names
        for each in (SimpleNamespace(**options), *settings)
    )


def _check_options(options: dict[str, Any]) -> None:
    """Refuse arguments that `generate` itself does not take: other inputs of the model may change KV unseen."""
    # Not the signature of the model's own `generate`, which may take images and more.
    known = {*inspect.signature(GenerationMixin.generate).parameters, *vars(GenerationConfig()), *_INPUTS}
    for name, value in options.items():
        if value is not None and (name in _REFUSED or name not in known):
            why = _REFUSED.get(name, "KV may depend on it, and the block hashes would not say so; call model.generate")
            raise InvalidRequest(f"{name}: wanted input_ids, attention_mask and settings of generate alone; {why}")


def _padding(mask: torch.Tensor, input_ids: torch.Tensor, pad_id: Any) -> tuple[int, ...]:
    """Return how many columns of padding each row has; `pad_id` is the token that the mask was inferred from, if any.

    Raises:
        InvalidRequest: the mask has another shape, other numbers than 0 and 1, or zeros behind a token.
    """
    if mask.shape != input_ids.shape:
        raise InvalidRequest(
            f"attention_mask: wanted one of input_ids' shape, {list(input_ids.shape)}, got {list(mask.shape)}"
        )
    ones = mask.ne(0)
    if not torch.equal(ones, mask.eq(1)):
        raise InvalidRequest(
            "attention_mask: wanted 0 for padding and 1 for tokens, got other numbers, whose sums would be positions"
        )
    # From the first 1 on, all ones: a hole or padding on the right would change the positions behind it.
    if not bool((ones.cummax(dim=1).values == ones).all()) or not bool(ones[:, -1].all()):
        if pad_id is not None:
            raise InvalidRequest(
                f"input_ids: wanted padding on the left only, got pad_token_id ({pad_id}) behind a token, and no "
                "attention_mask, so generate takes it for padding; pass attention_mask, with ones where it is a token, "
                "or pad on the left"
            )
        raise InvalidRequest(
            "attention_mask: wanted padding on the left only, got zeros behind a token; set padding_side='left' in the "
            "tokenizer, or call model.generate"
        )
    return tuple((mask.shape[1] - ones.sum(dim=1)).tolist())

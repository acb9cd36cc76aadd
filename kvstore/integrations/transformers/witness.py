"""Checks of what fills a cache: KV is saved only if it was computed from the tokens that its hash names.

Decoding loops use a cache in many ways, and more come with each version of transformers: they feed candidates and take
them back, or feed a prompt again. The cache alone does not show that: it has no tokens, and its length may be right by
chance. So each run of the model on it is checked before it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.errors import InvalidRequest
from kvstore.integrations.transformers.cache.columns import num_columns
from kvstore.integrations.transformers.prompts import Prompts


class Witness:
    """Follows one cache through one `generate`, as a context.

    Args:
        model: the model that runs.
        cache: the cache that it fills.
        prompts: the prompts that the first columns of the cache must belong to.
        num_loaded: leading columns that hold KV of the prompts already.
        sees_answer: whether columns behind the prompts count as well.
    """

    def __init__(
        self, model: Any, cache: DynamicCache, prompts: Prompts, num_loaded: int, *, sees_answer: bool
    ) -> None:
        self._model, self._cache, self._sees_answer = model, cache, sees_answer
        self._num_copies, self._num_loaded = prompts.num_copies, num_loaded
        self._tokens, self._mask = prompts.input_ids, prompts.attention_mask
        #: Leading columns that are known to be right.
        self._num_right = num_loaded
        #: (first column, tokens, positions) of each run behind the prompts; `num_right_of` compares them.
        self._answer: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
        #: One object, so that `close` finds it on the model, also after an interrupt while the context began.
        self._hook: Any = self._see

    def __enter__(self) -> Witness:
        self._model.register_forward_pre_hook(self._hook, with_kwargs=True)
        return self

    def close(self) -> None:
        """Remove the hook from the model; may be called again, also if the context has not begun."""
        hooks = self._model._forward_pre_hooks
        for key in [key for key, hook in list(hooks.items()) if hook is self._hook]:
            hooks.pop(key, None)
            self._model._forward_pre_hooks_with_kwargs.pop(key, None)
        self._hook = None  # Else a cycle would keep the cache in memory.

    def __exit__(self, *_: object) -> None:
        self.close()

    def num_right(self) -> int:
        """Return how many leading columns hold, in every layer, KV of the prompts and of nothing else."""
        return min(self._num_right, num_columns(self._cache))

    def num_right_of(self, sequences: torch.Tensor) -> int:
        """Return `num_right` for prompts with their answers, [num_rows, ...], each in one row of the cache."""
        num_right, num_more = self.num_right(), sequences.shape[1] - self._tokens.shape[1]
        if num_right < self._tokens.shape[1]:
            return num_right
        self._tokens, self._mask = sequences, torch.nn.functional.pad(self._mask, (0, num_more), value=1)
        for start, tokens, positions in self._answer:
            end = start + tokens.shape[1]
            if start > num_right or end > sequences.shape[1]:
                break
            if not self._is_of_prompt(start, end, tokens, positions, self._mask):
                return min(start, num_right)
            num_right = end  # It overwrites columns that were fed before and taken back.
        return min(num_right, num_columns(self._cache))

    def _see(self, _: Any, __: Any, given: Mapping[str, Any] | None = None) -> None:
        """Check a run of the model before it begins; other threads run the same model on other caches."""
        if given is None or not any(each is self._cache for each in given.values()):  # Its name varies.
            return
        start, width = num_columns(self._cache), self._tokens.shape[1]
        tokens, positions = given.get("input_ids"), given.get("position_ids")
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
            self._num_right = min(self._num_right, start)
            self._refuse_if_loaded("no tokens")
            return
        if start >= width:
            if self._sees_answer and self._num_right == width:
                self._answer.append((start, tokens.clone(), None if positions is None else positions.clone()))
            return
        end = min(start + tokens.shape[1], width)
        if not self._is_of_prompt(start, end, tokens, positions, given.get("attention_mask")):
            self._num_right = min(self._num_right, start)
            self._refuse_if_loaded(f"{tokens.shape[1]} other tokens, or tokens at other positions,")
        elif start <= self._num_right:
            self._num_right = end

    def _is_of_prompt(
        self, start: int, end: int, tokens: torch.Tensor, positions: torch.Tensor | None, mask: Any
    ) -> bool:
        """Whether tokens about to be computed are columns [start, end) of the prompts, at these positions."""
        wanted, is_token = self._rows(self._tokens), self._rows(self._mask).ne(0)
        if len(tokens) != len(wanted):
            return False
        is_new = is_token[:, start:end]
        if bool((tokens[:, : end - start].to(wanted.device).ne(wanted[:, start:end]) & is_new).any()):
            return False
        if positions is not None:
            places = is_token.cumsum(1)[:, start:end] - 1
            found = positions[..., : end - start].to(places.device)
            if found.dim() != 2 or bool((found.ne(places) & is_new).any()):
                return False
        elif not bool(is_token.all()):
            return False  # The model counts by itself, and may count padding too.
        if mask is None:
            return bool(is_token.all())
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] < end:
            return False
        return torch.equal(mask[:, :end].ne(0).to(is_token.device), is_token[:, :end])

    def _rows(self, given: torch.Tensor) -> torch.Tensor:
        """Return rows of the prompts as rows of the cache."""
        return given if self._num_copies == 1 else given.repeat_interleave(self._num_copies, dim=0)

    def _refuse_if_loaded(self, got: str) -> None:
        if self._num_loaded:
            raise InvalidRequest(
                f"wanted a decoding loop that goes on behind the {self._num_loaded} loaded columns of the prompt, got "
                f"{got} to be computed on top of them, which would give a wrong answer; call model.generate for this, "
                "and please report it"
            )

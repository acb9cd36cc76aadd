"""Compute with a transformers model over pages, in steps that give the same bits however much was found in a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvstore.errors import InvalidRequest
from kvstore.integrations.transformers.cache.columns import CACHE_NAME
from kvstore.integrations.transformers.paged.kv_cache import PagedKVCache
from kvstore.integrations.transformers.paged.step import GroupStep, PagedLayer, step_cache
from kvstore.kernels.index import make_batch, pages_to_slots
from kvstore.kernels.launch import Launch
from kvstore.paged.request import PagedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where the tokens of a request lie in one group.

    Args:
        slots: int64 [tokens] on the device of the KV; -1 for a token without a page.
        first_present: all tokens from here on have a page.
    """

    slots: Tensor
    first_present: int


class PagedRunner:
    """Run a model over the pages of requests.

    Floating-point sums depend on their order, and a matrix product over 800 rows adds in another order than one over
    16. So every step has exactly `cache.step_tokens` rows, and begins at a multiple of that: rows before the new tokens
    are computed again, and are not written; rows behind them are padding. Then the KV of a token depends on nothing but
    the tokens up to it: not on how much of them was in a cache, where a page ended, or whether it was a prompt, a draft
    or an answer. torch must use one thread, or be deterministic.

    Args:
        cache: the pages, and their model.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._model, self._cache = cache.model, cache
        self._run_index = _index_runner(cache.device)

    def run(self, request: PagedRequest, tokens: Sequence[int], num_known: int, num_logits: int = 1) -> Tensor:
        """Compute the KV of `tokens[num_known:]`, and write it into the request's slots.

        Args:
            request: has slots for all tokens, also those of a prepared step.
            tokens: of the request, from its first one on.
            num_known: leading tokens whose KV is in place.
            num_logits: how many of the last tokens' logits are wanted; tokens with known KV are allowed.

        Returns:
            [num_logits, vocab], on the device of the model.

        Raises:
            InvalidRequest: a number does not fit, or a token sees others whose pages were given up; nothing was
                computed.
        """
        num_tokens, size = len(tokens), self._cache.step_tokens
        if request.num_slots < num_tokens:
            raise InvalidRequest(
                f"run: wanted a request with slots for {num_tokens} tokens, got {request.num_slots}; call extend "
                "first, and release afterwards"
            )
        if not 0 <= num_known <= num_tokens or not 1 <= num_logits <= num_tokens:
            raise InvalidRequest(
                f"run: wanted num_known in [0, {num_tokens}] and num_logits in [1, {num_tokens}], got {num_known} and "
                f"{num_logits}"
            )
        places = [self._places(request, group, num_tokens) for group in range(len(self._cache.layer_groups))]
        first_logit, parts = num_tokens - num_logits, []
        self._check_windows(places, min(num_known, first_logit))
        with torch.no_grad():
            for start in range(min(num_known, first_logit) // size * size, num_tokens, size):
                stop = min(start + size, num_tokens)
                logits = self._step(tokens, start, stop, max(start, min(num_known, stop)), places, stop > first_logit)
                parts.append(logits[max(0, first_logit - start) : stop - start])
        return torch.cat(parts)

    def _check_windows(self, places: list[_Places], first_used: int) -> None:
        """Refuse tokens that see others which have no page any more: those would be read as zeros."""
        for group, place in zip(self._cache.layer_groups, places, strict=True):
            needed = 0 if group.window_tokens is None else max(0, first_used - group.window_tokens + 1)
            if place.first_present > needed:
                raise InvalidRequest(
                    f"run: wanted pages from token {needed} on, which token {first_used} sees, got a request whose "
                    f"windows begin at {place.first_present}; ask for fewer logits, or trim windows later"
                )

    def _step(
        self, tokens: Sequence[int], start: int, stop: int, known: int, places: list[_Places], needs_logits: bool
    ) -> Tensor:
        """Run the model on the rows of one step; returns their logits, or those of the last row alone."""
        rows = [*tokens[start:stop], *[0] * (start + self._cache.step_tokens - stop)]
        layers: dict[int, PagedLayer] = {}
        for group, tensors, place in zip(self._cache.layer_groups, self._cache.tensors, places, strict=True):
            window = group.window_tokens
            first = 0 if window is None else max(0, start - window + 1)
            present = min(max(first, place.first_present), stop)
            step = GroupStep(
                start=start,
                num_rows=len(rows),
                first=first,
                first_new=known - start,
                num_missing=present - first,
                read=place.slots[present:stop],
                write=place.slots[known:stop],
            )
            layers |= {
                index: PagedLayer(tensor, step, window is not None)
                for index, tensor in zip(group.layers, tensors, strict=True)
            }
        device = self._cache.device
        output = self._model(
            input_ids=torch.tensor([rows], device=device),
            position_ids=torch.arange(start, start + len(rows), device=device)[None],
            use_cache=True,
            logits_to_keep=0 if needs_logits else 1,
            **{CACHE_NAME: step_cache([layers[index] for index in sorted(layers)])},
        )
        logits: Tensor = output.logits[0]
        return logits

    def _places(self, request: PagedRequest, group: int, num_tokens: int) -> _Places:
        pages = request.pages(group)
        missing = np.flatnonzero(pages < 0)
        first_present = (int(missing[-1]) + 1) * self._cache.page_size if len(missing) else 0
        if self._run_index is None:
            slots = torch.from_numpy(request.slots(0, num_tokens, group))
        else:
            batch = make_batch([num_tokens], self._cache.page_size, self._cache.device)
            ids = torch.from_numpy(pages.astype(np.int64)[: batch.num_pages]).to(self._cache.device)
            slots = pages_to_slots(batch, ids, self._run_index)
        return _Places(slots=slots, first_present=first_present)


def _index_runner(device: torch.device) -> Callable[[Launch], None] | None:
    """Return how the kernels of index.cu run; None on the CPU, where NumPy does the same."""
    if device.type != "cuda":
        return None
    from kvstore.kernels.gpu import runner

    return runner("index.cu", device)

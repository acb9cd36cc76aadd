"""Calling a function once, when the first new token is out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria


class AfterFirstToken(StoppingCriteria):
    """Calls a function when the second token was chosen, so that the first one did not wait; stops nothing."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._num_tokens = call, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Count a token; no row stops for it."""
        self._num_tokens += 1
        if self._num_tokens == 2:
            self._call()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

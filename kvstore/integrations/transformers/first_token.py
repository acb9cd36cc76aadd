"""Calling a function once, when the first new token is out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria


class AfterFirstToken(StoppingCriteria):
    """Calls a function once, when the second token was chosen, so that the first one did not wait; stops nothing."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._num_tokens = 0

    def call(self) -> None:
        """Make the call, unless it was made before."""
        call, self._call = self._call, None
        if call is not None:
            call()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Count a token; no row stops for it."""
        self._num_tokens += 1
        if self._num_tokens == 2:
            self.call()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

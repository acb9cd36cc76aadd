"""One step of a model over pages: where its new KV is written, and what its attention reads.

Has the form of transformers' caches, so that any decoder model computes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """A step of `num_rows` tokens, for the layers of one group.

    The rows are of three kinds, in this order: tokens whose KV is in pages already, new tokens, and padding.

    Args:
        start: position of the first row.
        num_rows: rows of the step.
        first: position of the first token that attention reads, at most `start`.
        first_new: row of the first new token.
        num_missing: of the tokens that attention reads, the first ones that have no page any more. No new token sees
            them, so they are read as zeros.
        read: int64, slots of the tokens from `first` + `num_missing` on, up to the last new one.
        write: int64, slots of the new tokens.
    """

    start: int
    num_rows: int
    first: int
    first_new: int
    num_missing: int
    read: Tensor
    write: Tensor


class PagedLayer(CacheLayerMixin):
    """KV of one layer during one step.

    Args:
        tensor: [P, B, T, H, D]; new KV is written into it.
        step: of the layer's group.
        is_sliding: whether the layer has a window; transformers makes its mask by that.
    """

    is_croppable = False

    def __init__(self, tensor: Tensor, step: GroupStep, is_sliding: bool) -> None:
        super().__init__()
        self._rows, self._step, self.is_sliding = tensor.flatten(1, 2), step, is_sliding
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pages are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens' KV [1, H, rows, D] into their slots; return what attention reads, [1, H, tokens, D]."""
        step, new = self._step, slice(self._step.first_new, self._step.first_new + len(self._step.write))
        num_heads, head_dim = key_states.shape[1], key_states.shape[3]
        num_tokens = step.start - step.first + step.num_rows
        read = key_states.new_empty(2, 1, num_heads, num_tokens, head_dim)
        end = step.num_missing + len(step.read)
        for plane, states in enumerate((key_states[0], value_states[0])):
            self._rows[plane].index_copy_(0, step.write, states[:, new].transpose(0, 1))
            read[plane, 0, :, : step.num_missing] = 0
            read[plane, 0, :, step.num_missing : end] = self._rows[plane].index_select(0, step.read).transpose(0, 1)
            read[plane, 0, :, end:] = states[:, new.stop :]
        return read[0], read[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens attention reads, and the position of the first."""
        return self._step.start - self._step.first + query_length, self._step.first

    def get_seq_length(self) -> int:
        """Return the position of the step's first row."""
        return self._step.start

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1


def step_cache(layers: list[PagedLayer]) -> Cache:
    """Return the cache of one step, to be passed to the model as `past_key_values`."""
    return Cache(layers=layers)

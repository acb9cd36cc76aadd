"""A sliding-window layer of a cache that keeps what has left the window until its blocks are saved."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvstore.errors import LayoutMismatch


class KeptWindowLayer(DynamicSlidingWindowLayer):
    """The sliding-window layer of transformers, with the columns before its window.

    Attention gets the tensors that it gets from the layer of transformers: the window and the new columns. So it
    costs the same and gives the same bits. Columns that leave the window are set aside until `forget`.

    Args:
        sliding_window: tokens that a token attends to, itself included; two or more.
    """

    #: Subclasses with a type would become the layers of all caches.
    _layer_type = None

    def __init__(self, sliding_window: int, **kwargs: Any) -> None:
        super().__init__(sliding_window, **kwargs)
        #: (K, V) of columns that left the window, in their order, each piece shorter than the one before; None when
        #: they are no longer kept.
        self._earlier: list[tuple[torch.Tensor, torch.Tensor]] | None = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add columns, [rows, heads, columns, head_dim]; return those that they attend to."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if not self.record_past:  # While it is on, nothing leaves before a crop.
            self._set_aside(keys, values, keys.shape[2] - self.keys.shape[2])
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove columns, as the layer of transformers does."""
        keys, values = self.keys, self.values
        super().crop(tokens_to_remove)
        if keys is not None:
            self._set_aside(keys, values, keys.shape[2] + tokens_to_remove - self.keys.shape[2])

    def reset(self) -> None:
        """Drop all columns."""
        super().reset()
        self._earlier = None if self._earlier is None else []

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace the rows by those that beam search goes on with."""
        super().reorder_cache(beam_idx)
        self._change_rows(lambda each: each.index_select(0, beam_idx.to(each.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)
        self._change_rows(lambda each: each.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows only."""
        super().batch_select_indices(indices)
        self._change_rows(lambda each: each[indices, ...])

    def num_columns(self) -> int:
        """Return how many columns were added and not taken back; 0 if the kept columns are not as many."""
        if self._earlier is None or self.keys is None:
            return int(self.cumulative_length)
        num_kept = sum(keys.shape[2] for keys, _ in self._earlier) + self.keys.shape[2]
        return num_kept if num_kept == self.cumulative_length else 0

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of all columns, [rows, heads, columns, head_dim]; valid until the layer is next used.

        Raises:
            LayoutMismatch: the columns before the window are no longer kept, or not all of them; nothing changed.
        """
        if self._earlier is None or self.num_columns() != self.cumulative_length or self.keys is None:
            raise LayoutMismatch(
                f"wanted all {self.cumulative_length} columns of a sliding-window layer, got those of its window of "
                f"{self.sliding_window} tokens; nothing is saved"
            )
        if not self._earlier:
            return self.keys, self.values
        keys = torch.cat([*(piece for piece, _ in self._earlier), self.keys], 2)
        values = torch.cat([*(piece for _, piece in self._earlier), self.values], 2)
        num_earlier = keys.shape[2] - self.keys.shape[2]
        # The pieces would be held a second time.
        self._earlier = [(keys[:, :, :num_earlier], values[:, :, :num_earlier])]
        return keys, values

    def forget(self) -> None:
        """Keep no columns before the window from now on."""
        self._earlier = None

    def _set_aside(self, keys: torch.Tensor, values: torch.Tensor, num_left: int) -> None:
        """Keep the first columns of what attention got."""
        if self._earlier is None or num_left <= 0:
            return
        piece = keys[:, :, :num_left], values[:, :, :num_left]
        if 2 * num_left < keys.shape[2]:  # A view would keep all of the tensor in memory.
            piece = piece[0].clone(), piece[1].clone()
        # Pieces of a token each are joined, so that a long answer is a few tensors, and each byte is copied seldom.
        while self._earlier and self._earlier[-1][0].shape[2] <= piece[0].shape[2]:
            before = self._earlier.pop()
            piece = torch.cat([before[0], piece[0]], 2), torch.cat([before[1], piece[1]], 2)
        self._earlier.append(piece)

    def _change_rows(self, change: Any) -> None:
        if self._earlier is not None:
            self._earlier = [(change(keys), change(values)) for keys, values in self._earlier]

"""The paged KV cache of one transformers model: tensors, and the index of their pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvstore.bounds import check_count
from kvstore.errors import ConfigError
from kvstore.integrations.transformers.paged.geometry import read_groups
from kvstore.kernels.reference import torch_dtype
from kvstore.paged.cache import PagedPrefixCache
from kvstore.paged.copying import PageCopy
from kvstore.paged.groups import PageGroup

_MAX_STEP_TOKENS = 4096


class PagedKVCache:
    """Hold the KV of a model in pages. Letters of dims: the legend in kvstore.engine.layout; a page is a block B.

    Args:
        model: a decoder model in eval mode; it is tried out on a few tokens.
        page_size: tokens of a page, 1 .. 256.
        num_pages: pages of the layers that see all tokens.
        num_window_pages: pages of the layers of each window; None for `num_pages`. A request needs those of its window
            and of the tokens that are computed at once.
        align_tokens: tokens of a stored block; a window then begins at a block. A multiple or a divisor of page_size.
        step_tokens: rows of each step of the model (see `PagedRunner`). More make a prompt faster, and a single token
            slower. KV of steps of another size differs in rounding, and is not shared.

    Raises:
        UnsupportedModel: the KV of the model has no pages; the message says what is supported.
        InvalidRequest: this is no model with `generate`, it is in training mode, autocast is on, or step_tokens is out
            of range.
        ConfigError: a size is out of range, align_tokens does not fit, or transformers is too old.
    """

    def __init__(
        self,
        model: Any,
        *,
        page_size: int = 16,
        num_pages: int = 256,
        num_window_pages: int | None = None,
        align_tokens: int = 1,
        step_tokens: int = 16,
    ) -> None:
        self.model = model
        self.step_tokens = check_count("step_tokens", step_tokens, 1, _MAX_STEP_TOKENS)
        self.layer_groups, self.device = read_groups(model)
        windows = [group.window_tokens for group in self.layer_groups]
        page_groups = [
            PageGroup(
                window_tokens=window, num_pages=None if window is None else num_window_pages, align_tokens=align_tokens
            )
            for window in windows
        ]
        self.index = PagedPrefixCache(page_size, num_pages, page_groups)
        """Which pages hold which tokens. The group `i` of its calls are the layers of `layer_groups[i]`."""
        if align_tokens % page_size and page_size % align_tokens:
            raise ConfigError(
                f"align_tokens: wanted a multiple or a divisor of page_size {page_size}, got {align_tokens}"
            )
        self.tensors: tuple[tuple[Tensor, ...], ...] = tuple(
            tuple(
                torch.zeros(
                    (2, allocator.num_pages, page_size, group.token_shape.num_kv_heads, group.token_shape.head_dim),
                    dtype=torch_dtype(group.token_shape.dtype),
                    device=self.device,
                )
                for _ in group.layers
            )
            for group, allocator in zip(self.layer_groups, self.index.allocators, strict=True)
        )
        """For each group, for each of its layers, K and V as [P, B, T, H, D]."""

    @property
    def page_size(self) -> int:
        """Return the tokens of a page."""
        return self.index.page_size

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the first tokens of pages, as `PagedRequest.prepare_copy` says."""
        for each in copies:
            for tensor in self.tensors[each.group]:
                tensor[:, each.target_page, : each.num_tokens] = tensor[:, each.source_page, : each.num_tokens]

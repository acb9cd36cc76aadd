"""The order inside a block of vLLM's CPU attention, which tensor shapes do not show.

Its kernels keep a block's keys as [head_dim, tokens] and its values as [tokens, head_dim], one behind the other, or in
tiles. Whole blocks can be copied as they are. To cut a block into tokens, its keys are transposed first. Caches on a
GPU are rows of one token each, and need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvstore.engine.registered import Registered
from kvstore.errors import ConfigError

#: Kernels whose order is keys [head_dim, tokens], then values [tokens, head_dim].
_KEYS_TURNED = ("vec", "vec16")


def order_inside(config: Any, name: str, tensor: Tensor, spec: Any) -> str:
    """Return the name of the order inside a block, "" where it is rows of tokens.

    Args:
        config: vLLM's.
        name: of a layer.
        tensor: its cache.
        spec: of the KV cache group.
    """
    if tensor.device.type != "cpu":
        return ""
    layer = config.compilation_config.static_forward_context.get(name)
    found = getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)
    if found is None:
        try:
            from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
        except ImportError:
            return "unknown"
        found = _get_attn_isa(spec.dtype, int(spec.block_size), int(spec.head_size))
    return str(found)


class TokenRows:
    """A second cache with the same block ids, in rows of tokens; `take` and `give` copy the blocks in use.

    Args:
        tensors: the engine's, one per layer.
        order: as `order_inside` returns it.
        head_dim: elements of a row of K or V.

    Raises:
        ConfigError: blocks of that order cannot be cut into tokens.
    """

    def __init__(self, tensors: Sequence[Tensor], order: str, head_dim: int) -> None:
        if order not in _KEYS_TURNED:
            raise ConfigError(
                f"kv_connector_extra_config['portable']: wanted an attention kernel whose order inside a block is "
                f"known ({', '.join(_KEYS_TURNED)}), got {order!r}; leave portable out, and give all engines "
                "that share one block size"
            )
        self._registered = Registered(list(tensors))
        self._pairs = [_keys_and_values(tensor, head_dim) for tensor in tensors]
        #: One per layer, [num_blocks, 2, num_kv_heads, block_size, head_dim]; memory is taken as blocks are used.
        self.tensors = [torch.empty((v.shape[0], 2, *v.shape[1:]), dtype=v.dtype) for _, v in self._pairs]

    def take(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from the engine's cache to this one.

        Raises:
            LayoutMismatch: the engine's tensors are not the registered ones.
        """
        self._registered.check()
        ids = torch.as_tensor(block_ids, dtype=torch.int64)
        for (keys, values), rows in zip(self._pairs, self.tensors, strict=True):
            rows[ids, 0] = keys[ids].transpose(-1, -2)
            rows[ids, 1] = values[ids]

    def give(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from this cache to the engine's; nothing else of the engine's cache is written.

        Raises:
            LayoutMismatch: the engine's tensors are not the registered ones.
        """
        self._registered.check()
        ids = torch.as_tensor(block_ids, dtype=torch.int64)
        for (keys, values), rows in zip(self._pairs, self.tensors, strict=True):
            keys[ids] = rows[ids, 0].transpose(-1, -2)
            values[ids] = rows[ids, 1]


def _keys_and_values(tensor: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """View a layer's cache as keys [B, H, D, T] and values [B, H, T, D]."""
    if tensor.dim() == 5:
        keys, values = tensor.unbind(0)
        return keys.view(*keys.shape[:2], head_dim, keys.shape[2]), values
    blocks, heads, tokens, _ = tensor.shape
    both = tensor.view(blocks, heads, 2, tokens * head_dim)
    keys = both[:, :, 0].view(blocks, heads, head_dim, tokens)
    return keys, both[:, :, 1].view(blocks, heads, tokens, head_dim)

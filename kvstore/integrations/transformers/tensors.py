"""Digests of plain tensors, whose bytes in memory are all of their content."""

from __future__ import annotations

import json
from hashlib import sha256

import torch

from kvstore.errors import UnsupportedModel

_PIECE_BYTES = 64 << 20

_HOLD_MORE = ("is_quantized", "is_nested", "is_mkldnn", "is_sparse", "is_sparse_csr")
"""Attributes of tensors that have scales, offsets, indexes or their own order besides the elements."""


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """Return SHA-256 over dtype, shape and all bytes of a tensor, in hex.

    Raises:
        UnsupportedModel: it is not in memory, or its bytes are not all of its content; pass model_id then.
    """
    if why := _why_not(tensor):
        raise UnsupportedModel(
            f"wanted weights that lie in memory as plain tensors, got {name} {why}, of which no digest can be taken; "
            "pass model_id= with a name that only these weights have"
        )
    digest = sha256(json.dumps([str(tensor.dtype), list(tensor.shape)]).encode())
    flat = tensor.detach().reshape(-1)
    for piece in torch.split(flat, max(1, _PIECE_BYTES // tensor.element_size())):
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _why_not(tensor: torch.Tensor) -> str:
    """Return why a tensor's bytes are not all of its content; empty for a plain tensor."""
    # Quantised and distributed tensors keep scales or shards where no digest would see them.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"a {type(tensor).__name__}"
    if tensor.is_meta:
        return "on the meta device"
    if found := [name for name in _HOLD_MORE if getattr(tensor, name)]:
        return f"with {found[0]}"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    # Views of another tensor's bytes, whose signs are flipped when they are read.
    if found := [name for name, is_on in (("is_conj", tensor.is_conj()), ("is_neg", tensor.is_neg())) if is_on]:
        return f"with {found[0]}"
    return ""

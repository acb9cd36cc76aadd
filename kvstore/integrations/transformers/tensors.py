"""Digests of plain tensors, whose bytes in memory are all of their content."""

from __future__ import annotations

import json
from hashlib import sha256

import torch

from kvstore.errors import UnsupportedModel

_PIECE_BYTES = 64 << 20


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes in memory are all of its content.

    Quantised and distributed tensors keep scales or shards elsewhere; the signs of some views are flipped when they are
    read.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """Return SHA-256 over dtype, shape and all bytes of a tensor, in hex.

    Raises:
        UnsupportedModel: it is not in memory, or its bytes are not all of its content; pass model_id then.
    """
    if not is_plain(tensor):
        raise UnsupportedModel(
            f"wanted weights that lie in memory as plain tensors, got {name} (a {type(tensor).__name__} of "
            f"{tensor.layout} on {tensor.device}), of which no digest can be taken; pass model_id= with a name that "
            "only these weights have"
        )
    digest = sha256(json.dumps([str(tensor.dtype), list(tensor.shape)]).encode())
    flat = tensor.detach().reshape(-1)
    for piece in torch.split(flat, max(1, _PIECE_BYTES // tensor.element_size())):
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

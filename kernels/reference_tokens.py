"""The torch oracle of pack.cu: the same copies token by token, by plain indexing, on any device.

Written to be obviously right and to share nothing with the checked code: it has no spans, no strides of a slot and no
word widths. Letters of dims: see stored.py and plan.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.kernels.reference import torch_dtype
from kvstore.kernels.stored import StoredBlock

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def token_pairs(
    engine_tokens: Sequence[int],
    slot_ids: Sequence[int],
    stored_block_size: int,
    num_tokens: int,
    skip_prefix_tokens: int = 0,
) -> list[tuple[int, int, int]]:
    """Return (flat token of the engine, slot, token of its block) for every copied token."""
    pairs = []
    for token in range(skip_prefix_tokens, num_tokens):
        place, slot = engine_tokens[token], slot_ids[token // stored_block_size]
        if place >= 0 and slot >= 0:
            pairs.append((place, slot, token % stored_block_size))
    return pairs


def flat_tokens(block_ids: Sequence[int], engine_block_size: int) -> list[int]:
    """Return the flat token slots of whole engine blocks; -1 for tokens of negative blocks."""
    return [
        block * engine_block_size + offset if block >= 0 else -1
        for block in block_ids
        for offset in range(engine_block_size)
    ]


def slot_sections(slots: Tensor, stored: StoredBlock) -> list[Tensor]:
    """View slots as the tensors of a block: the planes, then the side tensors.

    Args:
        slots: uint8 `[S, slot_bytes]`, contiguous.
        stored: the block.

    Returns:
        Per tensor `[S, G, H, L, P, T, D]`, as integers of its elements' width, sharing the slots' memory; H is 1 if the
        tensor has no heads, and T is 1 if it has no tokens.
    """
    groups, heads, per_group, _, tokens, _ = stored.block_dims
    whole = slots[:, : stored.block_bytes].view(-1, groups, stored.block_bytes // groups)
    of_heads = whole[..., : heads * stored.head_bytes].view(-1, groups, heads, stored.head_bytes)
    of_groups = whole[..., None, heads * stored.head_bytes :]
    sections, ends = [], {True: 0, False: 0}
    for tensor in stored.tensors:
        held, rows = of_heads if tensor.per_head else of_groups, tokens if tensor.per_token else 1
        begin, num_bytes = ends[tensor.per_head], per_group * tensor.num_planes * rows * tensor.row_bytes
        part = held[..., begin : begin + num_bytes].view(_BITS[torch_dtype(tensor.dtype).itemsize])
        sections.append(part.view(-1, groups, held.shape[2], per_group, tensor.num_planes, rows, tensor.dim))
        ends[tensor.per_head] = begin + -(-num_bytes // 16) * 16
    return sections


def pack_tokens(
    views: Sequence[Sequence[Tensor]],
    slots: Tensor,
    stored: StoredBlock,
    pairs: Sequence[tuple[int, int, int]],
    layers: range,
    heads: range,
) -> None:
    """Copy tokens of an engine into slots.

    Args:
        views: per tensor of the block, the engine's views as for `plan_copy`. Only read.
        slots: uint8 `[S, slot_bytes]`, written.
        stored: the block.
        pairs: from `token_pairs`.
        layers: layers that the engine holds.
        heads: heads that the engine holds.
    """
    for view, piece, size in _pieces(views, slots, stored, layers, heads):
        for place, slot, token in pairs:
            # A row that all tokens share is copied with each of them.
            piece[slot, :, :, token % piece.shape[3]] = view[place // size, :, :, place % size % view.shape[3]]


def unpack_tokens(
    slots: Tensor,
    views: Sequence[Sequence[Tensor]],
    stored: StoredBlock,
    pairs: Sequence[tuple[int, int, int]],
    layers: range,
    heads: range,
) -> None:
    """Copy tokens of slots into an engine; arguments as for `pack_tokens`."""
    for view, piece, size in _pieces(views, slots, stored, layers, heads):
        for place, slot, token in pairs:
            view[place // size, :, :, place % size % view.shape[3]] = piece[slot, :, :, token % piece.shape[3]]


def _pieces(
    views: Sequence[Sequence[Tensor]], slots: Tensor, stored: StoredBlock, layers: range, heads: range
) -> list[tuple[Tensor, Tensor, int]]:
    """Pair every view `[B, H, P, T, D]` with the piece `[S, H, P, T, D]` of the slots for the same KV.

    Each pair also has the engine's block size, because views without tokens do not show it.
    """
    pieces, size = [], views[0][0].shape[3]
    for section, group in zip(slot_sections(slots, stored), views, strict=True):
        per_layer = len(group) // len(layers)
        held = section.shape[4] // per_layer
        for index, view in enumerate(group):
            layer, plane = layers[index // per_layer], index % per_layer * held
            g, inside = divmod(layer, stored.block_dims[2])
            chosen = slice(heads.start, heads.stop) if section.shape[2] == stored.num_heads else slice(1)
            piece = section[:, g, chosen, inside, plane : plane + held]
            pieces.append((view.view(section.dtype), piece, size))
    return pieces

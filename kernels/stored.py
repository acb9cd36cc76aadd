"""The place of every byte of a stored block in its slot, including side tensors and parts.

Letters of dims: G layer group, H head, L layer within its group, P plane, T token, D dim. A block lies as
[G, H, L, P, T, D]. Side tensors, such as the scales of a quantised cache, travel behind the planes of their head,
and those without heads behind all heads of their group:

    slot ─► group 0: head 0: [L, P, T, D] [side 0: L, P', T, D'] ... | head 1: ... | [side: L, P', T, D'] | group 1: ...

So the part of one tensor- or pipeline-parallel rank is still one run of bytes, and moves as one descriptor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ELEMENT_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element of every dtype that a block may hold."""

_SIDE_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A side tensor: a row of `dim` elements for every layer, plane, and head and token if it has them.

    Writing a row that is for all tokens of a block changes the meaning of all of them. So blocks with such a side are
    only copied whole, between blocks of one size. A scale for a whole layer is not a side tensor: it belongs to the
    engine's configuration.

    Args:
        num_planes: its planes; 2 when K and V have separate rows.
        dim: elements of one row.
        dtype: name of the element type, a key of `ELEMENT_BYTES`.
        per_head: every head has its own rows; else one row is for all heads, and moves only with all of them.
        per_token: every token has its own rows; else one row is for all tokens of a block.
    """

    num_planes: int
    dim: int
    dtype: str
    per_head: bool = True
    per_token: bool = True

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return self.dim * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """The block of all layers and heads, as it lies in a slot.

    Args:
        block_dims: sizes [G, H, L, P, T, D].
        dtype: name of the element type, a key of `ELEMENT_BYTES`.
        sides: side tensors, in the order in which they lie.

    Raises:
        ValueError: a size is below 1, or the dtype is unknown.
    """

    block_dims: tuple[int, int, int, int, int, int]
    dtype: str
    sides: Sequence[Side] = ()

    def __post_init__(self) -> None:
        sizes = [*self.block_dims, *(size for side in self.sides for size in (side.num_planes, side.dim))]
        if len(self.block_dims) != 6 or min(sizes) < 1:
            raise ValueError(
                f"StoredBlock: wanted six sizes [G, H, L, P, T, D] >= 1 and sides of sizes >= 1, got "
                f"{list(self.block_dims)} and {list(self.sides)}"
            )
        for dtype in (self.dtype, *(side.dtype for side in self.sides)):
            if dtype not in ELEMENT_BYTES:
                raise ValueError(f"StoredBlock: wanted a dtype of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")

    @property
    def num_layers(self) -> int:
        """Return the number of layers of the whole block."""
        return self.block_dims[0] * self.block_dims[2]

    @property
    def num_heads(self) -> int:
        """Return the number of heads of the whole block."""
        return self.block_dims[1]

    @property
    def tensors(self) -> list[Side]:
        """Return the planes as a tensor, then the side tensors."""
        return [Side(num_planes=self.block_dims[3], dim=self.block_dims[5], dtype=self.dtype), *self.sides]

    def rows_of(self, tensor: Side) -> int:
        """Return the rows of a tensor in one block for a layer, plane and head."""
        return self.block_dims[4] if tensor.per_token else 1

    def section_bytes(self, index: int) -> int:
        """Return the bytes of tensor `index` in a group, and in one head if it has heads, without padding."""
        tensor = self.tensors[index]
        return self.block_dims[2] * tensor.num_planes * self.rows_of(tensor) * tensor.row_bytes

    def section_offset(self, index: int) -> int:
        """Return the offset of tensor `index` in its head, or in its group if it has no heads."""
        per_head = self.tensors[index].per_head
        return (0 if per_head else self.num_heads * self.head_bytes) + self._extent(per_head, index)

    @property
    def head_bytes(self) -> int:
        """Return the distance between two heads of a group."""
        return self._extent(True, len(self.tensors)) if self.sides else self.section_bytes(0)

    @property
    def group_bytes(self) -> int:
        """Return the distance between two layer groups."""
        return self.num_heads * self.head_bytes + self._extent(False, len(self.tensors))

    def _extent(self, per_head: bool, end: int) -> int:
        """Return the bytes of the tensors below `end` that are in a head, or after all heads."""
        tensors = self.tensors[:end]
        return sum(_aligned(self.section_bytes(at)) for at, found in enumerate(tensors) if found.per_head == per_head)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block."""
        return self.block_dims[0] * self.group_bytes

    def part(self, tp_rank: int, tp_size: int, pp_rank: int = 0, pp_size: int = 1) -> tuple[range, range]:
        """Return the layers and the heads of one rank; their bytes are one run of the slot when pp or tp is 1.

        Raises:
            ValueError: a rank is not below its size, or a size does not divide what it splits.
        """
        groups, heads = self.block_dims[0], self.num_heads
        if not (0 <= tp_rank < tp_size and 0 <= pp_rank < pp_size):
            raise ValueError(
                f"part: wanted ranks below their sizes, got tp {tp_rank} of {tp_size}, pp {pp_rank} of {pp_size}"
            )
        if heads % tp_size:
            raise ValueError(
                f"part: wanted tp_size to divide the {heads} KV heads of a block, got tp_size={tp_size}; where heads "
                "are replicated, let one rank of each set of replicas save"
            )
        if groups % pp_size:
            raise ValueError(
                f"part: wanted pp_size to divide the {groups} layer groups of a block, got pp_size={pp_size}; store "
                f"blocks with num_layer_groups as a multiple of {pp_size}"
            )
        layers = self.num_layers // pp_size
        held = heads // tp_size
        return range(pp_rank * layers, (pp_rank + 1) * layers), range(tp_rank * held, (tp_rank + 1) * held)

    def runs(self, layers: range, heads: range) -> list[tuple[int, int]]:
        """Return (offset, bytes) of the slot's runs that hold these heads of these layers' groups.

        Side tensors without heads are included only with all heads.
        """
        per_group = self.block_dims[2]
        if layers.start % per_group or layers.stop % per_group:
            raise ValueError(f"runs: wanted whole groups of {per_group} layers, got {layers}")
        groups = range(layers.start // per_group, layers.stop // per_group)
        if len(heads) == self.num_heads:
            return [(groups.start * self.group_bytes, len(groups) * self.group_bytes)]
        return [
            (group * self.group_bytes + heads.start * self.head_bytes, len(heads) * self.head_bytes) for group in groups
        ]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _SIDE_ALIGN_BYTES) * _SIDE_ALIGN_BYTES

"""Where every byte of a stored block lies in its slot, side tensors and parts included.

Letters of dims: G layer group, H head, L layer within its group, P plane, T token, D dim. A block lies as
[G, H, L, P, T, D]. Side tensors, such as the scales of a quantised cache, travel behind the planes of their head:

    slot ─► group 0: head 0: [L, P, T, D] [side 0: L, P', T, D'] ... | head 1: ... | group 1: ...

so that what one tensor- or pipeline-parallel rank owns is still one run of bytes, and moves as one descriptor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.kernels.reference import torch_dtype

_SIDE_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A side tensor: `dim` elements for every token, head, layer and plane.

    A scale for a whole block is none: it could not be written without changing what tokens below a skipped
    prefix mean. A scale for a whole layer belongs to the engine's configuration.

    Args:
        num_planes: its planes; 2 when K and V have each their own.
        dim: elements of one row.
        dtype: name of the element type, as for `torch_dtype`.
    """

    num_planes: int
    dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dim * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """The block of all layers and heads, as it lies in a slot.

    Args:
        block_dims: sizes [G, H, L, P, T, D].
        dtype: name of the element type, as for `torch_dtype`.
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
            torch_dtype(dtype)

    @property
    def num_layers(self) -> int:
        """Layers of the whole block."""
        return self.block_dims[0] * self.block_dims[2]

    @property
    def num_heads(self) -> int:
        """Heads of the whole block."""
        return self.block_dims[1]

    @property
    def tensors(self) -> list[Side]:
        """The planes themselves, then the side tensors."""
        return [Side(num_planes=self.block_dims[3], dim=self.block_dims[5], dtype=self.dtype), *self.sides]

    def section_bytes(self, index: int) -> int:
        """Bytes of tensor `index` for one head of one group, without what aligns the next one."""
        return self.block_dims[2] * self.tensors[index].num_planes * self.block_dims[4] * self.tensors[index].row_bytes

    def section_offset(self, index: int) -> int:
        """Distance of tensor `index` from the begin of its head."""
        return sum(_aligned(self.section_bytes(before)) for before in range(index))

    @property
    def head_bytes(self) -> int:
        """Distance between two heads of a group."""
        if not self.sides:
            return self.section_bytes(0)
        return _aligned(self.section_offset(len(self.sides)) + self.section_bytes(len(self.sides)))

    @property
    def group_bytes(self) -> int:
        """Distance between two layer groups."""
        return self.num_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
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
        """Return (offset, bytes) of the runs of a slot that hold these heads of the groups of these layers."""
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

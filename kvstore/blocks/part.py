"""Define the part of every block that one rank of an engine holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.blocks.shape import KVShape
from kvstore.bounds import MAX_PARTS, clip
from kvstore.errors import ConfigError, LayoutMismatch


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of every block, in the order (tp_rank, tp_size, pp_rank, pp_size).

    Tensor-parallel ranks divide the heads, pipeline-parallel ranks the layers, both evenly and in order.

    Raises:
        ConfigError: a rank is not below its size, or a block has too many parts.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int

    def __post_init__(self) -> None:
        for name, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
                raise ConfigError(
                    f"Part: wanted 0 <= {name}_rank < {name}_size as ints, got {clip(rank)} of {clip(size)}; count "
                    "ranks from 0"
                )
        if self.num_parts > MAX_PARTS:
            raise ConfigError(
                f"Part: wanted at most {MAX_PARTS} parts of a block, got {clip(self.tp_size)} * {clip(self.pp_size)}"
            )

    @property
    def ranks(self) -> tuple[int, int, int, int]:
        """The same as a tuple, in the order above."""
        return self.tp_rank, self.tp_size, self.pp_rank, self.pp_size

    @property
    def num_parts(self) -> int:
        """Parts of a block; it is published when all of them are written."""
        return self.tp_size * self.pp_size

    @property
    def index(self) -> int:
        """Number of this part, below `num_parts`."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def check(self, shape: KVShape) -> None:
        """Check that the blocks of a shape can be divided among these ranks.

        Raises:
            LayoutMismatch: the number of ranks does not divide the heads or layer groups, or a side tensor has one
                row for all heads while several ranks share them.
        """
        if shape.num_kv_heads % self.tp_size:
            raise LayoutMismatch(
                f"part: wanted tp_size to divide the {shape.num_kv_heads} KV heads of a block, got tp_size="
                f"{self.tp_size}; where several ranks hold the same heads, count the sets of heads instead of the "
                "ranks, and give ranks with the same heads the same part"
            )
        if shape.num_layer_groups % self.pp_size:
            raise LayoutMismatch(
                f"part: wanted pp_size to divide the {shape.num_layer_groups} layer groups of a block, got pp_size="
                f"{self.pp_size}; use KVShape(num_layer_groups=) with a multiple of {self.pp_size} that divides the "
                f"{shape.num_layers} layers, for all engines that share these blocks"
            )
        shared = [side.name for side in shape.sides if not side.per_head]
        if self.tp_size > 1 and shared:
            raise LayoutMismatch(
                f"part: wanted tp_size=1, because side tensors {shared} have one row for all "
                f"{shape.num_kv_heads} heads, got tp_size={self.tp_size}; use SideTensor(per_head=True), "
                "each rank with the rows of its own heads"
            )

    def ranges(self, shape: KVShape) -> tuple[range, range]:
        """Return (layers, heads) of a block that this rank holds."""
        layers, heads = shape.num_layers // self.pp_size, shape.num_kv_heads // self.tp_size
        return (
            range(self.pp_rank * layers, (self.pp_rank + 1) * layers),
            range(self.tp_rank * heads, (self.tp_rank + 1) * heads),
        )

    def held(self, shape: KVShape) -> KVShape:
        """Return the shape of this rank's part of a block.

        Raises:
            LayoutMismatch: as for `check`.
        """
        self.check(shape)
        return replace(
            shape,
            num_layers=shape.num_layers // self.pp_size,
            num_kv_heads=shape.num_kv_heads // self.tp_size,
            num_layer_groups=shape.num_layer_groups // self.pp_size,
        )


WHOLE = Part(0, 1, 0, 1)


def as_part(part: Part | Sequence[int] | None) -> Part:
    """Return a user's argument as a `Part`: a Part, four numbers, or None (the whole block).

    Raises:
        ConfigError: they are not four ints, a rank is not below its size, or a block has too many parts.
    """
    if part is None:
        return WHOLE
    if isinstance(part, Part):
        return part
    if not isinstance(part, Sequence) or isinstance(part, str | bytes) or len(part) != 4:
        raise ConfigError(f"part: wanted (tp_rank, tp_size, pp_rank, pp_size), got {part!r}")
    return Part(*part)

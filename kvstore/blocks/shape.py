"""Define the stored block: its content, its size, and the order of its bytes.

A block's bytes lie in its slot as [G, H, L, P, T, D] (letters: the legend in kvstore/engine/layout.py;
G = layer group, L = layer within its group). Heads are outside layers, so the bytes of every
tensor-parallel rank are one contiguous run; layer groups are outside heads for the same reason, for
pipeline-parallel ranks. Side tensors lie behind the planes of their head, see kernels/stored.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from kvstore.bounds import MAX_BLOCK_BYTES, clip
from kvstore.errors import ConfigError
from kvstore.kernels.stored import ELEMENT_BYTES, Side, StoredBlock

BLOCK_ORDER_VERSION = 1
"""Version of the byte order above. Part of every namespace, so blocks in another order never hit."""


class Planes(Enum):
    """How K and V share a block."""

    KV_SPLIT = "kv"
    """K and V are two planes of rows of head_dim."""

    KV_PACKED = "packed"
    """One plane; a row holds K then V, 2 * head_dim elements."""

    SINGLE = "single"
    """One plane of rows of head_dim, for example an MLA latent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideTensor:
    """A tensor beside each layer's cache, without which an engine cannot read it, such as scales.

    Its bytes are part of the block: they are stored, found, moved and evicted with it. The namespace covers it.

    Args:
        name: the name under which `register_kv_caches` gets the tensors.
        dtype: name of the element type, a key of `ELEMENT_BYTES`.
        dim: elements of one row. A row belongs to one layer, and to one head and one token if the flags below say so.
        per_head: each KV head has its own rows. A row for all heads cannot be divided among tensor-parallel ranks.
        per_token: each token has its own rows. With one row for all tokens of a block, engines need the stored block
            size, and a load skips whole blocks only.

    Raises:
        ConfigError: a value cannot work.
    """

    name: str
    dtype: str
    dim: int = 1
    per_head: bool = True
    per_token: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"SideTensor: wanted name as text that is not empty, got {self.name!r}; name what it is")
        _check_count("SideTensor", "dim", self.dim)
        _check_dtype("SideTensor", self.dtype)
        for name in ("per_head", "per_token"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(
                    f"SideTensor: wanted {name} as True or False, got {getattr(self, name)!r}; pass a plain bool"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Describe the stored block of the whole model. It has all layers and heads, before any TP or PP split.

    Args:
        num_layers: layers of the model that hold KV.
        num_kv_heads: KV heads of the whole model; 1 for an MLA latent.
        head_dim: elements of one K (or V, or latent) row.
        dtype: name of the element type, a key of `ELEMENT_BYTES`.
        block_size: tokens per block.
        planes: a `Planes`, or its value as a string.
        num_layer_groups: number of contiguous groups of layers; a multiple of the largest
            pipeline-parallel size that shares these blocks. Must divide num_layers.
        sides: tensors beside the caches; always kept sorted by name.

    Raises:
        ConfigError: a value cannot work, or a block has 4 GiB or more.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 16
    planes: Planes | str = Planes.KV_SPLIT
    num_layer_groups: int = 1
    sides: Sequence[SideTensor] = ()
    #: Bytes of one block, side tensors included. Cached, because every job reads it.
    block_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_layer_groups"):
            _check_count("KVShape", name, getattr(self, name))
        _check_dtype("KVShape", self.dtype)
        try:
            object.__setattr__(self, "planes", Planes(self.planes))
        except ValueError as cause:
            wanted = ", ".join(repr(plane.value) for plane in Planes)
            raise ConfigError(
                f"KVShape: wanted planes as a Planes or one of {wanted}, got {self.planes!r}; "
                "use 'kv' when K and V are apart, 'packed' when a row holds both, 'single' for MLA"
            ) from cause
        if self.num_layers % self.num_layer_groups:
            raise ConfigError(
                f"KVShape: wanted num_layer_groups to divide num_layers={clip(self.num_layers)}, "
                f"got {clip(self.num_layer_groups)}; choose a divisor"
            )
        sides = self.sides
        if not isinstance(sides, Sequence) or not all(isinstance(side, SideTensor) for side in sides):
            raise ConfigError(f"KVShape: wanted sides as a list of SideTensor, got {sides!r}; make one for each tensor")
        names = sorted(side.name for side in sides)
        if len(set(names)) != len(names):
            raise ConfigError(f"KVShape: wanted sides of different names, got {names}; K and V have one each")
        object.__setattr__(self, "sides", tuple(sorted(sides, key=lambda side: side.name)))
        object.__setattr__(self, "block_bytes", self.stored_block.block_bytes)
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise ConfigError(
                f"KVShape: wanted blocks of at most {MAX_BLOCK_BYTES} bytes, got {clip(self.block_bytes)} bytes from "
                f"num_layers={clip(self.num_layers)}, num_kv_heads={clip(self.num_kv_heads)}, "
                f"head_dim={clip(self.head_dim)}, block_size={clip(self.block_size)} and {len(self.sides)} sides; take "
                "a smaller block_size, or check the numbers"
            )

    @property
    def num_planes(self) -> int:
        """Planes of a block: 2 when K and V are apart, else 1."""
        return 2 if self.planes is Planes.KV_SPLIT else 1

    @property
    def row_dim(self) -> int:
        """Elements of one row: one token, head and plane."""
        return 2 * self.head_dim if self.planes is Planes.KV_PACKED else self.head_dim

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def stored_block(self) -> StoredBlock:
        """The position of every byte of a block in its slot."""
        sides = tuple(
            Side(num_planes=1, dim=side.dim, dtype=side.dtype, per_head=side.per_head, per_token=side.per_token)
            for side in self.sides
        )
        return StoredBlock(block_dims=self.block_dims, dtype=self.dtype, sides=sides)

    @property
    def block_dims(self) -> tuple[int, int, int, int, int, int]:
        """Sizes of a block in its slot, [G, H, L, P, T, D], outermost first."""
        return (
            self.num_layer_groups,
            self.num_kv_heads,
            self.num_layers // self.num_layer_groups,
            self.num_planes,
            self.block_size,
            self.row_dim,
        )

    def of_side(self, side: SideTensor) -> KVShape:
        """Return the shape of a side tensor by itself: one plane; 1 head or 1 token where rows are shared."""
        return replace(
            self,
            num_kv_heads=self.num_kv_heads if side.per_head else 1,
            head_dim=side.dim,
            dtype=side.dtype,
            block_size=self.block_size if side.per_token else 1,
            planes=Planes.SINGLE,
            sides=(),
        )

    def canonical(self) -> bytes:
        """Encode the shape and the byte order; equal encodings mean equal blocks.

        Returns:
            ASCII JSON with sorted keys and no spaces, the same in every process and version.
        """
        fields: dict[str, object] = {
            "block_order_version": BLOCK_ORDER_VERSION,
            "block_size": self.block_size,
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "num_kv_heads": self.num_kv_heads,
            "num_layer_groups": self.num_layer_groups,
            "num_layers": self.num_layers,
            "planes": Planes(self.planes).value,
        }
        if self.sides:  # Without sides, the encoding is the one from before sides existed.
            fields["sides"] = [asdict(side) for side in self.sides]
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")


def _check_count(what: str, name: str, value: object) -> None:
    # type() and not isinstance(): True is an int, and numpy integers do not encode as JSON.
    if type(value) is not int or value < 1:
        raise ConfigError(f"{what}: wanted {name} as an int >= 1, got {clip(value)}; pass a plain positive int")


def _check_dtype(what: str, dtype: object) -> None:
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise ConfigError(
            f"{what}: wanted dtype as one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}; "
            "pass the name of the tensors' element type"
        )

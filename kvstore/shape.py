"""The stored block: what one block of KV holds, how big it is, and the order of its bytes.

A block's bytes lie in its slot as [G, H, L, P, T, D] (letters: the legend in layout.py;
G = layer group, L = layer within its group). Heads outside layers makes the bytes of every
tensor-parallel rank one contiguous run; layer groups outside heads does the same for every
pipeline-parallel rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from kvstore.errors import ConfigError

BLOCK_ORDER_VERSION = 1
"""Version of the byte order above. It is hashed into every namespace: another order never hits."""

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


class Planes(Enum):
    """How K and V share a block."""

    KV_SPLIT = "kv"
    """K and V are two planes of rows of head_dim."""

    KV_PACKED = "packed"
    """One plane; a row holds K then V, 2 * head_dim elements."""

    SINGLE = "single"
    """One plane of rows of head_dim, for example an MLA latent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Describe the stored block of the whole model: all layers and all heads, before any TP or PP split.

    Args:
        num_layers: layers of the model that hold KV.
        num_kv_heads: KV heads of the whole model; 1 for an MLA latent.
        head_dim: elements of one K (or V, or latent) row.
        dtype: name of the element type, a key of `ELEMENT_BYTES`.
        block_size: tokens per block.
        planes: a `Planes`, or its value as a string.
        num_layer_groups: contiguous groups the layers are stored in; a multiple of the largest
            pipeline-parallel size that shares these blocks. Must divide num_layers.

    Raises:
        ConfigError: a value cannot work.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 16
    planes: Planes | str = Planes.KV_SPLIT
    num_layer_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_layer_groups"):
            value = getattr(self, name)
            # type() and not isinstance(): True is an int, and numpy integers do not encode as JSON.
            if type(value) is not int or value < 1:
                raise ConfigError(f"KVShape: wanted {name} as an int >= 1, got {value!r}; pass a plain positive int")
        if not isinstance(self.dtype, str) or self.dtype not in ELEMENT_BYTES:
            raise ConfigError(
                f"KVShape: wanted dtype as one of {', '.join(ELEMENT_BYTES)}, got {self.dtype!r}; "
                "pass the name of the KV cache's element type"
            )
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
                f"KVShape: wanted num_layer_groups to divide num_layers={self.num_layers}, "
                f"got {self.num_layer_groups}; choose a divisor"
            )

    @property
    def num_planes(self) -> int:
        """Planes of a block: 2 when K and V are apart, else 1."""
        return 2 if self.planes is Planes.KV_SPLIT else 1

    @property
    def row_dim(self) -> int:
        """Elements of one row, of one token, head and plane."""
        return 2 * self.head_dim if self.planes is Planes.KV_PACKED else self.head_dim

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: all layers, heads and planes."""
        return self.num_layers * self.num_kv_heads * self.num_planes * self.row_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.token_bytes

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

    def canonical(self) -> bytes:
        """Encode the shape and the byte order; two shapes encode alike only if their blocks are alike.

        Returns:
            ASCII JSON with sorted keys and no spaces, the same in every process and version.
        """
        fields = {
            "block_order_version": BLOCK_ORDER_VERSION,
            "block_size": self.block_size,
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "num_kv_heads": self.num_kv_heads,
            "num_layer_groups": self.num_layer_groups,
            "num_layers": self.num_layers,
            "planes": Planes(self.planes).value,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")

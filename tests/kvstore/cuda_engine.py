"""An engine with a paged cache on a GPU, in any layout, whose blocks can be compared byte for byte."""

from __future__ import annotations

import torch

from kvstore.kernels.reference import torch_dtype

POISON = 0x5A
#: Name -> (planes of the shape, axes of a tensor). "pairs" are a tensor for K and one for V.
FORMS = {
    "NHD": ("kv", "PBTHD"),
    "NHD, blocks first": ("kv", "BPTHD"),
    "HND": ("kv", "BPHTD"),
    "pairs": ("kv", "pairs"),
    "packed": ("packed", "BHTD"),
    "cross-layer": ("kv", "BHLPTD"),
    "cross-layer, tokens outside": ("kv", "BLPTHD"),
    "MLA": ("single", "BTD"),
}


class CudaEngine:
    """Random caches of a client's part on a device, registered with it; `block_size` is the stored one by default."""

    def __init__(self, client, axes, num_blocks=64, copy_path="auto", device="cuda", block_size=None):
        self.client, self.axes, self.num_blocks = client, axes, num_blocks
        shape = client.part.held(client.space.shape)
        element = torch_dtype(shape.dtype)
        sizes = {
            "L": shape.num_layers, "B": num_blocks, "P": shape.num_planes, "T": block_size or shape.block_size,
            "H": shape.num_kv_heads, "D": shape.row_dim,
        }  # fmt: skip
        dims = [sizes[axis] for axis in ("BTHD" if axes == "pairs" else axes)]
        count = 1 if "L" in axes else shape.num_layers * (2 if axes == "pairs" else 1)
        self.tensors = [torch.empty(dims, dtype=element, device=device) for _ in range(count)]
        self.fill()
        caches = self.tensors
        if axes == "pairs":
            caches = list(zip(self.tensors[::2], self.tensors[1::2], strict=True))
        elif "L" in axes:
            caches = self.tensors[0]
        client.register_kv_caches(caches, None if axes == "pairs" else axes, copy_path=copy_path)

    @property
    def raw(self):
        """The same memory as bytes."""
        return [tensor.view(torch.uint8) for tensor in self.tensors]

    def fill(self):
        """Draw every byte anew."""
        for raw in self.raw:
            raw.random_(0, 256)

    def poison(self):
        for raw in self.raw:
            raw.fill_(POISON)

    def views(self):
        """The caches as `[L][B, H, P, T, D]`, sharing their memory, as integers of the elements' width."""
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.tensors[0].element_size()]
        tensors = [tensor.view(bits) for tensor in self.tensors]
        if self.axes == "pairs":
            return [
                torch.stack(pair, 1).permute(0, 3, 1, 2, 4) for pair in zip(tensors[::2], tensors[1::2], strict=True)
            ]
        axes = self.axes
        if "L" in axes:
            tensors, axes = list(tensors[0].unbind(axes.index("L"))), axes.replace("L", "")
        missing = "".join(axis for axis in "BHPTD" if axis not in axes)
        order = [(missing + axes).index(axis) for axis in "BHPTD"]
        return [tensor[(None,) * len(missing)].permute(order) for tensor in tensors]

    def tokens(self, ids):
        """Copy blocks to `[L, H, P, tokens, D]` on the CPU, the tokens of the blocks one after the other."""
        index = torch.as_tensor(list(ids), device=self.tensors[0].device)
        blocks = torch.stack([view[index] for view in self.views()])  # L n H P T D
        return blocks.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).cpu()

    def save(self, hashes, ids):
        return self.client.save(hashes, list(ids)).result(60)

    def load(self, hashes, ids, skip=0):
        return self.client.load(hashes, list(ids), skip).result(60)

"""The copy kernels alone: blocks of a CUDA cache of separate layers, packed, and unpacked into other blocks.

$ python examples/pack_blocks.py
packed 3 blocks of 2097152 bytes; unpacked all but their first 5 tokens: equal
"""

import numpy as np
import torch

from kvstore.kernels.gpu import GpuCopier
from kvstore.kernels.plan import plan_copy
from kvstore.kernels.spans import block_spans
from kvstore.kernels.stored import StoredBlock


def main() -> None:
    # An engine's cache: 32 layers of [block, plane, token, head, dim]. A stored block holds all layers, heads outside.
    cache = torch.randn(32, 64, 2, 16, 8, 128, device="cuda").to(torch.bfloat16)
    stored = StoredBlock(block_dims=(1, 8, 32, 2, 16, 128), dtype="bfloat16")
    copier = GpuCopier(plan_copy([layer.permute(0, 3, 1, 2, 4) for layer in cache], stored))
    slots = torch.empty(3, stored.block_bytes, dtype=torch.uint8, device="cuda")

    paging = copier.plan.paging
    copier.pack(copier.place(block_spans(paging, [7, 0, 42], np.arange(3), 3)), slots)
    copier.unpack(copier.place(block_spans(paging, [1, 9, 5], np.arange(3), 3, skip_prefix_tokens=5)), slots)

    same = torch.equal(cache[:, [0, 42]], cache[:, [9, 5]]) and torch.equal(cache[:, 7, :, 5:], cache[:, 1, :, 5:])
    print(
        f"packed 3 blocks of {stored.block_bytes} bytes; unpacked all but their first 5 tokens: "
        f"{'equal' if same else 'NOT equal'}"
    )


if __name__ == "__main__":
    main()

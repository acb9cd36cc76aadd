"""Random engines, slots and runs of tokens for tests of the copy kernels; the same on a CPU and on a GPU."""

from dataclasses import dataclass

import numpy as np
import torch

from kvstore.kernels import reference_tokens as oracle
from kvstore.kernels.plan import plan_copy
from kvstore.kernels.reference import torch_dtype
from kvstore.kernels.spans import block_spans, token_spans
from kvstore.kernels.stored import Side, StoredBlock

GUARD = 64
#: Axes of one view in the engine's memory. "cross" are one tensor for all layers.
ORDERS = ["BPTHD", "PBTHD", "BPHTD", "BHPTD", "HBPTD", "BPTDH", "pairs"]
CROSS = ["BHLPTD", "BLPTHD", "LBPTHD", "LPBTHD", "BLPHTD"]
DTYPES = ["bfloat16", "float32", "uint8", "float8_e4m3fn"]


def random_bytes(count, rng):
    return torch.from_numpy(rng.integers(0, 256, count, dtype=np.uint8))


@dataclass
class Engine:
    """One tensor of an engine: guarded raw bytes, and views [B, H, P, T, D] over them."""

    raw: torch.Tensor
    views: list[torch.Tensor]

    def on(self, device):
        """The same bytes elsewhere, viewed alike."""
        raw = self.raw.to(device, copy=True)
        views = [
            torch.empty(0, dtype=view.dtype, device=device).set_(
                raw.untyped_storage(), view.storage_offset(), view.shape, view.stride()
            )
            for view in self.views
        ]
        return Engine(raw, views)


def make_engine(rng, order, sizes, num_layers, dtype, shift=0):
    """Build one tensor of an engine in a memory order, padded and shifted at random."""
    element = torch_dtype(dtype)
    pairs, cross = order == "pairs", "L" in order
    axes = "BTHD" if pairs else order
    sizes = {**sizes, "L": num_layers}
    shape = [sizes[axis] for axis in axes]
    padding = int(rng.choice([0, 0, 0, 3]))
    padded = [*shape[:-1], shape[-1] + padding]
    count = 1 if cross else num_layers * (sizes["P"] if pairs else 1)
    num_bytes = int(np.prod(padded)) * element.itemsize
    step = -(-num_bytes // 16) * 16 + GUARD
    raw = random_bytes(count * step + 2 * GUARD, rng)
    views = []
    for index in range(count):
        start = GUARD + index * step + shift * element.itemsize
        tensor = raw[start : start + num_bytes].view(element).view(padded)[..., : shape[-1]]
        if cross:
            views += [
                t.permute([axes.replace("L", "").index(a) for a in "BHPTD"]) for t in tensor.unbind(axes.index("L"))
            ]
        elif pairs:
            views.append(tensor.permute(0, 2, 1, 3)[:, :, None])
        else:
            views.append(tensor.permute([axes.index(axis) for axis in "BHPTD"]))
    return Engine(raw, views)


class Case:
    """An engine, the slots of a stored block, and one run of tokens, all drawn from a seed.

    With `shared` there are side tensors of which all heads or all tokens of a block share a row.
    """

    def __init__(self, seed, order=None, dtype=None, token_mode=None, big=False, shared=False):
        rng = self.rng = np.random.default_rng(seed)
        order = order or str(rng.choice(ORDERS + CROSS))
        dtype = dtype or str(rng.choice(DTYPES))
        self.token_mode = bool(rng.integers(2)) if token_mode is None else token_mode
        groups, heads = int(rng.choice([1, 2])), int(rng.choice([1, 2, 4]))
        per_group, planes = int(rng.integers(1, 3)), 1 if rng.random() < 0.3 else 2
        stored_size, engine_size = [(4, 4), (4, 8), (8, 2), (6, 3), (4, 1), (16, 16)][int(rng.integers(6))]
        dim = int(rng.choice([1, 3, 8, 16, 36, 41, 128] if big else [1, 3, 8, 16, 36]))
        sides = (Side(num_planes=planes, dim=1, dtype="float32"),) if rng.random() < 0.3 else ()
        if sides and rng.random() < 0.5:
            sides += (Side(num_planes=1, dim=3, dtype="uint8"),)
        if shared:
            kinds = [dict(zip(("per_head", "per_token"), rng.random(2) < 0.4, strict=True)) for _ in range(3)]
            sides += tuple(Side(num_planes=1, dim=int(rng.integers(1, 4)), dtype="float16", **kind) for kind in kinds)
        self.whole_blocks = not all(side.per_token for side in sides)
        if self.whole_blocks:
            engine_size, self.token_mode = stored_size, False
        self.stored = StoredBlock(
            block_dims=(groups, heads, per_group, planes, stored_size, dim), dtype=dtype, sides=sides
        )
        self._choose_part(heads if all(side.per_head for side in sides) else 1, groups)
        num_blocks, num_slots = (40, 30) if big else (9, 7)
        sizes = {"B": num_blocks, "H": len(self.heads), "T": engine_size}
        shift = int(rng.choice([0, 0, 1]))
        self.engines = []
        for index, tensor in enumerate(self.stored.tensors):
            axes = order if index == 0 or "L" not in order else "BPTHD"
            dims = {**sizes, "P": tensor.num_planes, "D": tensor.dim}
            dims |= {} if tensor.per_head else {"H": 1}
            dims |= {} if tensor.per_token else {"T": 1}
            self.engines.append(make_engine(rng, axes, dims, len(self.layers), tensor.dtype, shift))
        self.slot_bytes = self.stored.block_bytes + int(rng.choice([0, 4, 16])) * 4
        self.buffer = random_bytes(num_slots * self.slot_bytes + 2 * GUARD, rng)
        self.num_slots = num_slots
        self._choose_run(num_blocks, engine_size, stored_size)

    def _choose_part(self, heads, groups):
        tp_size = int(self.rng.choice([n for n in (1, 2, 4) if heads % n == 0]))
        pp_size = int(self.rng.choice([n for n in (1, 2) if groups % n == 0]))
        tp_rank, pp_rank = int(self.rng.integers(tp_size)), int(self.rng.integers(pp_size))
        self.layers, self.heads = self.stored.part(tp_rank, tp_size, pp_rank, pp_size)

    def _choose_run(self, num_blocks, engine_size, stored_size):
        rng = self.rng
        most = min(num_blocks * engine_size, self.num_slots * stored_size)
        self.num_tokens = int(rng.integers(0, most + 1))
        self.skip = int(rng.integers(0, self.num_tokens + 1)) if rng.random() < 0.7 else 0
        if self.whole_blocks:
            self.num_tokens, self.skip = (n // stored_size * stored_size for n in (self.num_tokens, self.skip))
        slots = rng.permutation(self.num_slots)[: -(-self.num_tokens // stored_size)]
        self.slot_ids = np.where(rng.random(len(slots)) < 0.1, -1, slots).astype(np.int64)
        blocks = rng.permutation(num_blocks)[: -(-self.num_tokens // engine_size)]
        self.block_ids = np.where(rng.random(len(blocks)) < 0.1, -1, blocks).astype(np.int64)
        if self.token_mode:
            # Whole pages, as an allocator gives them, with strays; one more than the run is long.
            places = np.array(oracle.flat_tokens(blocks.tolist(), engine_size) or [0])[: self.num_tokens]
            if rng.random() < 0.5:
                places = rng.permutation(num_blocks * engine_size)[: self.num_tokens]
            places = np.where(rng.random(len(places)) < 0.1, -1, places)
            self.slot_mapping = np.concatenate([places, [-1]]).astype(np.int64)

    def slots_of(self, buffer):
        return buffer[GUARD : GUARD + self.num_slots * self.slot_bytes].view(self.num_slots, self.slot_bytes)

    def plan(self, engines):
        return plan_copy(
            engines[0].views, self.stored, layers=self.layers, heads=self.heads, sides=[e.views for e in engines[1:]]
        )

    def spans(self, paging):
        lengths = {"num_tokens": self.num_tokens, "skip_prefix_tokens": self.skip}
        if self.token_mode:
            return token_spans(paging, self.slot_mapping, self.slot_ids, self.num_slots, **lengths)
        return block_spans(paging, self.block_ids, self.slot_ids, self.num_slots, **lengths)

    def expected(self, to_slots):
        """Engines and buffer as the oracle leaves them."""
        engines, buffer = [engine.on("cpu") for engine in self.engines], self.buffer.clone()
        engine_size = engines[0].views[0].shape[3]
        places = (
            self.slot_mapping.tolist() if self.token_mode else oracle.flat_tokens(self.block_ids.tolist(), engine_size)
        )
        pairs = oracle.token_pairs(
            places, self.slot_ids.tolist(), self.stored.block_dims[4], self.num_tokens, self.skip
        )
        views, slots = [engine.views for engine in engines], self.slots_of(buffer)
        if to_slots:
            oracle.pack_tokens(views, slots, self.stored, pairs, self.layers, self.heads)
        else:
            oracle.unpack_tokens(slots, views, self.stored, pairs, self.layers, self.heads)
        return engines, buffer, pairs


@dataclass
class ElevenPlanes:
    """Three blocks of eleven planes, which no strip of two to ten divides; blocks ascend, so that they lie together."""

    dim: int

    def __post_init__(self):
        self.stored = StoredBlock(block_dims=(1, 2, 11, 1, 4, self.dim), dtype="uint8")
        self.blocks, self.slot_ids = [0, 3, 5], [1, 4, 2]
        self.engine = torch.randint(1, 99, (11, 6, 2, 1, 4, self.dim), dtype=torch.uint8)  # L B H P T D
        self.slots = torch.randint(100, 199, (5, self.stored.block_bytes), dtype=torch.uint8)

    def plan(self, engine):
        return plan_copy(list(engine), self.stored)

    def spans(self, paging):
        return block_spans(paging, self.blocks, self.slot_ids, len(self.slots))

    def expected(self, to_slots):
        """Engine and slots after the copy."""
        engine, slots = self.engine.clone(), self.slots.clone()
        held = slots.view(5, 2, 11, 1, 4, self.dim).permute(2, 0, 1, 3, 4, 5)
        if to_slots:
            held[:, self.slot_ids] = engine[:, self.blocks]
        else:
            engine[:, self.blocks] = held[:, self.slot_ids]
        return engine, slots

"""An engine whose own hit ends inside a stored block and inside a page, and the mask that keeps loads off that hit.

Shared pages are read by other requests all the time: not even the same bytes may be written there. `MASKS` are the
three places that know the mask, each with a change of text that forgets it: what a test of the mask has to catch.
"""

import types
from dataclasses import dataclass, field

import numpy as np
import torch

from kvstore.kernels import reference_tokens, spans
from kvstore.kernels.module import source_of
from kvstore.kernels.plan import plan_copy
from kvstore.kernels.stored import StoredBlock

#: Which file -> (text, the same without the mask).
MASKS = {
    "spans.py": ("first, last = skip_prefix_tokens // step,", "skip_prefix_tokens = 0\n    first, last = 0,"),
    "reference_tokens.py": ("range(skip_prefix_tokens, num_tokens)", "range(num_tokens)"),
    "pack.cu": (" + span.engine_token * copy.engine_token", ""),  # from the begin of the page
}
PAGE, STORED_SIZE, NUM_PAGES = 16, 64, 64


def without_mask(file):
    """The text of a file of kernels/ that has forgotten the mask."""
    text, (old, new) = source_of(file).read_text(), MASKS[file]
    assert text.count(old) == 1, f"{file} has moved on: the mutant has to follow"
    return text.replace(old, new)


def module_without_mask(file):
    """The same as a module."""
    module = types.ModuleType(file)
    original = {"spans.py": spans, "reference_tokens.py": reference_tokens}[file]
    module.__dict__.update({"__name__": original.__name__})
    exec(compile(without_mask(file), file, "exec", dont_inherit=True), module.__dict__)
    return module


@dataclass
class Overlap:
    """A cache `[L, B, P, T, H, D]` of bytes, slots with other bytes, and a run that begins with the engine's hit."""

    heads: int = 2
    layers: int = 2
    dim: int = 16
    device: str = "cpu"
    hit: int = PAGE * 9 + 5  # tokens; in the third stored block, and inside a page
    num_tokens: int = PAGE * 32 - 3
    cache: torch.Tensor = field(init=False)

    def __post_init__(self):
        rng = torch.Generator().manual_seed(11)
        dims = (self.layers, NUM_PAGES, 2, PAGE, self.heads, self.dim)
        self.cache = torch.randint(0, 256, dims, dtype=torch.uint8, generator=rng).to(self.device)
        self.stored = StoredBlock(block_dims=(1, self.heads, self.layers, 2, STORED_SIZE, self.dim), dtype="uint8")
        slots = torch.randint(0, 256, (8, self.stored.block_bytes), dtype=torch.uint8, generator=rng)
        self.slots = slots.pin_memory() if self.device != "cpu" else slots
        self.pages = np.random.default_rng(0).permutation(NUM_PAGES)[:32]
        self.before = self.cache.clone()
        self.plan = plan_copy(self.views(self.cache), self.stored)
        self.whole = torch.from_numpy(self.pages[: self.hit // PAGE]).to(self.device)

    @staticmethod
    def views(cache):
        """Per layer `[B, H, P, T, D]`."""
        return [layer.permute(0, 3, 1, 2, 4) for layer in cache]

    def spans(self, module=spans):
        """What a load of the run copies beside the hit."""
        return module.block_spans(
            self.plan.paging, self.pages, range(8), 8, num_tokens=self.num_tokens, skip_prefix_tokens=self.hit
        )

    def load_by_oracle(self, cache, module=reference_tokens):
        """Load token by token."""
        places = reference_tokens.flat_tokens(self.pages.tolist(), PAGE)
        pairs = module.token_pairs(places, list(range(8)), STORED_SIZE, self.num_tokens, self.hit)
        reference_tokens.unpack_tokens(
            self.slots, [self.views(cache)], self.stored, pairs, range(self.layers), range(self.heads)
        )

    def num_wrong(self):
        """How many bytes of the hit differ from what they were, read now; a tensor."""
        page, tokens = int(self.pages[self.hit // PAGE]), self.hit % PAGE
        wrong = (self.cache[:, self.whole] != self.before[:, self.whole]).sum()
        return wrong + (self.cache[:, page, :, :tokens] != self.before[:, page, :, :tokens]).sum()

    def is_loaded(self):
        """Whether the cache is, byte for byte, what the oracle makes of it."""
        want = self.before.cpu().clone()
        self.load_by_oracle(want)
        return torch.equal(self.cache.cpu(), want)

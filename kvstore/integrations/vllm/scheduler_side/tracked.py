"""The state of one request in the scheduler's half."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.integrations.vllm.handover import Handover
from kvstore.integrations.vllm.scheduler_side.keys import hash_blocks
from kvstore.integrations.vllm.scheduler_side.lookups import Question


@dataclass(slots=True)
class Tracked:
    """The state of one request until it and its copies have ended."""

    request: Any
    question: Question | None = None
    hashes: BlockHashes | None = None
    block_ids: list[int] = field(default_factory=list)
    num_engine_tokens: int = 0  # in the engine's own prefix cache, when vLLM asked last
    num_external_tokens: int = 0  # behind those, planned to be loaded since
    num_planned_tokens: int = 0  # computed once the last planned step is done
    num_saved: int = 0
    num_saves_open: int = 0  # on all workers
    num_landing: int = 0  # loads still copying although vLLM has them as received, on all workers
    is_loading: bool = False
    may_load: bool = True
    may_save: bool = True
    may_publish: bool = False
    arriving: Handover | None = None  # tickets that the request brought, not used yet
    leaving: Handover | None = None  # tickets published for another engine
    is_fetching: bool = False
    is_freed: bool = False  # ended; vLLM may give its blocks to others, and its saves end before they are overwritten

    @property
    def is_copied(self) -> bool:
        """Whether copies that vLLM does not know of may still use its blocks."""
        return bool(self.num_saves_open or self.num_landing)

    def why_unsure(self, begin: int, end: int, engine_block_size: int) -> str:
        """Return why blocks up to token `end` may not hold KV of the request; empty when they do.

        Args:
            begin: first token that the step computes, as vLLM says.
            end: the token behind the last one.
            engine_block_size: tokens of vLLM's blocks.
        """
        num_known = max(self.num_planned_tokens, self.num_engine_tokens + self.num_external_tokens)
        if begin > num_known:
            return f"vLLM goes on from token {begin}, and only {num_known} are known to be computed, cached or loaded"
        ids = self.block_ids[: -(-end // engine_block_size)]
        if len(ids) * engine_block_size < end:
            return f"vLLM computes up to token {end}, and gave {len(ids)} blocks of {engine_block_size}"
        if 0 in ids:
            return "vLLM has put its block 0, which stands for none, where tokens were"
        return ""

    def is_covered(self, block_size: int, num_engine_tokens: int) -> bool:
        """Whether the engine's own cache has all blocks of the prompt that the store could have."""
        return bool(self.request.num_prompt_tokens // block_size * block_size <= num_engine_tokens)

    def hash_answer(self, space: Namespace, end: int) -> None:
        """Hash the answer's full blocks up to `end` whose tokens are known.

        Drafts become tokens of a request only when accepted, so `end` may include planned drafts. It must not include
        rejected ones: tokens sampled since then are in their places.
        """
        assert self.hashes is not None
        size = space.shape.block_size
        first = len(self.hashes) * size
        last = min(end, self.request.num_tokens) // size * size
        if last > first:
            tokens = list(self.request.all_token_ids[first:last])
            self.hashes = BlockHashes.join(self.hashes, hash_blocks(space, self.request, tokens, self.hashes))

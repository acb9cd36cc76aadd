"""A very small serving engine for examples/prefill_decode.py: a transformers model with a paged KV cache.

Where KV comes from, in this order: pages that this engine still has (`PagedPrefixCache`), a page that is equal in part
(copied), the store (memory or disk of this node, other nodes) or a hand-off, and what is then missing is computed. What
one request computed is inserted for the next ones of this engine, and saved for those of all.

Why outputs can be identical to the last bit: see `PagedRunner`. Every step of the model has the same number of rows and
begins at a multiple of it, with one thread, or on a GPU with torch told to be deterministic. So the KV of a token
depends on the tokens up to it alone, also that of an answer, and of drafts that were accepted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from demo_models import Reference, answer_from_nothing, build_model, digest_of, same_bits
from demo_prompts import BLOCK_SIZE

import kvstore
from kvstore.errors import StoreUnavailable, TransferError
from kvstore.integrations.transformers.paged import (
    BroughtTokens,
    PagedKVCache,
    PagedRunner,
    PagedStore,
    PagedTicket,
    wait_saved,
)
from kvstore.paged.request import PagedRequest

logger = logging.getLogger(__name__)

PIECE_TOKENS = 128
"""Of a prompt, computed and saved at once: as long as layers with a window keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is made of.

    Args:
        model: a key of demo_models.KINDS.
        size: "demo", or "tiny" for tests.
        page_size: tokens of a page.
        num_pages: pages of the layers that see all tokens; None for 4096 tokens.
        num_window_tokens: tokens of the pages of layers with a window; None for as many as the others.
        block_size: tokens of a stored block.
        step_tokens: rows of a step of the model.
        num_draft_tokens: tokens that are guessed ahead of each step of decoding; 0 for none.
        device: of the model.
        salt: keeps tenants apart.
    """

    model: str = "llama"
    size: str = "demo"
    page_size: int = 16
    num_pages: int | None = None
    num_window_tokens: int | None = None
    block_size: int = BLOCK_SIZE
    step_tokens: int = 16
    num_draft_tokens: int = 0
    device: str = "cpu"
    salt: bytes = b""


@dataclass(kw_only=True)
class Answer:
    """What a request came to.

    Args:
        tokens: chosen greedily.
        logits: those that each was chosen by, [num_tokens, vocab_size].
        num_engine_tokens: tokens of the prompt in pages that this engine had.
        num_copied_tokens: of them, those copied out of a page that is equal in part.
        brought: what came from the store or a hand-off.
        num_drafted: tokens that were guessed.
        num_accepted: of them, those that the model would have chosen.
        first_token_s: seconds from the request's arrival to its first token.
        same_kv: whether the KV of the prompt equals a reference's; None without one.
    """

    tokens: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None
    num_engine_tokens: int = 0
    num_copied_tokens: int = 0
    brought: BroughtTokens = field(default_factory=lambda: BroughtTokens(num_tokens=0))
    num_drafted: int = 0
    num_accepted: int = 0
    first_token_s: float = 0.0
    same_kv: bool | None = None


class Engine:
    """Model, paged cache, and the clients of this node's store.

    Args:
        store: as `kvstore.start` returns it; None for the engine's own cache alone.
        options: of the engine.
        peers: nodes to fetch hand-offs from, from GPU to GPU where that works; None for host memory.
    """

    def __init__(
        self, store: Any, options: EngineOptions = EngineOptions(), peers: tuple[str, ...] | None = None
    ) -> None:
        torch.set_num_threads(1)  # Sums of several threads may be added in another order.
        torch.set_grad_enabled(False)
        if options.device != "cpu":
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # What cuBLAS needs for the same.
            torch.use_deterministic_algorithms(True)
        self.options, page_size = options, options.page_size
        self.model = build_model(options.model, options.size).to(options.device)
        windows = options.num_window_tokens
        self.cache = PagedKVCache(
            self.model,
            page_size=page_size,
            num_pages=options.num_pages or 4096 // page_size,
            num_window_pages=windows and -(-windows // page_size),
            align_tokens=options.block_size,
            step_tokens=options.step_tokens,
        )
        self.runner = PagedRunner(self.cache)
        self.revision = digest_of(self.model)
        self.store = None
        if store is not None:
            self.store = PagedStore(
                store,
                self.cache,
                block_size=options.block_size,
                salt=options.salt,
            )
        if self.store is not None and peers is not None:
            self.store.attach_handoff("64MiB", peers)

    def ready(self) -> str:
        """Return the digest of the weights, by which the driver sees that all workers hold one model."""
        return self.revision

    def forget(self) -> int:
        """Evict all pages that no request holds, as if other requests had needed them; returns how many."""
        index = self.cache.index
        return sum(index.evict(allocator.num_pages, group) for group, allocator in enumerate(index.allocators))

    def close(self) -> None:
        """Give everything back to the store."""
        if self.store is not None:
            self.store.close()

    def serve(
        self,
        prompt: list[int],
        num_tokens: int,
        *,
        ticket: PagedTicket | None = None,
        is_handoff: bool = False,
        reference: Reference | None = None,
        finish: Callable[[PagedRequest], object] | None = None,
    ) -> Answer:
        """Bring or compute the KV of a prompt, and answer it.

        Args:
            prompt: token ids, at least one.
            num_tokens: of the answer; 0 for the KV alone.
            ticket: of a prefill worker, which has the prompt's blocks.
            is_handoff: ask the ticket only, and store nothing.
            reference: to compare the KV with.
            finish: is called with the request while it still has its pages.
        """
        arrived_s, answer = time.perf_counter(), Answer()
        request = self.cache.index.acquire(prompt, salt=self.options.salt)
        try:
            copies = request.prepare_copy()
            if copies:
                self.cache.copy(copies)
                answer.num_copied_tokens = request.complete_copy()
            answer.num_engine_tokens = request.num_tokens
            if self.store is not None and (ticket is not None or not is_handoff):
                answer.brought = self._bring(request, prompt, ticket)
            request.insert(prompt, min(request.num_tokens, len(prompt)))
            logits = self._compute(request, prompt, saves=not is_handoff)
            answer.tokens.append(int(logits[-1].argmax()))
            answer.first_token_s = time.perf_counter() - arrived_s
            answer.logits = self._decode(request, prompt, answer, num_tokens, logits[-1:], not is_handoff)
            self._keep(request, prompt + answer.tokens, saves=not is_handoff)
            if reference is not None:
                answer.same_kv = self._equals(request, reference, len(prompt))
            if finish is not None:
                finish(request)
        finally:
            request.release()
        answer.tokens = answer.tokens[:num_tokens]
        return answer

    def _bring(self, request: PagedRequest, prompt: list[int], ticket: PagedTicket | None) -> BroughtTokens:
        """Bring what the store or a hand-off has; a store that is lost costs hits, not requests."""
        assert self.store is not None
        try:
            return self.store.load(request, prompt) if ticket is None else self.store.fetch(request, prompt, ticket)
        except (StoreUnavailable, TransferError) as error:
            logger.warning("nothing is loaded: %s", error)
            return BroughtTokens(num_tokens=0)

    def _compute(self, request: PagedRequest, prompt: list[int], saves: bool) -> torch.Tensor:
        """Compute what is left of the prompt; returns the last token's logits."""
        known = request.num_tokens
        while True:
            stop = min(known + PIECE_TOKENS, len(prompt))
            request.extend(stop - known)
            logits = self.runner.run(request, prompt[:stop], known)
            if stop > known:
                self._keep(request, prompt[:stop], saves)
            known = stop
            if known == len(prompt):
                return logits

    def _decode(
        self,
        request: PagedRequest,
        prompt: list[int],
        answer: Answer,
        num_tokens: int,
        logits: torch.Tensor,
        saves: bool,
    ) -> torch.Tensor:
        """Go on greedily, with drafts if the engine has them; returns the logits of all tokens."""
        parts, kept = [logits], request.num_tokens
        while len(answer.tokens) < num_tokens:
            tokens = prompt + answer.tokens
            drafts = draft(tokens, min(self.options.num_draft_tokens, num_tokens - len(answer.tokens) - 1))
            request.prepare_step(1 + len(drafts))
            logits = self.runner.run(request, tokens + drafts, len(tokens) - 1, 1 + len(drafts))
            chosen, num_accepted = logits.argmax(-1).tolist(), 0
            while num_accepted < len(drafts) and drafts[num_accepted] == chosen[num_accepted]:
                num_accepted += 1
            request.complete_step(1 + num_accepted)
            parts.append(logits[: 1 + num_accepted])
            answer.tokens += chosen[: 1 + num_accepted]
            answer.num_drafted += len(drafts)
            answer.num_accepted += num_accepted
            if request.num_tokens >= kept + PIECE_TOKENS:
                self._keep(request, prompt + answer.tokens, saves)
                kept = request.num_tokens
        return torch.cat(parts)[: max(1, num_tokens)]

    def _keep(self, request: PagedRequest, tokens: list[int], saves: bool) -> None:
        """Let later requests find what was computed, here and, if `saves`, in the store."""
        num_computed = request.num_tokens
        request.insert(tokens, num_computed)
        if saves and self.store is not None:
            try:
                for _ in wait_saved(self.store.save(request, tokens, num_computed)):
                    pass
            except (StoreUnavailable, TransferError) as error:
                logger.warning("nothing is saved: %s", error)
        request.trim_windows(num_computed)

    def _equals(self, request: PagedRequest, reference: Reference, num_tokens: int) -> bool:
        """Whether the KV of the prompt that is in pages has the bits of the reference, as far as that has it."""
        for group, (layers, tensors) in enumerate(zip(self.cache.layer_groups, self.cache.tensors, strict=True)):
            slots = torch.from_numpy(request.slots(0, num_tokens, group)).to(self.cache.device)
            missing = (slots < 0).nonzero()  # Before the window.
            num_missing = int(missing[-1]) + 1 if len(missing) else 0
            for index, tensor in zip(layers.layers, tensors, strict=True):
                for plane, computed in enumerate(reference.layers[index]):
                    begin = reference.num_tokens - computed.shape[2]
                    first = max(num_missing, begin)
                    mine = tensor.flatten(1, 2)[plane, slots[first:]].transpose(0, 1)
                    if not same_bits(mine, computed[0, :, first - begin : num_tokens - begin]):
                        return False
        return True


def draft(tokens: list[int], num_tokens: int) -> list[int]:
    """Guess how tokens go on: as they went on after the last two tokens came before."""
    for start in range(len(tokens) - 3, -1, -1):
        if num_tokens > 0 and tokens[start : start + 2] == tokens[-2:]:
            return tokens[start + 2 : start + 2 + num_tokens]
    return []


class PrefillWorker(Engine):
    """Computes the KV of prompts, and saves it or hands it off."""

    def prefill(self, prompt: list[int]) -> dict[str, float]:
        """Make all full blocks of a prompt findable; returns what that took."""
        began_s = time.perf_counter()
        if len(prompt) < self.options.block_size:
            return {"num_tokens_reused": 0, "num_tokens_computed": 0, "nixl_bytes": 0, "seconds": 0.0}
        answer = self.serve(prompt, 0)
        num_reused = answer.num_engine_tokens + answer.brought.num_tokens
        return {
            "num_tokens_reused": num_reused,
            "num_tokens_computed": len(prompt) - num_reused,
            "nixl_bytes": sum(result.num_bytes for result in answer.brought.results),
            "seconds": time.perf_counter() - began_s,
        }

    def prefill_and_hand_off(self, prompt: list[int]) -> PagedTicket | None:
        """Compute a prompt, and publish its full blocks for one decode worker; None when there are none."""
        store, tickets = self.store, list[PagedTicket | None]()
        if store is None or len(prompt) < self.options.block_size:
            return None
        self.serve(
            prompt, 0, is_handoff=True, finish=lambda held: tickets.append(store.publish(held, prompt, len(prompt)))
        )
        return tickets[0]

    def withdraw(self, ticket: PagedTicket, prompt: list[int]) -> None:
        """Drop what waits for a decode worker that does not need it."""
        if self.store is not None:
            self.store.withdraw(ticket, prompt)


class DecodeWorker(Engine):
    """Answers prompts: once without any cache, as the measure of all, and once with all of them."""

    def answer_without_cache(self, prompt: list[int], num_tokens: int) -> None:
        """Compute prompt and answer from nothing, in the same steps, and remember KV and logits."""
        self._reference = answer_from_nothing(self.model, prompt, num_tokens, self.options.step_tokens)

    def answer(
        self, prompt: list[int], num_tokens: int, is_handoff: bool = False, ticket: PagedTicket | None = None
    ) -> dict[str, object]:
        """Answer with all help there is; then compare with the run above and an ordinary one.

        The ordinary run prefills the whole prompt in one step, which is the fastest way there is without a cache. It is
        what time to first token is compared with; its logits differ by rounding.
        """
        reference = self._reference
        answer = self.serve(prompt, num_tokens, ticket=ticket, is_handoff=is_handoff, reference=reference)
        began_s = time.perf_counter()
        self.model(torch.tensor([prompt], device=self.options.device), logits_to_keep=1).logits.argmax().item()
        ordinary_s = time.perf_counter() - began_s
        results, size = answer.brought.results, self.options.block_size
        loaded = results[0] if results else kvstore.LoadResult(num_blocks=0)
        num_blocks, num_engine = len(prompt) // size, answer.num_engine_tokens // size
        return {
            "num_prompt_tokens": len(prompt),
            "num_blocks": num_blocks,
            "num_tokens_engine": answer.num_engine_tokens,
            "num_tokens_copied": answer.num_copied_tokens,
            "num_blocks_engine": num_engine,
            "num_blocks_own": loaded.num_local + loaded.num_disk,
            "num_blocks_disk": loaded.num_disk,
            "num_blocks_peer": loaded.num_peer,
            "num_blocks_recomputed": num_blocks - (answer.num_engine_tokens + answer.brought.num_tokens) // size,
            "num_tokens_computed": len(prompt) - answer.num_engine_tokens - answer.brought.num_tokens,
            "used_ticket": bool(results),
            "not_loaded_because": loaded.failed[0].detail if loaded.failed else "",
            "route": getattr(loaded, "route", ""),
            "nixl_bytes": sum(result.num_bytes for result in results),
            "nixl_gb_per_s": loaded.num_bytes / loaded.read_s / 1e9 if loaded.num_bytes else 0.0,
            "num_drafted": answer.num_drafted,
            "num_accepted": answer.num_accepted,
            "ttft_cached_s": answer.first_token_s,
            "ttft_uncached_s": ordinary_s,
            "kv_identical": bool(answer.same_kv),
            "logits_identical": answer.logits is not None and same_bits(answer.logits, reference.logits),
            "tokens_identical": answer.tokens == reference.tokens,
            "answer": answer.tokens,
        }

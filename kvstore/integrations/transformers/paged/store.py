"""Pages from a store or a hand-off, and into them: one client for each group of layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.job import Job
from kvstore.client.results import LoadResult, MissReason, SaveResult
from kvstore.errors import ChainBroken, InvalidRequest, KVStoreError, PoolExhausted
from kvstore.integrations.transformers.identity import Snapshot
from kvstore.integrations.transformers.paged.clients import GroupClients, spaces_of
from kvstore.integrations.transformers.paged.kv_cache import PagedKVCache
from kvstore.paged.request import PagedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BroughtTokens:
    """What a load or a fetch brought.

    Args:
        num_tokens: tokens that the request got; their KV is in its pages.
        results: of each group's last job; empty if there was nothing to bring.
    """

    num_tokens: int
    results: tuple[LoadResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTicket:
    """A hand-off of the first tokens of a request. It may be pickled and sent.

    It does not say which tokens: publisher and reader each name them by their hashes. Of each group the last blocks
    before token `num_tokens` are handed off, as many as its ticket says.

    Args:
        num_tokens: how many tokens; whole blocks.
        tickets: for each group.
    """

    num_tokens: int
    tickets: tuple[HandoffTicket, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks of one group: `[first, stop)` of a chain, the engine's pages of them, and tokens to leave alone."""

    first: int
    stop: int
    pages: list[int]
    skip_tokens: int


class PagedStore:
    """Connect a paged KV cache to the store of this node.

    Layers with a window have a namespace and a client of their own, because of them only the window is read. Caches on
    another kind of device, or with steps of another size, share nothing: their KV differs in rounding. Calls must come
    from the thread of the cache. If the store is lost, a call raises, and the next one tries to reach the new store of
    this node. After `close` the pages stay as they are.
    While the model is not what it was when this was made, nothing is loaded, saved or handed off; the log says why.

    Args:
        store: as `kvstore.start` or `kvstore.connect` returns it.
        cache: whose tensors are registered. If it has windows, its `align_tokens` is a multiple of block_size.
        model_id: a name of exactly these weights, in every process that shares; None takes the digest of all weights.
        block_size: tokens of a stored block; a multiple or a divisor of the page size.
        salt: keeps tenants apart. A request takes the same salt in the cache's index.
        tenant: whose quotas in the store count; "" is the shared tenant, which has none.

    Raises:
        InvalidRequest: the windows of the cache begin within blocks, or it has pages or requests already.
        UnsupportedModel: as for `identity_of`.
        LayoutMismatch, StoreUnavailable, KVStoreError: as for `Client.register_kv_caches`; nothing stays open.
    """

    def __init__(
        self,
        store: Any,
        cache: PagedKVCache,
        *,
        model_id: str | None = None,
        block_size: int = 16,
        salt: bytes = b"",
        tenant: str = "",
    ) -> None:
        windows = [group.align_tokens for group in cache.index.groups if group.window_tokens is not None]
        if any(max(align, cache.page_size) % block_size for align in windows):
            raise InvalidRequest(
                f"wanted windows that begin at blocks of {block_size} tokens, got align_tokens={windows[0]} and pages "
                f"of {cache.page_size}; make PagedKVCache with align_tokens={block_size}"
            )
        self._cache, self.block_size = cache, block_size
        self._snapshot = Snapshot(cache.model, is_named=model_id is not None)
        self.spaces = spaces_of(store, cache, model_id, block_size, salt, tenant)
        """The namespace of each group's blocks."""
        self._clients = GroupClients(store, cache, self.spaces, tenant)

    def attach_handoff(self, staging: str | int, peers: Sequence[str] = ()) -> None:
        """Send hand-offs from GPU to GPU where that is faster; see `Client.attach_handoff`."""
        self._clients.attach_handoff(staging, peers)

    def load(self, request: PagedRequest, tokens: Sequence[int]) -> BroughtTokens:
        """Bring the stored blocks of a prompt behind what the request has.

        All groups have the tokens then, or none: a load that fails for one group is tried again with what it could
        bring. Insert them once this returns.

        Args:
            request: right after `acquire`, or after a copy. It gets slots for what is brought.
            tokens: of the prompt.

        Raises:
            StoreUnavailable, TransferError: the store does not answer; the request was not changed.
        """
        if not self._snapshot.is_of(self._cache.model):
            return BroughtTokens(num_tokens=0)
        chains = self._chains(tokens)
        with self._clients.opened() as clients:
            found = min(client.lookup(chain).num_blocks for client, chain in zip(clients, chains, strict=True))
            results: tuple[LoadResult, ...] = ()
            while found * self.block_size > request.num_tokens:
                before, target = request.num_tokens, found * self.block_size
                try:
                    request.prepare_step(target - before, only_windows=True)
                except PoolExhausted:
                    break  # Others need the pages: what has no room is computed, piece by piece.
                num_accepted = 0
                try:
                    runs = [self._run(request, group, before, target) for group in range(len(chains))]
                    results = self._wait(
                        [
                            partial(client.load, chain[run.first : run.stop], run.pages, run.skip_tokens)
                            for run, client, chain in zip(runs, clients, chains, strict=True)
                        ]
                    )
                    found = min(run.first + result.num_blocks for run, result in zip(runs, results, strict=True))
                    usable = max(0, found * self.block_size - before)
                    num_accepted = usable if usable == target - before or not self._has_windows else 0
                finally:
                    request.complete_step(num_accepted)
                if num_accepted or usable == 0:
                    return BroughtTokens(num_tokens=num_accepted, results=results)
            return BroughtTokens(num_tokens=0, results=results)

    def save(
        self, request: PagedRequest, tokens: Sequence[int], num_computed_tokens: int
    ) -> tuple[Job[SaveResult], ...]:
        """Begin to store the whole blocks of a request; blocks that are stored already are skipped.

        A group with a window saves the blocks that it has pages for: so save before pages are trimmed.

        Args:
            request: keeps its pages until the jobs are done: do not release it or trim its windows before.
            tokens: of the request, from its first one on.
            num_computed_tokens: tokens whose KV is in place.

        Returns:
            A job for each group that has blocks. `wait_saved` waits for them.

        Raises:
            StoreUnavailable, KVStoreError: as for `Client.save`; no job runs on.
        """
        if not self._snapshot.is_of(self._cache.model):
            return ()
        with self._clients.opened() as clients, contextlib.ExitStack() as undo:
            jobs = []
            for group, chain in enumerate(self._chains(tokens[:num_computed_tokens])):
                run = self._run(request, group, 0, len(chain) * self.block_size)
                if run.first < run.stop:
                    jobs.append(clients[group].save(chain[run.first : run.stop], run.pages))
                    undo.callback(_end, jobs[-1])
            undo.pop_all()
        return tuple(jobs)

    def publish(self, request: PagedRequest, tokens: Sequence[int], num_computed_tokens: int) -> PagedTicket | None:
        """Keep a copy of a request's whole blocks for one fetch by another worker; see `Client.publish`.

        Args:
            request: its pages may be reused when this returns.
            tokens: of the request, from its first one on.
            num_computed_tokens: tokens whose KV is in place.

        Returns:
            The ticket; None if there is no whole block, or the model changed.

        Raises:
            PoolExhausted, StoreUnavailable, KVStoreError: as for `Client.publish`; nothing is kept.
        """
        num_tokens = num_computed_tokens // self.block_size * self.block_size
        if not num_tokens or not self._snapshot.is_of(self._cache.model):
            return None
        chains, tickets = self._chains(tokens[:num_tokens]), list[HandoffTicket]()
        with self._clients.opened() as clients:
            try:
                for group, (client, chain) in enumerate(zip(clients, chains, strict=True)):
                    run = self._run(request, group, 0, num_tokens, only_window=True)
                    # Nobody has it before its blocks are there: for other tokens it is missed at once.
                    ticket = replace(client.prepare_ticket(run.stop - run.first), is_early=False)
                    tickets.append(client.publish(run.pages, hashes=chain, ticket=ticket))
            except BaseException:
                for client, chain, ticket in zip(clients, chains, tickets, strict=False):
                    with contextlib.suppress(KVStoreError):  # The first error says why.
                        client.withdraw(ticket, hashes=chain)
                raise
        return PagedTicket(num_tokens=num_tokens, tickets=tuple(tickets))

    def fetch(self, request: PagedRequest, tokens: Sequence[int], ticket: PagedTicket) -> BroughtTokens:
        """Bring handed-off tokens behind what the request has: all of them, or none.

        A ticket that was published for other tokens, or was changed, brings nothing: `not_found`.

        Args:
            request: right after `acquire`, or after a copy. It gets slots for what is brought.
            tokens: of the prompt; they begin with those that were published.
            ticket: of `publish` of a worker with the same model, block size and salt.

        Raises:
            InvalidRequest: the ticket is of more tokens or other groups, or its windows do not begin at a page here;
                nothing was changed.
            NamespaceMismatch, KVStoreError: as for `Client.fetch`; the request was not changed.
        """
        size, before, target = self._cache.page_size, request.num_tokens, ticket.num_tokens
        first_tokens = [target - part.num_blocks * self.block_size for part in ticket.tickets]
        if len(ticket.tickets) != len(self.spaces) or any(first % size for first in first_tokens):
            raise InvalidRequest(
                f"fetch: wanted a ticket of {len(self.spaces)} groups that begin at pages of {size} tokens, got one "
                f"of {len(ticket.tickets)} that begin at tokens {first_tokens}; take one page size on both sides for "
                "models with windows"
            )
        chains = self._chains(tokens[:target])
        if len(chains[0]) * self.block_size != target:
            raise InvalidRequest(
                f"fetch: wanted a ticket of this prompt's {len(tokens)} tokens or fewer, in blocks of "
                f"{self.block_size}, got one of {target}"
            )
        if target <= before or not self._snapshot.is_of(self._cache.model):
            return BroughtTokens(num_tokens=0)
        with self._clients.opened() as clients:
            request.prepare_step(target - before, only_windows=True)
            num_accepted = 0
            try:
                jobs: list[Callable[[], Job[Any]]] = []
                for group, (client, first) in enumerate(zip(clients, first_tokens, strict=True)):
                    needed = max(before, self._window(group, target))
                    if not 0 <= first <= needed:
                        raise InvalidRequest(f"fetch: wanted a ticket from token {needed} on, got one from {first}")
                    pages = request.pages(group)[first // size : -(-target // size)].tolist()
                    part, num_own = ticket.tickets[group], max(0, before - first)
                    jobs.append(partial(client.fetch, part, pages, num_own, hashes=chains[group]))
                results = self._wait(jobs)
                if all(
                    result.num_blocks == part.num_blocks for result, part in zip(results, ticket.tickets, strict=True)
                ):
                    num_accepted = target - before
            finally:
                request.complete_step(num_accepted)
        return BroughtTokens(num_tokens=num_accepted, results=results)

    def withdraw(self, ticket: PagedTicket, tokens: Sequence[int]) -> bool:
        """Drop what this worker published for a ticket that will not be fetched; returns whether it was still held.

        Args:
            ticket: of `publish`.
            tokens: of the request, as for `publish`.
        """
        chains = self._chains(tokens[: ticket.num_tokens])
        with self._clients.opened() as clients:
            parts = zip(clients, ticket.tickets, chains, strict=True)
            return any([client.withdraw(part, hashes=chain) for client, part, chain in parts])

    def close(self) -> None:
        """Give everything back to the store; may be called again."""
        self._clients.close()

    @property
    def _has_windows(self) -> bool:
        return any(space.window_tokens is not None for space in self._cache.layer_groups)

    def _chains(self, tokens: Sequence[int]) -> list[BlockHashes]:
        return [space.block_hashes(tokens) for space in self.spaces]

    def _run(self, request: PagedRequest, group: int, before: int, target: int, *, only_window: bool = False) -> _Run:
        """Return the blocks up to token `target` that the request lacks, or has pages for, and these pages."""
        pages, size = request.pages(group), self._cache.page_size
        missing = np.flatnonzero(pages[: -(-target // size)] < 0)
        first = max(before, (int(missing[-1]) + 1) * size if len(missing) else 0)
        if only_window:
            needed = self._window(group, target)
            if first > needed:
                raise InvalidRequest(
                    f"publish: wanted pages from token {needed} on, got a request whose windows were trimmed up to "
                    f"{first}; publish earlier, or fewer tokens"
                )
            first = needed
        block = first // self.block_size
        begin = block * self.block_size
        return _Run(
            first=block,
            stop=target // self.block_size,
            pages=pages[begin // size : -(-target // size)].tolist(),
            skip_tokens=first - begin,
        )

    def _window(self, group: int, num_tokens: int) -> int:
        """Return the first token that a group keeps for the token after `num_tokens`."""
        size = self._cache.page_size
        return self._cache.index.groups[group].first_page(num_tokens, size) * size

    def _wait(self, begin: Sequence[Callable[[], Job[Any]]]) -> tuple[Any, ...]:
        """Begin jobs and wait for all; if one cannot be begun or fails, no job writes pages after this."""
        jobs: list[Job[Any]] = []
        with contextlib.ExitStack() as undo:
            for each in begin:
                jobs.append(each())
                undo.callback(_end, jobs[-1])
            results = tuple(job.result(None) for job in jobs)
        if any(failure.reason is MissReason.STORE_LOST for result in results for failure in result.failed):
            self._clients.drop()
        return results


def wait_saved(jobs: Sequence[Job[SaveResult]]) -> Iterator[SaveResult | None]:
    """Wait for jobs of `PagedStore.save`; yields their results, None where earlier blocks of the chain are gone.

    However it ends, no job reads pages any more: so a request may be released after an error, too.

    Raises:
        KVStoreError: a job failed; the others were ended.
    """
    with contextlib.ExitStack() as undo:
        for job in jobs:
            undo.callback(_end, job)
        for job in jobs:
            try:
                yield job.result(None)
            except ChainBroken:  # They were evicted meanwhile; a later request saves them again.
                yield None


def _end(job: Job[Any]) -> None:
    while not job.done() and not job.abandon():
        pass  # A copy is running; it has a time limit.

"""What a client of the soak does with tickets, and what may have become of one when a fetch of it failed."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstore.blocks.hashing import BlockHashes
from kvstore.blocks.ticket import HandoffTicket, expiry_after
from kvstore.client.job import Job
from kvstore.client.results import BlockFailure, FetchResult, MissReason
from kvstore.errors import InvalidRequest, KVStoreError, StoreUnavailable, all_error_types
from tests.soak.engine import LAYOUTS, MINE, POISON, Engine
from tests.soak.mailbox import Letter, Mailbox, owner_name
from tests.soak.plan import SHAPE, Choice, Verb, space
from tests.soak.voice import Voice
from tests.soak.weights import Weights

#: Reasons that say nothing about the ticket: of a load, whose way was bad or too long.
_OF_A_LOAD = frozenset(
    {
        MissReason.PEER_LOST, MissReason.TIMEOUT, MissReason.LEASE_EXPIRED, MissReason.POOL_FULL, MissReason.BUSY,
        MissReason.STORE_LOST,
    }
)  # fmt: skip
#: A store may know of an end before all processes do: within this every client has noticed, or was replaced.
_NOTICED_S = 60.0
_RESULT_S = 30.0
#: A withdrawal waits for up to 0.2 s through this: a publication takes about a millisecond.
_MOMENTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A reason that only something that others do explains, which may show a little later.

    Args:
        text: what is wrong if nothing does.
        is_explained: asked until `until_s`.
        until_s: by the monotonic clock.
    """

    text: str
    is_explained: Callable[[], bool]
    until_s: float


def unexplained(letter: Letter, failure: BlockFailure, now_s: float) -> str:
    """Return why a fetch must not have failed for this reason, as far as its letter tells; "" if it may."""
    match failure.reason:
        case MissReason.USED:
            explained = letter.may_be_used
        case MissReason.EXPIRED:
            explained = now_s >= letter.good_until_s
        case MissReason.WITHDRAWN:
            explained = letter.may_be_withdrawn
        case MissReason.NOT_FOUND:
            explained = letter.may_be_missing
        case MissReason.OTHER:
            explained = failure.detail.split(":", 1)[0] in all_error_types()
        case MissReason.OWNER_GONE | MissReason.STALE | MissReason.CLEARED:
            explained = True  # As far as the letter tells.
        case _:
            explained = failure.reason in _OF_A_LOAD
    return "" if explained else f"a fetch failed with {failure.detail!r}, which cannot be, of {letter}"


class Handoffs:
    """Publishes and fetches with a client's engine.

    Args:
        mailbox: of all clients.
        voice: is told.
        chains: that all clients know.
        weights: count clearings.
        node: index of the client's node.
        rng: chooses blocks and letters.
        own: the engine's blocks for it.
        path_of: returns the socket of a node's present store.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        voice: Voice,
        chains: Sequence[BlockHashes],
        weights: Weights,
        node: int,
        rng: random.Random,
        own: Sequence[int],
        path_of: Callable[[int], str],
    ) -> None:
        self._mailbox, self._voice, self._chains, self._weights = mailbox, voice, chains, weights
        self._node, self._rng, self._own, self._path_of = node, rng, own, path_of
        self._numbers = itertools.count()
        self._owner = self._path = ""
        self._claimed: list[Claimed] = []

    def opened(self, path: str) -> None:
        """There is another engine, of the store with this socket."""
        self._owner, self._path = owner_name(next(self._numbers)), path

    def closing(self) -> None:
        """The engine is about to be closed, and what it published goes with it."""
        if self._owner:
            self._mailbox.leaves(self._owner)

    def publish(self, engine: Engine, choice: Choice, run: BlockHashes) -> None:
        """Publish a run in the way that the verb names; from its end on the engine's blocks hold something else."""
        ids = self._rng.sample(self._own, len(run))
        engine.cache.write(run, ids)
        letter = self._letter(engine, choice)
        self._voice.counts["hand-offs", "published"] += 1
        if choice.verb is Verb.WITHDRAW_AT_ONCE:
            self._withdraw_at_once(engine, choice, ids, letter)
            return
        if choice.verb is Verb.BEGIN_PUBLISH:
            self._begin(engine, choice, ids, letter)
        else:
            ticket = engine.client.publish(ids, hashes=run, ttl_s=choice.ttl_s)
            engine.cache.fill(ids, MINE)
            self._mailbox.send(replace(letter, ticket=ticket, may_be_withdrawn=choice.is_withdrawn), choice.num_copies)
            letter = replace(letter, ticket=ticket)
        if choice.is_withdrawn:
            time.sleep(choice.wait_s)
            self._voice.counts["hand-offs", "withdrawn"] += engine.client.withdraw(
                letter.ticket, hashes=self._run_of(letter)
            )

    def _withdraw_at_once(self, engine: Engine, choice: Choice, ids: list[int], letter: Letter) -> None:
        """Take blocks back at any moment of their publication, on another thread; then nothing of it is kept."""
        letter = replace(letter, may_be_withdrawn=True)
        self._mailbox.send(replace(letter, may_be_missing=not choice.is_early), choice.num_copies)

        def withdraw() -> None:
            time.sleep(choice.wait_s / _MOMENTS)
            with contextlib.suppress(KVStoreError):
                self._voice.counts["hand-offs", "withdrawn"] += engine.client.withdraw(
                    letter.ticket, hashes=self._run_of(letter)
                )

        thread = threading.Thread(target=withdraw, daemon=True)
        thread.start()
        try:
            publication = engine.client.begin_publish(
                ids, hashes=self._run_of(letter), ttl_s=choice.ttl_s, ticket=letter.ticket
            )
            publication.job.result(_RESULT_S)
        except (InvalidRequest, StoreUnavailable) as error:  # It was withdrawn before, or while it was copied.
            self._voice.counts["hand-offs", f"called off: {type(error).__name__}"] += 1
        finally:
            thread.join(_RESULT_S)
            engine.cache.fill(ids, MINE)

    def publish_and_leave(self, path: str, choice: Choice, run: BlockHashes) -> None:
        """Publish as a client that closes before anybody need have fetched."""
        engine, owner = Engine(path, space(), LAYOUTS[0], len(run)), owner_name(next(self._numbers))
        try:
            ids = list(range(len(run)))
            engine.cache.write(run, ids)
            letter = replace(self._letter(engine, choice), owner=owner, path=path)
            ticket = engine.client.publish(ids, hashes=run, ttl_s=choice.ttl_s)
            self._mailbox.send(replace(letter, ticket=ticket), choice.num_copies)
            time.sleep(choice.wait_s)
        finally:
            self._mailbox.leaves(owner)
            engine.close()

    def _begin(self, engine: Engine, choice: Choice, ids: list[int], letter: Letter) -> None:
        letter = replace(letter, may_be_withdrawn=True)  # If the copy fails.
        if choice.is_named:
            # Of one that is early nobody hears that it is missing.
            self._mailbox.send(replace(letter, may_be_missing=not choice.is_early), choice.num_copies)
            try:
                publication = engine.client.begin_publish(
                    ids, hashes=self._run_of(letter), ttl_s=choice.ttl_s, ticket=letter.ticket
                )
            except KVStoreError:
                with contextlib.suppress(KVStoreError):
                    engine.client.withdraw(letter.ticket, hashes=self._run_of(letter))
                raise
        else:
            publication = engine.client.begin_publish(ids, hashes=self._run_of(letter), ttl_s=choice.ttl_s)
            self._mailbox.send(replace(letter, ticket=publication.ticket), choice.num_copies)
        publication.job.result(_RESULT_S)
        engine.cache.fill(ids, MINE)

    def _letter(self, engine: Engine, choice: Choice) -> Letter:
        client = engine.client
        ticket = HandoffTicket(
            node_id=client.node_id, epoch=bytes.fromhex(client.epoch), namespace=client.space.digest,
            num_blocks=choice.num_blocks, block_bytes=SHAPE.block_bytes, expires_s=expiry_after(choice.ttl_s),
            is_early=choice.is_early,
        )  # fmt: skip
        return Letter(
            ticket=ticket, node=self._node, chain=choice.chain, first=choice.first, owner=self._owner,
            path=self._path, good_until_s=time.monotonic() + choice.ttl_s, num_clearings=self._weights.num_clearings,
        )  # fmt: skip

    def _run_of(self, letter: Letter) -> BlockHashes:
        return self._chains[letter.chain][letter.first : letter.first + letter.ticket.num_blocks]

    def take(self) -> Letter | None:
        """Take a ticket that somebody sent."""
        letter = self._mailbox.take(self._rng, self._node)
        if letter is None:
            self._voice.counts["hand-offs", "no ticket"] += 1
        return letter

    def begin_fetch(self, engine: Engine, letter: Letter, ids: Sequence[int], skip: int = 0) -> Job[FetchResult]:
        """Fetch into blocks that nothing else uses."""
        engine.cache.fill(ids, POISON)
        return engine.client.fetch(letter.ticket, list(ids), skip, hashes=self._run_of(letter))

    def fetch(self, engine: Engine, choice: Choice) -> str:
        """Fetch in the way that the verb names, and check what came; returns why the client is of no use any more."""
        letter = self.take()
        if letter is None:
            return ""
        num_blocks = letter.ticket.num_blocks
        skip = min(choice.skip_tokens, num_blocks * SHAPE.block_size)
        if choice.verb is Verb.FETCH_FORGED:
            forged = replace(letter.ticket, nonce=bytes(len(letter.ticket.nonce)), is_early=False)
            letter = replace(letter, ticket=forged, may_be_missing=True)
        num_jobs = 2 if choice.verb is Verb.FETCH_TWICE else 1
        ids = self._rng.sample(self._own, num_jobs * num_blocks)
        parts = [ids[i * num_blocks : (i + 1) * num_blocks] for i in range(num_jobs)]
        jobs = [self.begin_fetch(engine, letter, part, skip) for part in parts]
        if num_jobs > 1:
            letter = replace(letter, may_be_used=True)
        lost = ""
        for part, job in zip(parts, jobs, strict=True):
            result = job.result(_RESULT_S)
            lost = self._check(engine, letter, part, skip, result, choice.verb) or lost
        return lost

    def _check(self, engine: Engine, letter: Letter, ids: list[int], skip: int, result: FetchResult, verb: Verb) -> str:
        voice, run = self._voice, self._run_of(letter)
        for wrong in engine.cache.wrong_blocks(run, ids, result.num_blocks, skip):
            voice.finding(f"WRONG BYTES in a fetch, {wrong}; {result} of {letter}")
        if [block_id for failure in result.failed for block_id in failure.block_ids] != ids[result.num_blocks :]:
            voice.finding(f"a fetch of {ids} names other failed blocks: {result}")
        if not result.failed:
            if skip < len(ids) * SHAPE.block_size:
                voice.counts["blocks", "verified"] += len(ids) - skip // SHAPE.block_size
                voice.counts["blocks", "handed off"] += len(ids)
                self._delivered(letter, verb)
            return ""
        failure = result.failed[0]
        voice.counts["fetches that failed", failure.reason.value] += 1
        if problem := unexplained(letter, failure, time.monotonic()):
            voice.finding(problem)
        self._remember(letter, failure)
        if failure.reason in _OF_A_LOAD and verb is Verb.FETCH and time.monotonic() < letter.good_until_s:
            self._mailbox.send(replace(letter, may_be_used=True))  # The ticket may still be good.
        return failure.detail if failure.reason is MissReason.STORE_LOST else ""

    def _delivered(self, letter: Letter, verb: Verb) -> None:
        if verb is Verb.FETCH_FORGED:
            self._voice.finding(f"a forged ticket was good: {letter}")
        elif not self._mailbox.is_first(letter.ticket.nonce):
            self._voice.finding(f"a ticket was good for two fetches: {letter}")

    def _remember(self, letter: Letter, failure: BlockFailure) -> None:
        asked: dict[MissReason, Callable[[], bool]] = {
            MissReason.OWNER_GONE: lambda: self._has_left(letter),
            MissReason.STALE: lambda: self._is_replaced(letter),
            MissReason.CLEARED: lambda: self._weights.num_clearings > letter.num_clearings,
        }
        if is_explained := asked.get(failure.reason):
            text = f"a fetch failed with {failure.detail!r}, but nobody did that to {letter}"
            until_s = time.monotonic() + _NOTICED_S
            self._claimed.append(Claimed(text=text, is_explained=is_explained, until_s=until_s))

    def _has_left(self, letter: Letter) -> bool:
        return self._mailbox.has_left(letter.owner) or self._is_replaced(letter)

    def _is_replaced(self, letter: Letter) -> bool:
        return self._path_of(letter.node) != letter.path

    def check_claimed(self, *, now: bool = False) -> None:
        """See whether what the store said of others has turned out true.

        Args:
            now: there is no more time for that.
        """
        left = []
        for claimed in self._claimed:
            if claimed.is_explained():
                continue
            if now or time.monotonic() > claimed.until_s:
                self._voice.finding(claimed.text)
            else:
                left.append(claimed)
        self._claimed = left

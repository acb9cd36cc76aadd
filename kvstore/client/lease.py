"""Leases and pins: blocks that stay in the node's memory until they are given back."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from kvstore.blocks.codec import decode_count, encode
from kvstore.blocks.grants import Grant
from kvstore.blocks.hashing import BlockHashes
from kvstore.bounds import check_flag, check_ttl, clip
from kvstore.client.results import Pinned
from kvstore.errors import InvalidRequest, KVStoreError, LeaseExpired, LeaseReleased
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Ask, AskPin, Renew, decode_grant
from kvstore.runtime import clock
from kvstore.runtime.forks import check_process, this_process

if TYPE_CHECKING:
    from kvstore.client.attachment import Attachment  # Importing it imports torch.

T = TypeVar("T")


def take_lease(attached: Attachment, hashes: BlockHashes, ttl_s: float) -> Lease:
    """Ask for what `Client.lease` returns."""
    ttl_s = check_ttl("ttl_s", ttl_s)
    chain = attached.chain(hashes)
    # Taken before the question, so that the lease never ends later here than in the store.
    deadline_s = clock.now_s() + ttl_s - attached.store.config.lease_margin_s

    def hold(grant: Grant) -> Lease:
        slots = grant.slots_of(len(chain), attached.num_slots)
        return Lease(attached, grant.lease_id, hashes[: len(slots)], slots, deadline_s)

    return _granted(attached, Op.LEASE, encode(Ask(chain, ttl_s)), hold)


def take_pin(attached: Attachment, hashes: BlockHashes, soft: bool, ttl_s: float | None) -> Pinned:
    """Ask for what `Client.pin` returns."""
    is_forever = ttl_s is None or (isinstance(ttl_s, float) and ttl_s == math.inf)
    keep_s = math.inf if is_forever else check_ttl("ttl_s", ttl_s)
    question = encode(AskPin(attached.chain(hashes), check_flag("soft", soft), keep_s))
    return _granted(
        attached,
        Op.PIN,
        question,
        lambda grant: Pinned(pin_id=grant.lease_id, num_blocks=len(grant.slots), num_refused=grant.num_refused),
    )


def release(attached: Attachment, lease_id: int) -> bool:
    """Give a lease or a pin back, and return whether the store still held it."""
    return bool(decode_count(attached.store.call(Op.RELEASE, encode(lease_id))))


def _granted(attached: Attachment, op: Op, question: bytes, hold: Callable[[Grant], T]) -> T:
    """Ask for a grant, and give it back if an interrupt keeps it from the caller.

    The store takes back what it granted in an answer that was never read, see `ControlClient.unheard`.
    """
    answer = b""
    try:
        answer = attached.store.call(op, question)
        return hold(decode_grant(answer))
    except BaseException:
        if answer:
            with contextlib.suppress(KVStoreError):
                release(attached, decode_grant(answer).lease_id)
        raise


class Lease:
    """Blocks that cannot be evicted or overwritten until the lease ends.

    Args:
        attached: the client's attachment, kept alive by this lease.
        lease_id: the store's number for it; 0 when no block was here.
        hashes: the leased blocks, a prefix of those asked for.
        slots: slot of each in the node's arena.
        deadline_s: by kvstore.runtime.clock, never later than the store's.
    """

    def __init__(
        self, attached: Attachment, lease_id: int, hashes: BlockHashes, slots: Sequence[int], deadline_s: float
    ) -> None:
        self.lease_id, self.hashes, self.slots = lease_id, hashes, slots
        self._attached, self._deadline_s = attached, deadline_s
        self._released = self._is_told = lease_id == 0
        self._pid = this_process()

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        return f"Lease({len(self)} blocks, {'held' if self.held() else 'ended'})"

    def held(self) -> bool:
        """Return whether it is unreleased and unexpired, and its client open, as far as this process knows."""
        return not self._released and clock.now_s() < self._deadline_s and self._attached.is_open()

    def block(self, index: int) -> memoryview:
        """Return the bytes of block `index`, read-only, in the stored order. Valid while the lease is held.

        Raises:
            InvalidRequest: `index` is outside the lease.
            LeaseReleased: it was released.
            LeaseExpired: its deadline passed.
        """
        if self._released:
            raise LeaseReleased("wanted a held lease, got a released one; take a new one")
        if clock.now_s() >= self._deadline_s:
            raise LeaseExpired("wanted a held lease, got one past its deadline; renew leases in time")
        try:
            slot = self.slots[operator.index(index)]
        except (IndexError, TypeError) as error:
            raise InvalidRequest(
                f"index: wanted the number of one of {len(self)} leased blocks, got {clip(index)}"
            ) from error
        return self._attached.block_in(slot)

    def renew(self, ttl_s: float = 30.0) -> bool:
        """Extend the lease to `ttl_s` from now, and return whether it was still held. Never shortens it.

        Raises:
            ForkedClient: this is a child of the process that took it.
            InvalidRequest: `ttl_s` is not above 0, or exceeds a day.
        """
        check_process(self._pid)
        ttl_s = check_ttl("ttl_s", ttl_s)
        if self._released:
            return False
        asked_s = clock.now_s()
        store = self._attached.store
        held = bool(decode_count(store.call(Op.RENEW, encode(Renew(self.lease_id, ttl_s)))))
        if held:
            self._deadline_s = max(self._deadline_s, asked_s + ttl_s - store.config.lease_margin_s)
        return held

    def release(self) -> bool:
        """Release it, and return whether the store still held it. A second call returns False.

        After an interrupt or an error, call it again.

        Raises:
            ForkedClient: this is a child of the process that took it; that process still holds it.
        """
        check_process(self._pid)
        if self._is_told:
            return False
        self._released = True  # First: after an interrupt it is unknown whether the store got the message.
        held = release(self._attached, self.lease_id)
        self._is_told = True
        return held

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A forked child also leaves the `with` block, but owns no lease.
        if this_process() == self._pid:
            self.release()

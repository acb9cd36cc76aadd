"""A lease as its holder sees it: pinned blocks, released once, by hand or at the end of a with block."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import TracebackType

from kvstore.blocks.hashing import BlockHashes
from kvstore.bounds import check_ttl, clip
from kvstore.errors import InvalidRequest, LeaseExpired, LeaseReleased
from kvstore.runtime import clock
from kvstore.runtime.forks import check_process, this_process


class Lease:
    """Blocks that cannot be evicted or overwritten until the lease ends.

    Args:
        hashes: the pinned blocks, a prefix of what was asked for.
        slots: slot of each in the node's arena.
        deadline_s: of kvstore.runtime.clock, taken before the lease was asked for, so that it is
            never later than the store's.
        margin_s: by how much it is earlier.
        release, renew: ask the store; see the methods of these names.
        read: returns the bytes of a slot; raises StoreUnavailable when the client was closed.
        is_open: whether the client is, and the life of its store goes on.
    """

    def __init__(
        self,
        lease_id: int,
        hashes: BlockHashes,
        slots: Sequence[int],
        deadline_s: float,
        margin_s: float,
        release: Callable[[int], bool],
        renew: Callable[[int, float], bool],
        read: Callable[[int], memoryview],
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        self.lease_id, self.hashes, self.slots = lease_id, hashes, slots
        self._deadline_s, self._margin_s = deadline_s, margin_s
        self._release, self._renew, self._read, self._is_open = release, renew, read, is_open
        self._released = self._is_told = lease_id == 0
        self._pid = this_process()

    def __len__(self) -> int:
        return len(self.slots)

    def __repr__(self) -> str:
        return f"Lease({len(self)} blocks, {'held' if self.held() else 'ended'})"

    def held(self) -> bool:
        """Whether it is neither released nor past its deadline, and its client open, as far as this process knows."""
        return not self._released and clock.now_s() < self._deadline_s and self._is_open()

    def block(self, index: int) -> memoryview:
        """Return the bytes of block `index`, read-only, in the stored order; valid while the lease is held.

        Raises:
            InvalidRequest: it has no such block.
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
        return self._read(slot)

    def renew(self, ttl_s: float = 30.0) -> bool:
        """Extend to `ttl_s` from now, never shortening; whether it was still held.

        Raises:
            ForkedClient: this is a child of the process that took it.
            InvalidRequest: `ttl_s` is no time above 0, or over a day.
        """
        check_process(self._pid)
        check_ttl("ttl_s", ttl_s)
        if self._released:
            return False
        asked_s = clock.now_s()
        held = self._renew(self.lease_id, ttl_s)
        if held:
            self._deadline_s = max(self._deadline_s, asked_s + ttl_s - self._margin_s)
        return held

    def release(self) -> bool:
        """Let go; whether the store still held it. May be called again, and says False then.

        One that was interrupted, or failed, is to be called again.

        Raises:
            ForkedClient: this is a child of the process that took it, which goes on to hold it.
        """
        check_process(self._pid)
        if self._is_told:
            return False
        self._released = True  # First: when it is interrupted nobody knows what the store heard.
        held = self._release(self.lease_id)
        self._is_told = True
        return held

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A forked child that leaves the block as well has nothing to give back.
        if this_process() == self._pid:
            self.release()

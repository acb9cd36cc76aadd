"""Write blocks of memory to the disk only when they are about to be evicted, and evict them after that.

The eviction loop (kvstore.pool.reclaim) says how many slots are wanted. A thread of the disk pins the next victims of
the memory's pool, writes those that are not on the disk yet, and evicts them. Nobody waits for that: a claim that comes
faster evicts blocks that were not written, and they are counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from kvstore.blocks.grants import Victims
from kvstore.disk.places import TierContext
from kvstore.disk.writing.offers import Offer, OfferKind
from kvstore.disk.writing.writer import OWNER, Writer
from kvstore.runtime import clock

#: How often it is looked whether the disk still works, while the rest is written at the end of a store.
_LOOK_S = 0.05
#: Most blocks that are written at the end of a store: more than a disk takes in that time.
_MOST_AT_END = 1 << 17
#: Most blocks that are looked at then; those of them that the disk has need no write.
_MOST_CHOSEN = 4 * _MOST_AT_END


class WriteBack:
    """What is written at eviction. `write_some` runs on threads of the disk, the others on any thread.

    Args:
        context: of the tier.
        writer: writes the blocks, and counts.
        wake: has `write_some` called soon.
        is_off: returns whether the disk is off.
    """

    def __init__(
        self, context: TierContext, writer: Writer, wake: Callable[[], None], is_off: Callable[[], bool]
    ) -> None:
        self._context, self._writer, self._wake, self._is_off = context, writer, wake, is_off
        self._turned = threading.Condition()
        #: Blocks that no turn has taken yet, that turns have now, and that went since `take_gone`.
        self._num_wanted = self.num_writing = self._num_gone = 0
        self._num_turns, self._is_stuck = 0, False

    def write_back(self, num_blocks: int, timeout_s: float) -> int | None:
        """Have the next victims written and evicted; see `WritesBack` in kvstore.pool.reclaim."""
        with self._turned:
            self._num_wanted, self._is_stuck = max(num_blocks - self.num_writing, 0), False
            num_turns = self._num_turns
        self._wake()
        with self._turned:
            self._turned.wait_for(lambda: self._num_turns != num_turns, timeout_s)
            num_gone, self._num_gone = self._num_gone, 0
            return None if self._is_stuck and not num_gone and not self.num_writing else num_gone

    def write_some(self) -> bool:
        """Write and evict some of the blocks that are wanted; return whether there were any.

        Raises:
            OSError: the disk refused. All victims of this turn stay, and are the next ones again.
        """
        with self._turned:
            most = min(self._num_wanted, self._writer.num_in_turn())
            self._num_wanted -= most
            self.num_writing += most
        if not most:
            return False
        num_gone, has_found = 0, True
        try:
            with ExitStack() as turn:
                turn.enter_context(self._writer.claiming)
                victims = self._context.memory_pool.hold_victims(most, OWNER)
                if has_found := bool(victims.slots):
                    num_gone = self._write(victims, turn.close)
        finally:
            with self._turned:
                self.num_writing -= most
                self._num_gone += num_gone
                if not has_found:  # All others are in use.
                    self._num_wanted, self._is_stuck = 0, True
                # While others write, a turn that finds nothing is no news.
                self._num_turns += has_found or not self.num_writing
                self._turned.notify_all()
        self._writer.sweep.run_if_due()
        return has_found

    def _write(self, victims: Victims, claimed: Callable[[], None]) -> int:
        pool = self._context.memory_pool
        try:
            for offer in self._offers(victims):
                self._writer.write(offer, claimed)
        except OSError:
            pool.release(victims.lease_id, OWNER)
            raise
        except BaseException:
            # An error of the program would come again: these must not be the first victims for ever.
            pool.evict_held(victims, OWNER)
            raise
        num_gone = pool.evict_held(victims, OWNER)
        self._context.changed()
        return num_gone

    def _offers(self, victims: Victims) -> list[Offer]:
        """Return the victims that are worth a write, by namespace, and those of a chain from its root on.

        The state of a namespace is noted now. `Writer.write` pins only what was not cleared until then.
        """
        slots = dict[bytes, list[int]]()
        hashes = self._context.memory_pool.hashes_of(victims.slots)
        for slot, namespace, own in zip(victims.slots, victims.namespaces, hashes, strict=True):
            if self._writer.is_worthy(own):
                slots.setdefault(namespace, []).append(slot)
        kind = OfferKind.VICTIMS
        return [self._writer.offer_of(namespace, found[::-1], kind) for namespace, found in slots.items()]

    def evicted(self, hashes: list[bytes], num_low: int) -> None:
        """Count those of blocks that were evicted without a write and are not on the disk; see `Pool.keep_free`.

        Under the memory pool's lock, so nothing here waits.
        """
        self._writer.drop("low_priority", num_low)
        reason = "off" if self._is_off() else "evicted"
        here = self._context.disk_pool.present(hashes)
        self._writer.drop(reason, sum(own not in here and self._writer.is_worthy(own) for own in hashes))

    def forget(self) -> None:
        """Write nothing more back until asked again: the disk is off."""
        with self._turned:
            self._num_wanted = 0
            self._num_turns += 1
            self._turned.notify_all()

    def write_rest(self, timeout_s: float) -> int:
        """Write what is in memory and not on the disk, the blocks that were used last first; a store ends.

        What a block builds on comes before it, so that the next store can find it. These have the highest generations,
        so that the next store evicts them last. With what they build on, and those that the disk has, they are no more
        blocks than it has slots, and of each tenant no more than it may have there. At most `_MOST_AT_END` are written.

        Returns:
            How many of these blocks the disk has not; those whose turn did not come are counted as `stopped`.
        """
        writer, memory, disk = self._writer, self._context.memory_pool, self._context.disk_pool
        until_s, num_low = clock.now_s() + timeout_s, writer.counts.dropped["low_priority"]
        self.forget()
        # Victims of before would take the places of what is chosen now.
        self._look_until(until_s, lambda: not self.num_writing)
        most = min(disk.num_slots, _MOST_CHOSEN)
        last = memory.by_touch(most, writer.is_worthy, disk.most_slots_of)
        found = [(name, slots, memory.hashes_of(slots)) for name, slots in last]
        for namespace, _, hashes in reversed(found):  # What the disk has of them keeps its places.
            disk.touch(namespace, hashes)
        generations, chosen = writer.take_generations(most), list[bytes]()
        writer.most_queued, room, num_cut = _MOST_AT_END, _MOST_AT_END, 0
        for namespace, slots, hashes in found:
            here = disk.present(hashes)
            left = [(slot, own) for slot, own in zip(slots, hashes, strict=True) if own not in here]
            now = [slot for slot, _ in left[:room]]
            room, num_cut = room - len(now), num_cut + len(left) - len(now)
            chosen += hashes
            if now:
                writer.queue_up(namespace, now, OfferKind.BEHIND, generations[-len(now) :])
                generations = generations[: -len(now)]
        writer.drop("stopped", num_cut)
        self._look_until(until_s, lambda: not writer.num_unwritten())
        writer.drop_all("stopped")
        num_low = writer.counts.dropped["low_priority"] - num_low
        return max(len(chosen) - len(disk.present(chosen)) - num_low, 0)

    def _look_until(self, until_s: float, is_done: Callable[[], bool]) -> None:
        """Wait until something is done, the time is over, or the disk is off."""
        while not is_done() and clock.now_s() < until_s and not self._is_off():
            time.sleep(_LOOK_S)

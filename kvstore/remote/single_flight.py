"""Of several loads that miss one block, one fetches it. The others wait, holding no thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.errors import StoreBusy
from kvstore.remote.load import Load
from kvstore.runtime import clock


@dataclass(slots=True, eq=False)
class Flight:
    """Blocks on their way here, and the loads that are parked until they come.

    `asks_peer` says that they are asked of another node.
    """

    asks_peer: bool = False
    waiting: list[Load] = field(default_factory=list)


class Flights:
    """The blocks that are on their way to one node.

    Args:
        resume: called with a parked load when its flight has ended or failed, or its own deadline has passed.
            Any thread; must not block.
    """

    def __init__(self, resume: Callable[[Load], None]) -> None:
        self._resume = resume
        self._lock = threading.Lock()
        self._flights: dict[bytes, Flight] = {}
        self.num_waiting = 0

    def lead(self, block_hash: bytes, load: Load, *, asks_peer: bool = False) -> Flight | None:
        """Begin the flight of a block, for `leave` to end. Return None if another load leads it.

        Then this load is parked until `resume` is called with it.

        Raises:
            StoreBusy: the load is for another node, and the block is asked of one, which may wait for this load.
        """
        mine = Flight(asks_peer)
        with self._lock:
            flight = self._flights.setdefault(block_hash, mine)
            if flight is mine:
                return mine
            if flight.asks_peer and not load.may_ask_peers:
                raise StoreBusy("another node is asked for this block already; try again soon")
            flight.waiting.append(load)
            self.num_waiting += 1
            return None

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._flights

    def enter(self, hashes: list[bytes], flight: Flight) -> list[bytes]:
        """Add blocks to `flight`; return those that were in no other flight, for `leave`."""
        with self._lock:
            new = [block_hash for block_hash in hashes if block_hash not in self._flights]
            self._flights.update(dict.fromkeys(new, flight))
            return new

    def leave(self, hashes: list[bytes], flight: Flight) -> None:
        """End a flight: forget its blocks and resume the loads that wait for it."""
        with self._lock:
            for block_hash in hashes:
                del self._flights[block_hash]
            waiting, flight.waiting = flight.waiting, []
            self.num_waiting -= len(waiting)
        for load in waiting:
            self._resume(load)

    def give_up_overdue(self) -> None:
        """Resume the parked loads whose own deadline has passed; their flights continue."""
        if self.num_waiting == 0:
            return
        now_s, overdue = clock.now_s(), []
        with self._lock:
            for flight in set(self._flights.values()):
                overdue += [load for load in flight.waiting if load.deadline_s < now_s]
                flight.waiting = [load for load in flight.waiting if load.deadline_s >= now_s]
            self.num_waiting -= len(overdue)
        for load in overdue:
            self._resume(load)

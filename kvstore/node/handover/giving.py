"""Give up a node store's memory for its next life: end the grants, and send what the next one has to know."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.blocks.indexes import pack_ints
from kvstore.errors import ConfigError, StoreBusy, StoreUnavailable
from kvstore.handoff.table import HandoffTable
from kvstore.node.core import NodeCore
from kvstore.node.handover.message import Held, Message, pack_blocks, samples_of, seal
from kvstore.node.handover.processes import pid_of
from kvstore.node.handover.transfer import GIVE, HAVE, MOST_DESCRIPTORS, Parcel, connect, receive, send
from kvstore.pool.handover.adoption import OLD_READER, OLD_WRITER
from kvstore.pool.handover.image import OldReaders, OldWriters, PoolImage
from kvstore.runtime import clock
from kvstore.runtime.life import log_life

logger = logging.getLogger(__name__)

#: An owner of slots, and a time before which they are not used again, even if it has no process.
User = tuple[str, float]

_HOLDER_S, _SERVER_S = 5.0, 5.0
#: How long a store that gave its memory away waits for its caller to end it.
ENDS_ITSELF_S = 30.0
#: Beginnings of the owners' names of workers, whose processes write to slots by themselves; a worker over Ray has a
#: deadline. All other owners are parts of the store: the store's process or its mover's writes.
_WORKERS, _OVER_RAY = ("client-", "local-"), "ray:"


@dataclass(frozen=True, slots=True)
class Given:
    """What an old store gave.

    Args:
        num_blocks: readable blocks.
        num_held_slots: slots that processes may still use.
    """

    num_blocks: int
    num_held_slots: int


def hand_over(core: NodeCore, path: str, wait_s: float) -> Given:
    """Give a node store's memory to the holder at `path`. The store serves nobody any more when this returns.

    Waits at most `wait_s` for leases, writes and hand-offs to end. Slots that are still used then are named.

    Raises:
        StoreUnavailable: nobody holds there, or no namespace has attached; the store serves on.
        StoreBusy: the node was put back while it was drained; the store serves on.
        KVStoreError, OSError: the memory was not given, and the store must end: it serves nobody.
    """
    if not core.state.pool_service.is_attached:
        raise StoreUnavailable("it was empty: no namespace has attached")
    connect(path, _HOLDER_S).close()  # Is it there? It waits for a packet only for seconds, the drain may take longer.
    core.drain(wait_s)
    try:
        connect(path, _HOLDER_S).close()
    except StoreUnavailable:
        core.undrain()
        raise
    # No way back from here. Nobody may claim or keep anything between the processes, the image and what is told beside.
    _leave(core)
    with contextlib.closing(UserProcesses(core)) as processes:
        if not core.control.server.end(_SERVER_S):
            raise StoreUnavailable("the thread that serves this store's sockets does not end")
        # Before the freeze: of a directory that is met later, this store may have refused a clearing.
        directory = core.state.hints.met
        image = core.pool.freeze()
        message = _written(seal(_message(core, image, processes, directory)))
        try:
            with connect(path, _HOLDER_S) as sock:
                send(sock, GIVE, Parcel(core.state.arena.fd, message, processes.pidfds))
                word, _ = receive(sock)
        finally:
            os.close(message)
    if word != HAVE:
        raise StoreUnavailable(f"the holder did not take the memory, it said {word!r}")
    num_held = sum(len(held.slots) for held in image.writers)
    logger.info("node %s gave %d blocks to its next store", core.state.node_id, len(image.blocks))
    return Given(len(image.blocks), num_held)


def end_later(core: NodeCore) -> None:
    """End this process, if its caller died after the memory was given: another store would wait for its end."""
    time.sleep(ENDS_ITSELF_S)
    state = core.state
    name, epoch = state.config.name, state.epoch.hex()
    log_life("store_stopped", store=name, node=state.node_id, epoch=epoch, reason="a restart")
    os._exit(0)


def _leave(core: NodeCore) -> None:
    """Make the drain final: from now on the node cannot be put back, so no worker gets slots.

    Raises:
        StoreBusy: it was put back meanwhile, and serves on.
        StoreUnavailable: the store is being stopped.
    """
    service = core.state.pool_service
    with core.draining:
        service.check_running()
        if not service.is_draining:
            raise StoreBusy("wanted a drained node, got one that a person put back meanwhile; restart it again")
        service.is_ending = True


def _message(core: NodeCore, image: PoolImage, processes: UserProcesses, directory: bytes) -> Message:
    state, service = core.state, core.state.pool_service
    sizes = [service.block_bytes[namespace] for namespace in image.namespaces]
    handoffs, own_until_s = core.control.handoffs, clock.now_s() + state.config.lease_ttl_s
    users = handoff_users(handoffs.table, handoffs.fetcher.users())
    writers = processes.held_by_all(image.writers, users, own_until_s)
    return Message(
        store=state.config.name, node=state.node_id, epoch=state.epoch, capacity_bytes=state.arena.num_bytes,
        slot_bytes=service.slot_bytes, block_bytes=dict(service.block_bytes), versions=state.versions.since(0)[1],
        directory=directory, clears=state.presence.clears.copy(), generations=image.generations.astype("<u4").tobytes(),
        tenants=image.tenants, owners=image.owners.tobytes(), namespaces=image.namespaces,
        blocks=pack_blocks(image.blocks),
        writers=writers,
        readers=tuple(map(processes.held_by_readers, image.readers)),
        samples=samples_of(image.blocks, sizes, service.slot_bytes, state.arena.memory),
    )  # fmt: skip


def _written(data: bytes) -> int:
    """Return a sealed file of memory with these bytes."""
    fd = os.memfd_create("raykv-handover", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd
    except BaseException:
        os.close(fd)
        raise


class UserProcesses:
    """The processes that may still use slots, by owner. The first is the store, the second its mover.

    Made after the last request that may get slots has begun, and before the store's server ends, which serves that
    request and then closes the pidfds of its connections. So it copies the pidfds of all workers: which of them hold
    something is known later, from the frozen pool.

    Raises:
        OSError: there is no descriptor for a copy.
    """

    def __init__(self, core: NodeCore) -> None:
        self._copies = [os.pidfd_open(os.getpid())]
        #: Indexes of `_copies`, by process id.
        self._copy_of = {os.getpid(): 0}
        self._of: dict[str, tuple[set[int], float]] = {}
        self._nameless = set[str]()
        #: Owners of what is only read though the pool has it as a write: of blocks cleared in the life before.
        self._only_read = set[str]()
        #: Indexes of `_copies` in the order of `pidfds`.
        self._sent = [0, 1]
        try:
            self._collect(core)
        except BaseException:
            self.close()
            raise

    @property
    def pidfds(self) -> tuple[int, ...]:
        """Of the store, of its mover, and of each process that `held...` has named; they stay this object's."""
        return tuple(self._copies[copy] for copy in self._sent)

    def _collect(self, core: NodeCore) -> None:
        connections = list(core.control.server.connections)
        # Another one that said that it is a mover may be there, and was given no READ.
        mover = core.state.mover.connection
        # Where there is no process besides the store, that is there twice.
        if mover is None or self._copy(mover.pidfd, mover.pid) != 1:
            self._copies.append(os.dup(self._copies[0]))
        for connection in connections:
            owner = connection.owner
            if not owner.startswith(_WORKERS):
                continue
            copies, _ = self._of.setdefault(owner, (set(), 0.0))
            if connection.pidfd >= 0:
                copies.add(copy := self._copy(connection.pidfd, connection.pid))
                if connection.pid and self._copy_of.get(connection.pid) != copy:
                    copies.add(-1)  # Its number is another known process by now.
            elif not connection.ended and not any(c.owner == owner and c.pidfd >= 0 for c in connections):
                self._nameless.add(owner)
        for use in () if core.old is None else core.old.processes.uses():
            self._of[use.owner] = {self._copy(pidfd, 0) for pidfd in use.pidfds}, use.until_s
            if use.is_read:
                self._only_read.add(use.owner)

    def close(self) -> None:
        """Close all pidfds; call this once."""
        for copy in self._copies:
            os.close(copy)

    def held_by_all(
        self, entries: Sequence[OldWriters], users: Mapping[str, list[User]], own_until_s: float
    ) -> tuple[Held, ...]:
        """Return entries as from `held`; those that are only read come last, and get the room that is left."""
        ordered = sorted(entries, key=self._is_only_read)
        return tuple(self.held(entry, users, own_until_s) for entry in ordered)

    def _is_only_read(self, entry: OldWriters) -> bool:
        return self._only_read.issuperset(entry.owners)

    def held(self, entry: OldWriters, users: Mapping[str, list[User]], own_until_s: float) -> Held:
        """Return slots with the processes that have to end before these are used again.

        Those to which nobody writes are as from `held_by_readers`.

        Args:
            entry: the slots, and their owners.
            users: of slots of hand-offs.
            own_until_s: end of what workers may read of the slots that the store itself fills.

        Raises:
            ConfigError: the process of an owner cannot be named, or there are too many. This memory must not be used
                again.
        """
        if self._is_only_read(entry):
            return self.held_by_readers(OldReaders(entry.owners or entry.readers, entry.until_s, entry.slots))
        until_s, places = entry.until_s, set[int]()
        for owner in entry.owners:
            for user, user_until_s in users.get(owner, [(owner, 0.0)]):
                until_s = max(until_s, user_until_s)
                if user.startswith((*_WORKERS, OLD_WRITER)):
                    theirs, their_until_s = self._named(user)
                    places |= theirs
                    until_s = max(until_s, their_until_s)
                elif user and not user.startswith(_OVER_RAY):
                    places |= {0, 1}
                    until_s = max(until_s, own_until_s)
        return Held(until_s, pack_ints(entry.slots), tuple(sorted(places)))

    def held_by_readers(self, entry: OldReaders) -> Held:
        """Return slots that are only read, with the processes that free them by their end, also before their time.

        These are the processes of all readers. There are none if one reader has none that can be named: it is a caller
        over Ray, the store of another node or a part of this one, or the kernel does not name it; nor if the parcel has
        no room for more. Then the time alone frees the slots, which is right for every lease. So a reader never ends
        the giving.
        """
        until_s, copies = entry.until_s, set[int]()
        is_named = len(entry.owners) > 0
        for owner in entry.owners:
            theirs, their_until_s = self._of.get(owner, (set[int](), 0.0))
            until_s = max(until_s, their_until_s)
            copies |= theirs
            if owner.startswith(_WORKERS):
                # A pidfd that is closed (-1) is no proof of an end here: the worker may have connected once more.
                is_named = is_named and len(theirs) > 0 and -1 not in theirs and owner not in self._nameless
            else:
                # Of the life before: -1 is a process that has ended, and without any only the time counts.
                is_named = is_named and len(theirs) > 0 and owner.startswith((OLD_READER, OLD_WRITER))
        copies.discard(-1)
        if not is_named or len(copies.union(self._sent)) > MOST_DESCRIPTORS:
            return Held(until_s, pack_ints(entry.slots), is_read=True)
        # Without processes all are gone, so no time is left.
        places = tuple(sorted(map(self._place, copies)))
        return Held(until_s if places else 0.0, pack_ints(entry.slots), places, is_read=True)

    def _named(self, owner: str) -> tuple[set[int], float]:
        """Return the places of an owner's processes that may live, and its time."""
        if owner in self._nameless:
            raise ConfigError(f"this kernel cannot name the process of {owner} (Linux 5.3 can)")
        if owner not in self._of:
            raise ConfigError(f"wanted to name the process of each worker that has slots, got {owner} without one")
        copies, until_s = self._of[owner]
        return {self._place(copy) for copy in copies if copy >= 0}, until_s

    def _place(self, copy: int) -> int:
        if copy not in self._sent:
            if len(self._sent) >= MOST_DESCRIPTORS:
                raise ConfigError(f"more than {MOST_DESCRIPTORS} processes are in the middle of writes")
            self._sent.append(copy)
        return self._sent.index(copy)

    def _copy(self, pidfd: int, wanted_pid: int) -> int:
        """Copy the pidfd of a process unless there is a copy, and return its index.

        Returns -1 if it is not `wanted_pid`, or has ended.
        """
        try:
            copy = fcntl.fcntl(pidfd, fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise  # That of a live worker may not be left out.
            return -1  # Closed just now by the thread that watches it, because the process has ended.
        try:
            pid = pid_of(copy)
        except BaseException:
            os.close(copy)
            raise
        # Its number may be of another file by now. A process that cannot be seen from here (0) is never known.
        if pid is None or pid < 0 or pid in self._copy_of or (wanted_pid and pid != wanted_pid):
            os.close(copy)
            return -1 if pid is None else self._copy_of.get(pid, -1)
        self._copies.append(copy)
        index = len(self._copies) - 1
        if pid:
            self._copy_of[pid] = index
        return index


def handoff_users(table: HandoffTable, fetches: Sequence[tuple[str, str]] = ()) -> dict[str, list[User]]:
    """Return, by owner of slots of hand-offs, (owner that may use them, until when); a reader only until that.

    Args:
        table: what is published here.
        fetches: of each fetch, (owner of its slots, its client; "" if that has left).
    """
    users: dict[str, list[User]] = defaultdict(list)
    for slot_owner, client in fetches:
        # The client copies out of them until it says that it is done: it looks at no clock.
        users[slot_owner] += [("!mover", 0.0), (client, 0.0)]
    for handoff in list(table.handoffs.values()):
        if handoff.is_written:
            users[handoff.write_owner].append((handoff.owner, 0.0))
        until_s = handoff.claim_deadline_s if handoff.claim_id else 0.0
        # A reader's claim ends by itself; one without an end is that of no reader.
        users[handoff.write_owner].append(("", until_s if until_s < math.inf else 0.0))
        if (move := table.moves.get(handoff.claim_id)) is not None:
            users[move.owner] += [("!mover", 0.0), ("", until_s)]
    return users

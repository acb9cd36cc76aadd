"""Lookups and loads that may need other nodes. On the control thread, so nothing here may block."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import encode
from kvstore.blocks.priority import NORMAL, OF_LOW_READER, Priority
from kvstore.bounds import check_seconds
from kvstore.errors import StoreDraining
from kvstore.node.later import Asked, answer_all, send_piece
from kvstore.node.state import NodeState
from kvstore.remote.load import Load
from kvstore.rpc.connection import Connection, Handler
from kvstore.rpc.framing import Flag, Message, Op
from kvstore.rpc.messages import FoundByStore, Progress, decode_ask_load, decode_ask_lookup
from kvstore.runtime import clock
from kvstore.runtime.clock import deadline_after
from kvstore.runtime.threads.store_threads import Blocking

#: Makes the answer to a question about a chain, of which so many blocks are in memory, until a time; None if it
#: answers later.
_Answering = Callable[[Asked, BlockHashes, int, float], bytes | None]


class LoadControl:
    """Serves `routes` to clients. A route that raises KVStoreError changed nothing.

    Args:
        state: of the node store.
        wake: called when a deadline was set, so that the control thread looks at it.
    """

    def __init__(self, state: NodeState, wake: Callable[[], None]) -> None:
        self._state, self._service, self._wake = state, state.pool_service, wake
        self.routes: dict[Op, Handler] = {
            Op.LOAD: self._load,
            Op.LOOKUP: partial(self._lookup, self._held),
            Op.LOOKUP_ALL: partial(self._lookup, self._find),
        }

    def _lookup(self, answer: _Answering, connection: Connection, message: Message) -> bytes | None:
        """Answer at once, or when the saves that decide the answer have ended, or when their time is over."""
        asked, service, asked_s = decode_ask_lookup(message.payload), self._service, clock.now_s()
        chain, until_s = asked.chain, asked_s + check_seconds("seconds", asked.seconds)
        save_wait_s = check_seconds("save_wait_s", asked.save_wait_s)
        # Do not keep the message: its bytes would stay in memory while the lookup waits.
        question, num_local = (connection, message.op, message.request), service.lookup(chain)
        if not (save_wait_s and self._is_being_saved(chain, num_local)):
            return answer(question, chain, num_local, until_s)

        def go_on(num_saved: int) -> None:
            # Looked up anew: blocks before those that were saved may be gone.
            found = answer(question, chain, service.lookup(chain), until_s)
            if found is not None:
                connection.send(question[1], Flag.REPLY, question[2], found)

        rest = chain.tail(num_local)
        self._state.fetcher.saves.wait(service.current, rest, asked_s + save_wait_s, go_on)
        return None

    def _is_being_saved(self, chain: BlockHashes, num_local: int) -> bool:
        """Return whether a save of this node writes the block behind those in memory.

        A block that comes from this node's disk, or from another node, counts there: it is not waited for.
        """
        service = self._service
        if num_local == len(chain) or service.is_draining or chain.hash_at(num_local) in self._state.fetcher.flights:
            return False
        rest = chain.tail(num_local)
        return service.current.is_being_written(rest) and not service.lookup_disk(rest.head(1), 0)[0]

    def _held(self, question: Asked, chain: BlockHashes, num_local: int, until_s: float) -> bytes:
        return encode((num_local, *self._service.lookup_disk(chain, num_local)))

    def _find(self, question: Asked, chain: BlockHashes, num_local: int, until_s: float) -> bytes | None:
        state = self._state
        if num_local < len(chain) and not state.hints.is_alone() and not self._service.is_draining:
            run = partial(answer_all, [question], lambda: _found(state, chain, until_s))
            if state.threads.submit(Blocking.LOOKUP, run):
                return None
        return encode(FoundByStore([(state.node_id, num_local)], *self._service.lookup_disk(chain, num_local)))

    def _load(self, connection: Connection, message: Message) -> None:
        asked, service = decode_ask_load(message.payload), self._service
        chain, timeout_s = asked.chain, check_seconds("timeout_s", asked.timeout_s)
        try:
            service.check_serving()
        except StoreDraining:
            service.traffic.load_refused(len(chain), "draining")
            raise
        block_bytes, pool = service.block_bytes_of(chain.namespace), service.pool
        version_now = partial(self._state.versions.get, chain.namespace)
        version = version_now()  # Before the pin.
        # Look at the first block only: if it is not here, the rest of the chain need not be searched here.
        held = chain if pool.lookup(chain.head(1)) else chain.head(0)
        retention = OF_LOW_READER if asked.priority is Priority.LOW else NORMAL
        deadline_s, tenant = deadline_after(asked.ttl_s), connection.tenant
        grant = pool.pin_prefix(held, connection.owner, deadline_s, retention=retention, tenant=tenant)
        self._wake()
        question = message.request  # Do not keep the message: its bytes would stay in memory while the load waits.
        connection.gave = question, partial(pool.release, grant.lease_id, connection.owner)
        counted = partial(service.traffic.load_ended, num_blocks=len(chain), block_bytes=block_bytes)
        load = Load(
            chain=chain,
            block_bytes=block_bytes,
            owner=connection.owner,
            lease_id=grant.lease_id,
            ttl_s=asked.ttl_s,
            deadline_s=clock.now_s() + timeout_s,
            pool=pool,
            version_now=version_now,
            version=version,
            send=partial(send_piece, connection, message.op, question, counted=counted),
            is_open=lambda: not connection.closed,
            retention=retention,
            tenant=tenant,
        )
        load.num_ready = load.report.num_local = num_here = len(grant.packed_slots) // 4
        load.num_unpinned = grant.num_refused
        load.report.reason = load.why_unpinned()
        if grant.num_refused or num_here == len(chain):
            load.send(Progress(grant.lease_id, 0, grant.packed_slots, load.report))
            return
        if grant.packed_slots:
            load.send(Progress(grant.lease_id, 0, grant.packed_slots))
        self._state.fetcher.begin(load)


def _found(state: NodeState, chain: BlockHashes, until_s: float) -> FoundByStore:
    found = lookup_all(state, chain, until_s)
    return FoundByStore(found, *state.pool_service.lookup_disk(chain, found[0][1]))


def lookup_all(state: NodeState, chain: BlockHashes, until_s: float = math.inf) -> list[tuple[str, int]]:
    """Return (node, prefix length) pairs. This node is first and exact, the others are the directory's hints.

    A drained node does not fetch from other nodes for its workers, so it names none. The directory is not asked
    if `until_s` passes before earlier questions to it were answered.
    """
    num_local, hints = state.pool_service.lookup(chain), state.hints
    found = [(state.node_id, num_local)]
    if num_local < len(chain) and not state.pool_service.is_draining:
        others = [item for item in hints.locate(chain, until_s) if item[0] != state.node_id]
        longer = [(node, count - num_local) for node, count in others if count > num_local]
        if longer:
            hints.remember(chain.hash_at(num_local), longer)
        found += others
    return found

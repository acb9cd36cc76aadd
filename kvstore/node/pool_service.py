"""The pool's verbs as a node's own workers ask for them. Runs on the control thread, so nothing here may block."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvstore.blocks.chain import decode_hashes, namespace_in
from kvstore.blocks.grants import Grant
from kvstore.bounds import check_seconds
from kvstore.errors import ConfigError
from kvstore.rpc.connection import Connection, Handler
from kvstore.rpc.framing import Flag, Message, Op
from kvstore.rpc.messages import (
    U64,
    U64_F64,
    pack_grant,
    pack_ticket,
    unpack_lease,
    unpack_pin,
    unpack_prepare,
    unpack_write_end,
)
from kvstore.runtime import clock

if TYPE_CHECKING:
    from kvstore.node.core import NodeCore


class PoolControl:
    """Serves the operations of `verbs`: each takes a message and returns the answer, None when that comes later.

    A verb that raises KVStoreError changed nothing.

    Args:
        core: the node store.
    """

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self.verbs: dict[Op, Handler] = {
            Op.LOOKUP: self._lookup,
            Op.LEASE: self._lease,
            Op.PIN: self._pin,
            Op.RELEASE: self._release,
            Op.RENEW: self._renew,
            Op.PREPARE_STORE: self._prepare_store,
            Op.COMPLETE_STORE: self._complete_store,
            Op.ABORT_STORE: self._abort_store,
            Op.AWAIT_STORE: self._await_store,
            Op.UNPIN_ALL: self._unpin_all,
        }
        # Each save that waits for others to have written the same blocks: until when, and who asked.
        self._waiting: dict[int, tuple[float, Connection]] = {}

    def _lookup(self, connection: Connection, message: Message) -> bytes:
        pool, hashes = self._core.attached_pool, decode_hashes(message.payload)
        if pool is None or self._core.is_draining:
            return U64.pack(0)
        return U64.pack(pool.num_ready(namespace_in(message.payload), hashes))

    def _lease(self, connection: Connection, message: Message) -> bytes:
        chain, ttl_s = unpack_lease(message.payload)
        return self._granted(connection, message, self._core.lease(chain, connection.owner, ttl_s))

    def _pin(self, connection: Connection, message: Message) -> bytes:
        chain, kind, ttl_s = unpack_pin(message.payload)
        return self._granted(connection, message, self._core.pin(chain, connection.owner, kind, ttl_s))

    def _granted(self, connection: Connection, message: Message, grant: Grant) -> bytes:
        connection.gave = message.request, partial(self._core.release, grant.lease_id, connection.owner)
        return pack_grant(grant)

    def _unpin_all(self, connection: Connection, message: Message) -> None:
        if (pool := self._core.attached_pool) is not None:
            pool.release_pins(connection.owner)

    def _release(self, connection: Connection, message: Message) -> bytes:
        return U64.pack(self._core.release(U64.unpack(message.payload)[0], connection.owner))

    def _renew(self, connection: Connection, message: Message) -> bytes:
        lease_id, ttl_s = U64_F64.unpack(message.payload)
        return U64.pack(self._core.renew(lease_id, connection.owner, ttl_s))

    def _prepare_store(self, connection: Connection, message: Message) -> bytes:
        chain, num_parts, part, num_clears = unpack_prepare(message.payload)
        if connection.pidfd < 0:
            raise ConfigError(
                "this kernel does not tell the store when this process ends, so it may read but not write; "
                "run both in one PID namespace (Linux 5.3 and newer) or on Linux 6.5 and newer"
            )
        ticket = self._core.prepare_store(chain, connection.owner, num_parts, part, num_clears=num_clears)
        connection.gave = message.request, partial(self._core.abort_store, ticket.write_id, connection.owner)
        return pack_ticket(ticket)

    def _complete_store(self, connection: Connection, message: Message) -> None:
        write_id, epoch, generations = unpack_write_end(message.payload)
        pool = self._core.pool
        num_published = pool.complete_store(write_id, connection.owner, generations=generations, epoch=epoch)
        self._reply_when_known(connection, message, num_published)

    def _abort_store(self, connection: Connection, message: Message) -> bytes:
        write_id, epoch, generations = unpack_write_end(message.payload)
        return U64.pack(self._core.abort_store(write_id, connection.owner, generations, epoch))

    def _await_store(self, connection: Connection, message: Message) -> None:
        chain, timeout_s = unpack_lease(message.payload)
        check_seconds("timeout_s", timeout_s)
        watch_id = self._core.pool.watch(chain, lambda count: self._reply_when_known(connection, message, count))
        if self._core.pool.is_watching(watch_id):  # One that is told between is forgotten by the next tick.
            self._waiting[watch_id] = clock.now_s() + timeout_s, connection

    def _reply_when_known(self, connection: Connection, message: Message, value: int) -> None:
        def reply() -> None:
            connection.send(message.op, Flag.REPLY, message.request, U64.pack(value))

        # Answered after the directory has heard, so that who waits for a save can find it from any node.
        self._core.hints.publish_soon(reply)

    def wants_ticks(self) -> bool:
        """Whether something here or in the pool ends with time."""
        pool = self._core.attached_pool
        return bool(self._waiting) or (pool is not None and (pool.has_deadlines() or pool.has_cleared()))

    def tick(self, now_s: float) -> None:
        """End what is over."""
        pool = self._core.attached_pool
        if pool is None:
            return
        pool.expire(now_s)
        pool.sweep()
        for watch_id, (deadline_s, connection) in list(self._waiting.items()):
            if deadline_s < now_s or connection.closed or not pool.is_watching(watch_id):
                del self._waiting[watch_id]
                pool.end_watch(watch_id)

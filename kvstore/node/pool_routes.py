"""The pool's verbs for a node's own workers. Runs on the control thread, so nothing here may block."""

from __future__ import annotations

from functools import partial

from kvstore.blocks.codec import decode_id, encode
from kvstore.blocks.grants import Grant, PinKind
from kvstore.blocks.priority import retention_of
from kvstore.bounds import check_seconds
from kvstore.errors import ConfigError
from kvstore.node.state import NodeState
from kvstore.rpc.connection import Connection, Handler
from kvstore.rpc.framing import Flag, Message, Op
from kvstore.rpc.messages import decode_ask, decode_ask_pin, decode_prepare, decode_renew, decode_write_end
from kvstore.runtime import clock


class PoolRoutes:
    """Serves `routes`. Each takes a message and returns the answer, or None if it comes later.

    A route that raises KVStoreError changed nothing.

    Args:
        state: of the node store.
    """

    def __init__(self, state: NodeState) -> None:
        self._service, self._hints, self._disk = state.pool_service, state.hints, state.disk
        self.routes: dict[Op, Handler] = {
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
        # Deadline and connection of each save that waits until other workers have written the same blocks.
        self._waiting: dict[int, tuple[float, Connection]] = {}

    def _lease(self, connection: Connection, message: Message) -> bytes:
        asked = decode_ask(message.payload)
        grant = self._service.lease(asked.chain, connection.owner, asked.seconds, tenant=connection.tenant)
        return self._granted(connection, message, grant)

    def _pin(self, connection: Connection, message: Message) -> bytes:
        asked = decode_ask_pin(message.payload)
        grant = self._service.pin(
            asked.chain, connection.owner, PinKind.SOFT if asked.is_soft else PinKind.HARD, asked.ttl_s,
            tenant=connection.tenant,
        )  # fmt: skip
        return self._granted(connection, message, grant)

    def _granted(self, connection: Connection, message: Message, grant: Grant) -> bytes:
        connection.gave = message.request, partial(self._service.release, grant.lease_id, connection.owner)
        return encode(grant)

    def _unpin_all(self, connection: Connection, message: Message) -> None:
        self._service.current.release_pins(connection.owner)

    def _release(self, connection: Connection, message: Message) -> bytes:
        return encode(self._service.release(decode_id(message.payload), connection.owner))

    def _renew(self, connection: Connection, message: Message) -> bytes:
        asked = decode_renew(message.payload)
        return encode(self._service.renew(asked.lease_id, connection.owner, asked.ttl_s))

    def _prepare_store(self, connection: Connection, message: Message) -> bytes:
        asked = decode_prepare(message.payload)
        if connection.pidfd < 0:
            raise ConfigError(
                "this kernel does not tell the store when this process ends, so it may read but not write; "
                "run both in one PID namespace (Linux 5.3 and newer) or on Linux 6.5 and newer"
            )
        retention = retention_of(asked.priority, asked.priority_s, clock.now_s())
        ticket = self._service.prepare_store(
            asked.chain, connection.owner, asked.num_parts, asked.part,
            num_clears=asked.num_clears, retention=retention, tenant=connection.tenant,
        )  # fmt: skip
        connection.gave = message.request, partial(self._service.abort_store, ticket.write_id, connection.owner)
        return encode(ticket)

    def _complete_store(self, connection: Connection, message: Message) -> None:
        end, pool = decode_write_end(message.payload), self._service.pool
        num_published = pool.complete_store(
            end.write_id, connection.owner, generations=end.generations, epoch=end.epoch
        )
        self._reply_when_known(connection, message, num_published)

    def _abort_store(self, connection: Connection, message: Message) -> bytes:
        end = decode_write_end(message.payload)
        return encode(self._service.abort_store(end.write_id, connection.owner, end.generations, end.epoch))

    def _await_store(self, connection: Connection, message: Message) -> None:
        asked = decode_ask(message.payload)
        timeout_s = check_seconds("timeout_s", asked.seconds)
        pool = self._service.pool
        watch_id = pool.watch(asked.chain, lambda count: self._reply_when_known(connection, message, count))
        if pool.is_watching(watch_id):  # If it is answered between these two lines, the next tick forgets it.
            self._waiting[watch_id] = clock.now_s() + timeout_s, connection

    def _reply_when_known(self, connection: Connection, message: Message, value: int) -> None:
        def reply() -> None:
            connection.send(message.op, Flag.REPLY, message.request, encode(value))

        # Answer after the directory has received it: then the waiting caller can find the blocks from any node.
        self._hints.publish_soon(reply)

    def wants_ticks(self) -> bool:
        """Return whether anything here or in the pool has a deadline or needs sweeping."""
        pool = self._service.current
        if self._disk is not None and self._disk.has_cleared():
            return True
        return bool(self._waiting) or pool.has_deadlines() or pool.has_cleared()

    def tick(self, now_s: float) -> None:
        """End leases, writes and waits that have expired, and sweep cleared slots."""
        pool = self._service.current
        pool.expire(now_s)
        pool.sweep()
        if self._disk is not None:
            self._disk.sweep()
        for watch_id, (deadline_s, connection) in list(self._waiting.items()):
            if deadline_s < now_s or connection.closed or not pool.is_watching(watch_id):
                del self._waiting[watch_id]
                pool.end_watch(watch_id)

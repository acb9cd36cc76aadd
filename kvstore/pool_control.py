"""The pool's verbs as a node's own workers ask for them. Runs on the control thread, so nothing here may block."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from kvstore.chain import decode_chain
from kvstore.control_server import Connection
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.messages import (
    U64,
    U64_F64,
    pack_grant,
    pack_ticket,
    unpack_lease,
    unpack_pin,
    unpack_prepare,
    unpack_write_end,
)
from kvstore.wire import Flag, Message, Op

if TYPE_CHECKING:
    from kvstore.node import NodeCore


class PoolControl:
    """Serves the operations of `OPS`.

    Args:
        core: the node store.
    """

    OPS = frozenset(
        {
            Op.LOOKUP, Op.LEASE, Op.PIN, Op.RELEASE, Op.RENEW,
            Op.PREPARE_STORE, Op.COMPLETE_STORE, Op.ABORT_STORE, Op.AWAIT_STORE,
        }
    )  # fmt: skip

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        # Deadline of each save that waits for others to have written the same blocks.
        self._waiting: dict[int, float] = {}

    def serve(self, connection: Connection, message: Message) -> bytes | None:
        """Serve one message; None when the answer comes later.

        Raises:
            KVStoreError: refused; nothing changed.
        """
        core, payload, owner = self._core, message.payload, connection.owner
        match message.op:
            case Op.LOOKUP:
                return U64.pack(core.lookup(decode_chain(payload)))
            case Op.LEASE:
                chain, ttl_s = unpack_lease(payload)
                return pack_grant(core.lease(chain, owner, ttl_s))
            case Op.PIN:
                chain, kind, ttl_s = unpack_pin(payload)
                return pack_grant(core.pin(chain, owner, kind, ttl_s))
            case Op.RELEASE:
                return U64.pack(core.release(U64.unpack(payload)[0], owner))
            case Op.RENEW:
                lease_id, ttl_s = U64_F64.unpack(payload)
                return U64.pack(core.renew(lease_id, owner, ttl_s))
            case Op.PREPARE_STORE:
                chain, num_parts, part = unpack_prepare(payload)
                if connection.pidfd < 0:
                    raise ConfigError(
                        "this kernel does not tell the store when this process ends, so it may read but not write; "
                        "run both in one PID namespace (Linux 5.3 and newer) or on Linux 6.5 and newer"
                    )
                return pack_ticket(core.prepare_store(chain, owner, num_parts, part))
            case Op.COMPLETE_STORE:
                write_id, epoch, generations = unpack_write_end(payload)
                num_published = core.pool.complete_store(write_id, owner, generations=generations, epoch=epoch)
                self._reply_when_known(connection, message, num_published)
                return None
            case Op.ABORT_STORE:
                write_id, epoch, generations = unpack_write_end(payload)
                return U64.pack(core.abort_store(write_id, owner, generations, epoch))
            case _:
                self._await_store(connection, message)
                return None

    def _await_store(self, connection: Connection, message: Message) -> None:
        chain, timeout_s = unpack_lease(message.payload)
        if not 0 <= timeout_s < math.inf:
            raise InvalidRequest(f"timeout_s: wanted a number of seconds from 0 on, got {timeout_s}")
        watch_id = self._core.pool.watch(chain, lambda count: self._reply_when_known(connection, message, count))
        # Not forgotten when it is told earlier: ending a watch that ended does nothing.
        self._waiting[watch_id] = time.monotonic() + timeout_s

    def _reply_when_known(self, connection: Connection, message: Message, value: int) -> None:
        def reply() -> None:
            connection.send(message.op, Flag.REPLY, message.request, U64.pack(value))

        # Answered after the directory has heard, so that who waits for a save can find it from any node.
        self._core.hints.publish_soon(reply)

    def wants_ticks(self) -> bool:
        """Whether something here or in the pool ends with time."""
        pool = self._core.attached_pool
        return bool(self._waiting) or (pool is not None and pool.has_deadlines())

    def tick(self, now_s: float) -> None:
        """End what is over."""
        pool = self._core.attached_pool
        if pool is None:
            return
        pool.expire(now_s)
        for watch_id in [watch_id for watch_id, deadline_s in self._waiting.items() if deadline_s < now_s]:
            del self._waiting[watch_id]
            pool.end_watch(watch_id)

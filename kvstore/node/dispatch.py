"""The control connections of a node store: with workers, with its mover, and with peers.

Runs on the one thread of kvstore.rpc.server, so nothing here may block.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.blocks.codec import decode_object, encode, encode_object
from kvstore.bounds import MAX_CHAIN_BYTES, clip
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import ConfigError, IncompatibleStore, ProtocolError, StoreUnavailable
from kvstore.handoff.records import CLAIM_BIT
from kvstore.node.fence import MoverFence
from kvstore.node.handoff_service import HandoffControl
from kvstore.node.later import SharedAnswer, answer_later
from kvstore.node.load_service import LoadControl
from kvstore.node.peer_service import PeerControl, owner_of
from kvstore.node.pool_routes import PoolRoutes
from kvstore.node.state import NodeState
from kvstore.quotas import check_tenant
from kvstore.rpc.connection import Connection, Handler, Role
from kvstore.rpc.framing import OWNER_KEY_DIGITS, STRANGER_BYTES, Flag, Message, Op, is_secret
from kvstore.rpc.messages import NOTIFICATION, decode_attach
from kvstore.rpc.server import ControlServer
from kvstore.runtime import clock
from kvstore.runtime.guard import LogLimit
from kvstore.runtime.life import MOST_LINES, log_life
from kvstore.runtime.threads.store_threads import Blocking

logger = logging.getLogger(__name__)

_LONGEST_QUESTION_BYTES = MAX_CHAIN_BYTES + STRANGER_BYTES
#: Of one message, by the role of its sender.
_MAX_BYTES = {
    Role.PRESENCE: STRANGER_BYTES, Role.CLIENT: _LONGEST_QUESTION_BYTES, Role.PEER: _LONGEST_QUESTION_BYTES,
}  # fmt: skip


class NodeControl:
    """Serves one node store's connections.

    Args:
        state: of the node store.
        stats: returns the node store's counts; called on a thread of the store.
        on_mover_gone: called, on its own thread, when the mover's process is gone.
    """

    def __init__(
        self, state: NodeState, stats: Callable[[], dict[str, Any]], on_mover_gone: Callable[[], None]
    ) -> None:
        self._state, self._service, self.on_mover_gone = state, state.pool_service, on_mover_gone
        self._is_mover_wanted, self._log, self._gone_limit = False, LogLimit(), LogLimit(at_once=MOST_LINES)
        self.fence = MoverFence(
            state.config,
            state.mover,
            lambda: [self._service.current, *(stage.pool for stage in self.handoffs.stages.all())],
        )
        self.server = ControlServer(
            self._serve, self._gone, self._tick, self._wants_ticks, holds=self._holds, max_bytes=_MAX_BYTES
        )
        self.pool = PoolRoutes(state)
        self._peers = PeerControl(state, self.server.wake)
        self.handoffs = HandoffControl(state, self._peers, self.server)
        loads = LoadControl(state, self.server.wake)
        self._stats = SharedAnswer(state.threads, Blocking.STATS, stats)
        #: What each role may ask.
        self._routes: dict[Role, dict[Op, Handler]] = {
            Role.CLIENT: {
                **self.pool.routes, **self.handoffs.routes, **loads.routes,
                Op.ATTACH: self._attach, Op.STATS: self._stats.ask,
            },
            Role.PEER: {**self._peers.routes, **self.handoffs.peers.routes},
            Role.MOVER: dict.fromkeys(set(Op) - {Op.HELLO, Op.GOODBYE}, self._hear_mover),
            Role.PRESENCE: {},
        }  # fmt: skip

    @property
    def num_calls(self) -> dict[str, int]:
        """Number of served messages, by kind."""
        served = self.server.num_served.copy()  # In one step: its thread goes on counting.
        return {op.name: count for op, count in served.items()}

    def start(self, path: str, host: str) -> None:
        """Listen for workers at `path`, and for peers at `host`. The system chooses the port."""
        self.server.listen_local(path)
        self.server.listen_remote(host)
        self.server.start()

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self.server.stop()
        self.handoffs.fetcher.stop()

    def _serve(self, connection: Connection, message: Message) -> bytes | None:
        """Serve the messages that have no route."""
        if message.op is Op.HELLO:
            return self.hello(connection, message)
        raise ProtocolError(f"a node store does not serve {message.op.name} to a {connection.role}")

    def _hear_mover(self, connection: Connection, message: Message) -> None:
        mover = self._state.mover
        try:
            mover.serve(connection, message, self._notified)
        except ProtocolError as error:
            if mover.is_present(connection):
                # It writes to slots, and its reports about them can no longer be trusted.
                self.fence.kill(str(error))
            else:
                if self._log.passes():
                    more = self._log.take_held_back()
                    logger.warning("%s is turned away: %s (%d more not logged)", connection.owner, error, more)
                connection.shut_down()

    def _notified(self, payload: bytes) -> None:
        """End the leases and claims whose READs have ended, before their time expires.

        Raises:
            ProtocolError: `payload` is not a row of notifications; nothing changed.
        """
        if len(payload) % NOTIFICATION.size:
            raise ProtocolError(f"wanted notifications of {NOTIFICATION.size} bytes each, got {len(payload)} bytes")
        for number, epoch, reader in NOTIFICATION.iter_unpack(payload):
            if epoch != self._state.epoch:
                continue
            if number & CLAIM_BIT:
                self.handoffs.peers.end(number, owner_of(reader), used=True)
            else:
                self._peers.release(number, owner_of(reader))

    def hello(self, connection: Connection, message: Message) -> bytes | None:
        """Give a new connection its role, or refuse it.

        Raises:
            IncompatibleStore: It speaks another protocol.
            StoreUnavailable: It is a client that knows other slots.
            ConfigError: It is a mover whose process this kernel cannot name, or names a tenant that the store has not.
        """
        value = decode_object(message.payload)
        if value.get("protocol") != PROTOCOL_VERSION:
            raise IncompatibleStore(
                f"this node store speaks protocol {PROTOCOL_VERSION}, got {clip(value.get('protocol'))}; "
                "run one version of raykv everywhere"
            )
        role = value.get("role")
        if role == Role.MOVER and connection.local and connection.pidfd < 0:
            raise ConfigError("this kernel cannot name the mover's process (Linux 5.3 can), so it could not be fenced")
        if connection.local and role in (Role.CLIENT, Role.MOVER, Role.PRESENCE):
            if role == Role.CLIENT:
                connection.tenant = check_tenant(self._state.config.tenants, value.get("tenant", ""))
                self._join(connection, value)
            connection.role, connection.routes = Role(role), self._routes[Role(role)]
            # The mover's messages free slots: read them even while the mover is slow to read its own.
            connection.reads_on = role == Role.MOVER
            memory = self._state.presence if role == Role.PRESENCE else self._state.arena
            connection.send(Op.HELLO, Flag.REPLY, message.request, self._greeting(connection), (memory.fd,))
            return None
        if not connection.local and role == Role.PEER:
            if not is_secret(value.get("token"), self._state.token):
                raise IncompatibleStore("wrong token: this address now belongs to another life of the store")
            connection.owner = self._peers.owner_in(value)
            connection.role, connection.routes = Role.PEER, self._routes[Role.PEER]
            return self._greeting(connection)
        raise ProtocolError(f"wanted role client, mover or presence locally, or peer remotely, got {clip(role)}")

    def _join(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Note the owner of a connection, and end the connection that it replaces."""
        key, replaced, since = hello.get("owner"), hello.get("replaces"), hello.get("since")
        if hello.get("slot_bytes", 0) not in (0, self._service.slot_bytes):
            raise StoreUnavailable(
                "the node store was restarted, or a client with larger blocks came before anything was saved: its "
                "memory is another one; close this client and make a new one"
            )
        connection.slot_bytes = hello.get("slot_bytes", 0)
        if key is not None:
            if not (isinstance(key, str) and len(key) == OWNER_KEY_DIGITS):
                raise ProtocolError(
                    f"owner: wanted {OWNER_KEY_DIGITS} digits, got {key!r:.40}; run one version of raykv"
                )
            # Hashed, because messages and logs have owners' names, and the key is the client's secret.
            self.server.join(connection, f"client-{hashlib.sha256(key.encode()).hexdigest()[:16]}")
        if isinstance(replaced, str) and isinstance(since, int):
            self.server.end_replaced(replaced, since, connection)

    def _attach(self, connection: Connection, message: Message) -> bytes | None:
        wanted, service, disk = decode_attach(message.payload), self._service, self._state.disk
        answer = service.attach(wanted.namespace, wanted.block_bytes, may_divide_again=True)
        connection.slot_bytes = service.slot_bytes
        # No question of a client that knows other slots is served from here on.
        for other in [each for each in self.server.connections if each.slot_bytes not in (0, service.slot_bytes)]:
            self.server.owners.close(other)
        if disk is None or disk.has_begun.is_set():
            return encode(answer)
        wait = partial(disk.wait_begun, answer)
        answer_later(self._state.threads, Blocking.ATTACH, connection, message, wait)
        return None

    def _greeting(self, connection: Connection) -> bytes:
        return encode_object(
            {
                "protocol": PROTOCOL_VERSION,
                "epoch": self._state.epoch.hex(),
                "node": self._state.node_id,
                "connection": connection.name,
                "config": self._state.config.to_json(),
                "arena_bytes": self._state.arena.num_bytes,
            }
        )

    def _gone(self, connection: Connection) -> None:
        if connection.role is Role.MOVER:
            if self._state.mover.is_present(connection):
                self._is_mover_wanted = True
                with contextlib.ExitStack() as parts:
                    # ExitStack runs them from the last to the first, and each one even if others raise.
                    parts.callback(self._want_mover)
                    parts.callback(self.handoffs.table.lose_stages)
                    parts.callback(self._state.mover.gone, connection)
                    num_reads = len(self._state.mover.unfinished.reads)
                    if not self.fence.expects_end:
                        log_life(
                            "mover_gone", level=logging.WARNING, node=self._state.node_id, mover_pid=connection.pid,
                            num_reads=num_reads,
                        )  # fmt: skip
        elif connection.role is Role.CLIENT and connection.ended:
            num_held = self._service.current.release_owner(connection.owner)
            num_handoffs = self.handoffs.release_owner(connection.owner)
            if num_held or num_handoffs:
                log_life(
                    "worker_gone", limit=self._gone_limit, node=self._state.node_id, owner=connection.owner,
                    worker_pid=connection.pid, tenant=connection.tenant or None,
                    how="closed" if connection.said_goodbye else "died", num_leases_and_writes=num_held,
                    num_handoffs=num_handoffs,
                )  # fmt: skip

    def _want_mover(self) -> None:
        """Call `on_mover_gone` on a new thread. If no thread can be started, the next tick tries again."""
        if not self._is_mover_wanted:
            return
        try:
            threading.Thread(target=self.on_mover_gone, name="raykv-mover-gone", daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            if self._log.passes():
                logger.error("the mover is gone, and no thread can be started that replaces it: %s", error)
        else:
            self._is_mover_wanted = False

    def _holds(self, connection: Connection) -> bool:
        if connection.role is Role.MOVER:
            # Its READs may still write until its process is gone. A mover that was turned away posted no READ.
            return self._state.mover.is_present(connection)
        if connection.role is not Role.CLIENT:
            return False
        return self._service.current.holds(connection.owner) or self.handoffs.holds(connection.owner)

    def _wants_ticks(self) -> bool:
        state = self._state
        if self.fence.wants_ticks() or state.hints.waiting or state.fetcher.flights.num_waiting:
            return True
        if self._is_mover_wanted or self._peers.wants_ticks():
            return True
        return self.pool.wants_ticks() or self.handoffs.wants_ticks()

    def _tick(self) -> None:
        now_s = clock.now_s()
        with contextlib.ExitStack() as parts:
            # ExitStack runs them from the last to the first, and each one even if others raise.
            parts.callback(self._peers.tick, now_s)
            parts.callback(self._state.fetcher.flights.give_up_overdue)
            parts.callback(self._state.hints.answer_overdue)
            parts.callback(self.fence.check)
            parts.callback(self._want_mover)
            parts.callback(self.handoffs.tick, now_s)
            parts.callback(self.pool.tick, now_s)

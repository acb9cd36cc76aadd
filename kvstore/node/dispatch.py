"""What a node store says on its control connections: to workers, to its mover, and to peers.

Runs on the one thread of kvstore.rpc.server, so nothing here may block.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.blocks.codec import decode_object, encode, encode_object
from kvstore.bounds import MAX_CHAIN_BYTES, check_seconds, clip
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import (
    ConfigError,
    IncompatibleStore,
    InvalidRequest,
    ProtocolError,
)
from kvstore.node.fence import MoverFence
from kvstore.node.handoff_service import HandoffControl
from kvstore.node.later import SharedAnswer, answer_all
from kvstore.node.peer_service import PeerControl
from kvstore.node.pool_service import PoolControl
from kvstore.node.pool_verbs import deadline_after
from kvstore.pool.pool import Pool
from kvstore.remote.load import Load
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import OWNER_KEY_DIGITS, STRANGER_BYTES, Flag, Message, Op, is_secret
from kvstore.rpc.messages import (
    Found,
    Progress,
    decode_ask,
    decode_ask_load,
    decode_attach,
)
from kvstore.rpc.server import ControlServer
from kvstore.runtime import clock
from kvstore.runtime.guard import LogLimit
from kvstore.runtime.store_threads import Blocking

if TYPE_CHECKING:
    from kvstore.node.core import NodeCore

logger = logging.getLogger(__name__)

#: Of one message, by the role of who sends it.
_MAX_BYTES = {"presence": STRANGER_BYTES} | dict.fromkeys(("client", "peer"), MAX_CHAIN_BYTES + STRANGER_BYTES)


class NodeControl:
    """Serves one node store's connections.

    Args:
        core: the node store.
        on_mover_gone: called, on a thread of its own, when the mover's process is gone.
    """

    def __init__(self, core: NodeCore, on_mover_gone: Callable[[], None]) -> None:
        self._core, self._on_mover_gone = core, on_mover_gone
        self._is_mover_wanted, self._log = False, LogLimit()
        self._fence = MoverFence(core.config, core.mover, self._pools_read_into)
        self._pool = PoolControl(core)
        self._peers = PeerControl(core, self.wake)
        self._stats = SharedAnswer(core.threads, Blocking.STATS, lambda: core.stats())
        self._server = ControlServer(
            self._serve, self._gone, self._tick, self._wants_ticks, holds=self._holds, max_bytes=_MAX_BYTES
        )
        self.handoffs = HandoffControl(core, self._peers.began, self._peers.ended, self._server)

    @property
    def port(self) -> int:
        """TCP port for peers."""
        return self._server.port

    @property
    def num_calls(self) -> dict[str, int]:
        """How many messages of each kind were served."""
        return {op.name: count for op, count in self._server.num_served.items()}

    @property
    def port_counts(self) -> dict[str, int]:
        """What went wrong at this node's ports, each kind counted."""
        server = self._server
        return {
            "num_malformed": server.num_malformed,
            "num_strangers_cut": server.num_strangers_cut,
            "num_unread_cut": server.num_unread_cut,
            "num_failures": server.num_failures,
        }

    @property
    def num_fenced(self) -> int:
        """How many movers had to be killed so far."""
        return self._fence.num_fenced

    def start(self, path: str, host: str) -> None:
        """Listen for workers at `path` and for peers at `host`, on a port that the system chooses."""
        self._server.listen_local(path)
        self._server.listen_remote(host)
        self._server.start()

    def is_serving(self, within_s: float) -> bool:
        """Whether the control thread goes through a whole round within so many seconds."""
        return self._server.is_serving(within_s)

    def wake(self) -> None:
        """Have the thread look at its timers: a lease was made by another thread."""
        self._server.wake()

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._server.stop()
        self.handoffs.fetcher.stop()

    def _serve(self, connection: Connection, message: Message) -> bytes | None:
        op, payload = message.op, message.payload
        if op is Op.HELLO:
            return self._hello(connection, message)
        if not connection.role:
            raise ProtocolError("wanted HELLO first")
        if connection.role == "presence":
            raise ProtocolError("wanted no more than HELLO from who only reads the presence table")
        if connection.role == "mover":
            self._hear_mover(connection, message)
            return None
        if connection.role == "peer":
            if op in HandoffControl.PEER_OPS:
                return self.handoffs.serve_peer(connection, message)
            return self._peers.serve(connection, message)
        if op in HandoffControl.OPS:
            return self.handoffs.serve(connection, message)
        match op:
            case Op.LOAD:
                self._load(connection, message)
                return None
            case Op.LOOKUP_ALL:
                asked = decode_ask(payload)
                chain, wait_s = asked.chain, check_seconds("wait_s", asked.seconds)
                num_local, until_s = self._core.lookup(chain), clock.now_s() + wait_s
                question = [(connection, op, message.request)]
                run = partial(answer_all, question, lambda: Found(self._core.lookup_all(chain, until_s)))
                is_sure = num_local == len(chain) or self._core.hints.is_alone() or self._core.is_draining
                if is_sure or not self._core.threads.submit(Blocking.LOOKUP, run):
                    return encode(Found([(self._core.node_id, num_local)]))
                return None
            case Op.ATTACH:
                wanted = decode_attach(payload)
                return encode(self._core.attach(wanted.namespace, wanted.block_bytes))
            case Op.STATS:
                self._stats.ask(connection, message)
                return None
            case _:
                raise ProtocolError(f"a node store does not serve {op.name} to a {connection.role}")

    def _pools_read_into(self) -> list[Pool]:
        arena = self._core.attached_pool
        return [] if arena is None else [arena, *(stage.pool for stage in self.handoffs.stages.all())]

    def _hear_mover(self, connection: Connection, message: Message) -> None:
        mover = self._core.mover
        try:
            mover.serve(connection, message, self._notified)
        except ProtocolError as error:
            if mover.is_present(connection):
                # It writes to slots, and nothing that it says of them can be believed any more.
                self._fence.kill(str(error))
            else:
                if self._log.passes():
                    more = self._log.take_held_back()
                    logger.warning("%s is turned away: %s (%d more not logged)", connection.owner, error, more)
                connection.shut_down()

    def _notified(self, payload: bytes) -> None:
        self._peers.notified(payload)
        self.handoffs.notified(payload)

    def _hello(self, connection: Connection, message: Message) -> bytes | None:
        value = decode_object(message.payload)
        if value.get("protocol") != PROTOCOL_VERSION:
            raise IncompatibleStore(
                f"this node store speaks protocol {PROTOCOL_VERSION}, got {clip(value.get('protocol'))}; "
                "run one version of raykv everywhere"
            )
        role = value.get("role")
        if role == "mover" and connection.local and connection.pidfd < 0:
            raise ConfigError("this kernel cannot name the mover's process (Linux 5.3 can), so it could not be fenced")
        if connection.local and role in ("client", "mover", "presence"):
            if role == "client":
                self._join(connection, value)
            connection.role = role
            # What the mover says frees slots: it is heard, however slowly it reads what it is asked.
            connection.reads_on = role == "mover"
            memory = self._core.presence if role == "presence" else self._core.arena
            connection.send(Op.HELLO, Flag.REPLY, message.request, self._greeting(connection), (memory.fd,))
            return None
        if not connection.local and role == "peer":
            if not is_secret(value.get("token"), self._core.token):
                raise IncompatibleStore("wrong token: this address now belongs to another life of the store")
            connection.owner = self._peers.owner_in(value)
            connection.role = "peer"
            return self._greeting(connection)
        raise ProtocolError(f"wanted role client, mover or presence locally, or peer remotely, got {clip(role)}")

    def _join(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Know whose connection it is, and which one it replaces."""
        key, replaced, since = hello.get("owner"), hello.get("replaces"), hello.get("since")
        if key is not None:
            self._server.join(connection, owner_of_key(key))
        if isinstance(replaced, str) and isinstance(since, int):
            self._server.end_replaced(replaced, since, connection)
        connection.verbs = self._pool.verbs

    def _greeting(self, connection: Connection) -> bytes:
        return encode_object(
            {
                "protocol": PROTOCOL_VERSION,
                "epoch": self._core.epoch.hex(),
                "node": self._core.node_id,
                "connection": connection.name,
                "config": self._core.config.to_json(),
                "arena_bytes": self._core.arena.num_bytes,
            }
        )

    def _load(self, connection: Connection, message: Message) -> None:
        asked = decode_ask_load(message.payload)
        chain, ttl_s, timeout_s = asked.chain, asked.ttl_s, check_seconds("timeout_s", asked.timeout_s)
        self._core.check_serving()
        if self._core.fetcher is None or chain.namespace not in self._core.block_bytes:
            raise InvalidRequest("wanted a namespace that has attached to this store, got another; make a client first")
        version = self._core.versions.get(chain.namespace)
        # A look at the first block: a load of what is all elsewhere is not searched for block by block.
        held = chain if self._core.pool.lookup(chain.head(1)) else chain.head(0)
        grant = self._core.pool.pin_prefix(held, connection.owner, deadline_after(ttl_s))
        self._server.wake()
        connection.gave = message.request, partial(self._core.release, grant.lease_id, connection.owner)
        request = message.request  # Not the message: its bytes would stay for as long as the load waits.
        load = Load(
            chain=chain,
            block_bytes=self._core.block_bytes[chain.namespace],
            owner=connection.owner,
            lease_id=grant.lease_id,
            ttl_s=ttl_s,
            deadline_s=clock.now_s() + timeout_s,
            pool=self._core.pool,
            version_now=partial(self._core.versions.get, chain.namespace),
            version=version,
            send=lambda payload, last: self._answer_load(connection, request, payload, last),
            is_open=lambda: not connection.closed,
        )
        load.num_ready = load.report.num_local = num_here = len(grant.packed_slots) // 4
        if grant.num_refused:
            load.report.reason = f"pool_full: the budget of pins has no room for {grant.num_refused} more blocks"
        if grant.num_refused or num_here == len(chain):
            load.send(encode(Progress(grant.lease_id, 0, grant.packed_slots, load.report)), True)
            return
        if grant.packed_slots:
            load.send(encode(Progress(grant.lease_id, 0, grant.packed_slots)), False)
        self._core.fetcher.begin(load)

    @staticmethod
    def _answer_load(connection: Connection, request: int, payload: bytes, last: bool) -> None:
        connection.send(Op.LOAD, Flag.REPLY if last else Flag.PROGRESS, request, payload)

    def _gone(self, connection: Connection) -> None:
        if connection.role == "mover":
            if self._core.mover.is_present(connection):
                self._is_mover_wanted = True
                with contextlib.ExitStack() as parts:
                    # From the last to the first; each is done whatever the others raise.
                    parts.callback(self._want_mover)
                    parts.callback(self.handoffs.mover_gone)
                    parts.callback(self._core.mover.gone, connection)
        elif self._core.attached_pool is not None and connection.role == "client" and connection.ended:
            dropped = self._core.attached_pool.release_owner(connection.owner)
            dropped += self.handoffs.release_owner(connection.owner)
            if dropped:
                logger.info("client %s is gone: %d leases, writes and hand-offs came back", connection.owner, dropped)

    def _want_mover(self) -> None:
        """Say that the mover is gone; where no thread can be started now, the next tick says it."""
        if not self._is_mover_wanted:
            return
        try:
            threading.Thread(target=self._on_mover_gone, name="raykv-mover-gone", daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            if self._log.passes():
                logger.error("the mover is gone, and no thread can be started that replaces it: %s", error)
        else:
            self._is_mover_wanted = False

    def _holds(self, connection: Connection) -> bool:
        if connection.role == "mover":
            # What it posted may still write until its process is gone. One that was turned away posted nothing.
            return self._core.mover.is_present(connection)
        pool = self._core.attached_pool
        if connection.role != "client" or pool is None:
            return False
        return pool.holds(connection.owner) or self.handoffs.holds(connection.owner)

    def _wants_ticks(self) -> bool:
        core = self._core
        if self._fence.wants_ticks() or core.hints.num_waiting > 0 or self._is_mover_wanted:
            return True
        if core.fetcher is not None and core.fetcher.flights.num_waiting > 0:
            return True
        return self._pool.wants_ticks() or self.handoffs.wants_ticks()

    def _tick(self) -> None:
        now_s = clock.now_s()
        with contextlib.ExitStack() as parts:
            # From the last to the first; each is done whatever the others raise.
            parts.callback(self._peers.tick, now_s)
            if self._core.fetcher is not None:
                parts.callback(self._core.fetcher.flights.give_up_overdue)
            parts.callback(self._core.hints.answer_overdue)
            parts.callback(self._fence.check)
            parts.callback(self._want_mover)
            parts.callback(self.handoffs.tick, now_s)
            parts.callback(self._pool.tick, now_s)


def owner_of_key(key: object) -> str:
    """Return the owner that a client is, by the key that it chose and tells nobody else.

    Raises:
        ProtocolError: that is no key.
    """
    if not (isinstance(key, str) and len(key) == OWNER_KEY_DIGITS):
        raise ProtocolError(f"owner: wanted {OWNER_KEY_DIGITS} digits, got {key!r:.40}; run one version of raykv")
    # Owners are named in messages and logs.
    return f"client-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

"""A client's connections to the store of its node.

For the store they are all one owner, named by the client's key: a grant over one connection is released, renewed and
completed over any. A call that times out closes its connection. The next connection names it and its first unanswered
question. The store then takes back what it granted, or would still have granted, from that question on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from io import FileIO

from kvstore.client.idle_connections import BrokenConnections, IdleConnections
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import (
    ConfigError,
    KVStoreError,
    NotAsked,
    PeerLost,
    StoreBusy,
    StoreNotRunning,
    StoreUnavailable,
    TransferTimeout,
)
from kvstore.memory.arena import attach_arena
from kvstore.rpc.client import ControlClient
from kvstore.rpc.connect import connect_local, greeting_of
from kvstore.rpc.framing import OWNER_KEY_DIGITS, Op
from kvstore.rpc.retelling import PAUSES_S, Retelling
from kvstore.runtime import clock
from kvstore.runtime.forks import check_process, this_process
from kvstore.runtime.turns import Turn, Turns

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 5.0
#: Tries of one call that finds its connection closed by another call's failure.
_MOST_TRIES = 3
#: For the kernel a timeout of 0 means no limit.
_LEAST_S = 1e-3


class StoreConnections:
    """Connections to one epoch of a node's store; for any thread.

    Args:
        path: the store's socket.
        on_lost: called when that epoch of the store has ended; on any thread, perhaps more than once.
        tenant: of the client, said in each HELLO; "" is the shared one.

    Attributes:
        node_id, epoch, config: the store's.
        call_timeout_s: limit for the answer to one call.
        slot_bytes: of the store's slots as the client knows them; 0 before it has attached.
        arena: the store's memory, mapped; the caller unmaps it.
        retelling: tells the store what only this client knows, now or as soon as it answers again.
        for_jobs, for_fetches, for_lookups: idle connections for saves and loads, for fetches, for lookups and `stats`.

    Raises:
        StoreNotRunning: no store answers at the path.
        IncompatibleStore: the store runs another protocol version.
        ProtocolError, ConfigError: its greeting is not that of a store of this version; or it has no such tenant.
    """

    def __init__(self, path: str, on_lost: Callable[[], None], tenant: str = "") -> None:
        self.path, self._tenant, self._on_lost = path, tenant, on_lost
        self.has_ended = self.was_closed = self._is_lost = False
        self._pid, self.key, self.slot_bytes = this_process(), secrets.token_hex(OWNER_KEY_DIGITS // 2), 0
        # Reentrant: a signal handler may ask under it.
        self._lock, self.renewing = threading.RLock(), Turns()
        # Two threads may send last messages: `close`, and one for jobs that outlast it. Without this lock one of them
        # may find no free connection, and wait in vain for a new one while the store is blocked.
        self._last_words = threading.RLock()
        self.open: list[ControlClient] = []
        self.broken = BrokenConnections()
        self.for_jobs = IdleConnections(self.connect, self.broken)
        self.for_fetches = IdleConnections(self.connect, self.broken)
        self.for_lookups = IdleConnections(self.connect, self.broken)
        self.retelling = Retelling(self.call, lambda: self._is_lost)
        self.call_timeout_s = _HELLO_TIMEOUT_S
        self.calls, file = self.connect_anew()
        try:
            greeting = greeting_of(self.calls)
            self.node_id, self.epoch = greeting.node, greeting.epoch
            self.config = StoreConfig.from_json(greeting.config)
            self.call_timeout_s = self.config.call_timeout_s
            self.arena = attach_arena(file, greeting.arena_bytes)
        except BaseException:
            file.close()
            self.calls.close()
            raise

    def connect_anew(
        self, replaces: ControlClient | None = None, since: int = 0, timeout_s: float | None = None
    ) -> tuple[ControlClient, FileIO]:
        """Open one more connection, with the arena's file; the caller closes the file.

        The store takes back its grants over a broken connection, `replaces`, for question `since` and later ones. Its
        answer is waited for `timeout_s`, or as long as for a call. The connection is in `open` then.
        """
        who = {"owner": self.key, "tenant": self._tenant, "slot_bytes": self.slot_bytes}
        hello: dict[str, object] = {"role": "client", "protocol": PROTOCOL_VERSION, **who}
        if replaces is not None:
            hello |= {"replaces": replaces.hello["connection"], "since": since}
        limit_s = self.call_timeout_s if timeout_s is None else timeout_s
        connection, file = connect_local(
            self.path, hello, timeout_s=max(limit_s, _LEAST_S), call_timeout_s=self.call_timeout_s
        )
        try:
            greeting_of(connection)  # Find a foreign server when opening, not when using it.
            with self._lock:
                # Drop the ones that a timeout or an abandoned load closed.
                self.open = [*(known for known in self.open if not known.closed), connection]
            return connection, file
        except BaseException:
            file.close()
            connection.close()
            raise

    def connect(
        self, replaces: ControlClient | None = None, since: int = 0, timeout_s: float | None = None
    ) -> ControlClient:
        """Open one more connection; arguments as for `connect_anew`.

        Raises:
            StoreUnavailable: the store is gone, or was restarted, or has other slots; `on_lost` was called.
            TransferTimeout: it did not answer in time.
            ForkedClient: this is a child of the process that made it.
        """
        check_process(self._pid)
        try:
            connection, file = self.connect_anew(replaces, since, timeout_s)
        except StoreUnavailable as error:
            if isinstance(error.__cause__, BlockingIOError):
                raise TransferTimeout(str(error)) from error
            # Others may have removed its socket's file; an open connection shows that it lives.
            is_gone = _is_nobody_there(error) and all(known.has_ended() for known in list(self.open))
            if is_gone or not isinstance(error, StoreNotRunning):  # The store itself refuses this client.
                self._lose()
            raise
        file.close()
        if connection.hello["epoch"] != self.epoch:
            connection.close()
            self._lose()
            raise StoreUnavailable(
                "the node store was restarted: its memory is another one; close this client and make a new one"
            )
        return connection

    def _lose(self) -> None:
        self._is_lost = True
        self._on_lost()

    def call(self, op: Op, payload: bytes, meanwhile: Callable[[], None] | None = None, awake_s: float = 0.0) -> bytes:
        """Ask over the connection of calls; raises what `ControlClient.call` raises."""
        self.check_open()
        limit_s = self.call_timeout_s
        for _ in range(_MOST_TRIES):
            connection = self.calls
            if connection.closed or self.broken.untold:
                asked_s = clock.now_s()
                connection = self.renewed(limit_s)
                limit_s = max(_LEAST_S, limit_s - (clock.now_s() - asked_s))
            try:
                return connection.call(op, payload, timeout_s=limit_s, meanwhile=meanwhile, awake_s=awake_s)
            except PeerLost as error:
                # Another client that attaches may end this connection, see NodeControl.
                if op is not Op.ATTACH and not isinstance(error, NotAsked):
                    raise
                last = error
        raise last

    def say(self, op: Op, payload: bytes) -> None:
        """Send a message without an answer over the connection of calls."""
        self.check_open()
        self.renewed(self.call_timeout_s).send(op, payload)

    def renewed(self, timeout_s: float) -> ControlClient:
        """Return the connection of calls, replaced if broken. Also name another broken one to the store."""
        if self.broken.is_due():
            self.for_lookups.name_broken(timeout_s)
        if not self.calls.closed:
            return self.calls
        check_process(self._pid)
        until_s, turn = clock.now_s() + timeout_s, [threading.get_ident()]
        try:
            with contextlib.suppress(StoreBusy):  # Raised if this thread has the turn: it is in a signal handler.
                if not self.renewing.take(turn) and not self.renewing.wait(turn, timeout_s, _check_other):
                    raise TransferTimeout(f"{self.calls.name}: others who connect anew took all the time")
            self.check_open()  # If closed meanwhile, no call would give back a grant.
            broken = self.calls
            if broken.closed:
                left_s = until_s - clock.now_s()
                self.calls = renewed = self.connect(broken, broken.unheard or broken.next_question, left_s)
                if self.has_ended:  # Closed meanwhile: the store may see this connection after the goodbye.
                    renewed.close()
                    self.check_open()
            return self.calls
        finally:
            self.renewing.end(turn)

    def ask(self, op: Op, payload: bytes, timeout_s: float) -> bytes:
        """Ask over a new connection, for questions that take longer than a call."""
        self.check_open()
        with contextlib.closing(self.connect()) as connection:
            return connection.call(op, payload, timeout_s=timeout_s)

    def check_open(self) -> None:
        """Refuse to continue after `end`, with StoreUnavailable, and in a forked child, with ForkedClient."""
        check_process(self._pid)
        if self.has_ended:
            raise StoreUnavailable("wanted an open client, got a closed one; make a new one")

    def check_process(self) -> None:
        """Refuse a forked child with ForkedClient."""
        check_process(self._pid)

    def is_inherited(self) -> bool:
        """Return whether this is a forked child, so that the connections are the parent's."""
        return this_process() != self._pid

    def end(self) -> bool:
        """Refuse everything new, and return whether this is the first call. Running jobs keep their connections."""
        if self.is_inherited():  # In a forked child the lock may be held forever.
            had_ended, self.has_ended = self.has_ended, True
            return not had_ended
        with self._lock:
            had_ended, self.has_ended = self.has_ended, True
            for idle in (self.for_jobs, self.for_fetches, self.for_lookups):
                idle.is_closed = True
        return not had_ended

    def close(self, *, jobs_are_over: bool, waits: bool = True) -> None:
        """Close every connection and have the store take everything back; may be called again.

        If the store does not answer now, a new thread tells it when it does; with `waits`, this waits for that at most
        as long as for a call. Unless `jobs_are_over`, the store takes back only the pins: jobs may still copy what they
        hold, so the store keeps that until `say_goodbye`, or until this process ends.
        """
        if self.is_inherited():
            connections, self.open = self.open, []
        else:
            self.retelling.close()
            self._say_last(Op.GOODBYE if jobs_are_over else Op.UNPIN_ALL, self.call_timeout_s if waits else 0.0)
            with self._lock:
                connections, self.open = self.open, []
        for connection in connections:
            connection.close()
        self.was_closed = True

    def say_goodbye(self) -> None:
        """Have the store take everything back; after `close`, when no job copies any more."""
        self._say_last(Op.GOODBYE, self.call_timeout_s)

    def _say_last(self, op: Op, wait_s: float) -> None:
        """Send a last message until the store gets it or has ended. Wait here at most `wait_s`."""
        if self._is_lost or self.is_said(op):
            return
        saying = threading.Thread(target=self._say_over_new, args=(op,), name="raykv-goodbye", daemon=True)
        try:
            saying.start()
        except RuntimeError:  # For example at interpreter exit, which tells the store.
            logger.debug("no thread can be started that says %s to the node store", op.name)
        else:
            saying.join(wait_s)

    def is_said(self, op: Op) -> bool:
        """Send it over one connection that is free now; return whether there was one."""
        with self._last_words:
            for connection in (self.calls, *list(self.open)):
                with contextlib.suppress(KVStoreError):
                    if connection.send_if_free(op):
                        return True
        return False

    def _say_over_new(self, op: Op) -> None:
        """Send it over a new connection, again and again until the store has got it."""
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            last = self.calls
            named = (last, last.unheard or last.next_question) if last.closed else (None, 0)
            try:
                connection, file = self.connect_anew(*named)
                file.close()
                with contextlib.closing(connection):
                    connection.send(op)
                    return
            except KVStoreError as error:
                is_refused = isinstance(error, StoreUnavailable) and not isinstance(error, StoreNotRunning)
                if is_refused or _is_nobody_there(error) or isinstance(error, ConfigError):
                    logger.debug("the node store was gone before this client")
                    return
            time.sleep(pause_s)


def _is_nobody_there(error: KVStoreError) -> bool:
    """Return whether no process listens at the path. An epoch's path is its own, so that is permanent."""
    return isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError))


def _check_other(now: Turn) -> None:
    if now[0] == threading.get_ident():
        raise StoreBusy("this thread connects anew already")

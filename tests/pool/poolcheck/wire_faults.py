"""Faults in what a store and its mover say to each other: count the messages of a load, then spoil each in turn.

The connection between them loses nothing and keeps the order, so these are not faults of a network: they stand for
bugs and for memory gone bad on either side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec
import pytest

from kvstore.mover.process import Mover
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Flag, Op

NEVER = -1
#: Later than all that waits for it has given up.
LATE_S = 0.6
_UNKNOWN_ID = 2**62


class Spoil(Enum):
    """What happens to a message."""

    DROPPED = "dropped"
    TWICE = "twice"
    LATE = "late"
    TRUNCATED = "truncated"
    UNKNOWN_ID = "unknown id"


#: Those that begin with the id of a READ or of a lease.
_WITH_ID = {Op.MOVER_READ, Op.MOVER_DONE, Op.MOVER_TERMINAL, Op.MOVER_NOTIFICATIONS}


@dataclass
class WireFaults:
    """Counts messages while armed, and spoils the one that was asked for."""

    spoil: Spoil = Spoil.DROPPED
    spoil_at: int = NEVER
    armed: bool = False
    messages: list[Op] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _late: list[threading.Timer] = field(default_factory=list)

    def arm(self, spoil: Spoil = Spoil.DROPPED, spoil_at: int = NEVER) -> None:
        """Count from here on, and spoil message `spoil_at`."""
        with self._lock:
            self.spoil, self.spoil_at, self.messages, self.armed = spoil, spoil_at, [], True

    def disarm(self) -> list[Op]:
        """Count and spoil no more, once what is late has come; returns the messages there were."""
        with self._lock:
            self.armed = False
            late, self._late = self._late, []
        for timer in late:
            timer.join(5.0)
        return self.messages

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand between every store and its mover."""
        tell, report = Connection.send, Mover.send

        def told(connection: Connection, op: Op, flag: Flag, request: int, payload: bytes, *rest: Any) -> bool:
            if connection.role != "mover" or op is Op.HELLO:
                return tell(connection, op, flag, request, payload, *rest)
            return self._pass(op, payload, lambda data: tell(connection, op, flag, request, data))

        def reported(mover: Mover, op: Op, payload: bytes, *rest: Any) -> None:
            def send(data: bytes) -> bool:
                try:
                    report(mover, op, data, *rest)
                except OSError:
                    if threading.current_thread() is threading.main_thread():
                        raise
                    # The mover that this was late from is gone.
                return True

            self._pass(op, payload, send)

        monkeypatch.setattr(Connection, "send", told)
        monkeypatch.setattr(Mover, "send", reported)

    def _pass(self, op: Op, payload: bytes, send: Callable[[bytes], bool]) -> bool:
        with self._lock:
            spoilt = self.armed and len(self.messages) == self.spoil_at
            if self.armed:
                self.messages.append(op)
            if spoilt and self.spoil is Spoil.LATE:
                timer = threading.Timer(LATE_S, send, [payload])
                timer.daemon = True
                timer.start()
                self._late.append(timer)
                return True
        if not spoilt:
            return send(payload)
        match self.spoil:
            case Spoil.DROPPED:
                return True
            case Spoil.TWICE:
                send(payload)
                return send(payload)
            case Spoil.TRUNCATED:
                return send(payload[: len(payload) // 2])
            case _:
                return send(_with_unknown_id(payload) if op in _WITH_ID else payload)


def _with_unknown_id(payload: bytes) -> bytes:
    value = msgspec.msgpack.decode(payload)
    if isinstance(value, bytes):  # Notifications, of which each begins with the id.
        value = _UNKNOWN_ID.to_bytes(8, "little") + value[8:]
    else:
        value = [_UNKNOWN_ID, *value[1:]] if isinstance(value, list) else _UNKNOWN_ID
    return msgspec.msgpack.encode(value)

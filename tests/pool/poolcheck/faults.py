"""Faults at every step of an operation: count the steps of one that succeeds, then break each of them in turn.

A step is a critical section of a pool that is about to begin, a message on a control connection, a call of the
transfer engine, or a copy between an engine's blocks and slots. A connection breaks, as connections do, when a
message on it is to be sent; everything else raises.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstore.engine.host_copier import HostCopier
from kvstore.errors import TransferError
from kvstore.mover.transport import ReadState
from kvstore.rpc.channel import Channel
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Flag, Op

NEVER = -1


class InjectedFault(Exception):
    """No error that the code expects."""


@dataclass
class Faults:
    """Counts steps while armed, and breaks the one that was asked for."""

    fail_at: int = NEVER
    armed: bool = False
    steps: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, fail_at: int = NEVER) -> None:
        """Count from here on, and break step `fail_at`."""
        with self._lock:
            self.fail_at, self.steps, self.armed = fail_at, [], True

    def disarm(self) -> list[str]:
        """Count and break no more; returns the steps there were."""
        with self._lock:
            self.armed = False
            return self.steps

    def breaks(self, step: str) -> bool:
        """Note a step; whether it is the one to break."""
        with self._lock:
            if not self.armed:
                return False
            self.steps.append(step)
            return len(self.steps) - 1 == self.fail_at

    # Where steps are.

    def before(self, function: Callable[..., Any], step: str) -> Callable[..., Any]:
        """Return a function that stands before another one."""

        def stepped(*arguments: Any, **named: Any) -> Any:
            if self.breaks(step):
                raise InjectedFault(f"injected before {step}")
            return function(*arguments, **named)

        return stepped

    def in_pool(self, step: str) -> None:
        """Stand before a critical section of a pool."""
        if self.breaks(f"pool {step}"):
            raise InjectedFault(f"injected before {step}")

    def on_the_wire(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand before every message between workers, stores and the directory."""
        ask, answer = Channel.send, Connection.send

        def asked(channel: Channel, op: Op, flag: Flag, payload: bytes) -> int:
            if op is not Op.PUBLISH and self.breaks(f"send {op.name}"):
                channel.sock.shutdown(socket.SHUT_RDWR)
            return ask(channel, op, flag, payload)

        def answered(connection: Connection, op: Op, flag: Flag, *rest: Any) -> bool:
            if connection.role != "mover" and op is not Op.PUBLISH and self.breaks(f"answer {op.name}"):
                connection.sock.shutdown(socket.SHUT_RDWR)
            return answer(connection, op, flag, *rest)

        monkeypatch.setattr(Channel, "send", asked)
        monkeypatch.setattr(Connection, "send", answered)

    def in_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand before every copy between engine blocks and slots."""
        for name in ("into_slots", "out_of_slots"):
            monkeypatch.setattr(HostCopier, name, self.before(getattr(HostCopier, name), f"copy {name}"))


class FaultyTransport:
    """A transport whose calls are steps."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _step(self, name: str) -> None:
        if self._faults.breaks(f"engine {name}"):
            raise TransferError(f"injected before {name}")

    def add_peer(self, *arguments: Any) -> None:
        """Make a peer readable."""
        self._step("add_peer")
        self._inner.add_peer(*arguments)

    def post(self, request: Any) -> int:
        """Start a READ."""
        self._step("post")
        handle: int = self._inner.post(request)
        return handle

    def poll(self, handle: int) -> ReadState:
        """Ask how a READ is doing."""
        self._step("poll")
        state: ReadState = self._inner.poll(handle)
        return state

"""An object in a child process, for benchmarks: asked over a pipe, with a timeout."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from kvstore.errors import KVStoreError, StoreUnavailable

_END_S = 5.0


class InProcess:
    """An object that a factory makes in a child process.

    Args:
        factory: a class or function that a new process can import.
        args: its arguments, which are sent there.
    """

    def __init__(self, factory: Callable[..., Any], *args: object) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._name = factory.__name__
        self._process = spawn.Process(target=_serve, args=(theirs, factory, args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Return the id of the process; 0 when there is none."""
        return self._process.pid or 0

    def ask(self, verb: str, timeout_s: float, *args: object) -> Any:
        """Call a method and return its result; arguments as for `begin`, errors as for `answer`."""
        self.begin(verb, *args)
        return self.answer(timeout_s)

    def begin(self, verb: str, *args: object) -> None:
        """Call a method; `answer` returns its result.

        Raises:
            StoreUnavailable: the process has ended.
        """
        try:
            self._pipe.send((verb, args))
        except OSError as error:
            raise StoreUnavailable(f"the process of {self._name} ended") from error

    def answer(self, timeout_s: float) -> Any:
        """Return the result of the oldest call that was begun.

        Raises:
            StoreUnavailable: the process ended, or did not answer in time.
            KVStoreError: the method's error.
        """
        try:
            if not self._pipe.poll(timeout_s):
                raise StoreUnavailable(f"{self._name} did not answer within {timeout_s} s")
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise StoreUnavailable(f"the process of {self._name} ended") from error
        if isinstance(answer, KVStoreError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process, by force if needed."""
        self._pipe.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)


def _serve(pipe: Connection, factory: Callable[..., Any], args: tuple[object, ...]) -> None:
    made = None
    while True:
        try:
            verb, given = pipe.recv()
        except EOFError:
            return
        try:
            made = factory(*args) if made is None else made
            pipe.send(getattr(made, verb)(*given))
        except KVStoreError as error:
            pipe.send(error)

"""Keep the standard output of a command for what the command itself prints."""

from __future__ import annotations

import sys
import threading
from typing import Any, TextIO


class OwnOutput:
    """A stream for one thread; what other threads print here goes to standard error.

    Args:
        stream: where the thread that makes this prints. Closed by its owner.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write a text, and return the number of its characters."""
        own = threading.get_ident() == self._thread
        return (self._stream if own else sys.stderr).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_own_output() -> None:
    """Let only this thread print to standard output, for the rest of the process.

    Ray prints its messages there at any time, from a thread of its own: of a node that died, for example. They would
    end up in the middle of JSON.
    """
    if not isinstance(sys.stdout, OwnOutput):
        sys.stdout = OwnOutput(sys.stdout)

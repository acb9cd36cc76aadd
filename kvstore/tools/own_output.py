"""Keep the standard output of a command for what the command itself prints."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
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


def drop_output() -> None:
    """Drop what is left for standard output because it cannot be written; Python would try again at its end."""
    with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def keep_own_output() -> None:
    """Let only this thread print to standard output, for the rest of the process.

    A stream that the caller has closed, as by `>&-`, goes nowhere: Ray and Python themselves need both.

    Ray prints its messages there at any time, from a thread of its own: of a node that died, for example. They would
    end up in the middle of JSON.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if not isinstance(sys.stdout, OwnOutput):
        sys.stdout = OwnOutput(sys.stdout)

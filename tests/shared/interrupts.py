"""Interrupts, as Ctrl-C sends them, at a chosen place of the calling thread."""

from __future__ import annotations

import linecache
import sys

#: Python serves no signal at these lines, nor between a lock's release and its return in the condition of a future. One
#: that traces does, and the lock is not freed.
_NO_PLACES = ("try:", "with ", "finally:", "else:")


class Interrupter:
    """Raises KeyboardInterrupt in the calling thread, once, before a line of a file of kvstore.

    Args:
        at: before which of the lines that are run, from 1 on.
        func: of this function alone.
        text: of the line, alone.

    Attributes:
        where: the place, once it was reached.
    """

    def __init__(self, at: int, func: str = "", text: str = "") -> None:
        self._left, self._func, self._text = at, func, text
        self.where = ""

    def __enter__(self) -> Interrupter:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _enter(self, frame, event, arg):
        path = frame.f_code.co_filename
        is_ours = "/kvstore/" in path and "/tests/" not in path and not path.endswith("/job_future.py")
        is_ours = is_ours and self._func in ("", frame.f_code.co_name)
        return self._line if is_ours and not self.where else None

    def _line(self, frame, event, arg):
        path, number = frame.f_code.co_filename, frame.f_lineno
        line = linecache.getline(path, number).strip()
        if event == "line" and not self.where and not line.startswith(_NO_PLACES) and self._text in line:
            self._left -= 1
            if not self._left:
                self.where = f"{path.rsplit('/', 1)[-1]}:{number} {frame.f_code.co_name}: {line}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line

"""The lock of a run: taking it is where another thread may come first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poolcheck.run import Run


class ExploredLock:
    """A lock of one run, not re-entrant; to take it is a point."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.owner = -1

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, letting others run first and while it is taken."""
        if self._run.current < 0:
            return True
        self._run.step("acquire")
        assert self.owner != self._run.current, "a thread takes the lock that it holds"
        self._run.wait_until(lambda: self.owner < 0, "lock")
        self.owner = self._run.current
        return True

    def release(self) -> None:
        """Give it back."""
        if self._run.current < 0:
            return
        self.owner = -1
        self._run.changed = True
        if self._run.files:
            self._run.step("release")

    def locked(self) -> bool:
        """Whether a thread holds it."""
        return self.owner >= 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

"""Name processes by pidfds, wait for their end, and free what ended processes of an old life could use."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from kvstore.runtime import clock
from kvstore.runtime.guard import Guard

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


def pid_of(pidfd: int) -> int | None:
    """Return the process id behind a pidfd; -1 if it has ended; 0 if it cannot be seen from here; None for no pidfd.

    Raises:
        OSError: it cannot be asked, for lack of descriptors or memory.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                return int(line.split()[1])
    return None


def has_ended(pidfd: int, within_s: float = 0.0) -> bool:
    """Return whether a process ends within a time, with all its threads."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000.0 * within_s))


def end(pidfd: int, patience_s: float, killed_within_s: float) -> bool:
    """Wait for the end of a process, kill it if it takes too long, and return whether it has ended."""
    if has_ended(pidfd, patience_s):
        return True
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return has_ended(pidfd, killed_within_s)


@dataclass(frozen=True, slots=True)
class OldUse:
    """Slots of the pool that belong to `owner` until a time has passed, processes are gone, or both.

    Slots that someone may write to wait for both: a writer looks at no clock. Slots that are only read wait for the
    first of the two. A reader uses no bytes after the end of its lease, so the time alone is enough. And if all that
    may read have ended, nobody is left that the time protects. That needs the processes of all readers: without any,
    one of them has no name, and only the time counts.

    Args:
        owner: of a lease or a write in the pool.
        until_s: of kvstore.runtime.clock; of readers the end of their last lease.
        pidfds: of the processes.
        is_read: whether nobody writes to them.
    """

    owner: str
    until_s: float
    pidfds: tuple[int, ...]
    is_read: bool = False

    def is_over(self, now_s: float, ended: Set[int]) -> bool:
        """Return whether these slots may be used again; `ended` are the pidfds of processes that are gone."""
        is_due, are_gone = now_s > self.until_s, ended >= set(self.pidfds)
        if self.is_read:
            return is_due or (len(self.pidfds) > 0 and are_gone)
        return is_due and are_gone


class OldProcesses:
    """Frees the slots of processes of an earlier life by the rule of `OldUse`. It owns all pidfds.

    Args:
        pidfds: all of them.
        uses: of slots; an entry's pidfds are among `pidfds`.
        release: called with the owner of slots that may be used again; on the thread of `start`.
    """

    def __init__(self, pidfds: tuple[int, ...], uses: list[OldUse], release: Callable[[str], object]) -> None:
        self._pidfds, self._release = pidfds, release
        self._uses = {use.owner: use for use in uses}
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="raykv-old-life", daemon=True)

    def start(self) -> None:
        """Start the thread, which ends with the last use."""
        self.thread.start()

    def uses(self) -> list[OldUse]:
        """Return the uses that are not over."""
        return list(self._uses.values())

    def stop(self) -> None:
        """End the thread; the slots stay as they are, and the pidfds open."""
        self._closed.set()
        if self.thread.is_alive():
            self.thread.join(2.0)

    def _run(self) -> None:
        guard = Guard(logger, "waiting for workers of the old store")
        while self._uses and not self._closed.is_set():
            try:
                now_s = clock.now_s()
                # Once for each process: one that has died may have read thousands of runs.
                ended = set(filter(has_ended, self._pidfds))
                for owner in [owner for owner, use in self._uses.items() if use.is_over(now_s, ended)]:
                    self._release(owner)
                    del self._uses[owner]
                guard.passed()
            except Exception as error:  # noqa: BLE001 - logged by the guard; nothing else frees these slots.
                guard.failed(error)
            if self._uses:
                self._closed.wait(_LOOK_S)
        if not self._uses:
            self.close()

    def close(self) -> None:
        """Close all pidfds, because nothing is waited for; may be called again, and no other method afterwards."""
        pidfds, self._pidfds = self._pidfds, ()
        for pidfd in pidfds:
            os.close(pidfd)

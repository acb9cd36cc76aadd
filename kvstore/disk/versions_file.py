"""Keep the versions of cleared namespaces on disk, so that a clearing holds when all stores were stopped meanwhile."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kvstore.blocks.chain import HASH_BYTES
from kvstore.disk.own_files import read_own, write_whole
from kvstore.errors import ConfigError

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
#: Some hundred bytes for each namespace that was ever cleared.
_MOST_BYTES = 1 << 28


def read_versions(path: Path) -> dict[bytes, int]:
    """Return the version of each namespace that was cleared; empty when there is no such file yet.

    Raises:
        ConfigError: the file is damaged, or not this user's: nothing says any more which blocks were cleared, so none
            may be used.
        OSError: the disk refused.
    """
    try:
        text = read_own(path, _MOST_BYTES)
    except FileNotFoundError:
        return {}
    try:
        values = json.loads(text)
        versions = {bytes.fromhex(namespace): int(version) for namespace, version in values.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: wanted the versions of cleared namespaces, got a damaged file ({error}); remove the folder"
        ) from error
    if any(len(namespace) != HASH_BYTES or version < 0 for namespace, version in versions.items()):
        raise ConfigError(f"{path}: wanted the versions of cleared namespaces, got others; remove the folder")
    return versions


def write_versions(path: Path, versions: Mapping[bytes, int]) -> None:
    """Replace the file at once; it is durable when this returns.

    Raises:
        OSError: the disk refused; the old file is still there.
    """
    write_whole(path, json.dumps({space.hex(): version for space, version in versions.items()}).encode())


class VersionsKeeper:
    """Writes the file on a thread of its own, so that no caller has to wait for the disk.

    Args:
        path: of the file.
        versions_now: returns the versions that this node knows.
        saved: what the file has.
    """

    def __init__(self, path: Path, versions_now: Callable[[], dict[bytes, int]], saved: Mapping[bytes, int]) -> None:
        self._path, self._versions_now, self._saved = path, versions_now, dict(saved)
        self._saving = threading.Lock()
        self._condition = threading.Condition()
        self._num_wanted = self._num_done = 0
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name="raykv-disk-versions", daemon=True)

    def save(self) -> None:
        """Have the disk keep the versions; writes nothing if it has them already.

        Raises:
            OSError: the disk refused.
        """
        with self._saving:
            versions = self._versions_now()
            if versions != self._saved:
                write_versions(self._path, versions)
                self._saved = versions

    def save_soon(self) -> int:
        """Have the thread save; return a number for `wait`. Never waits."""
        with self._condition:
            self._num_wanted += 1
            self._condition.notify_all()
            return self._num_wanted

    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait until what was known at `save_soon` is on the disk; False when it is not in that time."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_done >= number or not self.thread.is_alive(), timeout_s)
            return self._num_done >= number

    def close(self, timeout_s: float) -> bool:
        """Have the thread end after what is to be saved, and wait for it; return whether it has ended."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self.thread.ident is not None:
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._num_wanted > self._num_done or self._is_closed)
                number = self._num_wanted
                if number == self._num_done:
                    return
            try:
                self.save()
            except OSError as error:
                logger.warning("the clearings of namespaces cannot be kept on disk: %s", error)
                with self._condition:
                    if self._condition.wait_for(lambda: self._is_closed, _RETRY_S):
                        return
                continue
            with self._condition:
                self._num_done = number
                self._condition.notify_all()

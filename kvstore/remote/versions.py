"""The last clearing of each namespace, in the order in which they became known.

Both a store and the directory keep one. Each sends the other the clearings that it has not sent yet. So a store that
was away, or is new, knows of a clearing before it keeps blocks that the next peer would make it drop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from kvstore.blocks.codec import U64, Digest, Record, decoder
from kvstore.bounds import check_digest
from kvstore.errors import InvalidRequest, StaleVersion
from kvstore.memory.clears import group_of
from kvstore.runtime.guard import LogLimit

logger = logging.getLogger(__name__)

#: Versions are counts, so none is far ahead of another. A message with a huge version must not use up the range.
_MAX_AHEAD = 1 << 32
#: Clearings that were heard, and whose callers have not asked yet how many blocks went; most never do.
_MOST_HEARD = 1024


class NamespaceVersions:
    """The version of the last clearing of each namespace; any thread may call.

    The stores count versions, one count for each group of namespaces (`group_of`): clearing one namespace clears its
    group. A namespace that was never cleared has version 0.
    """

    def __init__(self) -> None:
        self._lock, self._hearing = threading.Lock(), threading.Lock()
        self._serial, self._log = 0, LogLimit()
        #: By group: (version, serial when it was noted, the namespace that it was noted for).
        self._known: dict[bytes, tuple[int, int, bytes]] = {}
        #: By group and version: how many blocks went with a clearing that was heard.
        self._heard: dict[tuple[bytes, int], int] = {}

    def get(self, namespace: bytes) -> int:
        """Return the version of a namespace."""
        known = self._known.get(group_of(namespace))
        return 0 if known is None else known[0]

    def advance(self, namespace: bytes, version: int | None = None) -> int:
        """Note a clearing, with the next version if none is given; return its version.

        Raises:
            StaleVersion: `version` is not later than the known one; nothing changed.
            InvalidRequest: an argument is not valid, or `version` is too far ahead of the known one; nothing changed.
        """
        check_digest("namespace", namespace)
        with self._lock:
            known = self.get(namespace)
            if version is None:
                version = known + 1
            elif not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= known + _MAX_AHEAD:
                raise InvalidRequest(
                    f"version: wanted an int from 0 to {known + _MAX_AHEAD}, got {version!r}; leave it out, or take "
                    "the one after the highest that the stores know"
                )
            if version <= known:
                raise StaleVersion(f"version: wanted a later one than {known}, got {version}; nothing was cleared")
            # Kept permanently: a forgotten version would start again at 0, below the versions that others know.
            self._serial += 1
            self._known[group_of(namespace)] = version, self._serial, namespace
            return version

    def hear(self, namespace: bytes, version: int) -> bool:
        """Note a clearing that another process reported; return whether it is new here.

        Raises:
            InvalidRequest: as for `advance`.
        """
        try:
            self.advance(namespace, version)
        except StaleVersion:
            return False
        return True

    def count_heard(
        self, namespace: bytes, version: int, begin_clear: Callable[[bytes, Callable[[], bool]], int | None]
    ) -> None:
        """Have a clearing that another process reported done if `hear` says that it is new; note how many blocks went.

        Args:
            namespace: of the clearing.
            version: likewise.
            begin_clear: clears a namespace if a function that it calls says so; returns the number of blocks.
        """
        with self._hearing:
            if num_cleared := begin_clear(namespace, lambda: self.hear(namespace, version)):
                self._heard[group_of(namespace), version] = num_cleared
                if len(self._heard) > _MOST_HEARD:
                    del self._heard[next(iter(self._heard))]

    def take_heard(self, namespace: bytes, version: int | None) -> int:
        """Return how many blocks went with a clearing that was heard, to the first caller; 0 to others."""
        with self._hearing:
            return 0 if version is None else self._heard.pop((group_of(namespace), version), 0)

    def hear_all(self, versions: Mapping[bytes, int], hear: Callable[[bytes, int], object] | None = None) -> None:
        """Note many clearings, each with `hear`. Skip those that are not valid, and log some of them."""
        for namespace, version in versions.items():
            try:
                (hear or self.hear)(namespace, version)
            except InvalidRequest as error:
                if self._log.passes():
                    more, text = self._log.take_held_back(), "namespace %s: a clearing is not taken over: %s (%d more)"
                    logger.warning(text, namespace.hex()[:12], error, more)

    def since(self, serial: int) -> tuple[int, dict[bytes, int]]:
        """Return (serial of the last noted version, versions noted after `serial`); 0 asks for all."""
        with self._lock:
            if serial == self._serial:
                return serial, {}
            return self._serial, {space: version for version, at, space in self._known.values() if at > serial}


class News(Record, frozen=True):
    """What a directory answers to an announcement.

    Args:
        versions: of the namespaces whose clearing the store may not know.
        is_settled: all nodes have had the time to tell this life of the directory which clearings they know.
    """

    versions: dict[Digest, U64]
    is_settled: bool


decode_news: Callable[[bytes], News] = decoder(News)

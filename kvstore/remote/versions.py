"""Which clearing of each namespace a process has heard of, and in which order it heard.

Both a store and the directory keep one: each tells the other what it has not told it yet, so that a store that was
away, or is new, hears of a clearing before it keeps blocks that the next peer would make it drop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from kvstore.blocks.codec import U64, Digest, decoder
from kvstore.bounds import clip
from kvstore.errors import InvalidRequest, StaleVersion
from kvstore.memory.clears import group_of
from kvstore.runtime.guard import LogLimit

logger = logging.getLogger(__name__)

_NAMESPACE_BYTES = 32
#: Versions are counts, so none is far ahead of another: what names one that is must not use up all that follow.
_MAX_AHEAD = 1 << 32


class NamespaceVersions:
    """The version of the last clearing of each namespace; any thread may call.

    Versions are counted by the stores, those of a group of namespaces together (`group_of`): all of it is cleared when
    one is. One that was never cleared has version 0.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serial, self._log = 0, LogLimit()
        #: By group: (version, when it was heard of, the namespace that it was heard for).
        self._known: dict[bytes, tuple[int, int, bytes]] = {}

    def get(self, namespace: bytes) -> int:
        """Return the version of a namespace."""
        known = self._known.get(group_of(namespace))
        return 0 if known is None else known[0]

    def advance(self, namespace: bytes, version: int | None = None) -> int:
        """Note a clearing, of the next version when none is given; returns its version.

        Raises:
            StaleVersion: it is not later than what was known; nothing changed.
            InvalidRequest: it is no version or no namespace, or too far ahead of what was known; nothing changed.
        """
        if not isinstance(namespace, bytes) or len(namespace) != _NAMESPACE_BYTES:
            raise InvalidRequest(f"namespace: wanted {_NAMESPACE_BYTES} bytes, got {clip(namespace)}")
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
            # Kept for good: a version that is forgotten would begin anew, below what others know.
            self._serial += 1
            self._known[group_of(namespace)] = version, self._serial, namespace
            return version

    def hear(self, namespace: bytes, version: int) -> bool:
        """Note a clearing that another process told of; whether it is news.

        Raises:
            InvalidRequest: as for `advance`.
        """
        try:
            self.advance(namespace, version)
        except StaleVersion:
            return False
        return True

    def hear_all(self, versions: Mapping[bytes, int], hear: Callable[[bytes, int], object] | None = None) -> None:
        """Note many, each with `hear`; one that cannot be keeps no other from being noted, and some are logged."""
        for namespace, version in versions.items():
            try:
                (hear or self.hear)(namespace, version)
            except InvalidRequest as error:
                if self._log.passes():
                    more, text = self._log.take_held_back(), "namespace %s: a clearing is not taken over: %s (%d more)"
                    logger.warning(text, namespace.hex()[:12], error, more)

    def since(self, serial: int) -> tuple[int, dict[bytes, int]]:
        """Return (serial of the last one heard of, versions heard of after `serial`); 0 asks for all."""
        with self._lock:
            if serial == self._serial:
                return serial, {}
            return self._serial, {space: version for version, at, space in self._known.values() if at > serial}


#: Decodes the versions of namespaces that are news.
decode_versions: Callable[[bytes], dict[bytes, int]] = decoder(dict[Digest, U64])

"""What the store's directory and the engines tell a router; each method blocks, so threads of a router call them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from kvstore.api import connect
from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.errors import KVStoreError, StoreUnavailable
from kvstore.integrations.space_text import space_from_text

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0


class StoreSource:
    """The directory of a store that may not run yet, or be restarted.

    Args:
        store: its name.
        address: of its Ray cluster; None is that of this process.
        open_store: how to connect; tests have their own.
    """

    def __init__(self, store: str, address: str | None, open_store: Callable[..., Any] = connect) -> None:
        self._name, self._address, self._open = store, address, open_store
        self._store: Any = None

    def locate(self, hashes: BlockHashes) -> list[tuple[str, int]]:
        """Return (node, leading blocks that it may have).

        Raises:
            KVStoreError: the store does not run or does not answer; the next call connects again.
        """
        if self._store is None:
            self._store = self._open(self._name, address=self._address, timeout_s=_CONNECT_S)
        try:
            found: list[tuple[str, int]] = self._store.locate(hashes)
        except StoreUnavailable:
            self._store = None
            raise
        return found


def first_space(said: Iterable[str]) -> Namespace | None:
    """Return the namespace that an engine's workers say they have; None where none has one yet.

    A text that cannot be read is logged, and counts as none.
    """
    for text in said:
        if text:
            try:
                return space_from_text(text)
            except KVStoreError as error:
                logger.warning("a replica's namespace is not used: %s", error)
    return None


def first_count(said: Iterable[object]) -> int:
    """Return the least of the counts that an engine's workers say; 0 where none says one."""
    return min((each for each in said if type(each) is int and each > 0), default=0)

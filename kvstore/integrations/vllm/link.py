"""One half's connection to the store of its node; it opens again after the store was restarted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvstore.api import Store, connect
from kvstore.blocks.hashing import Namespace, space_of_tenant
from kvstore.blocks.part import Part
from kvstore.client.client import Client
from kvstore.errors import ConfigError, KVStoreError, StoreDraining, StoreNotRunning, StoreUnavailable
from kvstore.integrations.vllm.options import Options
from kvstore.runtime.guard import Guard

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0
_CLOSE_S = 10.0


class StoreLink:
    """Hold a client while the store runs; otherwise a thread tries to open a new one.

    Args:
        options: where the store is.
        space: namespace of the blocks.
        part: the part of them that this half holds.
        on_open: each is called with each new client before that is used.
        may_be_away: whether a store that cannot be opened is looked for, as one that was lost.

    Raises:
        StoreNotRunning: there is no store; the message says what to change.
        KVStoreError: the store cannot hold these blocks.
    """

    def __init__(
        self,
        options: Options,
        space: Namespace,
        part: Part | None = None,
        on_open: Sequence[Callable[[Client], None]] = (),
        *,
        may_be_away: bool = False,
    ) -> None:
        self._options, self._part, self._on_open = options, part, on_open
        #: Of the blocks: the given one, or the tenant's own where tenants are private.
        self.space = space
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Store | None = None
        self._client: Client | None = None
        try:
            self._client = self._open()
        except KVStoreError as error:
            if may_be_away:
                logger.info("the store is not there yet: %s", error)
                self.lost(None)
            elif isinstance(error, StoreNotRunning):
                raise StoreNotRunning(
                    f"RaykvConnector: wanted the store {options.store!r} on this node, got: {error}. Start it with "
                    f"`kvstore start` before the engine, or set 'store' and 'address' in kv_connector_extra_config"
                ) from error
            else:
                raise

    def client(self) -> Client | None:
        """Return the client, or None while the store is not reachable."""
        return self._client

    def failed(self, client: Client, error: KVStoreError) -> None:
        """Report a failed call; an error that means the end of the store's epoch starts a search for the next one."""
        if isinstance(error, StoreUnavailable) and not isinstance(error, StoreDraining):
            self.lost(client)

    def lost(self, client: Client | None) -> None:
        """Drop a client and look for the store's next epoch; no effect if it was dropped before."""
        with self._lock:
            if self._client is not client or self._stopping.is_set():
                return
            self._client = None
            self._thread = threading.Thread(target=self._reopen, args=(client,), name="raykv-reopen", daemon=True)
            self._thread.start()
        logger.warning("the store is away; prompts are computed until it is back")

    def clear(self) -> str:
        """Make all blocks of the namespace a miss on every node; returns what went wrong, or nothing."""
        if self._store is None:
            return "it was not there yet"
        try:
            logger.info("cleared %d blocks of the store", self._store.clear(self.space))
        except Exception as error:  # noqa: BLE001 - the caller has to go on without the store, whatever it is.
            return f"{type(error).__name__}: {error}"
        return ""

    def close(self) -> None:
        """Close the client; may be called again."""
        self._stopping.set()
        with self._lock:
            client, self._client, thread = self._client, None, self._thread
        if thread is not None:
            thread.join(_CLOSE_S)
        if client is not None:
            client.close(_CLOSE_S)

    def _open(self) -> Client:
        if self._store is None:
            self._store = connect(self._options.store, address=self._options.address)
            if tenant := self._options.tenant:
                self.space = space_of_tenant(self.space, tenant, is_private=self._store.config.private_tenants)
        client = self._store.client(self.space, self._part, tenant=self._options.tenant, node_id=self._options.node_id)
        try:
            if client.space != self.space:
                raise ConfigError("the store was started again with private tenants; start this engine again, too")
            for step in self._on_open:
                step(client)
        except BaseException:
            client.close()
            raise
        return client

    def _reopen(self, old: Client | None) -> None:
        pause_s = _FIRST_PAUSE_S
        try:
            if old is not None:
                old.close(_CLOSE_S)
        except Exception:
            logger.exception("the client of a store that ended could not be closed")
        opening = Guard(logger, "looking for the store")
        while not self._stopping.wait(pause_s):
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                client = self._open()
            except KVStoreError as error:
                logger.info("the store is not back yet: %s", error)
                continue
            except Exception as error:  # noqa: BLE001 - if this thread ended, the engine would never get a store again.
                opening.failed(error)
                continue
            with self._lock:
                if not self._stopping.is_set():
                    self._client = client
                    logger.warning("the store is back")
                    return
            client.close(_CLOSE_S)

"""The connection to the store; the store may fail at any time, and its user must not fail with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from kvstore.blocks.hashing import Namespace
from kvstore.client.client import Client
from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError
from kvstore.integrations.transformers.staging import Staging

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StoreLike(Protocol):
    """The part of a store that is used here: `kvstore.start` and `kvstore.connect` return one."""

    @property
    def config(self) -> StoreConfig:
        """The settings of the store; asked only for a tenant."""

    def client(self, space: Namespace, *, tenant: str = "") -> Client:
        """Open a client on this process's node."""


class StoreLink:
    """One client and its staging buffer, opened again after a failure. Threads use it one at a time.

    Args:
        store: opens clients.
        space: namespace of the clients.
        num_blocks: blocks in each half of the buffer.
        device: of the buffer.
        retry_s: how long the store is left alone after a failure, and how long a thread waits for others.
        tenant: of the clients.

    Raises:
        KVStoreError: the first client cannot be opened.
    """

    def __init__(
        self,
        store: StoreLike,
        space: Namespace,
        num_blocks: int,
        device: torch.device,
        retry_s: float,
        tenant: str = "",
    ) -> None:
        self._store, self.space, self._num_blocks, self._device = store, space, num_blocks, device
        self._retry_s, self._retry_at_s, self._tenant = retry_s, 0.0, tenant
        self._lock, self._count_lock = threading.RLock(), threading.Lock()
        #: The thread that uses the buffer.
        self._user: int | None = None
        self.closed, self.num_failures, self.num_bypassed = False, 0, 0
        self.staging: Staging | None = self._open()

    def use(self, action: Callable[[Staging], T], otherwise: T) -> T:
        """Return an action's result, or `otherwise` if the store fails, failed recently, or is in use for too long."""
        me = threading.get_ident()
        if self._user == me:  # In a signal handler: the interrupted code is using the buffer.
            return self._bypass(otherwise)
        # An interrupt may come right after the lock is taken, so `acquire` is inside; only its owner can release it.
        try:
            if not self._lock.acquire(timeout=self._retry_s):
                return self._bypass(otherwise)
            try:
                self._user = me
                return self._use(action, otherwise)
            finally:
                self._user = None
        finally:
            try:  # noqa: SIM105 - an interrupt may come while a context is entered
                self._lock.release()
            except RuntimeError:
                pass
            if self._user == me:  # A second interrupt came while the first one was handled.
                self._user = None

    def close(self) -> None:
        """Give everything back to the store; may be called again. A running `use` does it at its end."""
        self.closed = True
        if self._user == threading.get_ident():
            return
        try:
            if self._lock.acquire(timeout=self._retry_s):
                self._give_back()
        finally:
            try:  # noqa: SIM105 - an interrupt may come while a context is entered
                self._lock.release()
            except RuntimeError:
                pass

    def _use(self, action: Callable[[Staging], T], otherwise: T) -> T:
        if self.closed or (self.staging is None and time.monotonic() < self._retry_at_s):
            return self._bypass(otherwise)
        try:
            if self.staging is None:
                self.staging = self._open()
                logger.info("the store answers again: prefixes are shared")
            return action(self.staging)
        except (KVStoreError, OSError, RuntimeError) as error:  # torch raises RuntimeError when memory is short
            self._fail(error)
            return otherwise
        except BaseException:
            # For example an interrupt: a job may still use the buffer, so nothing else may.
            self._give_back()
            raise
        finally:
            if self.closed:
                self._give_back()

    def _give_back(self) -> None:
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.close()

    def _bypass(self, otherwise: T) -> T:
        with self._count_lock:
            self.num_bypassed += 1
        return otherwise

    def _open(self) -> Staging:
        client = self._store.client(self.space, tenant=self._tenant)
        try:
            return Staging(client, self._num_blocks, self._device)
        except BaseException:
            client.close(1.0)
            raise

    def _fail(self, error: Exception) -> None:
        staging, self.staging = self.staging, None
        # Warn once: until the store answers again, there is no buffer.
        log = logger.debug if staging is None else logger.warning
        log(
            "the store failed; prompts are computed, and it is tried again in %.0f s: %s: %s",
            self._retry_s, type(error).__name__, error,
        )  # fmt: skip
        self.num_failures += 1
        self._retry_at_s = time.monotonic() + self._retry_s
        if staging is not None:
            staging.close()

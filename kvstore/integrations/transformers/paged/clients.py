"""The clients of all groups of layers, opened again after the store was lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from kvstore.blocks.hashing import Namespace, space_of_tenant
from kvstore.client.client import Client
from kvstore.errors import InvalidRequest, PeerLost, StoreBusy, StoreDraining, StoreUnavailable
from kvstore.integrations.transformers.identity import identity_of
from kvstore.integrations.transformers.paged.kv_cache import PagedKVCache

#: Limits for the jobs of a store that has ended, and of one that serves.
_CLOSE_S, _CLOSE_AT_END_S = 1.0, 10.0


def spaces_of(
    store: Any, cache: PagedKVCache, model_id: str | None, block_size: int, salt: bytes, tenant: str
) -> tuple[Namespace, ...]:
    """Return the namespace of each group's blocks; arguments as for `PagedStore`.

    Raises:
        InvalidRequest: the cache has pages or requests already.
        UnsupportedModel: as for `identity_of`.
    """
    if cache.index.num_nodes or cache.index.num_requests:
        raise InvalidRequest(
            f"wanted a cache without pages, whose KV may be of other weights, got {cache.index.num_nodes} edges of "
            f"pages and {cache.index.num_requests} requests; release all requests, and call cache.index.clear()"
        )
    is_private = bool(tenant) and store.config.private_tenants
    weights, settings = identity_of(cache.model, model_id)
    spaces = (
        Namespace(
            model=weights,
            # All that decides the bits of KV besides the model.
            revision=f"{settings}; {group.window_tokens} seen, {cache.step_tokens} a step",
            shape=group.shape(block_size),
            salt=salt,
        )
        for group in cache.layer_groups
    )
    return tuple(space_of_tenant(space, tenant, is_private=is_private) for space in spaces)


class GroupClients:
    """A client for each group. Not for several threads.

    Args:
        store: opens clients.
        cache: whose tensors they register.
        spaces: the namespace of each group.
        tenant: of the clients.

    Raises:
        LayoutMismatch, StoreUnavailable, KVStoreError: as for `Client.register_kv_caches`; nothing stays open.
    """

    def __init__(self, store: Any, cache: PagedKVCache, spaces: Sequence[Namespace], tenant: str) -> None:
        self._store, self._cache, self._spaces, self._tenant = store, cache, spaces, tenant
        self._stage: tuple[str | int, tuple[str, ...]] | None = None
        self._clients: list[Client] = []
        self._is_closed = False
        self._open()

    @contextmanager
    def opened(self) -> Iterator[list[Client]]:
        """Yield the clients; if the store is lost meanwhile, the next call opens new ones.

        Raises:
            StoreUnavailable: there is no store, or `close` was called.
        """
        if self._is_closed:
            raise StoreUnavailable("wanted an open PagedStore, got a closed one; make a new one")
        if not self._clients:
            self._open()
        try:
            yield self._clients
        except (StoreDraining, StoreBusy):
            raise  # It goes on, and keeps what these clients published.
        except (StoreUnavailable, PeerLost):
            self.drop()
            raise

    def attach_handoff(self, staging: str | int, peers: Sequence[str]) -> None:
        """Send hand-offs from GPU to GPU, also those of clients that are opened later."""
        with self.opened() as clients:
            for client in clients:
                client.attach_handoff(staging, peers)
        self._stage = staging, tuple(peers)

    def drop(self) -> None:
        """Give up the clients: their store has ended."""
        self._close_all(_CLOSE_S)

    def close(self) -> None:
        """Give everything back; may be called again."""
        self._is_closed = True
        self._close_all(_CLOSE_AT_END_S)

    def _close_all(self, timeout_s: float) -> None:
        with ExitStack() as closing:  # Each is closed, also if an interrupt ends the close of another.
            for client in self._clients:
                closing.callback(client.close, timeout_s)
            self._clients = []

    def _open(self) -> None:
        try:
            for space, tensors in zip(self._spaces, self._cache.tensors, strict=True):
                self._clients.append(self._store.client(space, tenant=self._tenant))
                self._clients[-1].register_kv_caches(list(tensors), "PBTHD")
            if self._stage is not None:
                for client in self._clients:
                    client.attach_handoff(*self._stage)
        except BaseException:
            self.drop()
            raise

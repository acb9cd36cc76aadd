"""The directory, or one shard of it, as a Ray actor; Ray restarts it, and the stores fill it again."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray

from kvstore.actors.calls import node_address
from kvstore.actors.metrics import Flusher, ray_recorders
from kvstore.actors.serving import show_life
from kvstore.bounds import DIGEST_BYTES, MAX_CHAIN_BYTES, check_count, check_digest, check_seconds, clip
from kvstore.config import StoreConfig
from kvstore.errors import InvalidRequest
from kvstore.remote.directory import SETTLE_S, DirectoryServer
from kvstore.remote.peers import PeerAddress
from kvstore.tools.shard_metrics import SHARD_METRICS

_MAX_VERSION = (1 << 64) - 1


class Directory:
    """Facade of kvstore.remote.directory.DirectoryServer.

    Args:
        is_first: whether no store ran in the cluster when it was made, so that no store has to reconnect.
        number: of this shard.
        config_json: settings of the store; for metrics.
    """

    def __init__(self, is_first: bool = False, number: int = 0, config_json: str = "") -> None:
        config = StoreConfig.from_json(config_json) if config_json else StoreConfig(metrics=False)
        show_life(store=config.name)
        # Ray restarts it with the same argument, when stores already run.
        is_first = is_first and not ray.get_runtime_context().was_current_actor_reconstructed
        self._server, self._number = DirectoryServer(node_address(), 0.0 if is_first else SETTLE_S), number
        if config.metrics:
            node_id = ray.get_runtime_context().get_node_id()
            make = partial(ray_recorders, SHARD_METRICS)
            Flusher(node_id, config.name, self.stats, make, metrics=SHARD_METRICS).start()

    def ping(self, within_s: float = 1.0) -> bool:
        """Return whether this directory serves: its socket thread answers within `within_s` seconds."""
        return self._server.server.is_serving(check_seconds("within_s", within_s))

    def address(self) -> PeerAddress:
        """Return where stores reach the directory."""
        return self._server.address()

    def locate(self, hashes: list[bytes]) -> list[tuple[str, int]]:
        """Return (node id, usable prefix length) for routers, longest first.

        Raises:
            InvalidRequest: these are not hashes, or too many.
        """
        if not isinstance(hashes, list | tuple) or len(hashes) > MAX_CHAIN_BYTES // DIGEST_BYTES:
            most = MAX_CHAIN_BYTES // DIGEST_BYTES
            raise InvalidRequest(f"hashes: wanted a list of at most {most} hashes of blocks, got {clip(hashes)}")
        for block_hash in hashes:
            check_digest("hash", block_hash)
        return self._server.index.locate(hashes)

    def version(self, namespace: bytes) -> int:
        """Return the highest version of a namespace that the directory knows."""
        return self._server.versions.get(check_digest("namespace", namespace))

    def hear_clearing(self, namespace: bytes, version: int) -> bool:
        """Note a clearing for stores that are away, and return whether it was new.

        Raises:
            InvalidRequest: this is not a namespace, or not a version of a store; nothing was noted.
        """
        check_digest("namespace", namespace)
        version = check_count("version", version, 0, _MAX_VERSION)  # Not None, by which stores count on.
        return self._server.versions.hear(namespace, version)

    def stats(self) -> dict[str, Any]:
        """Return what this shard knows, and counts since it began."""
        return {"shard": self._number, **self._server.stats()}

    def nodes(self) -> list[str]:
        """Return the nodes that publish to this directory."""
        return self._server.index.nodes()

    def num_hashes(self) -> int:
        """Return how many different blocks are known."""
        return len(self._server.index)

"""The Store object that users hold: use, stop or destroy a store in a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from kvstore.actors.calls import actor_name, call, find_actor, start_call, within
from kvstore.actors.clearing import clear_everywhere
from kvstore.actors.draining import drain_node
from kvstore.actors.ending import end_actors
from kvstore.actors.finding import alive_nodes, ask_nodes, find_shards, locate, node_store, node_stores, store_stats
from kvstore.actors.restart.rolling import restart_store
from kvstore.actors.session.handles import USE, is_connected
from kvstore.actors.session.probing import check_goes_on
from kvstore.actors.session.rays import RaySession, current_session
from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.part import Part
from kvstore.bounds import check_count, check_node_id, check_seconds
from kvstore.config import StoreConfig
from kvstore.errors import InvalidRequest, KVStoreError, StoreNotRunning, WrongCluster

if TYPE_CHECKING:
    from kvstore.client.client import Client

logger = logging.getLogger(__name__)

_CALL_S, _END_S = 10.0, 30.0
#: Limit for the supervisor to name the call that started it. The rest of `_END_S` is for ending actors that hang.
_STARTER_S = 5.0


class Store:
    """A handle of a store in a Ray cluster. Cheap; may be sent to actors and tasks of that cluster.

    Its calls go to the cluster that it was made in, and never connect this process to Ray. As a context manager it
    closes at the end.

    Every call raises:
        StoreNotRunning: the handle was closed, or this process is not connected to Ray. `close` and `stop` may be
            called again; `stop` ends the store that this handle started also after `close` or `with`.
        WrongCluster: this process is connected to another Ray than the store's.
    """

    def __init__(self, config: StoreConfig, session: RaySession, started_as: str | None = None) -> None:
        self.config, self._session = config, session
        self._started_as = started_as  # None: another handle started the store, and only that stops it.
        self._pid, self._closed, self._has_ended = os.getpid(), False, False

    def __repr__(self) -> str:
        return f"Store({self.config.name!r}, {self.config.capacity_bytes} bytes a node)"

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config.to_json(), "address": self._session.address, "session": self._session.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Store.__init__(self, StoreConfig.from_json(state["config"]), RaySession(state["address"], state["session"]))

    def __enter__(self) -> Store:
        self._check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Return the address of the store's Ray cluster, as `kvstore.connect` takes it."""
        return self._session.address

    def client(
        self,
        space: Namespace,
        part: Part | Sequence[int] | None = None,
        *,
        tenant: str = "",
        node_id: str | None = None,
    ) -> Client:
        """Open a client on this process's node.

        Args:
            space: what the blocks mean.
            part: which part of each block this rank of several holds: (tp_rank, tp_size, pp_rank, pp_size).
            tenant: whose quotas count for this client; see `Client`.
            node_id: another node whose store shares this machine, as in a cluster simulated on one host.

        Raises:
            InvalidRequest: `space` is not a namespace.
            StoreNotRunning: this node has no store, or it is on another machine.
            ConfigError: the store's slots are too small for these blocks, or it has no such tenant.
            LayoutMismatch: these blocks cannot be divided among so many ranks.
        """
        # Imports torch, which starting and stopping a store do not need.
        from kvstore.client.client import Client

        return Client(self.control_path(node_id=node_id), space, part, tenant=tenant)

    def control_path(self, *, node_id: str | None = None) -> str:
        """Return the socket path of a node's store, for a `kvstore.Client` in another process there.

        That process needs no Ray; it may be spawned, or forked from this one. The path belongs to this epoch of the
        node's store; a restarted store has another path.

        Args:
            node_id: of the node; this process's own when None.

        Raises:
            StoreNotRunning: the node has no store.
        """
        self._check()
        return str(call("node store", node_store(node_id, self.config.name).control_path, timeout_s=_CALL_S))

    def node_ids(self) -> list[str]:
        """Return the ids of the living nodes."""
        self._check()
        return sorted(alive_nodes())

    def locate(self, hashes: BlockHashes) -> list[tuple[str, int]]:
        """Return (node id, usable prefix length) for routers, longest first. These are hints.

        Raises:
            InvalidRequest: these are not hashes of `Namespace.block_hashes`.
            PeerLost, TransferTimeout: the directory, or Ray's GCS, is away; try again in a second.
        """
        self._check()
        if not isinstance(hashes, BlockHashes):
            raise InvalidRequest(
                f"hashes: wanted BlockHashes of space.block_hashes() or space.wrap(), got {type(hashes).__name__}"
            )
        return locate(self.config, hashes, _CALL_S)

    def clear(self, space: Namespace) -> int:
        """Make all blocks of a namespace a miss on every node, and return their number.

        Use it after weights changed. Leases go on with the old bytes, and saves that were requested before are not
        stored. A node that cannot be reached now hears of it later, from the directory or from a peer.

        Raises:
            StoreUnavailable: no store could be asked, or neither the directory nor all of the stores, so that the last
                clearing is not known; nothing was cleared.
            StaleVersion: other callers kept clearing this namespace; some nodes may have been cleared.
            PeerLost, TransferTimeout: Ray itself does not answer; some nodes may have been cleared.
            InvalidRequest: `space` is not a namespace, and nothing was cleared; or a store refused, and the others were
                cleared.
        """
        self._check()
        if not isinstance(space, Namespace):
            raise InvalidRequest(f"space: wanted a kvstore.Namespace, got {type(space).__name__}")
        shards, name = find_shards(self.config), self.config.name
        return clear_everywhere(space.digest, self._handles(), *shards, name=name, stores_now=self._handles)

    def drain(self, node_id: str, timeout_s: float = 30.0, *, hand_over_bytes: int = 1 << 30) -> dict[str, Any]:
        """Take a node out of service for a rolling restart.

        The node grants nothing to its workers any more. It hands its most recently used chains to another node, then
        waits for leases and writes to end, and for published hand-offs to be fetched by other nodes, or to expire.
        `node_store(id).undrain` puts it back.

        Returns:
            {"num_handed_over", "why_none", "num_leases", "num_writes", "num_handoffs", "is_drained"}: blocks that the
            other node has now of these chains, also those from before; a text why it has none; the leases, writes and
            hand-offs that were left at the end; and whether none was left and the node still grants nothing. It is
            False, and the call ends before its time, where another caller put the node back meanwhile.

        Raises:
            StoreNotRunning: the node has no store.
            InvalidRequest: a time over a day, or not a time, or not the id of a node; nothing changed.
            PeerLost, TransferTimeout: the node's store ended meanwhile, or does not answer.
        """
        self._check()
        check_node_id("node_id", node_id)
        timeout_s = check_seconds("timeout_s", timeout_s)
        hand_over_bytes = check_count("hand_over_bytes", hand_over_bytes, 0, 1 << 62)
        return drain_node(node_id, self._handles(), timeout_s, hand_over_bytes)

    def restart(
        self, node_ids: Sequence[str] | None = None, *, cold: bool = False, wait_s: float = 10.0,
        on_step: Callable[[str, str], object] = lambda node_id, what: None, **changes: Any,
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        """Restart node stores one after the other, with changed settings, and keep their blocks where that is safe.

        First digits of `node_ids` are enough. Each node waits up to `wait_s` for leases, writes and hand-offs. Clients
        are made anew. docs/operations.md has the settings that keep the blocks; with `cold` all begin empty. `on_step`
        is called before each step, with the id of a node and what it does.

        Returns:
            By node id: {"is_warm", "num_blocks", "num_held_slots", "why_cold"}.

        Raises:
            ConfigError: a setting cannot work, here or on a node; nothing changed.
            StoreBusy, StoreNotRunning, StoreUnavailable: another restart runs; it was stopped; a node has no store.
        """
        self._check()
        self.config, found = restart_store(self.config.name, node_ids, changes, cold, wait_s, on_step)
        return found

    def stats(self) -> dict[str, Any]:
        """Return counts of the store, and of each node.

        Returns:
            {"name", "nodes", "problems", "starting", "directory"}. Three are by node id: counts, or {"error"}; why a
            node has no store, and under "supervisor" why that does not answer; what a store that is being made may wait
            for. "directory" is a list with the counts of each shard, or {"error"}.

        Raises:
            StoreNotRunning: there is none any more.
            StoreUnavailable, TransferError: neither the supervisor nor any node answers.
        """
        return store_stats(self.config, self._handles(), _CALL_S)

    def inspect(self, what: str, *, timeout_s: float = 10.0, **options: Any) -> dict[str, Any]:
        """Look into the stores of all nodes, as `kvstore inspect` does; changes nothing.

        Args:
            what: "namespaces", "path", "chain", "leases" or "handoffs".
            timeout_s: for the answers of all nodes together.
            options: of the question; see `kvstore.node.inspection.answers`.

        Returns:
            By node id: the answer, or {"error"} of a node that did not give one in time.
        """
        return ask_nodes(self._handles(), "inspect", what, options, timeout_s=check_seconds("timeout_s", timeout_s))

    def close(self) -> None:
        """Close this handle; the store continues. May be called again.

        In a Ray that `kvstore.start` began for this process, the handle that started the store ends it.
        """
        if self._session.is_own:
            self.stop()
        USE.drop(self)
        self._closed = True

    def stop(self) -> None:
        """End the store if this handle started it, and close this handle. May be called again.

        A store that this handle started is ended also after `close` or `with`, which leave it running. A store that
        another handle started continues; `destroy` ends it. A Ray that `kvstore.start` began for this process ends
        with its last store, or, if it does not answer, with the last open handle; any other Ray continues.

        Raises:
            WrongCluster, StoreNotRunning: this process is not connected to the store's Ray any more; the store
                continues.
            StoreUnavailable, TransferError: that Ray does not answer, and continues; this may be called again.
        """
        if self._pid != os.getpid():
            return  # A fork: only its parent stops the store.
        if self._started_as is None:
            if not self._closed:
                logger.info("store %r goes on: others started it. destroy() ends it for all", self.config.name)
        elif not self._session.is_own or is_connected(self._session):
            self._check_ray()
            self._end(self._started_as)
            self._has_ended = True
        USE.drop(self)
        self._closed, self._started_as = True, None

    def destroy(self) -> None:
        """End the store on every node, even if others started or use it; their calls fail from now on.

        Ray and other stores continue; a Ray that `kvstore.start` began for this process ends with its last store.

        Raises:
            StoreUnavailable, TransferError: its Ray does not answer.
        """
        self._check()
        self._end()
        self._closed, self._started_as, self._has_ended = True, None, True

    def _end(self, only: str | None = None) -> None:
        """End the store, if the call `only` started it, and this process's own Ray unless it has other stores."""
        USE.drop(self)  # Even if this fails, this handle needs its Ray no more.
        name, failed = self.config.name, None
        try:
            check_goes_on(self._session, "close() this handle")
            has_ended = within(f"the end of store {name!r}", _END_S, lambda: self._end_actors(only))
        except KVStoreError as error:
            has_ended, failed = not USE.starts(name, self._session), error
        others = USE.leave(self._session, name if has_ended else None) if self._session.is_own else []
        if others:
            logger.info("the Ray at %s goes on, for the stores %s", self.address, ", ".join(others))
        if failed is not None:
            if others or not self._session.is_own:
                raise failed
            logger.warning("store %r ended with its Ray, at %s: %s", name, self.address, failed)

    def _end_actors(self, only: str | None) -> bool:
        """End the store's actors; return False if others started it again, so that it continues."""
        name = self.config.name
        if only is not None:
            try:
                supervisor = find_actor(actor_name(name, "supervisor"))
                if call("supervisor", supervisor.config, timeout_s=_STARTER_S)["starter"] != only:
                    logger.info("store %r was started again by others, and goes on", name)
                    return False
            except StoreNotRunning:
                pass  # Its supervisor is gone; other actors may be left.
            except KVStoreError:
                # In its own Ray only this process starts stores, so its handles tell the starter.
                if not self._session.is_own or USE.starts(name, self._session):
                    raise
        end_actors(name)
        return True

    def _is_of(self, session: RaySession) -> bool:
        """Return whether this handle is open, and its store in that Ray."""
        return not self._closed and self._session.name == session.name

    def _has_started(self, name: str, session: RaySession) -> bool:
        """Return whether this open handle started the store `name` in that Ray."""
        return self._is_of(session) and self._started_as is not None and self.config.name == name

    def _check(self) -> None:
        """Raise unless this handle is open and this process connected to the store's Ray; never connects."""
        name = self.config.name
        if self._closed and self._has_ended:
            raise StoreNotRunning(f"this handle ended the store {name!r}; {start_call(name)} starts it again")
        if self._closed:
            raise StoreNotRunning(f"this handle of store {name!r} was closed; {self._again()} makes another")
        self._check_ray()

    def _check_ray(self) -> None:
        name = self.config.name
        if self._pid != os.getpid():
            raise StoreNotRunning(
                f"this handle of store {name!r} is of the process that this one was forked from, and Ray does not work "
                "in forks; start processes with the method 'spawn' and connect there"
            )
        if not ray.is_initialized():
            raise StoreNotRunning(
                f"this process is not connected to the Ray of store {name!r} any more; {self._again()}"
            )
        session = current_session()
        if session.name != self._session.name:
            raise WrongCluster(
                f"wanted the Ray of store {name!r}, {self._session.name} at {self.address}, got a process that is "
                f"connected to {session.name} at {session.address}; ray.shutdown(), then {self._again()}"
            )

    def _again(self) -> str:
        name = self.config.name
        return start_call(name) if self._session.is_own else f"kvstore.connect({name!r}, address={self.address!r})"

    def _handles(self) -> dict[str, Any]:
        self._check()
        return node_stores(self.config.name)

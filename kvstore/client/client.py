"""The client: saves and loads the blocks of a worker process's engine.

It talks only to the store of its own node. Most requests need one control call; the bytes go through the arena, which
client and store both map. Each call is implemented in the module of that name; all of them share the attachment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from kvstore.blocks.codec import decode_counts, encode
from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.part import Part, as_part
from kvstore.blocks.priority import Priority
from kvstore.blocks.ticket import HandoffTicket
from kvstore.bounds import check_callable, check_flag, check_seconds, check_text, clip
from kvstore.client import lease, load, save
from kvstore.client.attachment import Attachment
from kvstore.client.handoff import fetch, publish
from kvstore.client.job import Job
from kvstore.client.lease import Lease
from kvstore.client.results import FetchResult, HandoffRoute, LoadResult, Match, Pinned, Publication, SaveResult
from kvstore.engine.cuda_copier import CopyPath
from kvstore.engine.detect import detect_layout
from kvstore.engine.layout import EngineLayout
from kvstore.engine.registration import make_copier
from kvstore.engine.side_tensors import detect_sides
from kvstore.errors import InvalidRequest
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import AskLookup, decode_found_by_store, decode_held
from kvstore.runtime import clock

#: The directory may take this share of a lookup's time; the rest is for the answer without the directory.
_REMOTE_SHARE = 0.8
#: The wait for saves may take this share of it, before the directory is asked.
_SAVES_SHARE = 0.25


class Client:
    """One engine's access to the store of its node.

    Args:
        control_path: the node store's socket, as `Store.control_path` returns it; `Store.client` knows it.
        space: what the blocks mean. Hashes of another namespace are refused.
        part: which part of each block this process holds, as `Part` or (tp_rank, tp_size, pp_rank, pp_size); None for
            all of it. A block can be found once all its parts are saved.
        tenant: whose quotas count for this client, and whose its blocks are; "" is the shared one, which has none. In a
            store with private tenants, `client.space` is the tenant's own namespace: make the hashes with it.

    Raises:
        InvalidRequest: `control_path` is not the path of a socket, or `space` is not a namespace.
        StoreNotRunning: no store answers at `control_path`.
        IncompatibleStore: the store runs another protocol version.
        ConfigError: the store's slots are too small for this namespace's blocks, or `part` is not a part; the store has
            no such tenant, or `space` is private to another one.
        LayoutMismatch: heads, layer groups or a side tensor of the namespace's shape do not divide by the number of
            ranks.
    """

    def __init__(
        self, control_path: str, space: Namespace, part: Part | Sequence[int] | None = None, *, tenant: str = ""
    ) -> None:
        if not isinstance(control_path, str) or not control_path or "\0" in control_path:
            raise InvalidRequest(
                f"control_path: wanted the path that Store.control_path() returns, got {clip(control_path)}"
            )
        if not isinstance(space, Namespace):
            raise InvalidRequest(f"space: wanted a kvstore.Namespace, got {type(space).__name__}")
        self.part, self.tenant = as_part(part), check_text("tenant", tenant)
        self.part.check(space.shape)
        self._attached = Attachment(control_path, space, self.part, self.tenant)
        self.space = self._attached.space
        self._store = self._attached.store
        self.node_id, self.epoch, self.config = self._store.node_id, self._store.epoch, self._store.config
        self.slot_bytes, self.num_slots = self._attached.slot_bytes, self._attached.num_slots

    def register_kv_caches(
        self,
        caches: Any,
        axes: str | None = None,
        *,
        side_caches: Mapping[str, Any] | None = None,
        side_axes: Mapping[str, str] | None = None,
        copy_path: CopyPath | str = CopyPath.AUTO,
    ) -> EngineLayout:
        """Register this engine's cache; its layout is found from shapes and strides.

        Args:
            caches: list or dict of per-layer tensors, of per-layer (K, V) pairs, or one cross-layer tensor. They hold
                the heads and layers of this client's part, in blocks of a multiple or a divisor of the stored size.
            axes: names the dimensions where shapes alone are ambiguous, see kvstore.engine.layout.
            side_caches: the tensors of every `SideTensor` of the namespace's shape, by name: one per layer in the order
                of the caches, or one for all layers. They are saved and loaded with the blocks.
            side_axes: `axes` of side tensors, by name, where needed.
            copy_path: how the bytes of a cache on a GPU are copied: "staged", "direct", or "auto", which takes the
                better one for this layout (docs/gpu.md). A cache on the CPU has one path.

        Returns:
            The layout that was found. The client keeps references to the tensors until `close`. It copies only to and
            from these: if one or its `data` is replaced, saves, loads, publications and fetches are refused until they
            are registered again.

        Raises:
            LayoutMismatch: the tensors do not fit the namespace's shape, or a side tensor is missing or not part of it;
                nothing is registered.
            ConfigError: the tensors are on a GPU, and CuPy or the driver is missing.
            KernelError: the kernels could not be built, or the GPU has no memory left for their buffers.
            StoreUnavailable: this client was closed.
        """
        self._store.check_open()
        shape = self.space.shape
        found = detect_layout(caches, shape, axes, self.part)
        layout, sides = detect_sides(caches, side_caches, shape, found, side_axes)
        copier = make_copier(
            caches, layout, shape, self._attached.mapping, self.slot_bytes, self.num_slots, copy_path, sides
        )
        self._attached.register(copier)
        return layout

    # Questions.

    def lookup(
        self,
        hashes: BlockHashes,
        *,
        remote: bool = True,
        timeout_s: float | None = None,
        meanwhile: Callable[[], None] | None = None,
        save_wait_s: float | None = None,
    ) -> Match:
        """Return how many blocks of a chain each node stores. No side effect.

        Blocks that are being saved on this node are waited for, for a moment.

        Args:
            hashes: a run of a chain.
            remote: also ask the directory when this node does not have everything.
            timeout_s: limit for the answer; the configured one when None. An engine's scheduler passes a small one and
                treats TransferTimeout as "nothing found".
            meanwhile: called while the answer is on its way.
            save_wait_s: how long the blocks that a save on this node is writing are waited for, up to a quarter of
                `timeout_s`. The setting `save_wait_s` when None; 0 for not at all. If none is being written, nothing is
                waited for.

        Returns:
            The prefix that each node has alone. A load can deliver more than the longest: it combines nodes.

        Raises:
            NamespaceMismatch, InvalidRequest: an argument is wrong.
            PeerLost: the node store is gone.
            TransferTimeout: no answer in time; the next lookup may be made at once.
        """
        chain, lookups = self._attached.chain(hashes), self._store.for_lookups
        limit_s = self._store.call_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        if not isinstance(remote, bool):
            remote = check_flag("remote", remote)
        if meanwhile is not None:
            check_callable("meanwhile", meanwhile)
        self._store.check_open()
        wait_s = self.config.save_wait_s if save_wait_s is None else check_seconds("save_wait_s", save_wait_s)
        op = Op.LOOKUP_ALL if remote else Op.LOOKUP
        payload = encode(AskLookup(chain, _REMOTE_SHARE * limit_s, min(wait_s, _SAVES_SHARE * limit_s)))
        until_s = clock.now_s() + limit_s
        connection = lookups.take(limit_s)
        try:
            left_s = max(0.0, until_s - clock.now_s())
            answer = connection.call(op, payload, timeout_s=left_s, meanwhile=meanwhile)
        finally:
            lookups.keep(connection)
        if not remote:
            num_local, num_disk, disk_bytes_per_s = decode_held(answer)
            return Match(num_local=num_local, num_disk=num_disk, disk_bytes_per_s=disk_bytes_per_s)
        found = decode_found_by_store(answer)
        (_, num_local), *others = found.nodes
        return Match(
            num_local=num_local, nodes=tuple(others), num_disk=found.num_disk, disk_bytes_per_s=found.disk_bytes_per_s
        )

    def map_presence(self) -> None:
        """Map the memory that `is_surely_absent` reads; before, that returns False. May be called again.

        Raises:
            StoreUnavailable: the node store is gone, or was restarted.
        """
        self._attached.map_presence()

    def is_surely_absent(self, hashes: BlockHashes, *, remote: bool = True) -> bool:
        """Return whether surely nothing of a chain is stored. Does not ask the store, never waits.

        Args:
            hashes: a chain from its root; only its first block is checked.
            remote: whether what other nodes have counts. Then nothing is sure while the store knows of another node, or
                before it asked the directory for the first time: it does so for a lookup or a load that misses a block.

        Returns:
            True if a lookup made now would find nothing. False says nothing; ask `lookup`.

        Raises:
            NamespaceMismatch, InvalidRequest: an argument is wrong.
        """
        if not isinstance(remote, bool):
            remote = check_flag("remote", remote)
        return self._attached.is_absent(self._attached.chain(hashes), remote=remote)

    def lease(self, hashes: BlockHashes, ttl_s: float = 30.0) -> Lease:
        """Pin the prefix of a chain that is in this node's memory.

        Args:
            hashes: the blocks wanted, a run of a chain.
            ttl_s: how long the lease holds unless renewed. The setting `lease_ttl_s` does not change this default.

        Returns:
            A lease that may be shorter than asked for, even empty. Release it, or let it expire.

        Raises:
            NamespaceMismatch: the hashes are of another namespace.
            InvalidRequest: `ttl_s` is not above 0, or exceeds a day.
            StoreDraining: the node grants no more leases.
        """
        return lease.take_lease(self._attached, hashes, ttl_s)

    def pin(self, hashes: BlockHashes, *, soft: bool = False, ttl_s: float | None = None) -> Pinned:
        """Keep a chain's prefix in this node's memory until `unpin`, the end of `ttl_s` or this client's end.

        Args:
            hashes: the blocks wanted; the prefix that is in this node's memory now is kept.
            soft: keep without a promise: these blocks are evicted last, when nothing else is left, and do not count
                against the quota of hard pins.
            ttl_s: end by itself after this long, up to a day; never when None or `math.inf`.

        Returns:
            The kept blocks: perhaps fewer than asked for, or none.

        Raises:
            NamespaceMismatch: the hashes are of another namespace.
            InvalidRequest: `ttl_s` is not above 0, or exceeds a day and is not infinite, or another argument is wrong.
            PoolExhausted: the blocks are here, but the quota has no room for even the first; nothing changed.
            StoreDraining: the node grants no more pins.
        """
        return lease.take_pin(self._attached, hashes, soft, ttl_s)

    def unpin(self, pinned: Pinned) -> bool:
        """End a pin, and return whether it was still held. A second call returns False.

        Raises:
            InvalidRequest: `pin` did not return this.
        """
        if not isinstance(pinned, Pinned):
            raise InvalidRequest(f"wanted what pin() returned, got {type(pinned).__name__}")
        return lease.release(self._attached, pinned.pin_id)

    def stats(self) -> dict[str, Any]:
        """Return the node store's counts. The store asks its mover for some; no other call waits for that."""
        self._store.check_open()
        with self._store.for_lookups.taken() as connection:
            return decode_counts(connection.call(Op.STATS, timeout_s=self._store.call_timeout_s))

    # Jobs.

    def save(
        self,
        hashes: BlockHashes,
        block_ids: object,
        *,
        priority: Priority | str = Priority.NORMAL,
        priority_s: float | None = None,
    ) -> Job[SaveResult]:
        """Store engine blocks; blocks that are already stored are skipped.

        The engine must not overwrite the blocks before the job is done or abandoned. A block can be found only once all
        its bytes are in place. Once the job is done, this node can find the blocks, and usually other nodes can too:
        the job waits for the directory, but for about a second at most, and not for one that is known to be away. If
        the blocks have several parts, all ranks save the same hashes, and each rank's job is done when all parts are
        saved. If the namespace is cleared after this call, nothing of this save is stored, however late its copies
        begin.

        Args:
            hashes: a run of a chain, from its root or right after a stored block.
            block_ids: the engine's blocks that hold the tokens of the hashes, in order: one for each hash when the
                block sizes are equal. Exactly the tokens of the hashes are stored.
            priority: how much the blocks matter when the memory of the node is full: "low", "normal" or "high"
                (docs/eviction.md). It raises that of blocks which are stored already, and never lowers it. A load, a
                lease or a pin of LOW blocks makes them NORMAL.
            priority_s: after so many seconds, above 0 and at most a day, the blocks are NORMAL; None for as long as
                they are here. Only with LOW or HIGH.

        Raises:
            NamespaceMismatch, ChainBroken, InvalidRequest: an argument is wrong; nothing changed. The job raises
                ChainBroken if the parent turns out not to be stored.
            LayoutMismatch: the registered tensors were replaced; nothing is stored. The job raises it if they are
                replaced later.
        """
        return save.begin_save(self._attached, hashes, block_ids, priority, priority_s)

    def load(
        self,
        hashes: BlockHashes,
        block_ids: object,
        skip_prefix_tokens: int = 0,
        *,
        timeout_s: float | None = None,
        on_queued: Callable[[], None] | None = None,
        num_copy_threads: int = 0,
        priority: Priority | str = Priority.NORMAL,
    ) -> Job[LoadResult]:
        """Bring stored blocks into the engine's cache, from this node's memory or from other nodes.

        Args:
            hashes: the blocks wanted, a run of a chain.
            block_ids: the engine's blocks for their tokens, in order: one for each hash when the block sizes are equal.
                Tokens outside the run in the first and the last one are not written.
            skip_prefix_tokens: number of leading tokens that the engine already has, at most all. Their bytes are not
                written. They need not end at a block boundary, unless a side tensor has one row for a whole block.
            timeout_s: give up fetching this long after the call; the configured transfer timeout when None. A load
                whose time ends before a thread is free is not begun.
            on_queued: called on a thread of the client, only if every block is leased and all copies are queued. Work
                after `Job.wait_on` may then be launched, and its results used: the load now succeeds unless the device
                fails or the copies outlast the lease. If it raises, the job ends with that error.
            num_copy_threads: threads that share the copies into a cache in host memory; the caller knows what else uses
                its cores. 0 means a quarter of the cores, from one to four.
            priority: "low" for a job whose blocks matter little: what is LOW in this node's memory stays so. Any other
                makes it NORMAL, because others use it, too. A load raises nothing to HIGH.

        Returns:
            A job; its result gives the usable prefix, and a reason for each block that is not usable. Blocks after the
            prefix may hold anything.

        Raises:
            NamespaceMismatch, InvalidRequest: an argument is wrong; nothing changed.
            LayoutMismatch: the registered tensors were replaced. The job raises it if they are replaced later: then
                nothing counts as loaded.
        """
        return load.begin_load(
            self._attached, hashes, block_ids, skip_prefix_tokens, timeout_s, on_queued, num_copy_threads, priority
        )

    def prefetch(self, hashes: BlockHashes, *, timeout_s: float | None = None) -> Job[LoadResult]:
        """Bring blocks from other nodes into this node's memory, without an engine.

        Args:
            hashes: the blocks wanted, a run of a chain.
            timeout_s: see `load`.

        Raises:
            NamespaceMismatch, InvalidRequest: an argument is wrong; nothing changed.
        """
        return load.begin_prefetch(self._attached, hashes, timeout_s)

    # Hand-offs.

    def attach_handoff(self, staging: str | int = "1GiB", peers: Sequence[str] = ()) -> HandoffRoute:
        """Send this client's hand-offs from GPU to GPU where that is faster.

        The blocks go through a stage: memory of the cache's GPU that this node's mover owns and lets other nodes read.
        All clients of the GPU share it, and it lives as long as the mover. Without this call, or where GPUs cannot
        reach each other, hand-offs go through host memory, with the same contract and the same bytes.

        Args:
            staging: size of the stage, such as "1GiB": all blocks that are published and fetched at the same time must
                fit. The first client of a GPU decides the size.
            peers: nodes from whose stages this client will fetch. Their lanes are warmed up and measured now; for other
                nodes the first fetch does that. Attach on the peers first.

        Returns:
            The route that hand-offs take, and why.

        Raises:
            InvalidRequest: no cache is registered, or an argument is wrong; the earlier stage stays.
            ConfigError: `staging` is not a size; the same.
            StoreUnavailable, PeerLost, TransferTimeout: the store or its mover is gone, or does not answer.
        """
        return self._attached.attach_stage(staging, peers)

    @property
    def handoff_slab(self) -> int:
        """Return where `begin_publish` puts blocks, for a ticket made elsewhere: a stage, or 0 for the arena."""
        return self._attached.stage.slab

    def prepare_ticket(self, num_blocks: int, *, ttl_s: float | None = None) -> HandoffTicket:
        """Return a ticket to send ahead of blocks that this client will publish.

        A fetch waits until the blocks are published under it and in place, and prepares its READ meanwhile.

        Args:
            num_blocks: stored blocks that will be published.
            ttl_s: time within which the blocks will be published; the configured lease time when None. It only sets the
                ticket's `expires_s`, which tells routers and readers how long the ticket is useful. `publish` decides
                how long the blocks are kept.

        Returns:
            The ticket, for the next `publish` or `begin_publish` of these blocks. Call `withdraw` if they will not be
            published, or a fetch waits until its timeout.

        Raises:
            InvalidRequest: an argument is wrong.
            StoreUnavailable: this client was closed.
        """
        return publish.prepare_ticket(self._attached, num_blocks, ttl_s)

    def publish(
        self,
        block_ids: object,
        *,
        hashes: BlockHashes | None = None,
        ttl_s: float | None = None,
        ticket: HandoffTicket | None = None,
    ) -> HandoffTicket:
        """Keep a copy of engine blocks for one fetch by another client, on any node.

        No lookup finds them. When this returns, the engine may reuse its blocks: on the CPU they are copied; on a GPU,
        work queued on the calling thread's current stream from then on comes after the copies. A fetch waits for copies
        that are still queued.

        Args:
            block_ids: the engine's blocks of a request, in order, from its first token on.
            hashes: of what the blocks hold, of this client's own making; the last one counts, and becomes a part of the
                ticket's name in the store. Then only a fetch with the same last hash finds the blocks, whatever ticket
                it brings. None trusts everyone who has the ticket to know what it is for.
            ttl_s: how long they are kept unless fetched earlier; the configured lease time when None. They are kept no
                longer than this client is open.
            ticket: publish under this ticket; see `begin_publish`.

        Returns:
            The ticket, to be sent to the other client by any means; with `ticket`, that one with a new `expires_s`. If
            the device fails later, the ticket is void: the log and the fetch report it.

        Raises:
            InvalidRequest, NamespaceMismatch, LayoutMismatch: an argument is wrong, or the ticket is not one of this
                client or was used before; nothing changed.
            PoolExhausted: the store has no room for all of the blocks; nothing changed.
            StaleVersion: the namespace was cleared meanwhile; nothing is kept.
            LayoutMismatch, KernelError: the cache is not as it was registered, or the device failed; nothing is kept.
            StoreUnavailable, PeerLost, TransferTimeout: the store is gone, drained, or does not answer.
        """
        return publish.publish(self._attached, block_ids, hashes, ttl_s, ticket)

    def begin_publish(
        self,
        block_ids: object,
        *,
        hashes: BlockHashes | None = None,
        ttl_s: float | None = None,
        ticket: HandoffTicket | None = None,
    ) -> Publication:
        """Publish blocks, but return before they are copied. The ticket can be sent meanwhile.

        A fetch waits until the blocks are in place. The engine must not change them before the job is done.

        Args:
            block_ids: as for `publish`.
            hashes: as for `publish`.
            ttl_s: as for `publish`, counted from the end of the job.
            ticket: publish under this ticket of `prepare_ticket` or made elsewhere; it may be on its way to the reader.
                It names this client's store and part. It says how many stored blocks to publish, for the last engine
                block may have room for more. If its `slab` is this client's stage, and that is full or gone, the blocks
                go to the arena. A fetch that comes before this call waits if the ticket `is_early`; else it fails, for
                the ticket is unknown.

        Returns:
            The ticket and the job. If the job fails, its `result` raises the error, and the ticket is void.

        Raises:
            InvalidRequest, NamespaceMismatch, LayoutMismatch, PoolExhausted, StoreUnavailable, PeerLost,
                TransferTimeout: as for `publish`.
        """
        return publish.begin_publish(self._attached, block_ids, hashes, ttl_s, ticket)

    def withdraw(self, ticket: HandoffTicket, *, hashes: BlockHashes | None = None) -> bool:
        """Drop what this node's store holds for a ticket that will not be fetched.

        From now on nothing is published under it, and a fetch that waits for it ends. Blocks that are still being
        copied for it reach no reader; their slots are given back when the copies have ended.

        Args:
            ticket: of this client, published or not.
            hashes: as for `publish`; with others, nothing that was published ends.

        Returns:
            Whether this call voided the ticket, published or not. False if it had ended before (fetched, expired,
            withdrawn), and for a ticket of another node or of an earlier epoch of this node's store.

        Raises:
            InvalidRequest: this is not a ticket.
            NamespaceMismatch, LayoutMismatch: it is of another namespace, part or byte order.
        """
        return publish.withdraw(self._attached, ticket, hashes)

    def fetch(
        self,
        ticket: HandoffTicket,
        block_ids: object,
        skip_prefix_tokens: int = 0,
        *,
        hashes: BlockHashes | None = None,
        timeout_s: float | None = None,
        num_copy_threads: int = 0,
    ) -> Job[FetchResult]:
        """Bring the blocks of a ticket into the engine's cache, wherever they were published.

        A ticket serves one fetch. A fetch that failed may be tried again before the ticket expires, with one exception:
        if the READ from another node brought all blocks, the ticket is used, also if the copy to the cache then failed.

        Args:
            ticket: of `publish`, `begin_publish` or `prepare_ticket`.
            block_ids: the engine's blocks for the tokens of the ticket's blocks, in order.
            skip_prefix_tokens: see `load`; the blocks of these tokens are moved all the same.
            hashes: of the blocks that this client wants, of its own making, if they were published with hashes; the
                last one counts. A ticket of other blocks, or with a changed field, is `not_found` then, and nothing is
                written. None takes whatever was published without hashes: its sender is trusted.
            timeout_s: give up this long after the call; the configured transfer timeout when None.
            num_copy_threads: see `load`.

        Returns:
            A job, as for `load`.

        Raises:
            NamespaceMismatch, LayoutMismatch: the ticket is of another namespace, part or byte order; nothing changed.
            InvalidRequest: another argument is wrong; nothing changed.
            LayoutMismatch, InvalidRequest, KernelError: nothing can be copied to the cache, because it was resized, a
                graph is being captured, or the device failed; nothing was copied, but the ticket may be used up.
        """
        return fetch.begin_fetch(
            self._attached, ticket, block_ids, skip_prefix_tokens, hashes, timeout_s, num_copy_threads
        )

    # The end.

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for running jobs, give everything back and unmap the arena; may be called again.

        In a forked child it only closes the child's copies of file descriptors. Jobs that outlast the time give back
        what they hold when they end. After an interrupt, call `close` again; it continues.

        Args:
            timeout_s: limit for the jobs; `math.inf` waits for as long as they take.

        Raises:
            InvalidRequest: `timeout_s` is not a time; nothing was closed.
        """
        self._attached.close(timeout_s)

    def __enter__(self) -> Client:
        self._store.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""The client: what a worker process uses to save and load the blocks of its engine.

It talks to the store of its own node only. One control call a request in the common case; bytes go
through the arena that both map. Jobs run on threads of the client, and hold none while they wait; see
kvstore.client.work. What each call does is in the module of that name; what all of them use is the attachment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from kvstore.blocks.codec import decode_count, decode_counts, encode
from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.part import Part, as_part
from kvstore.blocks.ticket import HandoffTicket
from kvstore.bounds import check_seconds
from kvstore.client import fetch, lease, load, publish, save
from kvstore.client.attachment import Attachment, Engine
from kvstore.client.lease import Lease
from kvstore.client.results import FetchResult, HandoffRoute, Job, LoadResult, Match, Pinned, Publication, SaveResult
from kvstore.engine.cuda_copier import CopyPath
from kvstore.engine.detect import detect_layout
from kvstore.engine.layout import EngineLayout
from kvstore.engine.registration import make_copier
from kvstore.engine.side_tensors import detect_sides
from kvstore.errors import InvalidRequest
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Ask, decode_found
from kvstore.runtime import clock

#: Of a lookup's time the directory may take so much; the rest is for the answer without it.
_REMOTE_SHARE = 0.8


class Client:
    """One engine's door to the store of its node.

    Args:
        control_path: the node store's socket, as `Store.control_path` returns it; `Store.client` knows it.
        space: what the blocks mean. Hashes of another namespace are refused.
        part: which part of each block this process holds, as `Part` or (tp_rank, tp_size, pp_rank, pp_size); None
            for all of it. A block can be found when all parts of it were saved.

    Raises:
        InvalidRequest: `control_path` is no path, or `space` no namespace.
        StoreNotRunning: nobody answers at `control_path`.
        IncompatibleStore: the store runs another protocol version.
        ConfigError: the store's slots are too small for this namespace's blocks, or `part` is no part.
        LayoutMismatch: heads, layer groups or a side tensor of the namespace's shape do not divide by the number of
            ranks.
    """

    def __init__(self, control_path: str, space: Namespace, part: Part | Sequence[int] | None = None) -> None:
        if not isinstance(control_path, str):
            raise InvalidRequest(
                f"control_path: wanted the path that Store.control_path() returns, got {type(control_path).__name__}"
            )
        if not isinstance(space, Namespace):
            raise InvalidRequest(f"space: wanted a kvstore.Namespace, got {type(space).__name__}")
        self.part, self.space = as_part(part), space
        self.part.check(space.shape)
        self._attached = Attachment(control_path, space, self.part)
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
        """Say where this engine's cache is; its layout is found from shape and strides.

        Args:
            caches: list or dict of per-layer tensors, of per-layer (K, V) pairs, or one cross-layer tensor; the heads
                and layers of this client's part, in blocks of a multiple or a divisor of the stored size.
            axes: names the dimensions where shapes alone are ambiguous, see kvstore.engine.layout.
            side_caches: the tensors of every `SideTensor` of the namespace's shape, by its name: per layer one, in the
                order of the caches, or one for all layers. They are saved and loaded with the blocks.
            side_axes: `axes` of side tensors, by name, where needed.
            copy_path: how the bytes of a cache on a GPU go: "staged", "direct", or "auto", which is whichever is
                better for this layout (docs/gpu.md). A cache on the CPU has one path.

        Returns:
            The layout that was found. The client keeps references to the tensors until `close`. It copies to and from
            these alone: where one is replaced, or its `data` is, everything is refused until they are registered again.

        Raises:
            LayoutMismatch: the tensors do not fit the namespace's shape, or a side tensor is missing or not of it;
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
        self._attached.register(Engine(copier))
        return layout

    # Questions.

    def lookup(
        self,
        hashes: BlockHashes,
        *,
        remote: bool = True,
        timeout_s: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Match:
        """Return how much of a chain is stored where. No side effect.

        Args:
            hashes: a run of a chain.
            remote: also ask the directory when this node does not have everything.
            timeout_s: for the answer; the configured one when None. An engine's scheduler passes a small one and takes
                TransferTimeout for "nothing".
            meanwhile: called while the answer is on its way.

        Returns:
            What each node has by itself. A load can do better than the longest: it puts prefixes together.

        Raises:
            NamespaceMismatch: the hashes are of another namespace.
            InvalidRequest: an argument is wrong.
            PeerLost: the node store is gone.
            TransferTimeout: no answer in time; the next lookup may be made at once.
        """
        chain, lookups = self._attached.chain(hashes), self._store.for_lookups
        limit_s = self._store.call_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        self._store.check_open()
        op = Op.LOOKUP_ALL if remote else Op.LOOKUP
        payload = encode(Ask(chain, _REMOTE_SHARE * limit_s)) if remote else chain.encode()
        until_s = clock.now_s() + limit_s
        connection = lookups.take(limit_s)
        try:
            left_s = max(0.0, until_s - clock.now_s())
            answer = connection.call(op, payload, timeout_s=left_s, meanwhile=meanwhile)
        finally:
            lookups.keep(connection)
        if not remote:
            return Match(num_local=decode_count(answer))
        (_, num_local), *others = decode_found(answer).nodes
        return Match(num_local=num_local, nodes=tuple(others))

    def map_presence(self) -> None:
        """Map what `is_surely_absent` reads; that says no to everything before. May be called again.

        Raises:
            StoreUnavailable: the node store is gone, or was restarted.
        """
        self._attached.map_presence()

    def is_surely_absent(self, hashes: BlockHashes, *, remote: bool = True) -> bool:
        """Whether nothing of a chain is stored, where that can be told without a question: this waits for nobody.

        Args:
            hashes: a chain from its root on; its first block decides.
            remote: whether what other nodes have counts; then nothing is sure while the store knows of any.

        Returns:
            True when a lookup that came now would find nothing. False says nothing: `lookup` knows.

        Raises:
            NamespaceMismatch: the hashes are of another namespace.
        """
        return self._attached.is_absent(self._attached.chain(hashes), remote=remote)

    def lease(self, hashes: BlockHashes, ttl_s: float = 30.0) -> Lease:
        """Pin the prefix of a chain that is in this node's memory.

        Returns:
            A lease that may be shorter than asked for, even empty. Release it, or let its time run out.

        Raises:
            NamespaceMismatch: the hashes are of another namespace.
            InvalidRequest: `ttl_s` is no time above 0, or over a day.
            StoreDraining: the node grants nothing any more.
        """
        return lease.take_lease(self._attached, hashes, ttl_s)

    def pin(self, hashes: BlockHashes, *, soft: bool = False, ttl_s: float | None = None) -> Pinned:
        """Keep the prefix of a chain that is in this node's memory there, until `unpin` or this client's end.

        Args:
            hashes: the blocks wanted.
            soft: a preference instead of a promise: evicted last, when nothing else is left, and not counted
                against the quota of hard pins.
            ttl_s: end by itself after this long.

        Returns:
            What is kept; it may be shorter than asked for, even empty.

        Raises:
            NamespaceMismatch: the hashes are of another namespace.
            InvalidRequest: `ttl_s` is no time above 0, or over a day.
            PoolExhausted: the blocks are here, but the quota has no room for even the first; nothing changed.
            StoreDraining: the node grants nothing any more.
        """
        return lease.take_pin(self._attached, hashes, soft, ttl_s)

    def unpin(self, pinned: Pinned) -> bool:
        """End a pin; whether it was still held. May be called again, and says False then.

        Raises:
            InvalidRequest: this is nothing that `pin` returned.
        """
        if not isinstance(pinned, Pinned):
            raise InvalidRequest(f"wanted what pin() returned, got {type(pinned).__name__}")
        return lease.release(self._attached, pinned.pin_id)

    def stats(self) -> dict[str, Any]:
        """Return the node store's counts. It asks its mover for some of them, and no other call waits for that."""
        self._store.check_open()
        with self._store.for_lookups.taken() as connection:
            return decode_counts(connection.call(Op.STATS, timeout_s=self._store.call_timeout_s))

    # Jobs.

    def save(self, hashes: BlockHashes, block_ids: object) -> Job[SaveResult]:
        """Store engine blocks; those that the store has already are skipped.

        The engine must not overwrite the blocks before the job is done, or was abandoned. A block becomes
        findable only when all its bytes are in place, and when the job is done other nodes can find it too. With a
        part of several, all ranks save the same hashes, and each one's job is done when all parts are there. If the
        namespace is cleared after this call, nothing of it is stored, however late its copies begin.

        Args:
            hashes: a chain from its root, or from a block that is stored.
            block_ids: the engine's blocks that hold the tokens of the hashes, in order: one for each hash when the
                block sizes are alike. All tokens of the hashes are stored, and no others.

        Raises:
            NamespaceMismatch, ChainBroken, InvalidRequest: an argument is wrong; nothing changed. ChainBroken
                comes from the job when the parent turns out not to be stored.
            LayoutMismatch: the tensors are not those that were registered; nothing is stored. From the job when they
                were replaced meanwhile.
        """
        return save.begin_save(self._attached, hashes, block_ids)

    def load(
        self,
        hashes: BlockHashes,
        block_ids: object,
        skip_prefix_tokens: int = 0,
        *,
        timeout_s: float | None = None,
        on_queued: Callable[[], None] | None = None,
        num_copy_threads: int = 0,
    ) -> Job[LoadResult]:
        """Bring stored blocks into the engine's cache, from this node's memory or from other nodes.

        Args:
            hashes: the blocks wanted, a run of a chain.
            block_ids: the engine's blocks for their tokens, in order: one for each hash when the block sizes are
                alike. Tokens before and behind the run in the first and the last one are not written.
            skip_prefix_tokens: tokens at the front that the engine has already, all of them at most: not one byte of
                them is written, whether or not they end at a block. With side tensors of a row for a whole block they
                have to.
            timeout_s: give up fetching so long after this call; the configured transfer timeout when None. A load whose
                time ends before a thread is free for it is not begun.
            on_queued: called on a thread of the client, if every block is leased and the copies of all are queued.
                Work that comes after `Job.wait_on` may then be launched, and what it computes may be used: the load
                is no more refused, it ends well, unless the device fails or its copies outlast the lease.
            num_copy_threads: that share the copies into a cache in host memory, whose owner knows what else its cores
                have to do; 0 for a quarter of them, one to four.

        Returns:
            A job; its result names the usable prefix and each block that is not. Blocks after the usable
            prefix may hold anything.

        Raises:
            NamespaceMismatch, InvalidRequest: an argument is wrong; nothing changed.
            LayoutMismatch: the tensors are not those that were registered. From the job when they were replaced
                meanwhile: nothing counts as loaded.
        """
        return load.begin_load(
            self._attached, hashes, block_ids, skip_prefix_tokens, timeout_s, on_queued, num_copy_threads
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
        """Let hand-offs of this client go from GPU to GPU, past host memory, where that is faster.

        The blocks go through a stage: memory of the cache's GPU that this node's mover has and lets others read. It is
        shared by all clients of the GPU, and stays while the mover lives. Without this call, or where GPUs cannot reach
        each other, hand-offs go through host memory; either way with the same contract and the same bytes.

        Args:
            staging: size of the stage, such as "1GiB": blocks that are published and fetched at once have to fit.
                The first client of a GPU decides.
            peers: nodes whose stages this client will fetch from. Their lanes are warmed up and measured now, which
                the first fetch from any other does by itself; attach there first.

        Returns:
            Which way hand-offs go, and why.

        Raises:
            InvalidRequest: no cache is registered.
            StoreUnavailable, PeerLost, TransferTimeout: the store or its mover is gone, or does not answer.
        """
        return self._attached.attach_stage(staging, peers)

    @property
    def handoff_slab(self) -> int:
        """Where `begin_publish` puts blocks, for a ticket that is made elsewhere: in this stage, or 0, the arena."""
        return self._attached.stage.slab

    def prepare_ticket(self, num_blocks: int, *, ttl_s: float | None = None) -> HandoffTicket:
        """Return a ticket for blocks that this client will publish, to be sent ahead of them.

        A fetch waits until they are published under it, and there. So the reader's way to them, and all that comes
        before the READ, is over when they are.

        Args:
            num_blocks: stored blocks that will be published.
            ttl_s: within which the blocks will be published; the configured lease time when None. Only the ticket's
                `expires_s` is made of it, which tells routers and readers how long the ticket is worth anything. How
                long the blocks are kept is for `publish` to say.

        Returns:
            The ticket, for the next `publish` or `begin_publish` of these blocks. Whoever will not publish after all
            says so with `withdraw`, or a fetch waits for its time.

        Raises:
            InvalidRequest: an argument is wrong.
            StoreUnavailable: this client was closed.
        """
        return publish.prepare_ticket(self._attached, num_blocks, ttl_s)

    def publish(
        self, block_ids: object, *, ttl_s: float | None = None, ticket: HandoffTicket | None = None
    ) -> HandoffTicket:
        """Hold a copy of engine blocks ready for one fetch by another client, on this node or on another.

        They are no cache: no lookup finds them. When this returns the engine's blocks are its own again: on the CPU
        because they are copied, on a GPU for all that is queued on the calling thread's current stream from now on. A
        fetch waits for copies that are still queued then.

        Args:
            block_ids: the engine's blocks of a request, in order, from its first token on.
            ttl_s: how long they are kept unless fetched before; the configured lease time when None. They are
                kept no longer than this client is open.
            ticket: publish under this one; see `begin_publish`.

        Returns:
            What the other client needs, to be sent there by any means; with `ticket`, that one with the `expires_s`
            that counts now. If the device fails after all, the ticket is void: the log says so, and the fetch.

        Raises:
            InvalidRequest: an argument is wrong; nothing changed.
            InvalidRequest, NamespaceMismatch, LayoutMismatch: the ticket is not one of this client, or was used
                before; nothing changed.
            PoolExhausted: the store has no room for all of the blocks; nothing changed.
            StaleVersion: the namespace was cleared meanwhile; nothing is kept.
            LayoutMismatch, KernelError: the cache is not as it was registered, or the device failed; nothing is kept.
            StoreUnavailable, PeerLost, TransferTimeout: the store is gone, drained, or does not answer.
        """
        return publish.publish(self._attached, block_ids, ttl_s, ticket)

    def begin_publish(
        self, block_ids: object, *, ttl_s: float | None = None, ticket: HandoffTicket | None = None
    ) -> Publication:
        """Publish blocks, but return before they are copied: their ticket can be on its way to the reader meanwhile.

        A fetch waits until the blocks are there. They have to stay as they are until the publication's job is done.

        Args:
            block_ids: as for `publish`.
            ttl_s: as for `publish`, from the end of the job on.
            ticket: publish under this one, of `prepare_ticket` or made elsewhere, which may be on its way to the
                reader; it names this client's store and part, and how many stored blocks to publish, where the last
                engine block has room for more. Where its `slab` is this client's stage and that is full, or gone, the
                arena takes the blocks. A fetch that comes before this call waits if the ticket `is_early`, and is else
                told that there is no such ticket.

        Returns:
            The ticket, and the job; what goes wrong with that is raised by its result, and voids the ticket.

        Raises:
            InvalidRequest, PoolExhausted, StoreUnavailable, PeerLost, TransferTimeout: as for `publish`.
            InvalidRequest, NamespaceMismatch, LayoutMismatch: the ticket is not one of this client, or was used
                before; nothing changed.
        """
        return publish.begin_publish(self._attached, block_ids, ttl_s, ticket)

    def withdraw(self, ticket: HandoffTicket) -> bool:
        """Take back what this node's store holds for a ticket, because nobody will fetch it any more.

        Nothing is published under it from now on, either, and a fetch that waits for that ends. While blocks are still
        being copied for it no reader gets them, and their room comes back when the copies have ended.

        Returns:
            Whether this call voided the ticket, published or not. False when it was over before (fetched, expired,
            withdrawn), and for a ticket of another node or of an earlier life of this one's store.

        Raises:
            InvalidRequest: this is no ticket.
        """
        return publish.withdraw(self._attached, ticket)

    def fetch(
        self,
        ticket: HandoffTicket,
        block_ids: object,
        skip_prefix_tokens: int = 0,
        *,
        timeout_s: float | None = None,
        num_copy_threads: int = 0,
    ) -> Job[FetchResult]:
        """Bring the blocks of a ticket into the engine's cache, wherever they were published.

        A ticket is good for one fetch that delivers everything; one that failed may be tried again in time.

        Args:
            ticket: of `publish`.
            block_ids: the engine's block for each of the ticket's.
            skip_prefix_tokens: tokens at the front that the engine has already: not one byte of them is written,
                whether or not they end at a block. Their blocks are moved all the same. See `Client.load`.
            timeout_s: give up so long after this call; the configured transfer timeout when None.
            num_copy_threads: see `Client.load`.

        Returns:
            A job; its result names the usable prefix and each block that is not, with a reason. Blocks after the
            usable prefix may hold anything.

        Raises:
            NamespaceMismatch: the ticket is of another namespace; nothing changed.
            LayoutMismatch: it is of another part or order of bytes; nothing changed.
            InvalidRequest: another argument is wrong; nothing changed.
            LayoutMismatch, InvalidRequest, KernelError: nothing can be copied to the cache, because it was resized, a
                graph is being captured, or the device failed; nothing was copied, but the ticket may be used up.
        """
        return fetch.begin_fetch(self._attached, ticket, block_ids, skip_prefix_tokens, timeout_s, num_copy_threads)

    # The end.

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for running jobs, give everything back and unmap the arena; may be called again.

        In a forked child it only lets go of the child's copies of descriptors. What jobs hold that outlast the time is
        given back when they are over. One that was interrupted is to be called again, and goes on.

        Args:
            timeout_s: for the jobs; `math.inf` waits for as long as they take.

        Raises:
            InvalidRequest: `timeout_s` is no time; nothing was closed.
        """
        self._attached.close(timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

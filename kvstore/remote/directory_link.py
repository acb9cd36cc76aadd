"""A store's link to the directory. It publishes the store's blocks in batches, and asks where blocks are.

Each batch names the namespaces that were cleared; the answer names clearings that this store does not know yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import encode
from kvstore.errors import KVStoreError, PeerLost, TransferTimeout
from kvstore.remote.announcements import Announcements, Blocks
from kvstore.remote.peers import PeerAddress
from kvstore.remote.sole_node import Solitude
from kvstore.remote.versions import NamespaceVersions, decode_news
from kvstore.rpc.client import ControlClient
from kvstore.rpc.connection import Role
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import OWNER_KEY_BYTES, decode_found
from kvstore.runtime import clock
from kvstore.runtime.guard import Guard
from kvstore.runtime.life import log_life

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
#: Longer than `_RETRY_S`: each try at a directory that does not answer costs a load its time.
_RETRY_HUNG_S = 5.0
_HEARTBEAT_S = 5.0
#: Questions to a shard do not wait for one that has no answer after this time: the threads are those of all shards.
_HANGS_AFTER_S = 0.5
#: How long the answer of a lookup may be used instead of asking again, and how many are kept.
_REMEMBERED_S, _MAX_REMEMBERED = 2.0, 1024
#: Most nodes taken from one answer of the directory, which has the best nodes first.
_MAX_NODES = 256
#: A caller waits for the publishing of a batch no longer than this, plus a tick of the control thread.
_ANSWER_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A callback for when a batch of this number has been published, or for `until_s`."""

    then: Callable[[], None]
    batch: int
    until_s: float


class Hints:
    """Two connections to the directory, to publish and to ask. Neither waits for the other.

    Args:
        resolve: finds the directory through the cluster; called on first contact and after failures only.
        versions: of the namespaces that this store knows were cleared.
        clear: called, on the link's thread, with a namespace and a version that the directory knows and the store
            may not know.
        say_alone: called, without a request, with whether this node is the only one that has blocks (see `is_alone`).
        epoch: this life of the store; the directory distinguishes the connections of different lives by it.
        is_shard: the directory has other shards, too: batches without news are only sent as heartbeats, and questions
            do not wait long for others.
        number: of the shard.
    """

    def __init__(
        self,
        node_id: str,
        resolve: Callable[[], PeerAddress],
        timeout_s: float,
        versions: NamespaceVersions,
        clear: Callable[[bytes, int], object],
        say_alone: Callable[[bool], None] = lambda alone: None,
        epoch: bytes | None = None,
        *,
        is_shard: bool = False,
        number: int = 0,
    ) -> None:
        self._node_id, self._resolve, self._timeout_s = node_id, resolve, timeout_s
        self._epoch = secrets.token_bytes(8) if epoch is None else epoch
        #: Proves to the directory that connections are of this store: many processes know its epoch.
        self._owner_key = secrets.token_bytes(OWNER_KEY_BYTES)
        self.versions, self._clear, self._told = versions, clear, 0
        self._announcements = Announcements()
        self._is_shard, self._answered_s = is_shard, -math.inf
        self._number, self._is_lost = number, False
        self._condition = threading.Condition()
        #: The callers that wait for the publishing of a batch.
        self.waiting: list[Waiting] = []
        self._num_begun = 0
        self._pending = self._stopping = self.is_away = False
        self._publisher: ControlClient | None = None
        self.asker: ControlClient | None = None
        #: Those that are open, which `stop` closes, also one that a caller has just made and not noted yet.
        self._connections: list[ControlClient] = []
        self._ask_lock = threading.Lock()
        #: When the question was asked that is being answered; infinite if there is none.
        self._asked_s = math.inf
        #: The directory knew no other node. When another appears, it closes the connection on which it said so.
        self._is_only = False
        self._solitude = Solitude(say_alone)
        self.ask_after_s = 0.0
        #: Set when the directory has answered for the first time.
        self.has_met = threading.Event()
        #: Set when a directory has answered that all nodes had the time to tell it their clearings: from then on this
        #: store knows what was cleared while it was away. One that was just restarted may not know.
        self.knows_clearings = threading.Event()
        #: Names the life of the directory that answered last; b"" before that. Another life may know fewer clearings.
        self.met = b""
        self._life = b""
        self._remembered: dict[bytes, tuple[float, list[tuple[str, int]]]] = {}
        self.thread = threading.Thread(target=self._run, name="raykv-hints", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Start the thread, and wait for the directory's first answer, which names the cleared namespaces.

        So a new store knows them before it keeps a block. After `timeout_s` the answer is not waited for any longer.
        """
        done = threading.Event()
        self.thread.start()
        self.publish_soon(done.set)
        done.wait(timeout_s)

    def follow(self, blocks: Blocks | None) -> None:
        """Publish these blocks from now on. If it is None, the directory forgets this node's blocks."""
        self._announcements.follow(blocks)
        self.publish_soon()

    def publish_soon(self, then: Callable[[], None] | None = None) -> None:
        """Publish the changes soon; `then` is called afterwards.

        `then` is called at once if the directory is known to be away, and by `answer_overdue` if it is slow: a save
        is complete when its node can find the blocks, and a directory that hangs must not make it fail.
        """
        with self._condition:
            if not self._stopping:
                self._pending = True
                self._condition.notify()
            if then is None:
                return
            if not (self._stopping or self.is_away):
                self.waiting.append(Waiting(then, self._num_begun + 1, clock.now_s() + _ANSWER_WITHIN_S))
                return
        then()

    def answer_overdue(self) -> None:
        """Call back the callers that waited long enough; the directory is told later."""
        now_s = clock.now_s()
        self._answer(lambda waiting: waiting.until_s < now_s)

    def _answer(self, is_due: Callable[[Waiting], bool]) -> None:
        with self._condition:
            due = [waiting for waiting in self.waiting if is_due(waiting)]
            self.waiting = [waiting for waiting in self.waiting if not is_due(waiting)]
        for waiting in due:
            try:
                waiting.then()
            except Exception:
                logger.exception("hints: a save could not be told that it is complete")

    def locate(self, chain: BlockHashes, until_s: float = math.inf) -> list[tuple[str, int]]:
        """Return (node, prefix length) of the nodes that may hold a run. Empty if the directory is away.

        One blocking call, unless this node is the only one.

        Args:
            chain: the run.
            until_s: the directory is not asked if earlier questions are still being answered at this time. A shard is
                not asked either while it leaves one unanswered for long.
        """
        if self.is_alone():
            return []
        now_s = clock.now_s()
        if self._is_shard:
            until_s = min(until_s, min(self._asked_s, now_s) + _HANGS_AFTER_S)
        left_s = max(0.0, until_s - now_s)
        if not self._ask_lock.acquire(timeout=left_s if left_s < threading.TIMEOUT_MAX else -1):
            return []
        try:
            self._asked_s = clock.now_s()
            return self._locate(chain)
        finally:
            self._asked_s = math.inf
            self._ask_lock.release()

    def _locate(self, chain: BlockHashes) -> list[tuple[str, int]]:
        started_s = clock.now_s()
        if started_s < self.ask_after_s:
            return []
        self._is_only = False
        self._solitude.end()
        try:
            nodes, only = _located(self.ask(chain.encode()), len(chain))
        except KVStoreError as error:
            hung = isinstance(error, TransferTimeout) or clock.now_s() - started_s > _RETRY_S
            self.ask_after_s = clock.now_s() + (_RETRY_HUNG_S if hung else _RETRY_S)
            logger.warning("the directory cannot be asked: %s; blocks of peers are misses until it can", error)
            return []
        self._is_only = only == self._node_id
        if self._is_only and self.asker is not None:
            self._solitude.begin(self.asker)
        return nodes

    def ask(self, chain: bytes) -> bytes:
        """Ask over the open connection, or over a new one if it was closed.

        The directory closes it when it meets another node, and when it ends.
        """
        if self.asker is not None and not self.asker.closed:
            with contextlib.suppress(PeerLost):
                return self.asker.call(Op.LOCATE, chain, timeout_s=self._timeout_s)
        self.asker = self._connect(self._resolve())
        return self.asker.call(Op.LOCATE, chain, timeout_s=self._timeout_s)

    def is_alone(self) -> bool:
        """Return whether no other node is known to hold blocks, without asking. Never waits."""
        asker = self.asker
        return self._is_only and asker is not None and asker.is_quiet()

    def remember(self, block_hash: bytes, nodes: list[tuple[str, int]]) -> None:
        """Note where a run that begins with this block was found. After a lookup an engine soon loads."""
        # No lock, here and in `recall`: each step is one operation on the dict, and a lost hint costs a question.
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered[block_hash] = (clock.now_s() + _REMEMBERED_S, nodes)

    def has_remembered(self, block_hash: bytes) -> bool:
        """Return whether `recall` would return nodes for this block."""
        until_s, nodes = self._remembered.get(block_hash, (0.0, []))
        return bool(nodes) and clock.now_s() < until_s

    def recall(self, block_hash: bytes) -> list[tuple[str, int]]:
        """Return, once, the nodes that `remember` noted a moment ago; else an empty list."""
        until_s, nodes = self._remembered.pop(block_hash, (0.0, []))
        return nodes if clock.now_s() < until_s else []

    def end_soon(self) -> None:
        """Begin to stop, and do not wait for it."""
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def stop(self) -> None:
        """End the thread and close the connections."""
        self.end_soon()
        if self.thread.is_alive():
            self.thread.join(2.0)
        self._solitude.end()
        for client in self._connections:
            client.close()

    def _connect(self, address: PeerAddress) -> ControlClient:
        client = address.connect(Role.STORE, self._node_id, self._epoch, self._owner_key, self._timeout_s)
        with self._condition:
            if not self._stopping:
                self._connections = [*(other for other in self._connections if not other.closed), client]
                return client
        client.close()
        raise PeerLost("this store is stopping; it asks its directory nothing any more")

    def _run(self) -> None:
        guard = Guard(logger, "hints: a round of publishing")
        while not self._stopping:
            try:
                self._round()
                guard.passed()
            except Exception as error:  # noqa: BLE001 - logged by the guard; nothing else publishes.
                self._rest(guard.failed(error))
        self._answer(lambda waiting: True)

    def _round(self) -> None:
        """Wait for something to publish, or for the heartbeat's time, and publish a batch."""
        with self._condition:
            if not self._pending and not self._stopping:
                self._condition.wait(_HEARTBEAT_S)
            if self._stopping:
                return
            self._pending = False
            self._num_begun += 1
            number = self._num_begun
        is_there = False
        try:
            is_there = self._publish()
        finally:
            self.is_away = not is_there
            if self.is_away or self._announcements.are_changes_told:
                self._answer(lambda waiting: waiting.batch <= number)
            if self.is_away or not self._announcements.is_all_told:
                with self._condition:
                    self._pending = True
        if self.is_away:
            self._rest(_RETRY_S)

    def _rest(self, seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._stopping, seconds)

    def _publish(self) -> bool:
        """Send a batch to the directory, and note the clearings in its answer. Return whether it is there."""
        try:
            if self._publisher is None or self._publisher.closed:
                address = self._resolve()
                self._publisher, self._told = self._connect(address), 0
                self._life = hashlib.blake2b(address.token.encode(), digest_size=8).digest()  # Not the secret itself.
                self._announcements.begin_connection()
            told, versions = self.versions.since(self._told)
            has_time = self._is_shard and clock.now_s() < self._answered_s + _HEARTBEAT_S
            if has_time and not versions and not self._announcements.has_news():
                return True  # What changed is another shard's.
            # Sent even when empty: this shows whether the directory was restarted.
            batch = encode(self._announcements.next(versions))
            news = decode_news(self._publisher.call(Op.PUBLISH, batch, timeout_s=self._timeout_s))
        except Exception as error:
            # This batch may be lost with the connection: the next connection begins with a full announcement.
            if self._publisher is not None:
                self._publisher.close()
            if not isinstance(error, KVStoreError):
                raise
            if not (self._is_lost or self._stopping):
                self._is_lost = True
                log_life("directory_lost", level=logging.WARNING, node=self._node_id, shard=self._number, reason=error)
            return False
        self._told, self._answered_s = told, clock.now_s()
        self.versions.hear_all(news.versions, self._clear)
        self.met = self._life
        self.has_met.set()
        if news.is_settled:
            self.knows_clearings.set()
        if self._is_lost and self._announcements.is_all_told:
            self._is_lost = False
            log_life("directory_resynced", node=self._node_id, shard=self._number)
        return True


def _located(payload: bytes, num_blocks: int) -> tuple[list[tuple[str, int]], str]:
    """Return ([(node, length of its prefix)], the only node that has blocks or "")."""
    found = decode_found(payload)
    nodes = [(node, min(count, num_blocks)) for node, count in found.nodes[:_MAX_NODES] if count > 0]
    return nodes, found.only

"""A store's links to all shards of a directory, used like the link to one."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.blocks.chain import BlockHashes
from kvstore.remote.directory_link import Hints, Waiting
from kvstore.remote.peers import PeerAddress
from kvstore.remote.shards.placing import merged, shard_of
from kvstore.remote.shards.split import RootedBlocks, Split
from kvstore.remote.versions import NamespaceVersions
from kvstore.runtime import clock

logger = logging.getLogger(__name__)


class ShardedHints:
    """One link for each shard. None of them waits for another, so a shard that is away costs only its own chains.

    A prompt is asked of the shard of its root alone; a run whose root is not known of all. Clearings are told to all.

    Args:
        links: by the number of the shard.
    """

    def __init__(self, links: Sequence[Hints]) -> None:
        self._links, self._split = tuple(links), Split(len(links))
        self.has_met = _All([link.has_met for link in links])
        self.knows_clearings = _All([link.knows_clearings for link in links])

    @property
    def met(self) -> bytes:
        """Names the lives of all shards that answered last; another one when any shard has another life."""
        return b"".join(link.met for link in self._links)

    @property
    def waiting(self) -> list[Waiting]:
        """The callers that wait for the publishing of a batch, once for each shard that they still wait for."""
        return [each for link in self._links for each in link.waiting]

    def start(self, timeout_s: float) -> None:
        """Start all links, and wait for the first answer of each; see `Hints.start`."""
        done = threading.Event()
        for link in self._links:
            link.thread.start()
        self.publish_soon(done.set)
        done.wait(timeout_s)

    def follow(self, blocks: RootedBlocks | None) -> None:
        """Publish these blocks from now on. If it is None, all shards forget this node's blocks."""
        self._split.follow(blocks)
        for link, part in zip(self._links, self._split.parts, strict=True):
            link.follow(None if blocks is None else part)

    def publish_soon(self, then: Callable[[], None] | None = None) -> None:
        """Publish the changes soon; `then` is called when no shard is waited for any more. See `Hints`."""
        each = None if then is None else _Countdown(len(self._links), then)
        for link in self._links:
            link.publish_soon(each)

    def answer_overdue(self) -> None:
        """Call back the callers that waited long enough."""
        for link in self._links:
            link.answer_overdue()

    def locate(self, chain: BlockHashes, until_s: float = math.inf) -> list[tuple[str, int]]:
        """Return (node, prefix length) of the nodes that may hold a run; see `Hints.locate`."""
        shard = shard_of(chain.root_key, len(self._links))
        if shard is not None:
            return self._links[shard].locate(chain, until_s)
        # Each may take a call's time. An answer without the last ones is a hint, too.
        return merged([link.locate(chain, until_s) for link in self._links if clock.now_s() < until_s])

    def is_alone(self) -> bool:
        """Return whether all shards are known to know of no other node. Never waits."""
        return all(link.is_alone() for link in self._links)

    def remember(self, block_hash: bytes, nodes: list[tuple[str, int]]) -> None:
        """Note where a run that begins with this block was found."""
        self._links[0].remember(block_hash, nodes)

    def has_remembered(self, block_hash: bytes) -> bool:
        """Return whether `recall` would return nodes for this block."""
        return self._links[0].has_remembered(block_hash)

    def recall(self, block_hash: bytes) -> list[tuple[str, int]]:
        """Return, once, the nodes that `remember` noted a moment ago; else an empty list."""
        return self._links[0].recall(block_hash)

    def stop(self) -> None:
        """End all threads and close all connections."""
        for link in self._links:
            link.end_soon()  # First, so that one that hangs delays no other.
        for link in self._links:
            link.stop()


#: A store's link to its directory, which has one shard or several.
DirectoryLink = Hints | ShardedHints


def link_to_directory(
    num_shards: int,
    node_id: str,
    resolve: Callable[..., PeerAddress],
    timeout_s: float,
    versions: NamespaceVersions,
    clear: Callable[[bytes, int], object],
    say_alone: Callable[[bool], None],
    epoch: bytes,
) -> DirectoryLink:
    """Return a link, not started, to a directory of so many shards; arguments as for `Hints`.

    Args:
        num_shards: of the directory.
        node_id: of this node.
        resolve: finds a shard by its number, which it is called with if there are several.
        timeout_s: limit of one call.
        versions: of the namespaces that this store knows were cleared.
        clear: hears of clearings, on the thread of any link.
        say_alone: hears whether this node is the only one that has blocks, as all shards know it.
        epoch: this life of the store.
    """
    if num_shards == 1:
        return Hints(node_id, resolve, timeout_s, versions, clear, say_alone, epoch)
    alone = _AllAlone(num_shards, say_alone)
    return ShardedHints(
        [
            Hints(
                node_id, partial(resolve, number), timeout_s, versions, clear, partial(alone.say, number), epoch,
                is_shard=True, number=number,
            )
            for number in range(num_shards)
        ]
    )  # fmt: skip


class _Countdown:
    """Calls a function at its last call."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._lock, self._left, self._then = threading.Lock(), count, then

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._then()


class _AllAlone:
    """Says that a node is alone while each shard says so."""

    def __init__(self, num_shards: int, say: Callable[[bool], None]) -> None:
        self._lock, self._alone, self._say = threading.Lock(), [False] * num_shards, say

    def say(self, number: int, alone: bool) -> None:
        """Note what one shard says."""
        with self._lock:
            self._alone[number] = alone
            self._say(all(self._alone))


class _All:
    """Whether the event of each shard is set: any of them may know of a clearing that the others do not."""

    def __init__(self, events: Sequence[threading.Event]) -> None:
        self._events = events

    def wait(self, timeout_s: float) -> bool:
        """Wait until all are set; return whether they are."""
        until_s = clock.now_s() + timeout_s
        return all(event.wait(max(0.0, until_s - clock.now_s())) for event in self._events)

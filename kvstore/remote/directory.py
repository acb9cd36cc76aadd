"""The directory: block hash -> nodes. A hint: wrong entries cost a question, never a wrong byte.

Stores send in batches which blocks became findable or are no longer findable. On each new connection a store begins
with a full announcement, so that the index is complete again after the directory died or a batch was lost. A batch
also names the namespaces that were cleared; the answer names the clearings that the store does not know yet.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from typing import Any

from kvstore.blocks.chain import decode_chain
from kvstore.blocks.codec import decode_object, encode, encode_object
from kvstore.bounds import MAX_NODE_ID_CHARS, clip
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import IncompatibleStore, ProtocolError
from kvstore.remote.announcements import Batch, decode_batch
from kvstore.remote.answers import EPOCH_BYTES, bytes_in
from kvstore.remote.index.directory_index import DirectoryIndex
from kvstore.remote.peers import PeerAddress
from kvstore.remote.versions import NamespaceVersions, News
from kvstore.rpc.connection import Connection, Role
from kvstore.rpc.framing import Message, Op, is_secret
from kvstore.rpc.messages import OWNER_KEY_BYTES, Found
from kvstore.rpc.server import ControlServer
from kvstore.runtime import clock

#: For this long after its start, or after a store was lost, a directory does not say that there is only one node:
#: another may be about to connect (a heartbeat of 5 s, a pause of 1 s, and a call's 5 s to find the directory).
SETTLE_S = 15.0
#: Time between two steps that remove entries of forgotten stores; a step takes some milliseconds.
_SWEEP_EVERY_S = 0.05
#: A batch has some thousand blocks, and the versions of all namespaces at most.
_MAX_MESSAGE_BYTES = 8 << 20


@dataclass(slots=True)
class _Link:
    """A connection of a store, and the announcements on it.

    `life` is the complete announcement, `coming` the one under way; 0 if there is none.
    """

    node_id: str
    epoch: bytes
    #: Random, chosen by the store: it proves that an earlier connection was its own. Many processes know the epoch.
    owner: bytes
    connection: Connection
    sequence: int = 0
    life: int = 0
    coming: int = 0
    #: The store was told the versions up to this serial.
    told: int = 0


class DirectoryServer:
    """Serves one index to the stores of a cluster over TCP.

    An announcement belongs to the node and the epoch in its connection's HELLO. It ends only with its connection, or
    with the next announcement of the same epoch and owner. So a store that uses another store's node id can at worst
    add wrong hints.

    Args:
        host: address of this node, as other nodes reach it.
        settle_s: for this long it does not say that a node is the only one, or that it knows all clearings; 0 for the
            first directory of a store, before any node has connected.
    """

    def __init__(self, host: str, settle_s: float = SETTLE_S) -> None:
        self.index = DirectoryIndex()
        self._token, self._epoch = secrets.token_hex(16), secrets.token_hex(8)
        self._num_resyncs = self._num_gaps = 0
        self._host = host
        self._settle_s = settle_s
        self.settled_at_s = self._knows_clearings_at_s = clock.now_s() + settle_s
        self.links: dict[str, _Link] = {}
        self._lives = itertools.count(1)
        #: Each store is told the new ones when it publishes next.
        self.versions = NamespaceVersions()
        #: Connections that were told which node is the only one; closed when another node appears.
        self._lonely: dict[str, Connection] = {}
        self.server = ControlServer(
            self._serve, self.gone, self.index.sweep, lambda: self.index.is_sweeping, _SWEEP_EVERY_S,
            max_bytes={Role.STORE: _MAX_MESSAGE_BYTES},
        )  # fmt: skip
        self.server.listen_remote(host)
        self.server.start()

    def address(self) -> PeerAddress:
        """Return where stores reach this directory."""
        return PeerAddress(self._host, self.server.port, self._token)

    def stats(self) -> dict[str, Any]:
        """Return what is known here, and counts since this directory began; takes no time. `epoch` is its life."""
        index, served = self.index, self.server.num_served
        return {
            "epoch": self._epoch,
            "num_nodes": len(index.nodes()),
            "num_blocks": len(index),
            "num_bytes": index.num_bytes,
            "num_dropped": index.num_dropped,
            "num_batches": served[Op.PUBLISH],
            "num_locates": served[Op.LOCATE],
            "num_walked": index.num_walked,
            "num_resyncs": self._num_resyncs,
            "num_gaps": self._num_gaps,
        }

    def stop(self) -> None:
        """Stop serving."""
        self.server.stop()

    def _serve(self, connection: Connection, message: Message) -> bytes | None:
        if message.op is Op.HELLO:
            return self._hello(connection, message)
        link = self.links.get(connection.owner)
        if link is None:
            raise ProtocolError("wanted HELLO first")
        if message.op is Op.LOCATE:
            chain, nodes = decode_chain(message.payload), self.index.nodes()
            only = nodes[0] if len(nodes) == 1 and clock.now_s() >= self.settled_at_s else ""
            if only:
                self._lonely[connection.owner] = connection
            return encode(Found(self.index.locate(chain.data), only))
        if message.op is Op.PUBLISH:
            return self._publish(link, decode_batch(message.payload))
        raise ProtocolError(f"a directory does not serve {message.op.name}")

    def _hello(self, connection: Connection, message: Message) -> bytes:
        value = decode_object(message.payload)
        if value.get("protocol") != PROTOCOL_VERSION:
            raise IncompatibleStore(
                f"wanted protocol {PROTOCOL_VERSION}, got {clip(value.get('protocol'))}; run one version everywhere"
            )
        if not is_secret(value.get("token"), self._token):
            raise IncompatibleStore("wrong token; connect through the cluster that runs this directory")
        node_id = value.get("node")
        epoch, owner = bytes_in(value, "epoch", EPOCH_BYTES), bytes_in(value, "owner", OWNER_KEY_BYTES)
        is_node = isinstance(node_id, str) and 0 < len(node_id) <= MAX_NODE_ID_CHARS
        if not (is_node and epoch and owner):
            raise ProtocolError(
                f"wanted a node of at most {MAX_NODE_ID_CHARS} characters, an epoch and an owner of {EPOCH_BYTES} "
                f"bytes in hexadecimal, got {clip(node_id)}, {clip(value.get('epoch'))} and {clip(value.get('owner'))}"
            )
        connection.role = Role.STORE
        self.links[connection.owner] = _Link(str(node_id), epoch, owner, connection)
        return encode_object({"protocol": PROTOCOL_VERSION})

    def _publish(self, link: _Link, batch: Batch) -> bytes:
        """Add a batch to the index. Return `News` with the versions that this connection was not told yet."""
        if batch.sequence != link.sequence + 1 or not (batch.begins or link.life or link.coming):
            self._num_gaps += 1
            raise ProtocolError(
                f"wanted batch {link.sequence + 1}, with a full announcement first, got batch {batch.sequence}; "
                "connect again"
            )
        link.sequence = batch.sequence
        self.versions.hear_all(batch.versions)
        if batch.begins:
            self._begin(link)
        for life in (link.life, link.coming):
            if life:
                self.index.remove(link.node_id, batch.removed, life)
        self.index.add(link.node_id, batch.added, link.coming or link.life)
        if batch.ends and link.coming:
            self.index.forget(link.node_id, link.life)
            link.life, link.coming = link.coming, 0
        if len(self.index.nodes()) > 1:
            for lonely in self._lonely.values():
                lonely.shut_down()  # Before the new node receives its answer.
            self._lonely.clear()
        link.told, news = self.versions.since(link.told)
        versions = {n: version for n, version in news.items() if batch.versions.get(n) != version}
        return encode(News(versions, clock.now_s() >= self._knows_clearings_at_s))

    def _begin(self, link: _Link) -> None:
        """Begin a full announcement; the one before it counts until this one is complete."""
        self.index.forget(link.node_id, link.coming)
        link.coming = next(self._lives)
        self._num_resyncs += 1
        for other in self.links.values():
            is_same = (other.node_id, other.epoch, other.owner) == (link.node_id, link.epoch, link.owner)
            if is_same and other is not link and other.sequence:
                # The same store over an earlier connection, whose end was not seen here.
                self.index.forget(link.node_id, other.coming)
                self.index.forget(link.node_id, link.life)
                link.life, other.life, other.coming = other.life, 0, 0
                other.connection.shut_down()

    def gone(self, connection: Connection) -> None:
        """Forget the blocks of a node store whose connection has ended."""
        self._lonely.pop(connection.owner, None)
        link = self.links.pop(connection.owner, None)
        if link is not None and (link.life or link.coming):
            # The store may connect again and announce its blocks.
            self.settled_at_s = clock.now_s() + self._settle_s
            self.index.forget(link.node_id, link.life)
            self.index.forget(link.node_id, link.coming)

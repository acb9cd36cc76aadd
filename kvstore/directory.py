"""The directory: block hash -> nodes. A hint: wrong entries cost a question, never a wrong byte.

Stores send what became findable and what stopped being so, in batches; after the directory died, or a
batch was lost, each store sends a full snapshot, and the index is whole again. With the batches they tell which
namespaces were cleared, and hear which others were.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence

from kvstore.chain import HASH_BYTES, decode_chain
from kvstore.config import PROTOCOL_VERSION
from kvstore.control_connection import Connection
from kvstore.control_server import ControlServer
from kvstore.errors import IncompatibleStore, ProtocolError
from kvstore.peers import PeerAddress
from kvstore.versions import NamespaceVersions, pack_versions, unpack_versions
from kvstore.wire import Message, Op, clip, is_secret, pack_json, unpack_json

_PUBLISH = struct.Struct("<BQIII")


class DirectoryIndex:
    """Which nodes hold which block, as one bit mask per hash."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._bit_of: dict[str, int] = {}
        self._node_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def nodes(self) -> list[str]:
        """Return the nodes that ever published and were not forgotten."""
        return sorted(self._bit_of)

    def add(self, node_id: str, hashes: Iterable[bytes]) -> None:
        """Note that a node holds blocks."""
        bit = self._bit(node_id)
        for block_hash in hashes:
            self._masks[block_hash] = self._masks.get(block_hash, 0) | bit

    def remove(self, node_id: str, hashes: Iterable[bytes]) -> None:
        """Note that a node holds blocks no more."""
        bit = self._bit(node_id)
        for block_hash in hashes:
            mask = self._masks.get(block_hash, 0) & ~bit
            if mask:
                self._masks[block_hash] = mask
            else:
                self._masks.pop(block_hash, None)

    def forget(self, node_id: str) -> None:
        """Drop everything of a node."""
        bit = self._bit_of.pop(node_id, 0)
        if bit:
            del self._node_of[bit]
            self._masks = {h: mask & ~bit for h, mask in self._masks.items() if mask & ~bit}

    def locate(self, hashes: Sequence[bytes]) -> list[tuple[str, int]]:
        """Return (node, length of the prefix it holds), longest first, nodes with none left out."""
        masks = self._masks
        alive = masks.get(hashes[0], 0) if hashes else 0
        lengths: list[tuple[str, int]] = []
        for count, block_hash in enumerate(hashes):
            still = alive & masks.get(block_hash, 0)
            if still != alive:
                lengths += [(node, count) for node in self._nodes_in(alive & ~still)]
                alive = still
                if not alive:
                    break
        lengths += [(node, len(hashes)) for node in self._nodes_in(alive)]
        return sorted(lengths, key=lambda item: (-item[1], item[0]))

    def _nodes_in(self, mask: int) -> list[str]:
        return [node for bit, node in self._node_of.items() if mask & bit]

    def _bit(self, node_id: str) -> int:
        bit = self._bit_of.get(node_id)
        if bit is None:
            bit = 1
            while bit in self._node_of:
                bit <<= 1
            self._bit_of[node_id] = bit
            self._node_of[bit] = node_id
        return bit


def pack_publish(
    node_id: str,
    *,
    reset: bool,
    sequence: int,
    added: Sequence[bytes],
    removed: Sequence[bytes],
    versions: Mapping[bytes, int],
) -> bytes:
    """Pack a batch of hints; `reset` says that `added` is everything the node holds.

    `versions` are those of cleared namespaces that the node has heard of since its last batch.
    """
    node, cleared = node_id.encode(), pack_versions(versions)
    head = _PUBLISH.pack(int(reset), sequence, len(node), len(cleared), len(added))
    return b"".join((head, node, cleared, *added, *removed))


class DirectoryServer:
    """Serves one index to the stores of a cluster over TCP.

    Args:
        host: address of this node, as other nodes reach it.
    """

    def __init__(self, host: str) -> None:
        self.index = DirectoryIndex()
        self._token = secrets.token_hex(16)
        self._host = host
        self._nodes: dict[str, str] = {}
        self._versions = NamespaceVersions()
        # Up to which serial of the versions each connection was told.
        self._told: dict[str, int] = {}
        #: Connections that were told which node is the only one; closed when there is another.
        self._lonely: dict[str, Connection] = {}
        self._server = ControlServer(self._serve, self._gone)
        self._server.listen_remote(host)
        self._server.start()

    def address(self) -> PeerAddress:
        """Return where stores reach this directory."""
        return PeerAddress(self._host, self._server.port, self._token)

    def is_serving(self, within_s: float) -> bool:
        """Whether the thread that serves the stores answers within so many seconds."""
        return self._server.is_serving(within_s)

    def version(self, namespace: bytes) -> int:
        """Return the highest version of a namespace that was heard of here."""
        return self._versions.get(namespace)

    def hear_clearing(self, namespace: bytes, version: int) -> bool:
        """Note a clearing, for stores that are away; whether it is news. Each hears of it when it publishes next."""
        return self._versions.hear(namespace, version)

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop()

    def _serve(self, connection: Connection, message: Message) -> bytes | None:
        if message.op is Op.HELLO:
            return self._hello(connection, message)
        if not connection.role:
            raise ProtocolError("wanted HELLO first")
        if message.op is Op.LOCATE:
            chain = decode_chain(message.payload)
            nodes = self.index.nodes()
            if len(nodes) == 1:
                self._lonely[connection.owner] = connection
            only = nodes[0] if len(nodes) == 1 else ""
            return pack_json({"nodes": self.index.locate(chain.hashes()), "only": only})
        if message.op is Op.PUBLISH:
            return self._publish(connection, message.payload)
        raise ProtocolError(f"a directory does not serve {message.op.name}")

    def _hello(self, connection: Connection, message: Message) -> bytes:
        value = unpack_json(message.payload)
        if value.get("protocol") != PROTOCOL_VERSION:
            raise IncompatibleStore(
                f"wanted protocol {PROTOCOL_VERSION}, got {clip(value.get('protocol'))}; run one version everywhere"
            )
        if not is_secret(value.get("token"), self._token):
            raise IncompatibleStore("wrong token; connect through the cluster that runs this directory")
        connection.role = "store"
        return pack_json({"protocol": PROTOCOL_VERSION})

    def _publish(self, connection: Connection, payload: bytes) -> bytes:
        """Take a batch in; returns the versions that this connection has not been told."""
        reset, _, node_len, cleared_len, num_added = _PUBLISH.unpack_from(payload)
        at = _PUBLISH.size
        node_id = payload[at : at + node_len].decode()
        at += node_len
        versions = unpack_versions(payload[at : at + cleared_len])
        data = payload[at + cleared_len :]
        self._versions.hear_all(versions)
        hashes = [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]
        self._nodes[connection.owner] = node_id
        if reset:
            self.index.forget(node_id)
        self.index.add(node_id, hashes[:num_added])
        self.index.remove(node_id, hashes[num_added:])
        if len(self.index.nodes()) > 1:
            for lonely in self._lonely.values():
                lonely.shut_down()  # Before the new node hears that it is known here.
            self._lonely.clear()
        self._told[connection.owner], news = self._versions.since(self._told.get(connection.owner, 0))
        return pack_versions({n: version for n, version in news.items() if versions.get(n) != version})

    def _gone(self, connection: Connection) -> None:
        self._told.pop(connection.owner, None)
        self._lonely.pop(connection.owner, None)
        node_id = self._nodes.pop(connection.owner, None)
        # A store that reconnected publishes over a newer connection and is not forgotten.
        if node_id is not None and node_id not in self._nodes.values():
            self.index.forget(node_id)

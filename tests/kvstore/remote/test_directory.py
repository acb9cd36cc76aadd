"""The directory over TCP, with stores' own link to it and with connections that say what no store would."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from directory_client import connect, publish, tell

from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import IncompatibleStore, PeerLost, ProtocolError
from kvstore.pool.pool import Pool
from kvstore.remote.announcements import PIECE_BLOCKS
from kvstore.remote.directory import DirectoryServer
from kvstore.remote.peers import PeerAddress
from kvstore.remote.versions import decode_news
from kvstore.rpc.framing import Op
from poolcheck.chains import NAMESPACES, chain_of, store

NAMESPACE = NAMESPACES[0]


def test_what_a_store_publishes_is_found(directory, start_hints):
    pool = Pool(8)
    one = start_hints("a", pool, directory.address)
    asker = start_hints("b", None, directory.address)
    store(pool, "uvw")
    publish(one)
    assert asker.locate(chain_of("uvwx")) == [("a", 3)]
    pool.clear(NAMESPACE)
    publish(one)
    assert asker.locate(chain_of("uvwx")) == []


def test_blocks_from_before_the_first_contact_come_as_a_snapshot(directory, start_hints):
    pool = Pool(8)
    store(pool, "uv")
    pool.drain_events()
    one = start_hints("a", pool, directory.address)
    publish(one)
    assert one.locate(chain_of("uv")) == [("a", 2)]


def test_a_batch_holds_the_last_word_on_each_block(directory, start_hints):
    pool = Pool(2)
    one = start_hints("a", pool, directory.address)
    publish(one)
    for tokens in ("u", "v", "w", "u", "x"):
        store(pool, tokens)
    publish(one)
    found = {tokens for tokens in "uvwx" if directory.index.locate(chain_of(tokens).hashes())}
    assert found == {tokens for tokens in "uvwx" if pool.lookup(chain_of(tokens))}
    assert len(found) == 2


def test_after_the_directory_died_the_stores_make_the_index_whole_again(directory, start_hints):
    current = [directory]
    pools = {node: Pool(8) for node in "ab"}
    hints = {node: start_hints(node, pool, lambda: current[0].address()) for node, pool in pools.items()}
    for node in "ab":
        store(pools[node], "uv" if node == "a" else "uvw")
        publish(hints[node])
    assert hints["a"].locate(chain_of("uvw")) == [("b", 3), ("a", 2)]
    directory.stop()
    current[0] = DirectoryServer("127.0.0.1")
    try:
        assert len(current[0].index) == 0
        deadline_s = time.monotonic() + 8
        while len(current[0].index) < 3 or len(current[0].index.nodes()) < 2:
            assert time.monotonic() < deadline_s
            for node in "ab":
                hints[node].publish_soon()
            time.sleep(0.05)
        found = []
        while found != [("b", 3), ("a", 2)]:
            assert time.monotonic() < deadline_s
            found = hints["a"].locate(chain_of("uvw"))
            time.sleep(0.05)
    finally:
        for link in hints.values():
            link.stop()
        current[0].stop()


def test_a_directory_that_is_away_costs_no_waiting_twice(start_hints):
    asked = []

    def resolve():
        asked.append(1)
        raise PeerLost("wanted a directory, got none")

    hints = start_hints("a", Pool(2), resolve)
    done = threading.Event()
    hints.publish_soon(done.set)
    assert done.wait(5), "who waits for a publication is told also when there is none"
    asked.clear()
    assert hints.locate(chain_of("u")) == []
    count = len(asked)
    assert hints.locate(chain_of("u")) == []
    assert len(asked) <= count + 1, "only the publisher may have tried again"


def test_a_stopped_link_still_calls_back(directory, start_hints):
    hints = start_hints("a", Pool(2), directory.address)
    hints.stop()
    told = []
    hints.publish_soon(lambda: told.append(1))
    assert told == [1]


def test_more_blocks_than_one_message_holds_arrive_in_pieces(directory, start_hints, wait_until):
    class Large:
        """Where so many blocks are in a pool does not matter here."""

        num_slots, hashes = 1 << 20, [i.to_bytes(4, "little") * 8 for i in range(3 * PIECE_BLOCKS + 5)]

        def resident_hashes(self):
            return self.hashes

        def drain_events(self):
            return []

    start_hints("a", Large(), directory.address)
    wait_until(lambda: len(directory.index) == len(Large.hashes), 10)
    assert directory.server.num_served[Op.PUBLISH] >= 4


def test_a_clearing_is_told_once_to_every_store_that_did_not_tell_it(directory):
    clients, sequences = {node: connect(directory.address(), node=node) for node in "ab"}, Counter()

    def news(node, versions):
        sequences[node] += 1
        return decode_news(tell(clients[node], sequences[node], whole=sequences[node] == 1, versions=versions)).versions

    old, new = b"o" * 32, b"n" * 32
    assert news("a", {old: 3}) == {}
    assert news("b", {}) == {old: 3}
    assert news("b", {}) == {}
    assert news("b", {old: 2, new: 5}) == {}, "an earlier clearing is no news"
    assert news("a", {}) == {new: 5}
    assert news("a", {old: 7}) == {}
    clients["late"] = connect(directory.address(), node="late")
    assert news("late", {old: 6}) == {old: 7, new: 5}
    for client in clients.values():
        client.close()


def test_stores_tell_a_new_directory_what_was_cleared(directory, start_hints, wait_until):
    current = [directory]
    one, two = (start_hints(node, Pool(4), lambda: current[0].address()) for node in "ab")
    one.versions.advance(NAMESPACE, 9)
    directory.stop()
    current[0] = DirectoryServer("127.0.0.1")
    try:

        def heard():
            one.publish_soon()
            two.publish_soon()
            return two.versions.get(NAMESPACE) == 9

        wait_until(heard)
    finally:
        for hints in (one, two):
            hints.stop()
        current[0].stop()


@pytest.mark.parametrize("changes", [{"token": "wrong"}, {"token": None}, {"protocol": PROTOCOL_VERSION + 1}])
def test_strangers_are_refused(directory, changes):
    with pytest.raises(IncompatibleStore) as caught:
        connect(directory.address(), **changes)
    if "protocol" in changes:
        assert str(PROTOCOL_VERSION) in str(caught.value)
        assert str(PROTOCOL_VERSION + 1) in str(caught.value)


def test_without_hello_nothing_is_served(directory):
    import socket

    from kvstore.rpc.client import ControlClient

    address = directory.address()
    client = ControlClient(socket.create_connection((address.host, address.port), timeout=2), "stranger")
    with pytest.raises(ProtocolError, match="HELLO"):
        client.call(Op.LOCATE, chain_of("u").encode(), timeout_s=2.0)
    client.close()


@pytest.mark.parametrize("op", [Op.LEASE, Op.PEER_LEASE, Op.MOVER_READY])
def test_what_a_directory_does_not_do(directory, op):
    client = connect(directory.address())
    with pytest.raises(ProtocolError, match=op.name):
        client.call(op, b"", timeout_s=2.0)
    client.close()


def test_nobody_listens():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(PeerLost, match=str(port)):
        connect(PeerAddress("127.0.0.1", port, "t"))

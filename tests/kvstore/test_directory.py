"""The index alone, and the directory over TCP with stores' own link to it."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import PROTOCOL_VERSION
from kvstore.control_connect import connect_remote
from kvstore.directory import DirectoryIndex, DirectoryServer, pack_publish
from kvstore.errors import IncompatibleStore, KVStoreError, PeerLost, ProtocolError
from kvstore.hints import Hints
from kvstore.peers import PeerAddress
from kvstore.pool import Pool
from kvstore.versions import NamespaceVersions, unpack_versions
from kvstore.wire import Op, unpack_json
from poolcheck.chains import NAMESPACES, chain_of, store

NAMESPACE = NAMESPACES[0]


def locate(index: DirectoryIndex, tokens: str) -> list[tuple[str, int]]:
    return index.locate(chain_of(tokens).hashes())


# The index.


def test_prefixes_longest_first():
    index = DirectoryIndex()
    index.add("a", chain_of("uv").hashes())
    index.add("b", chain_of("uvwx").hashes())
    index.add("c", chain_of("uvw").hashes())
    index.add("d", chain_of("zz").hashes())
    assert locate(index, "uvwx") == [("b", 4), ("c", 3), ("a", 2)]
    assert locate(index, "uv") == [("a", 2), ("b", 2), ("c", 2)]
    assert locate(index, "q") == []
    assert locate(index, "") == []


def test_a_hole_ends_a_nodes_prefix():
    index, hashes = DirectoryIndex(), chain_of("uvwx").hashes()
    index.add("a", [hashes[0], hashes[2], hashes[3]])
    index.add("b", hashes[1:])
    assert index.locate(hashes) == [("a", 1)]


def test_removed_blocks_are_gone():
    index, hashes = DirectoryIndex(), chain_of("uvw").hashes()
    index.add("a", hashes)
    index.add("b", hashes)
    index.remove("a", hashes[1:])
    assert index.locate(hashes) == [("b", 3), ("a", 1)]
    index.remove("b", hashes)
    assert len(index) == 1
    index.remove("b", hashes)
    assert index.locate(hashes) == [("a", 1)]


def test_a_forgotten_node_leaves_nothing_and_its_bit_is_used_again():
    index, hashes = DirectoryIndex(), chain_of("uvw").hashes()
    index.add("a", hashes)
    index.add("b", hashes[:1])
    index.forget("a")
    index.forget("a")
    assert index.locate(hashes) == [("b", 1)]
    assert (len(index), index.nodes()) == (1, ["b"])
    index.add("c", hashes[1:])
    assert index.locate(hashes) == [("b", 1)], "the old entries of the bit are not the new node's"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("add", "remove", "forget")),
            st.sampled_from("abcd"),
            st.sets(st.integers(0, 4), max_size=5),
        ),
        max_size=30,
    )
)
def test_the_index_against_sets(steps):
    index, model, hashes = DirectoryIndex(), {}, chain_of("uvwxy").hashes()
    for verb, node, picks in steps:
        picked = [hashes[i] for i in picks]
        if verb == "forget":
            index.forget(node)
            model.pop(node, None)
        else:
            getattr(index, verb)(node, picked)
            held = model.setdefault(node, set())
            (held.update if verb == "add" else held.difference_update)(picked)
    lengths = {node: next((i for i, h in enumerate(hashes) if h not in held), 5) for node, held in model.items()}
    wanted = sorted(((n, c) for n, c in lengths.items() if c), key=lambda item: (-item[1], item[0]))
    assert index.locate(hashes) == wanted
    assert len(index) == len(set().union(*model.values()))
    assert index.nodes() == sorted(model)


# The server.


@pytest.fixture
def directory():
    made = DirectoryServer("127.0.0.1")
    yield made
    made.stop()


@pytest.fixture
def start_hints():
    made = []

    def start(node_id, pool, resolve):
        versions = NamespaceVersions()
        hints = Hints(node_id, resolve, 2.0, versions, versions.advance)
        made.append(hints)
        if pool is not None:
            hints.start(2.0)
            hints.follow(pool)
        return hints

    yield start
    for hints in made:
        hints.stop()


def connect(address: PeerAddress, **changes):
    hello = {"role": "store", "protocol": PROTOCOL_VERSION, "token": address.token} | changes
    return connect_remote(address.host, address.port, hello, timeout_s=2.0)


def publish(hints: Hints) -> None:
    done = threading.Event()
    hints.publish_soon(done.set)
    assert done.wait(5)


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


def test_a_store_whose_connection_closes_is_forgotten_unless_it_has_a_newer_one(directory, wait_until):
    address = directory.address()
    old, new = connect(address), connect(address)
    batch = pack_publish("a", reset=True, sequence=1, added=chain_of("uv").hashes(), removed=[], versions={})
    for client in (old, new):
        client.call(Op.PUBLISH, batch, timeout_s=2.0)
    old.close()
    time.sleep(0.05)
    answer = unpack_json(new.call(Op.LOCATE, chain_of("uv").encode(), timeout_s=2.0))
    assert answer == {"nodes": [["a", 2]], "only": "a"}
    new.close()
    wait_until(lambda: len(directory.index) == 0)
    assert directory.index.nodes() == []


def test_reset_replaces_everything_of_that_node_only(directory):
    client = connect(directory.address())
    for node, tokens in (("a", "uv"), ("b", "uvw"), ("a", "xy")):
        batch = pack_publish(node, reset=True, sequence=1, added=chain_of(tokens).hashes(), removed=[], versions={})
        client.call(Op.PUBLISH, batch, timeout_s=2.0)
    assert directory.index.locate(chain_of("uv").hashes()) == [("b", 2)]
    assert directory.index.locate(chain_of("xy").hashes()) == [("a", 2)]
    hashes = chain_of("xyz").hashes()
    batch = pack_publish("a", reset=False, sequence=2, added=hashes[2:], removed=hashes[:1], versions={})
    client.call(Op.PUBLISH, batch, timeout_s=2.0)
    assert directory.index.locate(hashes) == []
    assert directory.index.locate(hashes[1:]) == [("a", 2)]
    client.close()


def cleared(node_id: str, versions: dict[bytes, int]) -> bytes:
    return pack_publish(node_id, reset=False, sequence=1, added=[], removed=[], versions=versions)


def test_a_clearing_is_told_once_to_every_store_that_did_not_tell_it(directory):
    clients = {node: connect(directory.address()) for node in "ab"}

    def tell(node, versions):
        return unpack_versions(clients[node].call(Op.PUBLISH, cleared(node, versions), timeout_s=2.0))

    old, new = b"o" * 32, b"n" * 32
    assert tell("a", {old: 3}) == {}
    assert tell("b", {}) == {old: 3}
    assert tell("b", {}) == {}
    assert tell("b", {old: 2, new: 5}) == {}, "an earlier clearing is no news"
    assert tell("a", {}) == {new: 5}
    assert tell("a", {old: 7}) == {}
    clients["late"] = connect(directory.address())
    assert tell("late", {old: 6}) == {old: 7, new: 5}
    for client in clients.values():
        client.close()


def test_stores_tell_a_new_directory_what_was_cleared(directory, start_hints, wait_until):
    current = [directory]
    one, two = (start_hints(node, Pool(4), lambda: current[0].address()) for node in "ab")
    one._versions.advance(NAMESPACE, 9)
    directory.stop()
    current[0] = DirectoryServer("127.0.0.1")
    try:

        def heard():
            one.publish_soon()
            two.publish_soon()
            return two._versions.get(NAMESPACE) == 9

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

    from kvstore.control_client import ControlClient

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


@pytest.mark.parametrize("payload", [b"", b"123", cleared("a", {b"n" * 32: 1})[:-1]])
def test_a_cut_batch_is_an_error_and_changes_nothing(directory, payload):
    client = connect(directory.address())
    with pytest.raises(KVStoreError):
        client.call(Op.PUBLISH, payload, timeout_s=2.0)
    assert (len(directory.index), directory.index.nodes()) == (0, [])
    client.close()


def test_nobody_listens():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(PeerLost, match=str(port)):
        connect(PeerAddress("127.0.0.1", port, "t"))

"""What a directory believes of its connections: whose blocks they announce, in which order, and who is alone."""

from __future__ import annotations

import pytest
from directory_client import batch, connect, publish, tell

from kvstore.blocks.codec import encode
from kvstore.errors import PeerLost, ProtocolError
from kvstore.pool.pool import Pool
from kvstore.remote.directory import SETTLE_S, DirectoryServer
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Found, decode_found
from kvstore.runtime import clock
from poolcheck.chains import chain_of, store


def test_a_store_whose_connection_closes_is_forgotten_unless_it_has_a_newer_one(directory, wait_until):
    address, hashes = directory.address(), chain_of("uv").hashes()
    old, new = connect(address), connect(address)
    tell(old, 1, hashes, whole=True)
    tell(new, 1, hashes, whole=True)
    with pytest.raises(PeerLost):
        tell(old, 2)
    old.close()
    answer = decode_found(new.call(Op.LOCATE, chain_of("uv").encode(), timeout_s=2.0))
    assert answer == Found([("a", 2)], "a")
    new.close()
    wait_until(lambda: len(directory.index) == 0)
    assert directory.index.nodes() == []


def test_a_full_announcement_replaces_the_one_before_and_touches_no_other_node(directory):
    clients = {node: connect(directory.address(), node=node) for node in "ab"}
    tell(clients["a"], 1, chain_of("uv").hashes(), whole=True)
    tell(clients["b"], 1, chain_of("uvw").hashes(), whole=True)
    tell(clients["a"], 2, chain_of("xy").hashes(), whole=True)
    assert directory.index.locate(chain_of("uv").hashes()) == [("b", 2)]
    assert directory.index.locate(chain_of("xy").hashes()) == [("a", 2)]
    hashes = chain_of("xyz").hashes()
    tell(clients["a"], 3, hashes[2:], hashes[:1])
    assert directory.index.locate(hashes) == []
    assert directory.index.locate(hashes[1:]) == [("a", 2)]
    for client in clients.values():
        client.close()


def test_what_is_announced_anew_in_pieces_is_found_all_the_time(directory):
    client, hashes = connect(directory.address()), chain_of("uvwx").hashes()
    tell(client, 1, hashes[:3], whole=True)
    tell(client, 2, hashes[:1], begins=True)
    assert directory.index.locate(hashes) == [("a", 3)], "the earlier announcement counts until this one is whole"
    tell(client, 3, hashes[3:])
    tell(client, 4, hashes[1:2], hashes[:1])
    assert directory.index.locate(hashes) == [], "what goes meanwhile is gone from both"
    tell(client, 5, hashes[:1], ends=True)
    assert directory.index.locate(hashes) == [("a", 2)]
    assert directory.index.locate(hashes[3:]) == [("a", 1)]
    assert len(directory.index) == 3
    client.close()


def test_a_full_announcement_that_is_begun_again_leaves_nothing_of_the_first_try(directory):
    client = connect(directory.address())
    tell(client, 1, chain_of("uv").hashes(), begins=True)
    tell(client, 2, chain_of("xy").hashes(), whole=True)
    assert directory.index.locate(chain_of("uv").hashes()) == []
    assert directory.index.locate(chain_of("xy").hashes()) == [("a", 2)]
    assert len(directory.index) == 2
    client.close()


@pytest.mark.parametrize("sequence", [1, 3, 4])
def test_a_batch_that_was_lost_is_noticed(directory, sequence):
    client = connect(directory.address())
    tell(client, 1, chain_of("u").hashes(), whole=True)
    with pytest.raises(ProtocolError, match=f"wanted batch 2.*got batch {sequence}"):
        tell(client, sequence, chain_of("v").hashes())
    assert directory.index.locate(chain_of("v").hashes()) == []
    client.close()


def test_a_connection_begins_with_a_full_announcement(directory):
    client = connect(directory.address())
    with pytest.raises(ProtocolError, match="full announcement first"):
        tell(client, 1, chain_of("u").hashes())
    assert directory.index.nodes() == []
    client.close()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0" * 16,
        batch(1, whole=True)[:-1],
        batch(1, [b"h" * 32])[:-1],
        encode([1, True, True, b"h" * 31, b"", {}]),
        encode([1, True, True, b"", b"h" * 33, {}]),
        batch(1, whole=True, versions={b"n" * 32: 1})[:-1],
        b"\xff" + batch(1)[1:],
        b"\1" + b"\xff" * 16,
    ],
)
def test_bytes_that_are_no_batch_are_refused_and_change_nothing(directory, payload):
    client = connect(directory.address())
    with pytest.raises(ProtocolError):
        client.call(Op.PUBLISH, payload, timeout_s=2.0)
    assert directory.index.nodes() == []
    client.close()


@pytest.mark.parametrize("epoch", ["11" * 8, "00" * 8], ids=["another epoch", "the same epoch"])
def test_an_impostor_takes_nothing_from_a_store_for_good(directory, start_hints, wait_until, epoch):
    pool = Pool(8)
    store(pool, "uvw")
    one = start_hints("a", pool, directory.address)
    one._epoch = bytes(8)
    one._publisher.close()
    publish(one)
    hashes = chain_of("uvw").hashes()
    assert directory.index.locate(hashes) == [("a", 3)]
    impostor = connect(directory.address(), epoch=epoch)
    tell(impostor, 1, whole=True)
    if epoch == "11" * 8:
        assert directory.index.locate(hashes) == [("a", 3)], "what one life says touches no other"
    else:
        # Taken for the store itself; the store notices with its next batch.
        wait_until(lambda: (publish(one), directory.index.locate(hashes) == [("a", 3)])[1])
    store(pool, "xy")
    publish(one)
    assert directory.index.locate(chain_of("xy").hashes()) == [("a", 2)]
    impostor.close()
    wait_until(lambda: len(directory.links) <= 1)
    publish(one)
    assert directory.index.locate(hashes) == [("a", 3)]


def test_two_lives_of_a_node_are_found_as_one(directory):
    clients = [connect(directory.address(), epoch=epoch * 8) for epoch in ("00", "11")]
    for client, tokens in zip(clients, ("uvw", "uv"), strict=True):
        tell(client, 1, chain_of(tokens).hashes(), whole=True)
    assert directory.index.locate(chain_of("uvwx").hashes()) == [("a", 3)]
    assert directory.index.nodes() == ["a"]
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"node": ""},
        {"node": None},
        {"node": "n" * 201},
        {"epoch": ""},
        {"epoch": "no"},
        {"epoch": "00" * 9},
        {"epoch": 1},
        {"owner": "no"},
    ],
    ids=str,
)
def test_a_store_says_which_node_and_life_it_is(directory, changes):
    with pytest.raises(
        ProtocolError, match="wanted a node of at most 200 characters, an epoch and an owner of 8 bytes"
    ):
        connect(directory.address(), **changes)


def asked_for_only(client) -> str:
    return decode_found(client.call(Op.LOCATE, chain_of("u").encode(), timeout_s=2.0)).only


def test_a_new_directory_says_of_no_node_that_it_is_the_only_one_until_others_had_time(monkeypatch):
    directory = DirectoryServer("127.0.0.1")
    try:
        client = connect(directory.address())
        tell(client, 1, whole=True)
        assert asked_for_only(client) == "", "stores of an earlier directory may be on their way"
        later_s = clock.now_s() + SETTLE_S
        monkeypatch.setattr(directory, "settled_at_s", later_s - SETTLE_S)
        assert asked_for_only(client) == "a"
        client.close()
    finally:
        directory.stop()


def test_after_a_store_was_lost_no_node_is_the_only_one_until_that_had_time_to_come_back(wait_until):
    directory = DirectoryServer("127.0.0.1")
    try:
        directory.settled_at_s = 0.0
        clients = {node: connect(directory.address(), node=node) for node in "ab"}
        for client in clients.values():
            tell(client, 1, whole=True)
        clients["b"].close()
        wait_until(lambda: directory.index.nodes() == ["a"])
        assert asked_for_only(clients["a"]) == ""
        directory.settled_at_s = 0.0
        assert asked_for_only(clients["a"]) == "a"
        clients["a"].close()
    finally:
        directory.stop()

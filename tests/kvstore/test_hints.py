"""The link to the directory: who waits for it, and for how long when it hangs."""

from __future__ import annotations

import socket
import time

import pytest

from kvstore.chain import Chain
from kvstore.errors import PeerLost
from kvstore.hints import Hints
from kvstore.peers import PeerAddress
from kvstore.pool import Pool
from kvstore.versions import NamespaceVersions


@pytest.fixture
def deaf():
    """A directory that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield PeerAddress("127.0.0.1", server.getsockname()[1], "token")


@pytest.fixture
def hints_of():
    made = []

    def make(resolve, timeout_s=3.0):
        made.append(Hints("n", resolve, timeout_s, NamespaceVersions(), lambda *_: None))
        return made[-1]

    yield make
    for hints in made:
        hints.stop()


def test_a_directory_that_hangs_is_waited_for_a_second_and_then_not_at_all(deaf, hints_of, wait_until):
    hints = hints_of(lambda: deaf)
    hints.start(0.0)
    hints.follow(Pool(4))
    heard, asked_s = [], time.monotonic()
    hints.publish_soon(lambda: heard.append(time.monotonic()))
    assert hints.num_waiting == 2, "who made contact, and this one"

    def answered():
        hints.answer_overdue()
        return heard

    wait_until(answered)
    assert 1.0 <= heard[0] - asked_s < 1.5
    assert hints.num_waiting == 0
    # Once it is known to be away nobody waits for it any more.
    wait_until(lambda: hints._is_away)
    hints.publish_soon(lambda: heard.append(time.monotonic()))
    assert len(heard) == 2


def test_each_is_called_back_once_and_after_its_batch(cluster, wait_until):
    core = cluster.add("a")
    cluster.client("a")
    heard = []
    for i in range(20):
        core.hints.publish_soon(lambda i=i: heard.append(i))
        core.hints.answer_overdue()
    wait_until(lambda: len(heard) == 20)
    assert sorted(heard) == list(range(20))
    assert core.hints.num_waiting == 0


def test_a_directory_that_hangs_is_asked_again_later_than_one_that_refuses(deaf, hints_of):
    def refuse():
        raise PeerLost("nobody there")

    chain = Chain(b"n" * 32, b"n" * 32, 0, b"h" * 32)
    refusing, hanging = hints_of(refuse), hints_of(lambda: deaf, 0.3)
    for hints in (refusing, hanging):
        assert hints.locate(chain) == []
    now_s = time.monotonic()
    assert refusing._ask_after_s - now_s <= 1.0 < 4.0 < hanging._ask_after_s - now_s <= 5.0
    started_s = time.monotonic()
    assert hanging.locate(chain) == []
    assert time.monotonic() - started_s < 0.1
    hanging._thread.start()


def test_the_only_node_asks_the_directory_once_and_again_when_there_is_another(cluster, wait_until):
    core = cluster.add("a")
    cluster.client("a")
    chain = Chain(b"n" * 32, b"n" * 32, 0, b"h" * 32)
    assert not core.hints.is_alone(), "nobody was asked"
    assert core.hints.locate(chain) == []
    asker = core.hints._asker
    num_calls = asker.num_calls
    assert core.hints.is_alone()
    assert core.hints.locate(chain) == []
    assert asker.num_calls == num_calls
    cluster.add("b")
    cluster.client("b")
    wait_until(lambda: not core.hints.is_alone())
    assert core.hints.locate(chain) == []
    assert core.hints._asker is not asker, "it was asked anew"
    assert not core.hints.is_alone()


def test_a_node_that_asked_when_only_another_was_known_is_answered_once_there_are_more(cluster, hints_of, wait_until):
    cluster.add("a")
    hashes = cluster.hashes(3)
    cluster.worker("a", seed=1).save(hashes, range(3))
    chain = Chain(hashes.namespace_digest, hashes.parent, hashes.start, hashes.data)
    hints = hints_of(cluster.directory.address)
    assert hints.locate(chain) == [("a", 3)]
    assert not hints.is_alone(), "another is the only one"
    cluster.add("b")
    wait_until(lambda: not hints._asker.is_quiet())
    assert hints.locate(chain) == [("a", 3)]


@pytest.fixture
def own_hints():
    def resolve():
        raise AssertionError("nothing here asks the directory")

    return Hints("a", resolve, 1.0, NamespaceVersions(), lambda *_: None)


def test_what_a_lookup_found_is_recalled_once(own_hints):
    own_hints.remember(b"x", [("b", 3)])
    assert own_hints.recall(b"y") == []
    assert own_hints.recall(b"x") == [("b", 3)]
    assert own_hints.recall(b"x") == []


def test_what_was_found_long_ago_is_not(own_hints, monkeypatch):
    own_hints.remember(b"x", [("b", 3)])
    later_s = time.monotonic() + 3.0
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert own_hints.recall(b"x") == []


def test_only_so_much_is_remembered(own_hints):
    for i in range(5000):
        own_hints.remember(i.to_bytes(2, "little"), [("b", 1)])
    assert sum(own_hints.recall(i.to_bytes(2, "little")) != [] for i in range(5000)) <= 1024

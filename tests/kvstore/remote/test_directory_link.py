"""The link to the directory: who waits for it, and for how long when it hangs."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from directory_client import connect

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import encode
from kvstore.errors import PeerLost
from kvstore.memory.presence import ALONE_AT
from kvstore.pool.pool import Pool
from kvstore.remote import directory_link
from kvstore.remote.directory import DirectoryServer
from kvstore.remote.directory_link import Hints
from kvstore.remote.peers import PeerAddress
from kvstore.remote.sole_node import Solitude
from kvstore.remote.versions import NamespaceVersions
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Found
from kvstore.runtime import clock
from poolcheck.chains import chain_of, store


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
    heard, asked_s = [], clock.now_s()
    hints.publish_soon(lambda: heard.append(clock.now_s()))
    assert len(hints.waiting) == 2, "who made contact, and this one"

    def answered():
        hints.answer_overdue()
        return heard

    wait_until(answered)
    assert 1.0 <= heard[0] - asked_s < 1.5
    assert hints.waiting == []
    # Once it is known to be away nobody waits for it any more.
    wait_until(lambda: hints.is_away)
    hints.publish_soon(lambda: heard.append(clock.now_s()))
    assert len(heard) == 2


def test_each_is_called_back_once_and_after_its_batch(cluster, wait_until):
    core = cluster.add("a")
    cluster.client("a")
    heard = []
    for i in range(20):
        core.state.hints.publish_soon(lambda i=i: heard.append(i))
        core.state.hints.answer_overdue()
    wait_until(lambda: len(heard) == 20)
    assert sorted(heard) == list(range(20))
    assert core.state.hints.waiting == []


def test_a_directory_that_hangs_is_asked_again_later_than_one_that_refuses(deaf, hints_of):
    def refuse():
        raise PeerLost("nobody there")

    chain = BlockHashes(b"n" * 32, b"n" * 32, 0, b"h" * 32)
    refusing, hanging = hints_of(refuse), hints_of(lambda: deaf, 0.3)
    for hints in (refusing, hanging):
        assert hints.locate(chain) == []
    now_s = clock.now_s()
    assert refusing.ask_after_s - now_s <= 1.0 < 4.0 < hanging.ask_after_s - now_s <= 5.0
    started_s = clock.now_s()
    assert hanging.locate(chain) == []
    assert clock.now_s() - started_s < 0.1
    hanging.thread.start()


def test_the_only_node_asks_the_directory_once_and_again_when_there_is_another(cluster, wait_until):
    core = cluster.add("a")
    cluster.client("a")
    chain = BlockHashes(b"n" * 32, b"n" * 32, 0, b"h" * 32)
    assert not core.state.hints.is_alone(), "nobody was asked"
    assert core.state.hints.locate(chain) == []
    asker = core.state.hints.asker
    num_calls = asker.num_calls
    assert core.state.hints.is_alone()
    assert core.state.hints.locate(chain) == []
    assert asker.num_calls == num_calls
    cluster.add("b")
    cluster.client("b")
    wait_until(lambda: not core.state.hints.is_alone())
    assert core.state.hints.locate(chain) == []
    assert core.state.hints.asker is not asker, "it was asked anew"
    assert not core.state.hints.is_alone()


def test_a_node_that_asked_when_only_another_was_known_is_answered_once_there_are_more(cluster, hints_of, wait_until):
    cluster.add("a")
    chain = cluster.hashes(3)
    cluster.worker("a", seed=1).save(chain, range(3))
    hints = hints_of(cluster.directory.address)
    assert hints.locate(chain) == [("a", 3)]
    assert not hints.is_alone(), "another is the only one"
    cluster.add("b")
    wait_until(lambda: not hints.asker.is_quiet())
    assert hints.locate(chain) == [("a", 3)]


@pytest.mark.parametrize("error", [RuntimeError("what nobody thought of"), TimeoutError("the cluster hangs")], ids=repr)
def test_whatever_is_raised_in_finding_the_directory_the_link_goes_on(directory, hints_of, error):
    raised = [error]

    def resolve():
        if raised:
            raise raised.pop()
        return directory.address()

    hints = hints_of(resolve)
    pool = Pool(4)
    store(pool, "uv")
    hints.follow(pool)
    told = threading.Event()
    hints.thread.start()
    hints.publish_soon(told.set)
    assert told.wait(5), "who waits is told"
    told.clear()
    hints.is_away = False
    hints.publish_soon(told.set)
    assert told.wait(5)
    assert directory.index.locate(chain_of("uv").hashes()) == [("n", 2)]


def test_a_failure_in_a_round_is_followed_by_a_full_announcement(directory, hints_of, monkeypatch, wait_until):
    """What was taken from the pool by then is told all the same."""
    hints, pool = hints_of(directory.address), Pool(8)
    hints.start(2.0)
    hints.follow(pool)
    told = threading.Event()
    hints.publish_soon(told.set)
    assert told.wait(5)
    real = hints.versions.since

    def fail_once(serial):
        monkeypatch.setattr(hints.versions, "since", real)
        pool.drain_events()
        raise MemoryError("no room for one batch")

    monkeypatch.setattr(hints.versions, "since", fail_once)
    store(pool, "uvw")
    told.clear()
    hints.publish_soon(told.set)
    assert told.wait(5)
    found = [("n", 3)]
    wait_until(lambda: directory.index.locate(chain_of("uvw").hashes()) == found)


def test_one_that_cannot_be_called_back_keeps_nobody_else_from_it(directory, hints_of):
    hints, told = hints_of(directory.address), threading.Event()

    def fail():
        raise RuntimeError("its connection is gone")

    hints.publish_soon(fail)
    hints.publish_soon(told.set)
    hints.thread.start()
    assert told.wait(5)
    told.clear()
    hints.publish_soon(told.set)
    assert told.wait(5)


def test_while_the_directory_is_away_only_so_much_is_kept_for_it(cluster, wait_until):
    core, num_blocks = cluster.add("a", mover=False), 1000
    cluster.client("a")
    pool = Pool(num_blocks)
    core.state.hints.follow(pool)
    cluster.directory.stop()
    # It is seen by the heartbeat, every 5 s.
    wait_until(lambda: core.state.hints.is_away, 60.0)
    num_kept = []
    for _ in range(3 * 17):
        chain = BlockHashes(bytes(32), bytes(32), 0, os.urandom(32 * num_blocks))
        pool.complete_store(pool.prepare_store(chain, "w").write_id, "w")
        num_kept.append(sum(len(hashes) for _, hashes in pool.table.index.events.events))
    assert max(num_kept) <= 1 << 14
    assert min(num_kept[-10:]) == 0, "all of it was dropped"
    cluster.directory = DirectoryServer("127.0.0.1", settle_s=0.0)
    # The link tries again a second after each attempt, and one attempt may hang for seconds.
    wait_until(lambda: len(cluster.directory.index) == num_blocks, 60.0)
    for block_hash in pool.resident_hashes():
        assert cluster.directory.index.locate([block_hash]) == [("a", 1)]


def test_after_the_directory_was_restarted_nothing_of_another_node_is_surely_absent(cluster, hints_of, wait_until):
    """The first that publishes must not hear that it is the only one: the other has not come yet."""
    core = cluster.add("a")
    cluster.client("a")
    other = hints_of(cluster.directory.address)
    other.start(2.0)
    cluster.directory.stop()
    other.stop()
    cluster.directory = DirectoryServer("127.0.0.1")
    chain = BlockHashes(b"n" * 32, b"n" * 32, 0, b"h" * 32)

    def asked():
        core.state.hints.publish_soon()
        core.state.hints.ask_after_s = 0.0
        core.state.hints.locate(chain)
        return cluster.directory.index.nodes() == ["a"] and cluster.directory.server.num_served[Op.LOCATE] > 1

    wait_until(asked)
    assert not core.state.hints.is_alone()
    assert not core.state.presence._head[ALONE_AT]
    cluster.directory.settled_at_s = 0.0
    core.state.hints.locate(chain)
    assert core.state.hints.is_alone()


@pytest.fixture
def solitude(directory):
    said, address = [], directory.address()
    made = Solitude(said.append)
    yield made, said, connect(address)
    made.end()


def test_nobody_is_said_to_be_alone_without_a_thread_that_takes_it_back(solitude, monkeypatch):
    (alone, said, connection), before = solitude, len(os.listdir("/proc/self/fd"))

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    alone.begin(connection)
    assert said == []
    assert len(os.listdir("/proc/self/fd")) == before
    connection.close()


def test_it_is_taken_back_whatever_ends_the_thread_that_watches(solitude, monkeypatch, wait_until):
    alone, said, connection = solitude

    class Broken:
        def register(self, *_):
            raise OSError("what nobody thought of")

    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    monkeypatch.setattr("kvstore.remote.sole_node.select.poll", Broken)
    alone.begin(connection)
    wait_until(lambda: said == [True, False])
    connection.close()


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
    later_s = clock.now_s() + 3.0
    monkeypatch.setattr("kvstore.runtime.clock.now_s", lambda: later_s)
    assert own_hints.recall(b"x") == []


def test_only_so_much_is_remembered(own_hints):
    for i in range(5000):
        own_hints.remember(i.to_bytes(2, "little"), [("b", 1)])
    assert sum(own_hints.recall(i.to_bytes(2, "little")) != [] for i in range(5000)) <= 1024


def test_of_what_a_directory_answers_no_node_has_more_than_was_asked_for_and_few_nodes_are_looked_at():
    found = Found([("much", 9), ("none", 0), ("less", 2), *((f"n{i}", 1) for i in range(1000))], "only")
    nodes, only = directory_link._located(encode(found), 3)
    assert nodes[:3] == [("much", 3), ("less", 2), ("n0", 1)]
    assert (len(nodes), only) == (directory_link._MAX_NODES - 1, "only")


def test_a_connection_that_is_made_while_the_link_stops_is_closed(hints_of, wait_until):
    """It would stay open as long as anything knows it: the one that asked for it may keep it for long."""
    made, may_go_on = [], threading.Event()

    class Slow(PeerAddress):
        def connect(self, *args):
            made.append(super().connect(*args))
            assert may_go_on.wait(5.0)
            return made[-1]

    directory = DirectoryServer("127.0.0.1")
    address = directory.address()
    hints = hints_of(lambda: Slow(address.host, address.port, address.token))
    asking = threading.Thread(target=hints.locate, args=(chain_of("ab"),))
    try:
        asking.start()
        wait_until(lambda: made)
        hints.stop()
        may_go_on.set()
        asking.join(5.0)
        assert not asking.is_alive()
        assert made[0].closed
        assert hints.asker is None
    finally:
        may_go_on.set()
        directory.stop()

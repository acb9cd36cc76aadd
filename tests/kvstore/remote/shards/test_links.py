"""A directory of several shards, with stores' own links to them: who is told what, who is asked, and what is lost."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
from directory_client import connect, tell

from kvstore.blocks.chain import BlockHashes
from kvstore.errors import ProtocolError
from kvstore.pool.pool import Pool
from kvstore.remote.directory import DirectoryServer
from kvstore.remote.shards.links import ShardedHints, link_to_directory
from kvstore.remote.versions import NamespaceVersions
from kvstore.rpc.framing import Op
from kvstore.runtime import clock
from kvstore.runtime.threads.store_threads import Blocking

SPACE = b"n" * 32
NUM_SHARDS = 3


def chain_of(seed: int, length: int = 5) -> BlockHashes:
    return BlockHashes(SPACE, SPACE, 0, random.Random(seed).randbytes(32 * length))


def chain_in(shard: int, length: int = 5, start: int = 0) -> BlockHashes:
    """Return a chain whose root is in a shard."""
    return next(
        chain for chain in (chain_of(seed, length) for seed in range(start, start + 999))
        if chain.root_key % NUM_SHARDS == shard
    )  # fmt: skip


def put(pool: Pool, chain: BlockHashes) -> None:
    pool.complete_store(pool.prepare_store(chain, "writer", needs_parent=False).write_id, "writer")


class Shards:
    """Directories that can be replaced, and the links of stores to them."""

    def __init__(self) -> None:
        self.servers = [DirectoryServer("127.0.0.1", settle_s=0.0) for _ in range(NUM_SHARDS)]
        self.links = []

    def link(self, node_id: str, pool: Pool | None = None, epoch: bytes = bytes(8), say=lambda alone: None):
        versions = NamespaceVersions()
        args = (lambda number: self.servers[number].address()), 2.0, versions, versions.advance, say, epoch
        made = link_to_directory(NUM_SHARDS, node_id, *args)
        self.links.append((made, versions))
        made.start(5.0)
        made.follow(pool)
        return made

    def restart(self, number: int) -> None:
        self.servers[number].stop()
        self.servers[number] = DirectoryServer("127.0.0.1", settle_s=0.0)

    def found(self, chain: BlockHashes) -> list[list[tuple[str, int]]]:
        return [server.index.locate(chain.data) for server in self.servers]

    def num_asked(self) -> list[int]:
        return [server.server.num_served[Op.LOCATE] for server in self.servers]

    def stop(self) -> None:
        for link, _ in self.links:
            link.stop()
        for server in self.servers:
            server.stop()


@pytest.fixture
def shards():
    made = Shards()
    yield made
    made.stop()


def publish(link) -> None:
    done = threading.Event()
    link.publish_soon(done.set)
    assert done.wait(5)


def test_a_chain_is_known_to_the_shard_of_its_root_alone_and_only_that_is_asked(shards):
    pool = Pool(64, has_roots=True)
    one, other = shards.link("a", pool), shards.link("b")
    for number in range(NUM_SHARDS):
        put(pool, chain_in(number))
    publish(one)
    for number in range(NUM_SHARDS):
        chain, before = chain_in(number), shards.num_asked()
        assert [bool(found) for found in shards.found(chain)] == [at == number for at in range(NUM_SHARDS)]
        assert other.locate(chain) == [("a", 5)]
        assert other.locate(chain.tail(2)) == [("a", 3)], "a tail has the root of its chain"
        asked = [after - at for at, after in zip(before, shards.num_asked(), strict=True)]
        assert asked == [2 if at == number else 0 for at in range(NUM_SHARDS)]


def test_a_run_whose_root_is_not_known_is_asked_of_all_shards(shards):
    pool, chain = Pool(64, has_roots=True), chain_in(1)
    one, other = shards.link("a", pool), shards.link("b")
    put(pool, chain)
    publish(one)
    by_hand = BlockHashes(SPACE, chain[1], 2, chain.data[64:])
    assert other.locate(by_hand) == [("a", 3)]
    assert shards.num_asked() == [1, 1, 1]


class Hanging:
    """A shard that leaves questions unanswered until it is let go, like one that was suspended."""

    def __init__(self, server: DirectoryServer) -> None:
        self.is_asked, self.goes_on, self._locate = threading.Event(), threading.Event(), server.index.locate
        self._index, server.index.locate = server.index, self

    def __call__(self, hashes):
        self.is_asked.set()
        assert self.goes_on.wait(100)
        return self._locate(hashes)

    def let_go(self) -> None:
        self._index.locate = self._locate
        self.goes_on.set()


def test_a_shard_that_hangs_keeps_one_question_and_no_lookup_waits_behind_it(cluster, wait_until):
    """Else lookups of its chains would take all threads, and those of other shards would wait for one."""
    cluster.more_shards.append(DirectoryServer("127.0.0.1", settle_s=0.0))
    nodes = [cluster.add(node, num_directory_shards=2, call_timeout_s=100.0) for node in "ab"]
    one, two = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    chains = [cluster.hashes(4, seed) for seed in range(40)]
    fine, *_ = [chain for chain in chains if chain.root_key % 2 == 0]
    one.save(fine, range(4))
    shard = Hanging(cluster.more_shards[0])
    asking = [
        threading.Thread(target=two.client.lookup, args=(chain,), daemon=True)
        for chain in chains if chain.root_key % 2 == 1
    ]  # fmt: skip
    assert len(asking) > 8
    try:
        asking[0].start()
        assert shard.is_asked.wait(10)
        for each in asking[1:]:
            each.start()
        wait_until(lambda: sum(each.is_alive() for each in asking) == 1)
        assert two.client.lookup(fine).num_blocks == 4
        wait_until(lambda: nodes[1].state.threads.num_pending[Blocking.LOOKUP] == 1)
    finally:
        shard.let_go()
        for each in asking:
            each.join(10)


def test_a_run_without_root_asks_no_more_shards_when_its_time_is_over(shards):
    one, run = shards.link("a", Pool(64, has_roots=True)), BlockHashes(SPACE, b"p" * 32, 4, b"h" * 32)
    shards.link("b", Pool(64, has_roots=True))
    assert one.locate(run, clock.now_s()) == []
    assert sum(shards.num_asked()) == 0
    assert one.locate(run, clock.now_s() + 10) == []
    assert shards.num_asked() == [1] * NUM_SHARDS


def test_a_save_sends_a_message_to_its_shard_and_none_to_the_others(shards, wait_until):
    pool = Pool(64, has_roots=True)
    one = shards.link("a", pool)
    publish(one)

    def num_batches():
        return [server.server.num_served[Op.PUBLISH] for server in shards.servers]

    wait_until(lambda: all(server.index.nodes() == ["a"] for server in shards.servers))
    before = num_batches()
    for seed in range(4):
        put(pool, chain_in(1, start=1000 * seed))
        publish(one)
    sent = [after - at for at, after in zip(before, num_batches(), strict=True)]
    assert sent[1] >= 4
    assert max(sent[0], sent[2]) <= 2, "heartbeats at most"


def test_evictions_are_told_to_the_shard_that_knows_the_block(shards):
    pool = Pool(5, has_roots=True)
    one = shards.link("a", pool)
    put(pool, chain_in(0))
    publish(one)
    put(pool, chain_in(2))
    publish(one)
    assert [len(server.index) for server in shards.servers] == [0, 0, 5]


def test_a_clearing_reaches_all_shards_and_from_any_of_them_other_stores(shards, wait_until):
    pool = Pool(64, has_roots=True)
    one = shards.link("a", pool)
    for number in range(NUM_SHARDS):
        put(pool, chain_in(number))
    publish(one)
    shards.links[0][1].advance(SPACE, 7)
    pool.clear(SPACE)
    publish(one)
    assert [len(server.index) for server in shards.servers] == [0, 0, 0]
    assert [server.versions.get(SPACE) for server in shards.servers] == [7, 7, 7]
    shards.link("b")
    assert shards.links[1][1].get(SPACE) == 7


def test_a_clearing_that_takes_no_block_is_told_with_the_next_message_too(shards):
    one = shards.link("a", Pool(64, has_roots=True))
    publish(one)
    shards.links[0][1].advance(SPACE, 7)
    publish(one)
    assert [server.versions.get(SPACE) for server in shards.servers] == [7, 7, 7]


def test_a_shard_that_is_away_costs_its_own_chains_only_and_is_filled_again(shards, wait_until):
    pool = Pool(64, has_roots=True)
    one, other = shards.link("a", pool), shards.link("b")
    for number in range(NUM_SHARDS):
        put(pool, chain_in(number))
    publish(one)
    shards.restart(1)
    assert other.locate(chain_in(0)) == other.locate(chain_in(2)) == [("a", 5)]
    put(pool, chain_in(1, start=5000))

    def is_whole():
        one.publish_soon()
        return shards.found(chain_in(1))[1] == shards.found(chain_in(1, start=5000))[1] == [("a", 5)]

    wait_until(is_whole)
    assert [len(server.index) for server in shards.servers] == [5, 10, 5]


def test_a_shard_that_ends_in_the_midst_of_a_full_announcement_is_filled_by_the_next_one(
    shards, wait_until, monkeypatch
):
    monkeypatch.setattr("kvstore.remote.announcements.Announcements.__init__.__defaults__", (8,))
    pool, chains = Pool(600, has_roots=True), [chain_of(seed, 6) for seed in range(90)]
    for chain in chains:
        put(pool, chain)
    add, ended, pieces = shards.servers[1].index.add, threading.Event(), list[bytes]()

    def end_after_some(node, added, life):
        add(node, added, life)
        pieces.append(added)
        if len(pieces) == 3:
            ended.set()

    monkeypatch.setattr(shards.servers[1].index, "add", end_after_some)
    one = shards.link("a", pool)
    assert ended.wait(10)
    shards.restart(1)
    wanted = sum(6 for chain in chains if chain.root_key % NUM_SHARDS == 1)

    def is_whole():
        one.publish_soon()
        return len(shards.servers[1].index) == wanted

    wait_until(is_whole)
    for chain in chains:
        found = shards.found(chain)
        assert found[chain.root_key % NUM_SHARDS] == [("a", 6)]


def test_after_a_gap_everything_is_announced_anew_and_nothing_is_missing(shards, wait_until):
    pool = Pool(64, has_roots=True)
    one, chains = shards.link("a", pool), [chain_in(1), chain_in(1, start=3000)]
    put(pool, chains[0])
    publish(one)
    [link] = shards.servers[1].links.values()
    link.sequence += 1  # As if a batch had been lost.
    put(pool, chains[1])

    def is_whole():
        one.publish_soon()
        return [shards.found(chain)[1] for chain in chains] == [[("a", 5)], [("a", 5)]]

    wait_until(is_whole)
    stats = [server.stats() for server in shards.servers]
    assert [each["num_gaps"] for each in stats] == [0, 1, 0]
    assert stats[1]["num_resyncs"] > stats[0]["num_resyncs"]
    assert [each["num_blocks"] for each in stats] == [0, 10, 0]


@pytest.mark.parametrize("order", [(2, 1), (1, 1), (1, 3)], ids=["reordered", "doubled", "lost"])
def test_batches_out_of_turn_are_refused_and_the_node_begins_anew(shards, order):
    chain, address = chain_in(0), shards.servers[0].address()
    client = connect(address)
    tell(client, 1, chain.hashes()[:1], whole=True)

    def tell_all():
        for number in order:
            tell(client, number + 1, chain.hashes()[number : number + 1])

    with pytest.raises(ProtocolError, match="wanted batch"):
        tell_all()
    client.close()
    client = connect(address)
    tell(client, 1, chain.hashes(), whole=True)
    assert shards.servers[0].index.locate(chain.data) == [("a", 5)]
    assert shards.servers[0].stats()["num_gaps"] == 1
    client.close()


def test_of_two_lives_of_a_node_each_shard_forgets_the_one_that_ended(shards, wait_until):
    pools = [Pool(64, has_roots=True) for _ in range(2)]
    old, new = (shards.link("a", pool, epoch=bytes([life]) * 8) for life, pool in enumerate(pools))
    put(pools[0], chain_in(0))
    put(pools[0], chain_in(1))
    put(pools[1], chain_in(1, 3))
    publish(old)
    publish(new)
    assert [found for found in shards.found(chain_in(1)) if found] == [[("a", 5)]]
    old.stop()
    wait_until(lambda: not shards.found(chain_in(0))[0])
    put(pools[1], chain_in(2))
    publish(new)
    assert shards.found(chain_in(2))[2] == [("a", 5)]
    assert [server.index.nodes() for server in shards.servers] == [["a"]] * NUM_SHARDS


def test_a_node_is_alone_when_every_shard_has_said_so_and_no_longer_when_one_takes_it_back(shards, wait_until):
    said = list[bool]()
    one = shards.link("a", Pool(64, has_roots=True), say=said.append)
    for number in range(NUM_SHARDS):
        assert not one.is_alone()
        assert True not in said
        assert one.locate(chain_in(number)) == []
    assert one.is_alone()
    assert said[-1] is True
    shards.link("b", Pool(64, has_roots=True))
    wait_until(lambda: not one.is_alone() and said[-1] is False)


def test_who_waits_for_a_publication_is_called_once_when_the_last_shard_was_told_or_is_late(shards, monkeypatch):
    one, heard = shards.link("a", Pool(64, has_roots=True)), list[int]()
    for number in range(20):
        one.publish_soon(lambda number=number: heard.append(number))
    done = threading.Event()
    one.publish_soon(done.set)
    assert done.wait(5)
    assert sorted(heard) == list(range(20))
    assert one.waiting == []


def test_it_has_met_the_directory_when_every_shard_has_answered(shards):
    address = shards.servers[2].address

    def refuse():
        raise ConnectionError("not yet")

    shards.servers[2].address = refuse
    one = shards.link("a")
    assert not one.has_met.wait(0.01)
    shards.servers[2].address = address
    assert one.has_met.wait(10)


def test_nodes_with_two_shards_find_and_load_each_others_blocks(cluster, wait_until):
    cluster.more_shards.append(DirectoryServer("127.0.0.1", settle_s=0.0))
    for node in "ab":
        cluster.add(node, num_directory_shards=2)
    one, two = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    chains = [cluster.hashes(4, seed) for seed in range(8)]
    for number, chain in enumerate(chains):
        one.save(chain, range(4 * number, 4 * number + 4))
    counts = [len(server.index) for server in (cluster.directory, *cluster.more_shards)]
    assert sum(counts) == 32
    assert counts == [4 * sum(chain.root_key % 2 == shard for chain in chains) for shard in range(2)]
    assert min(counts) > 0
    for number, chain in enumerate(chains):
        assert two.client.lookup(chain).num_blocks == 4
        assert two.load(chain, range(4 * number, 4 * number + 4)).num_peer == 4
    assert [two.block(at) for at in range(32)] == [one.block(at) for at in range(32)]


def test_another_life_of_any_shard_is_another_life_of_the_directory(shards, wait_until):
    pool = Pool(64, has_roots=True)
    one = shards.link("a", pool)
    for number in range(NUM_SHARDS):
        before = one.met
        shards.restart(number)
        put(pool, chain_in(number))

        def is_another(before=before):
            one.publish_soon()
            return one.met != before

        wait_until(is_another)


def test_a_shard_without_news_tells_of_clearings_that_it_heard_of(shards, wait_until, monkeypatch):
    monkeypatch.setattr("kvstore.remote.directory_link._HEARTBEAT_S", 0.05)
    one, (_, versions) = shards.link("a", Pool(64, has_roots=True)), shards.links[0]
    publish(one)
    shards.servers[2].versions.advance(SPACE, 7)
    wait_until(lambda: versions.get(SPACE) == 7)


def test_all_links_begin_to_stop_before_one_is_waited_for():
    calls = []

    def link(number):
        return SimpleNamespace(
            has_met=None,
            knows_clearings=None,
            end_soon=lambda: calls.append(("begins", number)),
            stop=lambda: calls.append(("ends", number)),
        )

    ShardedHints([link(number) for number in range(2)]).stop()
    assert calls == [("begins", 0), ("begins", 1), ("ends", 0), ("ends", 1)]

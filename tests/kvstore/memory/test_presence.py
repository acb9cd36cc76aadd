"""The presence table: what it counts, what it says, and when it says nothing."""

from __future__ import annotations

import mmap
import os

import pytest
from inner_parts import parts_of

from kvstore.blocks.hashing import Namespace
from kvstore.client.client import Client
from kvstore.errors import ConfigError, InvalidRequest, NamespaceMismatch, ProtocolError, StoreUnavailable
from kvstore.memory.presence import ALONE_AT, FULL, HEAD_BYTES, PresenceCounts, PresenceTable, place_of
from kvstore.memory.presence_view import PresenceView
from kvstore.rpc.framing import Op


def named(number: int) -> bytes:
    """Return a hash whose first eight bytes are a number."""
    return number.to_bytes(8, "little") + bytes(24)


def test_blocks_are_counted_where_their_hashes_fall_and_the_last_counter_is_one_of_them():
    counters = bytearray(8)
    counts = PresenceCounts(counters)
    for number in (0, 7, 15, 2**64 - 1):
        counts.add(named(number))
    assert list(counters) == [1, 0, 0, 0, 0, 0, 0, 3]
    counts.drop(named(15))
    counts.drop(named(0))
    assert list(counters) == [0, 0, 0, 0, 0, 0, 0, 2]
    counts.check([named(7), named(23)])
    with pytest.raises(AssertionError, match="counter 7 is 2, wanted 1"):
        counts.check([named(7)])
    with pytest.raises(AssertionError, match="counter 3 is 0, wanted 1"):
        counts.check([named(7), named(7), named(3)])


def test_a_counter_that_was_full_says_present_for_ever():
    counters = bytearray(2)
    counts = PresenceCounts(counters)
    for _ in range(300):
        counts.add(named(1))
    assert list(counters) == [0, FULL]
    counts.check([named(1)] * 300)
    for _ in range(300):
        counts.drop(named(1))
    assert list(counters) == [0, FULL], "how many there are is not known any more"
    counts.check([])


@pytest.mark.parametrize("number", [0, 3, 12])
def test_counters_are_a_power_of_two(number):
    with pytest.raises(ConfigError, match="power of two"):
        PresenceCounts(bytearray(number))


@pytest.mark.parametrize(("capacity_bytes", "num_counters"), [(1, 1 << 12), (12 << 30, 1 << 20), (1 << 50, 1 << 24)])
def test_its_size_follows_the_arena(capacity_bytes, num_counters, monkeypatch):
    if num_counters > 1 << 20:
        monkeypatch.setattr("kvstore.memory.presence._MOST", num_counters)
    table = PresenceTable(bytes(8), capacity_bytes)
    assert os.fstat(table.fd).st_size == HEAD_BYTES + num_counters
    table.close()


def test_whoever_has_its_descriptor_can_read_it_and_no_more():
    table = PresenceTable(b"12345678", 1)
    table.counts.add(named(5))
    table.set_alone(True)
    with mmap.mmap(table.fd, 0, prot=mmap.PROT_READ) as seen:
        assert seen[:8] == b"12345678"
        assert (seen[ALONE_AT], seen[HEAD_BYTES + 5]) == (1, 1)
        table.set_alone(False)
        assert seen[ALONE_AT] == 0
    with pytest.raises(PermissionError):
        mmap.mmap(table.fd, 0)
    with pytest.raises(PermissionError):
        os.pwrite(table.fd, b"x", HEAD_BYTES)
    table.close()


def absent(client, hashes, remote=False) -> bool:
    """Ask the table, and see that it never says of what a lookup finds that it is not there."""
    said = client.is_surely_absent(hashes, remote=remote)
    assert not (said and client.lookup(hashes, remote=remote).num_blocks)
    return said


def test_what_was_saved_is_not_absent_until_it_is_evicted_or_cleared(cluster):
    core = cluster.add("a")
    worker = cluster.worker("a")
    client = worker.client
    client.map_presence()
    one, two = cluster.hashes(3, seed=1), cluster.hashes(4, seed=2)
    assert absent(client, one)
    worker.save(one, range(3))
    worker.save(two, range(4))
    assert not absent(client, one)
    assert not absent(client, one[:1]), "the first block decides"
    assert not absent(client, one[1:]), "of what is no chain from its root nothing is sure"
    assert not absent(client, cluster.space.block_hashes([])), "nor of nothing"
    cluster.check()
    num_slots = core.pool.stats().num_slots
    for seed in range(3, 3 + num_slots // 8):
        worker.save(cluster.hashes(8, seed), range(8))
    assert absent(client, one)
    assert absent(client, two)
    assert not absent(client, cluster.hashes(8, seed))
    cluster.check()
    core.state.pool_service.clear(cluster.space.digest, 1)
    assert absent(client, cluster.hashes(8, seed))
    assert not any(parts_of(client)._presence.memory[HEAD_BYTES:])
    cluster.check()


def test_what_is_being_written_is_not_surely_absent_until_that_fails(cluster):
    core = cluster.add("a")
    client = cluster.client("a")
    client.map_presence()
    hashes = cluster.hashes(2)
    ticket = core.state.pool_service.prepare_store(parts_of(client).chain(hashes), "somebody", 1, 0)
    assert not absent(client, hashes)
    core.pool.check_integrity()
    core.pool.abort_store(ticket.write_id, "somebody")
    assert absent(client, hashes)
    core.pool.check_integrity()
    ticket = core.state.pool_service.prepare_store(parts_of(client).chain(hashes), "somebody", 1, 0)
    core.pool.complete_store(ticket.write_id, "somebody", count=1)
    assert not absent(client, hashes)
    core.pool.complete_store(ticket.write_id, "somebody")
    cluster.check()


def test_what_is_being_written_is_surely_absent_when_its_cleared_slots_are_swept(cluster):
    core = cluster.add("a")
    client = cluster.client("a")
    client.map_presence()
    hashes = cluster.hashes(2)
    ticket = core.state.pool_service.prepare_store(parts_of(client).chain(hashes), "somebody", 1, 0)
    core.state.pool_service.clear(cluster.space.digest, 1)
    core.pool.check_integrity()
    assert absent(client, hashes)
    assert not core.pool.complete_store(ticket.write_id, "somebody")
    assert absent(client, hashes)
    cluster.check()


def test_before_it_is_mapped_and_after_the_client_is_closed_nothing_is_sure(cluster):
    cluster.add("a")
    client, hashes = cluster.client("a"), cluster.hashes(1)
    assert not client.is_surely_absent(hashes, remote=False)
    client.map_presence()
    assert client.is_surely_absent(hashes, remote=False)
    client.map_presence()
    other = Namespace(model="another", shape=cluster.space.shape)
    with pytest.raises(NamespaceMismatch):
        client.is_surely_absent(other.block_hashes(range(4)))
    with pytest.raises(InvalidRequest):
        client.is_surely_absent([b"x" * 32])
    client.close()
    assert not client.is_surely_absent(hashes, remote=False)
    with pytest.raises(StoreUnavailable):
        client.map_presence()


def test_of_a_store_that_ended_nothing_is_sure_and_the_next_life_has_a_table_of_its_own(cluster, wait_until):
    cluster.add("a")
    client, hashes = cluster.client("a"), cluster.hashes(1)
    client.map_presence()
    assert client.is_surely_absent(hashes, remote=False)
    path = cluster.nodes["a"].control_path
    cluster.stop_node("a")
    wait_until(lambda: not client.is_surely_absent(hashes, remote=False))
    cluster.add("a")
    assert not client.is_surely_absent(hashes, remote=False), "this client is of the life before"
    again = cluster.client("a")
    again.map_presence()
    assert again.is_surely_absent(hashes, remote=False)
    assert cluster.nodes["a"].control_path != path
    with pytest.raises(StoreUnavailable, match="restarted"):
        PresenceView(cluster.nodes["a"].control_path, client.epoch, timeout_s=2.0)


def test_who_only_reads_the_table_gets_nothing_else(cluster):
    core = cluster.add("a")
    for op in (Op.ATTACH, Op.LOOKUP, Op.LOOKUP_ALL, Op.STATS, Op.LOAD):
        view = PresenceView(core.control_path, core.state.epoch.hex(), timeout_s=2.0)
        with pytest.raises(ProtocolError, match="presence"):
            view.connection.call(op, b"", timeout_s=2.0)
        view.close()


def test_other_nodes_count_until_the_directory_knows_of_none_and_from_the_moment_it_does(cluster):
    cluster.add("a")
    client, hashes = cluster.client("a"), cluster.hashes(3)
    client.map_presence()
    assert absent(client, hashes)
    assert not absent(client, hashes, remote=True), "the directory was not asked yet"
    client.lookup(hashes)
    assert absent(client, hashes, remote=True)
    cluster.add("b")
    cluster.worker("b").save(hashes, range(3))
    assert not client.is_surely_absent(hashes)
    assert client.lookup(hashes).num_blocks == 3


def test_a_directory_that_ended_is_no_word_of_being_alone_and_the_next_one_is_asked(cluster, wait_until):
    from kvstore.remote.directory import DirectoryServer

    cluster.add("a")
    client, hashes = cluster.client("a"), cluster.hashes(3)
    client.map_presence()
    client.lookup(hashes)
    assert absent(client, hashes, remote=True)
    cluster.directory.stop()
    wait_until(lambda: not client.is_surely_absent(hashes))
    cluster.directory = DirectoryServer("127.0.0.1", settle_s=0.3)
    core = cluster.nodes["a"]
    core.state.hints.ask_after_s = 0.0
    wait_until(
        lambda: (
            core.state.hints.publish_soon(),
            core.state.hints.locate(parts_of(client).chain(hashes)),
            core.state.hints.is_alone(),
        )[2]
    )
    assert absent(client, hashes, remote=True)


def test_a_table_falls_where_hashes_fall():
    assert place_of(named(0x1234), 0xFF) == 0x34
    assert place_of(b"\xff" * 32, (1 << 24) - 1) == (1 << 24) - 1


@pytest.mark.parametrize("remote", [False, True])
def test_what_one_client_saves_another_sees(cluster, remote):
    """An engine's scheduler and its worker have a client each."""
    core = cluster.add("a")
    worker = cluster.worker("a")
    client = Client(core.control_path, cluster.space)
    cluster.clients.append(client)
    client.map_presence()
    client.lookup(cluster.hashes(2))
    assert client.is_surely_absent(cluster.hashes(2), remote=remote)
    worker.save(cluster.hashes(2), range(2))
    assert not client.is_surely_absent(cluster.hashes(2), remote=remote)

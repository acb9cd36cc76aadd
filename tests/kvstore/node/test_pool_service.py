"""The pool's rules at the doors of a node store: its socket, its verbs, its client."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from inner_parts import parts_of

from kvstore.blocks.codec import decode_count, encode
from kvstore.blocks.hashing import Namespace
from kvstore.bounds import MAX_BLOCK_BYTES
from kvstore.client.client import Client
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import (
    ChainBroken,
    ConfigError,
    InvalidRequest,
    KVStoreError,
    PoolExhausted,
    ProtocolError,
    StaleTicket,
    StoreUnavailable,
)
from kvstore.pool.eviction.learned import LearnedReuse
from kvstore.pool.eviction.lru import LeastRecentlyUsed
from kvstore.remote.messages import PeerLease, decode_peer_lease
from kvstore.rpc.connect import connect_local
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import FetchRequest
from kvstore.rpc.messages import Ask, AskLoad, AskPin, Prepare, Renew, WriteEnd, decode_grant, decode_ticket
from kvstore.runtime import clock
from tests.kvstore.conftest import SHAPE


@pytest.fixture
def core(cluster):
    return cluster.add("a")


@pytest.fixture
def worker(core, cluster):
    return cluster.worker("a")


@pytest.fixture
def ask(core, worker):
    """Ask over a connection of its own."""
    client, fd = connect_local(core.control_path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=5.0)
    fd.close()
    yield lambda op, payload: client.call(op, payload, timeout_s=5.0)
    client.close()


def prepare(ask, hashes, num_parts=1, part=0):
    return decode_ticket(ask(Op.PREPARE_STORE, encode(Prepare(hashes, num_parts, part))))


def complete(ask, ticket) -> int:
    return decode_count(ask(Op.COMPLETE_STORE, encode(WriteEnd.of(ticket))))


def test_eight_clients_save_one_chain_at_once(cluster, core):
    """Duplicates: one copy, and everybody's result says that all of it is stored."""
    workers = [cluster.worker("a", 40, seed=1) for _ in range(8)]
    hashes = cluster.hashes(32)
    for worker in workers:
        for cache, first in zip(worker.caches, workers[0].caches, strict=True):
            cache.copy_(first)
    jobs = [worker.client.save(hashes, list(range(32))) for worker in workers]
    results = [job.result(20) for job in jobs]
    assert [(result.num_blocks, result.num_refused) for result in results] == [(32, 0)] * 8
    assert sum(result.num_written for result in results) == 32
    stats = core.pool.stats()
    assert (stats.num_idle, stats.num_writes, stats.num_published) == (32, 0, 32)
    assert workers[7].load(hashes, range(32)).num_blocks == 32


def test_a_save_takes_over_what_another_writer_gives_up(core, worker, cluster, ask, wait_until):
    """Duplicates: the save waits while the first writer lives, and writes when it aborts."""
    hashes = cluster.hashes(6)
    first = prepare(ask, hashes[:4])
    job = worker.client.save(hashes, list(range(6)))
    wait_until(lambda: core.pool.stats().num_published == 2)
    assert not job.done()
    assert decode_count(ask(Op.ABORT_STORE, encode(WriteEnd.of(first)))) == 4
    result = job.result(10)
    assert (result.num_blocks, result.num_written) == (6, 6)
    assert worker.client.lookup(hashes, remote=False).num_local == 6


def test_a_save_waits_only_so_long_for_another_writer_and_says_what_is_stored(core, worker, cluster, ask):
    """Duplicates: bounded by the transfer timeout, here 3 s, and truthful."""
    hashes = cluster.hashes(6)
    worker.save(hashes[:2], range(2))
    prepare(ask, hashes[:4])
    result = worker.client.save(hashes, list(range(6))).result(10)
    assert (result.num_blocks, result.num_written, result.num_refused) == (2, 2, 0)


def test_a_save_is_not_repeated_after_a_clearing(core, worker, cluster, ask, wait_until):
    """Bytes of the old weights are not stored under the new ones."""
    hashes = cluster.hashes(4)
    prepare(ask, hashes[:2])
    job = worker.client.save(hashes, list(range(4)))
    wait_until(lambda: core.pool.stats().num_published == 2)
    core.state.pool_service.clear(hashes.namespace_digest, 1)
    assert job.result(10).num_blocks == 0
    assert core.pool.stats().num_free == core.pool.stats().num_slots - 2
    assert worker.client.lookup(hashes, remote=False).num_local == 0


def test_two_ranks_write_parts_over_two_connections(core, worker, cluster, ask):
    """Rule 4 at the socket: part and number of parts travel, and a reader never sees half."""
    hashes = cluster.hashes(3)
    client, fd = connect_local(core.control_path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=5.0)
    fd.close()

    def other(op, payload):
        return client.call(op, payload, timeout_s=5.0)

    one, two = prepare(ask, hashes, 2, 0), prepare(other, hashes, 2, 1)
    assert one.slots == two.slots
    assert complete(ask, one) == 0
    assert worker.client.lookup(hashes, remote=False).num_local == 0
    assert complete(other, two) == 3
    assert worker.client.lookup(hashes, remote=False).num_local == 3
    client.close()


def test_a_rank_that_never_comes_is_given_up_after_the_lease_time(cluster, wait_until):
    """Rules 4 and 10."""
    core = cluster.add("b", lease_ttl_s=0.6, lease_margin_s=0.1)
    worker, hashes = cluster.worker("b"), cluster.hashes(3)
    ticket = core.state.pool_service.prepare_store(hashes, "rank0", 2, 0)
    assert core.state.pool_service.complete_store(ticket.write_id, "rank0") == 0
    wait_until(lambda: core.pool.stats().num_writing == 0)
    assert worker.save(hashes, range(3)).num_written == 3


def test_a_writer_over_ray_loses_its_slots_at_its_deadline(core, worker, cluster, wait_until):
    """Rule 10: nobody sees when that owner dies."""
    ticket = core.state.pool_service.prepare_store(cluster.hashes(3), "ray:x", ttl_s=0.3)
    assert core.pool.stats().num_writing == 3
    wait_until(lambda: core.pool.stats().num_writing == 0)
    assert core.state.pool_service.complete_store(ticket.write_id, "ray:x", ticket.generations, ticket.epoch) == 0


def test_stale_tickets_are_refused_over_the_socket(core, worker, cluster, ask):
    """Rule 5."""
    ticket = prepare(ask, cluster.hashes(2))
    assert ticket.epoch == core.state.epoch
    before = core.pool.stats()
    for epoch, lives in ((bytes(8), ticket.generations), (ticket.epoch, bytes(8)), (ticket.epoch, b"")):
        bad = encode(WriteEnd(ticket.write_id, epoch, lives))
        with pytest.raises(StaleTicket):
            ask(Op.COMPLETE_STORE, bad)
        assert decode_count(ask(Op.ABORT_STORE, bad)) == 0
        assert core.pool.stats() == before
    assert complete(ask, ticket) == 2


def test_ids_of_others_and_ids_that_are_over_change_nothing_over_the_socket(core, worker, cluster, ask):
    """Rule 6: only the connection that got a lease or a ticket can end it, and only once."""
    hashes, new = cluster.hashes(3), cluster.hashes(2, seed=7)
    worker.save(hashes, range(3))
    lease, ticket = worker.client.lease(hashes), prepare(lambda *asked: worker_ask(worker, *asked), new)

    def ends(ask_it):
        answers = [
            ask_it(Op.RELEASE, encode(lease.lease_id)), ask_it(Op.RENEW, encode(Renew(lease.lease_id, 5.0))),
            ask_it(Op.COMPLETE_STORE, encode(WriteEnd.of(ticket))), ask_it(Op.ABORT_STORE, encode(WriteEnd.of(ticket))),
            # A ticket is no lease, and a lease no ticket.
            ask_it(Op.RELEASE, encode(ticket.write_id)),
            ask_it(Op.ABORT_STORE, encode(WriteEnd(lease.lease_id, core.state.epoch))),
        ]  # fmt: skip
        return [decode_count(answer) for answer in answers]

    before = core.pool.stats()
    assert ends(ask) == [0] * 6
    assert core.pool.stats() == before
    assert lease.release()
    assert complete(lambda *asked: worker_ask(worker, *asked), ticket) == 2
    before = core.pool.stats()
    for _ in range(2):
        assert ends(lambda *asked: worker_ask(worker, *asked)) == [0] * 6
    assert core.pool.stats() == before


def worker_ask(worker, op, payload):
    return parts_of(worker.client).store.calls.call(op, payload, timeout_s=5.0)


def test_a_save_into_a_fully_pinned_pool_is_refused_and_succeeds_after_one_release(cluster, wait_until):
    """Rule 9: answered by the call that asks, from the counts as they are; nothing is waited for."""
    core = cluster.add("f", capacity_bytes=1 << 16, block_bytes=(1 << 16) // 8, max_pinned_fraction=1.0)
    worker = cluster.worker("f", 16)
    pinned, new = cluster.hashes(8), cluster.hashes(3, seed=5)
    worker.save(pinned, range(8))
    some, rest = worker.client.lease(pinned[:7]), worker.client.lease(pinned)
    assert core.pool.stats().num_pinned == 8
    before = core.pool.stats()
    refused = worker.save(new, range(3))
    assert (refused.num_blocks, refused.num_written, refused.num_refused) == (0, 0, 3)
    assert core.pool.stats() == before
    assert rest.release()
    part = worker.save(new, range(3))
    assert (part.num_blocks, part.num_written, part.num_refused) == (1, 1, 2), "as much as there is room for"
    assert some.release()
    assert worker.save(new, range(3)).num_blocks == 3
    core.pool.check_integrity()


@pytest.mark.parametrize("op", [Op.RELEASE, Op.RENEW, Op.COMPLETE_STORE, Op.ABORT_STORE])
def test_unknown_ids_over_the_socket_are_answered_with_nothing(core, ask, op):
    for number in (0, 1, 2**64 - 1):
        payload = encode(Renew(number, 5.0)) if op is Op.RENEW else encode(number)
        if op in (Op.COMPLETE_STORE, Op.ABORT_STORE):
            payload = encode(WriteEnd(number, core.state.epoch))
        assert decode_count(ask(op, payload)) == 0


@pytest.mark.parametrize(
    "op",
    [Op.LOOKUP, Op.LEASE, Op.PIN, Op.RELEASE, Op.RENEW, Op.PREPARE_STORE, Op.COMPLETE_STORE, Op.ABORT_STORE, Op.LOAD],
)
@pytest.mark.parametrize("payload", [b"", b"\x91", b"\xc1", b"\1" * 7])
def test_bytes_that_are_no_request_are_refused_with_a_type(cluster, core, worker, ask, op, payload):
    """Malformed ids, times and chains: a typed refusal, no count changed, and no other connection is touched."""
    before = core.pool.stats()
    with pytest.raises((InvalidRequest, ChainBroken, ProtocolError)):
        ask(op, payload)
    assert core.pool.stats() == before
    assert worker.client.lookup(cluster.hashes(1)).num_blocks == 0


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(core, worker, cluster, ask, ttl_s):
    hashes = cluster.hashes(2)
    worker.save(hashes, range(2))
    lease = worker.client.lease(hashes)
    if ttl_s != 0.0:
        with pytest.raises(InvalidRequest, match="timeout_s"):
            ask(Op.AWAIT_STORE, encode(Ask(hashes, ttl_s)))
    questions = [(Op.LEASE, encode(Ask(hashes, ttl_s))), (Op.RENEW, encode(Renew(lease.lease_id, ttl_s)))]
    if ttl_s != float("inf"):
        questions.append((Op.PIN, encode(AskPin(hashes, False, ttl_s))))
    for op, payload in questions:
        with pytest.raises(InvalidRequest, match="ttl_s"):
            ask(op, payload)
    assert core.pool.num_leases() == 1
    assert lease.release()


def test_pin_and_unpin(core, worker, cluster):
    hashes = cluster.hashes(4)
    assert worker.client.pin(hashes).num_blocks == 0
    worker.save(hashes, range(4))
    pinned, preferred = worker.client.pin(hashes), worker.client.pin(hashes, soft=True)
    assert (pinned.num_blocks, pinned.num_refused, preferred.num_blocks) == (4, 0, 4)
    stats = core.pool.stats()
    assert (stats.num_hard_pinned, stats.num_soft_pinned, stats.num_pinned) == (4, 4, 4)
    assert worker.client.unpin(pinned)
    assert not worker.client.unpin(pinned)
    assert worker.client.unpin(preferred)
    assert core.pool.num_leases() == 0


def test_pins_end_with_their_time_and_with_their_owner(core, worker, cluster, wait_until):
    """Rule 10."""
    hashes = cluster.hashes(4)
    worker.save(hashes, range(4))
    other = cluster.client("a")
    other.pin(hashes)
    worker.client.pin(hashes, ttl_s=0.2)
    assert core.pool.num_leases() == 2
    wait_until(lambda: core.pool.num_leases() == 1)
    other.close()
    wait_until(lambda: core.pool.num_leases() == 0)


def test_the_quota_of_hard_pins_is_refused_with_a_type(cluster):
    """Rule 9."""
    block_bytes = cluster.space.shape.block_bytes
    core = cluster.add("q", capacity_bytes=max(1 << 16, 16 * block_bytes), block_bytes=(1 << 16) // 16)
    worker = cluster.worker("q", 16)
    num_slots = core.state.pool_service.attach(cluster.space.digest, block_bytes)["num_slots"]
    hashes = cluster.hashes(num_slots // 2 + 1)
    worker.save(hashes, range(len(hashes)))
    pinned = worker.client.pin(hashes)
    assert (pinned.num_blocks, pinned.num_refused) == (num_slots // 2, 1)
    other = cluster.hashes(1, seed=9)
    worker.save(other, [0])
    with pytest.raises(PoolExhausted, match="budget of pins"):
        worker.client.pin(other)
    assert worker.client.pin(other, soft=True).num_blocks == 1


def test_a_grant_over_the_socket_names_lives(core, worker, cluster, ask):
    """Rule 5: slots come with their generation and the store's epoch."""
    hashes = cluster.hashes(3)
    worker.save(hashes, range(3))
    grant = decode_grant(ask(Op.LEASE, encode(Ask(hashes, 5.0))))
    assert grant.epoch == core.state.epoch
    assert tuple(np.frombuffer(grant.generations, "<u4")) == core.pool.generations(grant.slots)


def test_a_saver_that_waits_does_not_hold_up_the_control_thread(core, worker, cluster, ask):
    """The answer to a waiting save comes later; everybody else is served meanwhile."""
    hashes = cluster.hashes(2)
    ticket = prepare(ask, hashes)
    told: list[int] = []
    client, fd = connect_local(core.control_path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=30.0)
    fd.close()

    def wait():
        told.append(decode_count(client.call(Op.AWAIT_STORE, encode(Ask(hashes, 60.0)), timeout_s=90.0)))

    with contextlib.closing(client):
        thread = threading.Thread(target=wait)
        thread.start()
        for _ in range(20):
            assert worker.client.lookup(hashes, remote=False).num_local == 0
        assert told == []
        assert complete(ask, ticket) == 2
        thread.join(90)
        assert told == [2]


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_loads_and_fetches_of_no_time_are_refused(cluster, core, worker, ask, timeout_s):
    run, owner = cluster.hashes(2), os.urandom(32)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        ask(Op.LOAD, encode(AskLoad(run, 5.0, timeout_s)))
    request = FetchRequest(owner, run.namespace, core.state.epoch, "a", 1, 5.0, timeout_s, is_early=True)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        ask(Op.HANDOFF_FETCH, encode(request))
    assert core.pool.num_leases() == 0


@pytest.mark.parametrize("block_bytes", [1, 0, -1, -100, 64, 1 << 40, 1 << 70, True, 1024.5])
def test_blocks_of_no_size_divide_nothing(cluster, ask, core, block_bytes):
    fresh = cluster.add("fresh")
    with pytest.raises((InvalidRequest, ConfigError)):
        fresh.state.pool_service.attach(b"n" * 32, block_bytes)
    assert not fresh.state.pool_service.is_attached
    assert fresh.state.pool_service.attach(b"n" * 32, 1024)["slot_bytes"] == 1024


def test_a_block_is_no_larger_than_what_a_peer_can_be_told_of(cluster):
    """A load of a larger one would cost this store its peer, for everybody."""
    fresh, most = cluster.add("fresh"), MAX_BLOCK_BYTES
    lease = PeerLease(
        chain=cluster.hashes(2), block_bytes=most, slot_format=1, namespace_version=0, ttl_s=1.0, within_s=2.0
    )
    assert decode_peer_lease(encode(lease)) == lease
    with pytest.raises(ProtocolError):
        decode_peer_lease(encode(msgspec.structs.replace(lease, block_bytes=most + 1)))
    with pytest.raises(InvalidRequest, match=f"block_bytes: wanted an integer from 512 to {most}, got {most + 1}"):
        fresh.state.pool_service.attach(b"n" * 32, most + 1)
    with pytest.raises(ConfigError, match="capacity"):
        fresh.state.pool_service.attach(b"n" * 32, most)


@pytest.mark.parametrize("namespace", [b"", b"n" * 5, b"n" * 33, "n" * 32, None])
def test_a_namespace_has_32_bytes(core, namespace):
    with pytest.raises(InvalidRequest, match="namespace"):
        core.state.pool_service.attach(namespace, 1024)


def test_an_arena_of_too_many_slots_is_refused(cluster, monkeypatch):
    monkeypatch.setattr("kvstore.memory.slot_layout.MAX_SLOTS", 100)
    core = cluster.add("fresh", mover=False)
    with pytest.raises(ConfigError, match="block_bytes="):
        core.state.pool_service.attach(b"n" * 32, 1024)
    assert not core.state.pool_service.is_attached


def test_a_store_attaches_so_many_namespaces_and_no_more(cluster, core, worker, monkeypatch):
    monkeypatch.setattr("kvstore.node.pool_service.MAX_NAMESPACES", 1)
    with pytest.raises(ConfigError, match="namespaces"):
        core.state.pool_service.attach(b"n" * 32, 1024)
    cluster.worker("a")  # What is known goes on.


def test_who_waited_for_a_save_is_forgotten_when_it_is_told_or_gone(core, worker, cluster, ask, wait_until):
    """Until its time was over it would be kept, a day at most, and the control thread would tick for it."""
    waiting, hashes = core.control.pool._waiting, cluster.hashes(4)
    worker.save(hashes[:2], range(2))
    assert decode_count(ask(Op.AWAIT_STORE, encode(Ask(hashes[:2], 86400.0)))) == 2
    assert len(waiting) == 0
    ticket = prepare(ask, hashes[2:])
    other, fd = connect_local(core.control_path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=5.0)
    fd.close()
    other.send(Op.AWAIT_STORE, encode(Ask(hashes, 86400.0)))
    wait_until(lambda: len(waiting) == 1)
    other.close()
    wait_until(lambda: not waiting and not core.pool.watches._watches)
    assert complete(ask, ticket) == 2


def test_so_many_blocks_are_waited_for_and_no_more(core, worker, cluster, ask, monkeypatch):
    monkeypatch.setattr("kvstore.pool.watches._MOST_BLOCKS", 5)
    hashes, counts = cluster.hashes(3), []
    worker.save(hashes[:1], range(1))
    ticket = prepare(ask, hashes)
    assert len(ticket.slots) == 2
    core.pool.watch(hashes, counts.append)
    core.pool.watch(hashes, counts.append)
    assert counts == [1], "the second is told at once how things stand"
    assert complete(ask, ticket) == 2
    assert counts == [1, 3]
    core.pool.watch(hashes, counts.append)
    assert counts == [1, 3, 3]


def test_so_many_wait_for_blocks_and_no_more(core, worker, cluster, ask, monkeypatch):
    monkeypatch.setattr("kvstore.pool.watches._MOST_WATCHES", 2)
    hashes, counts = cluster.hashes(3), []
    ticket = prepare(ask, hashes)
    watching = [core.pool.watch(hashes, counts.append) for _ in range(2)]
    core.pool.watch(hashes, counts.append)
    assert counts == [0], "the third is told at once how things stand"
    core.pool.end_watch(watching[0])
    assert counts == [0, 0]
    core.pool.watch(hashes[:1], counts.append)
    assert complete(ask, ticket) == 3
    assert sorted(counts) == [0, 0, 1, 3]
    assert not core.pool.watches._by_hash


def test_a_store_has_so_many_leases_and_no_more(core, worker, cluster, ask, monkeypatch):
    monkeypatch.setattr("kvstore.pool.leases.MAX_LEASES", 3)
    hashes = cluster.hashes(2)
    worker.save(hashes, range(2))
    wanted = encode(AskPin(hashes, True, 3600.0))
    ids = [decode_grant(ask(Op.PIN, wanted)).lease_id for _ in range(3)]
    with pytest.raises(PoolExhausted, match="at most 3 leases"):
        ask(Op.PIN, wanted)
    with pytest.raises(PoolExhausted, match="at most 3 leases"):
        core.state.pool_service.lease(hashes, "ray:x", 30.0)
    core.pool.check_integrity()
    assert worker.client.lookup(hashes).num_local == 2
    assert decode_count(ask(Op.RELEASE, encode(ids[0]))) == 1
    with worker.client.lease(hashes, ttl_s=30) as lease:
        assert len(lease.slots) == 2


@pytest.mark.parametrize(("eviction", "policy"), [("learned", LearnedReuse), ("lru", LeastRecentlyUsed)])
def test_the_setting_decides_what_goes_when_a_node_is_full(cluster, eviction, policy):
    core = cluster.add("e", mover=False, capacity_bytes=1 << 16, eviction=eviction)
    core.state.pool_service.attach(b"n" * 32, 4096)
    assert isinstance(core.pool.table.eviction.policy, policy)


def space_of(num_layers):
    return Namespace(model=f"{num_layers} layers", shape=replace(SHAPE, num_layers=num_layers))


def test_a_client_that_saved_nothing_does_not_fix_the_size_of_the_slots(cluster):
    core, spaces = cluster.add("a"), [space_of(num_layers) for num_layers in (1, 8, 4)]
    small, large = spaces[0].shape.block_bytes, spaces[1].shape.block_bytes
    with Client(core.control_path, spaces[0]) as client:
        assert client.slot_bytes == small
    clients = [Client(core.control_path, space) for space in spaces[1:]]
    assert [client.slot_bytes for client in clients] == [large, large]
    assert core.state.pool_service.slot_bytes == large
    for client in clients:
        client.close()


def test_a_client_that_knows_the_old_slots_is_refused_in_words_and_holds_nothing(cluster, wait_until):
    """Its blocks would be at other places. A new client of its namespace saves and loads."""
    core = cluster.add("a")
    old, hashes = cluster.worker("a"), cluster.hashes(4)
    new = Client(core.control_path, space_of(8))
    with pytest.raises(KVStoreError):
        old.save(hashes, range(4))
    with pytest.raises(StoreUnavailable, match="larger blocks came before anything was saved"):
        old.save(hashes, range(4))
    assert core.pool.stats().num_free == core.pool.num_slots
    began_s = clock.now_s()
    old.client.close(5.0)
    assert clock.now_s() - began_s < 4.0
    again = cluster.worker("a")
    assert again.save(hashes, range(4)).num_written == 4
    assert again.load(hashes, range(4, 8)).num_blocks == 4
    assert [again.block(at) for at in range(4)] == [again.block(at) for at in range(4, 8)]
    core.pool.check_integrity()
    new.close()


def test_what_is_saved_fixes_the_slots_and_the_refusal_says_what_helps(cluster, core, worker):
    worker.save(cluster.hashes(2), range(2))
    size = cluster.space.shape.block_bytes
    large = space_of(8)
    with pytest.raises(ConfigError) as refused:
        Client(core.control_path, large)
    words = str(refused.value)
    assert f"namespace {cluster.space.digest.hex()[:12]}, {size} bytes" in words
    assert f"block_bytes={large.shape.block_bytes}" in words
    assert "another store (name=)" in words
    assert worker.load(cluster.hashes(2), range(2, 4)).num_blocks == 2


def test_clients_of_all_sizes_that_come_at_once_get_the_slots_of_the_largest(cluster, tmp_path):
    core = cluster.add("a", disk_path=str(tmp_path / "kv"), disk_capacity_bytes=1 << 20)
    made, failed = [], []

    def attach(num_layers):
        try:
            made.append(Client(core.control_path, space_of(num_layers)))
        except KVStoreError as error:
            failed.append(error)

    threads = [threading.Thread(target=attach, args=(1 + number % 8,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert failed == []
    assert core.state.pool_service.slot_bytes == 4096 * -(-space_of(8).shape.block_bytes // 4096)
    for client in made:
        client.close()

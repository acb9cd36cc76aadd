"""Slots that an old store gives: all that workers may still use is named, however the giving goes."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
from inner_parts import parts_of

from kvstore.errors import KVStoreError, StoreUnavailable
from kvstore.node.handover import giving, holder, processes, taking
from kvstore.node.handover.transfer import handover_path
from kvstore.remote.directory import DirectoryServer
from tests.kvstore.node.handover.lives import HOST, NODE, SETTINGS, Lives, prepare

TTL_S = 1.1


@pytest.fixture
def lives(cluster, monkeypatch):
    monkeypatch.setattr(taking, "end", lambda pidfd, patience_s, killed_within_s: True)
    monkeypatch.setattr(taking, "pid_of", lambda pidfd: 1)
    cluster.add(NODE, **SETTINGS)
    return Lives(cluster)


def test_a_drain_that_takes_longer_than_the_holder_waits_for_a_packet_loses_nothing(cluster, lives, monkeypatch):
    monkeypatch.setattr(holder, "_PACKET_S", 0.2)
    hashes, worker = cluster.hashes(4), cluster.worker(NODE, seed=1)
    worker.save(hashes, range(4))
    worker.client.lease(hashes, ttl_s=30.0)
    beginning = lives.go_on(wait_s=1.0)
    assert (beginning.is_warm, beginning.num_blocks) == (True, 4)


def test_a_node_that_is_put_back_while_it_is_drained_serves_on(cluster, lives, monkeypatch):
    core, worker, hashes = cluster.nodes[NODE], cluster.worker(NODE), cluster.hashes(4)
    worker.save(hashes, range(4))
    monkeypatch.setattr(core, "drain", lambda timeout_s: None)  # As if it was put back at its end.
    path = handover_path("default", NODE)
    held = holder.Holder(path)
    threading.Thread(target=held.run, args=(20.0,), daemon=True).start()
    with pytest.raises(StoreUnavailable, match="put back"):
        giving.hand_over(core, path, 0.1)
    held.close()
    assert worker.save(cluster.hashes(4, seed=5), range(4)).num_written == 4


def test_no_worker_gets_slots_after_those_that_have_some_were_noted(cluster, lives, monkeypatch):
    core, worker, hashes = cluster.nodes[NODE], cluster.worker(NODE), cluster.hashes(4)
    worker.save(hashes[:2], range(2))
    end, refused = core.control.server.end, []

    def put_back_before(timeout_s):
        with pytest.raises(StoreUnavailable):
            core.undrain()
        with pytest.raises(StoreUnavailable) as refusal:
            prepare(worker, hashes)
        refused.append(refusal)
        return end(timeout_s)

    monkeypatch.setattr(core.control.server, "end", put_back_before)
    beginning = lives.go_on()
    assert (beginning.num_held_slots, len(refused)) == (0, 1)


def test_a_worker_that_gets_slots_just_before_the_server_ends_is_waited_for(cluster, lives, monkeypatch):
    core, worker, hashes = cluster.nodes[NODE], cluster.worker(NODE), cluster.hashes(4)
    worker.save(hashes[:2], range(2))
    late = cluster.worker(NODE, seed=2)
    claim, end, begun, go = core.pool.prepare_store, core.control.server.end, threading.Event(), threading.Event()

    def claim_late(*args, **options):
        begun.set()
        assert go.wait(20)
        return claim(*args, **options)

    def end_after_the_claim(timeout_s):
        go.set()
        return end(timeout_s)

    monkeypatch.setattr(core.pool, "prepare_store", claim_late)
    monkeypatch.setattr(core.control.server, "end", end_after_the_claim)

    def ask():
        with contextlib.suppress(KVStoreError):  # The answer may be lost with the server.
            prepare(late, hashes)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert begun.wait(20)
    assert lives.give(wait_s=0.0).num_held_slots == 2
    asking.join(20)
    lives.take()
    (use,) = cluster.nodes[NODE].old.processes.uses()
    assert [processes.pid_of(pidfd) for pidfd in use.pidfds] == [os.getpid()]


def test_a_publisher_in_the_middle_of_its_copies_is_waited_for(cluster, lives, monkeypatch):
    publisher, begun, go = cluster.worker(NODE), threading.Event(), threading.Event()
    publisher.save(cluster.hashes(2), range(2))

    def copy(*_):
        begun.set()
        assert go.wait(20)

    monkeypatch.setattr(parts_of(publisher.client).copier, "into_slots", copy)
    publication = publisher.client.begin_publish(range(8))
    assert begun.wait(20)
    assert lives.go_on(wait_s=0.0).num_held_slots == 8
    (use,) = cluster.nodes[NODE].old.processes.uses()
    assert [processes.pid_of(pidfd) for pidfd in use.pidfds] == [os.getpid()]
    go.set()
    with pytest.raises(KVStoreError):
        publication.job.result(20)


def test_a_client_that_has_left_its_fetch_is_not_waited_for(cluster, lives, monkeypatch, wait_until):
    cluster.add("b", **SETTINGS)
    publisher, reader, go = cluster.worker("b", seed=1), cluster.worker(NODE, seed=2), threading.Event()
    monkeypatch.setattr(parts_of(publisher.client).copier, "into_slots", lambda *_: go.wait(20))
    publication = publisher.client.begin_publish(range(4))
    reader.client.fetch(publication.ticket, list(range(4)))
    fetcher = cluster.nodes[NODE].control.handoffs.fetcher
    wait_until(fetcher.users)
    ((slots, client),) = fetcher.users()
    assert client.startswith("client-")
    fetcher.release_owner(client)
    assert fetcher.users() == [(slots, "")]
    go.set()


def test_a_holder_that_ends_during_the_drain_costs_nothing(cluster, lives, monkeypatch):
    core, worker, hashes = cluster.nodes[NODE], cluster.worker(NODE), cluster.hashes(4)
    worker.save(hashes, range(4))
    path, drain = handover_path("default", NODE), core.drain
    held = holder.Holder(path)
    thread = threading.Thread(target=held.run, args=(20.0,), daemon=True)
    thread.start()

    def drain_longer(timeout_s):
        drain(timeout_s)
        held.close()
        thread.join(10)

    monkeypatch.setattr(core, "drain", drain_longer)
    with pytest.raises(StoreUnavailable, match="no process holds"):
        giving.hand_over(core, path, 0.1)
    assert worker.load(hashes, range(4)).num_blocks == 4
    assert worker.save(cluster.hashes(4, seed=5), range(4)).num_written == 4


class _OtherProcess:
    """The module `os` of a process that is not this one, and that the test says has ended."""

    getpid = staticmethod(lambda: 1)

    def __getattr__(self, name):
        return getattr(os, name)


def test_slots_of_a_fetch_wait_for_the_client_that_copies_out_of_them(cluster, monkeypatch, lives, wait_until):
    has_ended = processes.has_ended
    monkeypatch.setattr(giving, "os", _OtherProcess())
    monkeypatch.setattr(processes, "has_ended", lambda fd, within_s=0.0: processes.pid_of(fd) == 1 or has_ended(fd))
    monkeypatch.setattr(processes, "_LOOK_S", 0.05)
    cluster.stop_node(NODE)
    cluster.add(NODE, **(SETTINGS | {"lease_ttl_s": TTL_S}))
    cluster.add("b", **SETTINGS)
    source, target = cluster.worker("b", seed=1), cluster.worker(NODE, seed=2)
    target.save(cluster.hashes(2), range(2))
    target.client.lease(cluster.hashes(2), ttl_s=3 * TTL_S)
    ticket, copier = source.client.publish(list(range(8))), parts_of(target.client).copier
    begun, go, copy, slots = threading.Event(), threading.Event(), copier.out_of_slots, []

    def copy_late(pages, indexes, at, skip_tokens=0):
        slots.extend(at.tolist())
        begun.set()
        assert go.wait(30)
        copy(pages, indexes, at, skip_tokens)

    copier.out_of_slots = copy_late
    job = target.client.fetch(ticket, list(range(20, 28)))
    assert begun.wait(10)
    cluster.kill_mover(NODE)
    lives.go_on(lease_ttl_s=TTL_S)
    pool = cluster.nodes[NODE].pool
    wait_until(lambda: pool.stats().num_pinned == 0)  # All that has a time is over.
    other, used = cluster.worker(NODE, seed=3), set()
    for seed in range(20, 40):  # More than the node holds.
        chain = cluster.hashes(10, seed)
        other.save(chain, range(10))
        with other.client.lease(chain) as held:
            used |= set(held.slots)
    go.set()
    assert job.result(20).num_blocks == 8
    assert used.isdisjoint(slots)
    assert [target.block(20 + at) for at in range(8)] == [source.block(at) for at in range(8)]


def test_after_a_restart_of_the_directory_which_may_have_forgotten_a_clearing_nothing_is_kept(cluster, lives):
    hashes = cluster.hashes(4)
    cluster.worker(NODE).save(hashes, range(4))
    lives.give()
    cluster.directory.versions.hear(cluster.space.digest, 1)  # As `Store.clear` does.
    cluster.directory.stop()
    cluster.directory = DirectoryServer(HOST, settle_s=0.0)
    beginning = lives.take()
    assert (beginning.is_warm, "directory was restarted" in beginning.why_cold) == (False, True)
    assert cluster.client(NODE).lookup(hashes, remote=False).num_local == 0


@pytest.mark.parametrize("place", [1, 98])
@pytest.mark.parametrize("by", ["held", "held_by_readers"])
def test_slots_of_a_process_that_did_not_come_with_the_index_begin_an_empty_store(
    cluster, lives, monkeypatch, place, by
):
    worker, hashes = cluster.worker(NODE), cluster.hashes(4)
    worker.save(hashes[:2], range(2))
    worker.client.lease(hashes[:2], ttl_s=30.0)
    prepare(worker, hashes)

    def named(self, entry, *_):
        return giving.Held(0.0, entry.slots.tobytes(), (len(self.pidfds) - 1 + place,))

    monkeypatch.setattr(giving.UserProcesses, by, named)
    beginning = lives.go_on()
    assert (beginning.is_warm, "did not come with it" in beginning.why_cold) == (False, True)


def test_a_directory_that_is_met_after_the_last_grant_is_not_the_one_that_the_blocks_go_by(cluster, lives, monkeypatch):
    cluster.worker(NODE).save(cluster.hashes(2), range(2))
    core = cluster.nodes[NODE]
    freeze, told = core.pool.freeze, core.state.hints.met

    def freeze_then_meet():
        image = freeze()
        core.state.hints.met = b"another life"
        return image

    monkeypatch.setattr(core.pool, "freeze", freeze_then_meet)
    messages, seal = [], giving.seal
    monkeypatch.setattr(giving, "seal", lambda message: messages.append(message) or seal(message))
    assert lives.go_on().is_warm
    assert [message.directory for message in messages] == [told]


def test_a_store_that_is_stopped_while_it_is_drained_gives_nothing(cluster, lives, monkeypatch):
    core = cluster.nodes[NODE]
    cluster.worker(NODE).save(cluster.hashes(2), range(2))
    monkeypatch.setattr(core, "drain", lambda timeout_s: core.stop())
    with pytest.raises(StoreUnavailable, match="being stopped"):
        lives.give()

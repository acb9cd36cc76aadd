"""Slots of a hand-off belong to their publisher until its copies have ended: what ends before is only marked."""

import math
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from inner_parts import parts_of

from kvstore.blocks.codec import decode_count, encode
from kvstore.client.results import MissReason
from kvstore.engine.cuda_order import CudaOrder
from kvstore.engine.stage_copier import StageCopier
from kvstore.errors import CopyStuck, KernelError, StoreUnavailable, TransferTimeout
from kvstore.handoff.records import Place
from kvstore.handoff.table import HandoffTable
from kvstore.pool.pool import Pool
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import FRAGMENT_BYTES, Decoder, Flag, Op
from kvstore.rpc.handoff_messages import AbortHandoff, CompleteHandoff
from tests.kvstore.handed_off import fetch, is_empty, reason, same


class SlowCopies:
    """Holds the copies of a client's publications until `go` is set."""

    def __init__(self, client):
        self.begun, self.go, self._copy = (
            threading.Event(),
            threading.Event(),
            parts_of(client).copier.into_slots,
        )
        parts_of(client).copier.into_slots = self.copy

    def copy(self, *args):
        self.begun.set()
        assert self.go.wait(10)
        self._copy(*args)


@pytest.fixture
def three(cluster):
    """A publisher, and two other workers of its node."""
    cluster.add("a", mover=False)
    return [cluster.worker("a", seed=seed) for seed in (1, 2, 3)]


def give_up(how, cluster, publisher, other, ticket):
    if how == "withdrawn":
        assert publisher.client.withdraw(ticket)
        return MissReason.WITHDRAWN
    core = cluster.nodes["a"]
    core.state.pool_service.clear(cluster.space.digest, core.state.versions.get(cluster.space.digest) + 1)
    assert reason(fetch(other, ticket, range(8))) is MissReason.CLEARED
    return MissReason.CLEARED


@pytest.mark.parametrize("how", ["withdrawn", "cleared"])
def test_a_slow_publisher_writes_into_nobody_elses_slots(cluster, three, how):
    publisher, victim, reader = three
    core, copies = cluster.nodes["a"], SlowCopies(publisher.client)
    publication = publisher.client.begin_publish(range(8))
    assert copies.begun.wait(5)
    why = give_up(how, cluster, publisher, victim, publication.ticket)
    assert (core.pool.stats().num_writing, core.stats()["num_handoff_slots"]) == (8, 8), "they are its own still"
    hashes = cluster.hashes(40)
    assert victim.save(hashes, range(40)).num_written == 40
    copies.go.set()
    with pytest.raises(StoreUnavailable, match="withdrawn or cleared"):
        publication.job.result(10)
    assert is_empty(core), "its room came back with the end of its copies"
    assert reason(fetch(victim, publication.ticket, range(8))) is why
    assert reader.load(hashes, range(40)).num_blocks == 40
    assert all(same(victim, range(40), reader, range(40)))


def test_blocks_that_were_withdrawn_while_they_are_copied_go_with_a_publisher_that_dies(cluster, three):
    publisher, *_ = three
    core, copies = cluster.nodes["a"], SlowCopies(publisher.client)
    publication = publisher.client.begin_publish(range(8))
    assert copies.begun.wait(5)
    assert publisher.client.withdraw(publication.ticket)
    (handoff,) = core.control.handoffs.table.handoffs.values()
    assert core.control.handoffs.release_owner(handoff.owner) == 1
    assert core.pool.stats().num_writing == 0
    copies.go.set()
    with pytest.raises(StoreUnavailable):
        publication.job.result(10)


@pytest.mark.parametrize("op", [Op.HANDOFF_COMPLETE, Op.HANDOFF_ABORT])
def test_who_knows_the_ticket_cannot_say_that_its_publisher_has_ended(cluster, three, op):
    publisher, other, reader = three
    core, copies = cluster.nodes["a"], SlowCopies(publisher.client)
    publication = publisher.client.begin_publish(range(8))
    assert copies.begun.wait(5)
    key = publication.ticket.name(publication.ticket.namespace)
    payload = encode(AbortHandoff(key, 1)) if op is Op.HANDOFF_ABORT else encode(CompleteHandoff(key, 1, 5.0))
    assert decode_count(parts_of(other.client).store.call(op, payload)) == 0
    assert core.pool.stats().num_writing == 8
    copies.go.set()
    publication.job.result(10)
    assert fetch(reader, publication.ticket, range(8)).num_blocks == 8
    assert all(same(publisher, range(8), reader, range(8)))


def test_a_copy_that_never_ends_keeps_its_slots_whatever_becomes_of_the_ticket(cluster, three, monkeypatch):
    publisher, victim, _ = three
    core = cluster.nodes["a"]

    def stuck(*_):
        raise CopyStuck("a device that does not come to them")

    with monkeypatch.context() as patch:
        patch.setattr(parts_of(publisher.client).copier, "into_slots", stuck)
        with pytest.raises(CopyStuck):
            publisher.client.publish(range(4))
        publication = publisher.client.begin_publish(range(4))
        with pytest.raises(CopyStuck):
            publication.job.result(10)
    assert publisher.client.withdraw(publication.ticket)
    assert reason(fetch(victim, publication.ticket, range(4))) is MissReason.WITHDRAWN
    # The next job has a connection that breaks, and is replaced.
    with parts_of(publisher.client).store.for_jobs.taken() as connection:
        connection.close()
    assert publisher.save(cluster.hashes(3), range(3)).num_written == 3
    publisher.client.close()
    assert core.pool.stats().num_writing == 8, "until the process ends"


def test_slots_whose_answer_came_too_late_come_back_at_once(cluster, three, monkeypatch, wait_until):
    publisher, *_ = three
    core, told = cluster.nodes["a"], threading.Event()
    store = parts_of(publisher.client).store
    call = store.calls.call

    def too_late(op, payload, **how):
        if op is not Op.HANDOFF_PREPARE:
            return call(op, payload, **how)
        call(op, payload, **how)
        store.calls.close()
        told.set()
        raise TransferTimeout("as if the answer had come a moment later")

    with monkeypatch.context() as patch:
        patch.setattr(store.calls, "call", too_late)
        with pytest.raises(TransferTimeout):
            publisher.client.begin_publish(range(4))
    assert told.is_set()
    assert is_empty(core)


def test_of_an_answer_that_was_sent_in_part_nothing_is_heard():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        here.setblocking(False)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FRAGMENT_BYTES)
        connection, decoder = Connection(here, "publisher", local=True), Decoder()
        connection.send(Op.HANDOFF_PREPARE, Flag.REPLY, 1, bytes(4 * FRAGMENT_BYTES))
        connection.shut_down()
        packets = []
        while packet := there.recv(2 * FRAGMENT_BYTES):
            packets.append(packet)
        assert 1 <= len(packets) < 4, "a part of it went out"
        assert [decoder.packet(memoryview(packet)) for packet in packets] == [None] * len(packets)


def test_a_claim_is_ended_by_its_reader_alone():
    table, pool = HandoffTable(), Pool(4)
    table.prepare(b"k", 7, "publisher", b"n", 0, 2, Place(pool, 4))
    assert table.complete(b"k", 7, "publisher", math.inf)
    claim = table.claim(b"k", "reader", b"n", 0, math.inf)
    assert not table.end_claim(claim.claim_id, "thief", used=True)
    assert pool.stats().num_writing == 2
    assert table.end_claim(claim.claim_id, "reader", used=True)
    assert pool.stats().num_free == 4


# Copies that were queued in part when they failed.


class Stream:
    """A CUDA stream as `CudaOrder` and `StageCopier` see one; what was queued on it ends when `go` is set."""

    cuda_stream = 0

    def __init__(self):
        self.go, self.queued, self.refuses_events, self.num_asked = threading.Event(), [], False, 0

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def record_event(self):
        if self.refuses_events:
            raise RuntimeError("no event can be had")
        return self

    def query(self):
        self.num_asked += 1
        if self.go.is_set():
            while self.queued:
                self.queued.pop()()
        return self.go.is_set()


class PartlyRefused:
    """Kernels of which the first is queued and the second refused."""

    def __init__(self, stream, first):
        self._stream, self._first = stream, first

    def place(self, spans, stream):
        return SimpleNamespace(memory=None)

    def pack(self, placed, slots, stream):
        self._stream.queued.append(self._first)
        raise RuntimeError("too many resources requested for launch")


def stage_copier(stream, first):
    """Return a StageCopier on a device that is not there, of an engine with 8 blocks."""
    copier = StageCopier.__new__(StageCopier)
    paging = SimpleNamespace(engine_block_size=4, stored_block_size=4, num_blocks=8)
    copier.plan = SimpleNamespace(paging=paging, device=torch.device("cpu"), whole_blocks=False)
    copier.streams, copier._lock, copier.lists = {True: stream}, threading.Lock(), []
    copier.slots, copier.kernels = torch.zeros(8, 8), PartlyRefused(stream, first)
    return copier


@pytest.mark.parametrize("refuses_events", [False, True])
def test_copies_that_are_queued_in_part_have_ended_when_their_failure_is_heard(
    cluster, three, monkeypatch, refuses_events
):
    publisher, *_ = three
    core, stream, written = cluster.nodes["a"], Stream(), []
    stream.refuses_events = refuses_events
    copier = stage_copier(stream, lambda: written.append(core.pool.stats().num_writing))
    client = publisher.client
    monkeypatch.setattr(parts_of(client).copier, "order", lambda: CudaOrder(stream, stream))
    monkeypatch.setattr("kvstore.engine.stage_copier.job_spans", lambda *args: SimpleNamespace())
    monkeypatch.setattr(parts_of(client).copier, "into_slots", copier.into_slots)
    monkeypatch.setattr(parts_of(client).copier, "finish", copier.finish)
    publication = client.begin_publish(range(4))
    deadline_s = time.monotonic() + 5
    while stream.num_asked < 5:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert not publication.job.done()
    assert core.pool.stats().num_writing == 4, "a kernel may still write there"
    stream.go.set()
    with pytest.raises(KernelError, match="too many resources"):
        publication.job.result(5)
    assert written == [4]
    assert is_empty(core)


def test_copies_that_are_queued_in_part_and_never_end_keep_their_slots(cluster, three, monkeypatch):
    publisher, *_ = three
    core, stream = cluster.nodes["a"], Stream()
    copier, client = stage_copier(stream, lambda: None), publisher.client
    monkeypatch.setattr("kvstore.engine.cuda_order._DEVICE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(parts_of(client).copier, "order", lambda: CudaOrder(stream, stream))
    monkeypatch.setattr("kvstore.engine.stage_copier.job_spans", lambda *args: SimpleNamespace())
    monkeypatch.setattr(parts_of(client).copier, "into_slots", copier.into_slots)
    monkeypatch.setattr(parts_of(client).copier, "finish", copier.finish)
    publication = client.begin_publish(range(4))
    with pytest.raises(CopyStuck):
        publication.job.result(5)
    assert parts_of(client).is_stuck
    assert core.pool.stats().num_writing == 4
    stream.go.set()

"""The mover and the store's link to it, over a real control connection and a transport of memcpy."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
import time

import msgspec
import numpy as np
import pytest

from kvstore.blocks.chunking import plan_chunks
from kvstore.blocks.codec import encode, encode_object
from kvstore.errors import PeerLost, TransferError, TransferTimeout
from kvstore.mover.link import MoverLink
from kvstore.mover.messages import decode_mover_read
from kvstore.mover.process import Mover
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState
from kvstore.rpc.connect import connect_local
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Flag, Message, Op, packets_of
from kvstore.rpc.messages import NOTIFICATION
from kvstore.rpc.server import ControlServer
from tests.kvstore.loopback import LoopbackNetwork, LoopbackTransport

SLOT_BYTES, NUM_SLOTS = 64, 32
#: Long enough for whatever has to happen, on a machine that is busy with other things.
SOON_S = 20.0


# The pair.


class Stubborn(LoopbackTransport):
    """READs stay running until `let_go`; `fail` makes the next poll or post raise."""

    def __init__(self, *args):
        super().__init__(*args)
        self.running, self.fail_post, self.fail_poll = False, None, None
        self.stopped_peers: set[str] = set()
        self.posted: list[ReadRequest] = []

    def post(self, request):
        if self.fail_post is not None and len(self.posted) >= 1:
            raise self.fail_post
        self.posted.append(request)
        return super().post(request)

    def poll(self, handle):
        if self.fail_poll is not None:
            raise self.fail_poll
        stopped = self.running or self.handles[handle].peer in self.stopped_peers
        return ReadState.RUNNING if stopped else super().poll(handle)


class Clock:
    """The mover's clock: goes like any other, and can be put forward, so that no test has to wait for a time limit."""

    def __init__(self):
        self._ahead_s = 0.0

    def monotonic(self):
        return time.monotonic() + self._ahead_s

    def skip(self, seconds):
        self._ahead_s += seconds


class Pair:
    """A link on a control server, and a mover on a thread behind a real socket."""

    def __init__(self, path):
        self.terminal, self.notes = [], []
        self.link = MoverLink()
        self.server = ControlServer(self._serve, self.link.gone)
        self.server.listen_local(path)
        self.server.start()
        self.path = path
        self.network = LoopbackNetwork()
        self.movers = []
        self.peer = LoopbackTransport(
            "peer", np.repeat(np.arange(1, NUM_SLOTS + 1, dtype=np.uint8), SLOT_BYTES), self.network
        )
        self.description = PeerDescription(agent=b"peer", address=0, slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS)

    def _serve(self, connection, message):
        if message.op is Op.HELLO:
            connection.role = "mover"
            read_fd, write_fd = os.pipe()
            connection.send(Op.HELLO, Flag.REPLY, message.request, encode_object({}), (read_fd,))
            os.close(read_fd)
            os.close(write_fd)
        else:
            self.link.serve(connection, message, lambda payload: self.notes.extend(NOTIFICATION.iter_unpack(payload)))

    def start(self, name="own"):
        client, fd = connect_local(self.path, {}, timeout_s=2.0)
        fd.close()
        self.slab = np.zeros(NUM_SLOTS * SLOT_BYTES, np.uint8)
        self.transport = Stubborn(name, self.slab, self.network)
        self.link.set_slots(SLOT_BYTES, NUM_SLOTS)
        sock = client.detach()
        mover = Mover(sock, self.transport)
        thread = threading.Thread(target=mover.run, args=(4096,), daemon=True)
        thread.start()
        self.movers.append((mover, thread, sock))
        assert self.link.wait_ready(SOON_S)

    def die(self):
        """What the kernel says of a process that ended, said by hand: this process goes on."""
        _, thread, sock = self.movers.pop()
        for packet in packets_of(Message(Op.GOODBYE, Flag.ONE_WAY, 0, b"")):
            sock.sendall(packet)
        thread.join(6)
        assert not thread.is_alive()

    def read(self, local, remote, *, chunk_blocks=4, timeout_s=3.0, note=b"", peer="p"):
        heard, ended = [], threading.Event()

        def on_done(done, error):
            heard.append((done, error))
            if done.last and not done.terminal:
                self.hear_when_terminal(done.read_id)
            if done.last:
                ended.set()

        request = ReadRequest(
            peer=peer,
            block_bytes=SLOT_BYTES,
            local_slots=np.array(local, np.int32),
            remote_slots=np.array(remote, np.int32),
            notification=note,
        )
        ends = np.array(plan_chunks(len(request.local_slots), chunk_blocks), np.int32)
        read_id = self.link.read(request, self.description, on_done, chunk_ends=ends, timeout_s=timeout_s)
        return read_id, heard, ended

    def hear_when_terminal(self, read_id):
        self.link.when_terminal({read_id}, lambda: self.terminal.append(read_id))

    def slots(self):
        return self.slab.reshape(NUM_SLOTS, SLOT_BYTES)[:, 0].tolist()

    def stop(self):
        self.server.stop()
        for _, thread, _ in self.movers:
            thread.join(6)
            assert not thread.is_alive()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("kvstore.mover.process.time", made)
    monkeypatch.setattr("kvstore.mover.reads.time", made)
    return made


@pytest.fixture
def give_up(pair, clock, wait_until):
    """Lets READs run out of time, once what can be posted of them is posted; those begun may still write."""

    def until_over(*reads, num_posted):
        wait_until(lambda: len(pair.transport.posted) == num_posted)
        clock.skip(60.0)
        assert all(ended.wait(SOON_S) for _, _, ended in reads)

    return until_over


@pytest.fixture
def pair():
    with tempfile.TemporaryDirectory(prefix="rkm", dir="/tmp") as folder:
        made = Pair(f"{folder}/s")
        made.start()
        yield made
        made.stop()


def test_a_read_tells_of_every_chunk_and_ends_once(pair):
    _, heard, ended = pair.read(range(16), range(16, 32), note=b"")
    assert ended.wait(SOON_S)
    assert pair.slots()[:16] == list(range(17, 33))
    counts = [done.num_blocks for done, _ in heard]
    assert counts == sorted(set(counts))
    assert counts[-1] == 16
    assert [(done.last, done.terminal) for done, _ in heard[-1:]] == [(True, True)]
    assert not any(done.last for done, _ in heard[:-1])
    assert all(error is None for _, error in heard)
    assert [len(r.local_slots) for r in pair.transport.posted] == [
        b - a for a, b in zip([0, *plan_chunks(16, 4)], plan_chunks(16, 4), strict=False)
    ]
    assert heard[-1][0].num_descriptors == len(plan_chunks(16, 4))


def test_only_the_last_chunk_notifies(pair):
    note = NOTIFICATION.pack(7, b"12345678", b"readers.")
    _, _, ended = pair.read(range(16), range(16), note=note)
    assert ended.wait(SOON_S)
    assert [r.notification for r in pair.transport.posted][:-1] == [b""] * (len(pair.transport.posted) - 1)
    assert pair.peer.notifications() == [note]


def test_the_notification_does_not_overtake_an_earlier_chunk(pair, wait_until):
    note, ends = NOTIFICATION.pack(7, b"12345678", b"readers."), plan_chunks(3, 4)
    assert 1 < len(ends) <= 3, "all may be under way at once"
    pair.transport.running = True
    _, _, ended = pair.read(range(3), range(3), note=note)
    wait_until(lambda: len(pair.transport.posted) == len(ends) - 1)
    for _ in range(2):  # A round ends before the second answer.
        pair.link.stats(SOON_S)
    assert len(pair.transport.posted) == len(ends) - 1
    assert pair.peer.notifications() == []
    pair.transport.running = False
    assert ended.wait(SOON_S)
    assert pair.peer.notifications() == [note]


def waking(local, remote, peer="p"):
    return ReadRequest(
        peer=peer,
        block_bytes=SLOT_BYTES,
        local_slots=np.array([local], np.int32),
        remote_slots=np.array([remote], np.int32),
    )


def test_a_lane_is_woken_on_its_word_and_nobody_hears_of_it(pair, wait_until):
    _, _, ended = pair.read([0], [1])
    assert ended.wait(SOON_S)
    counted = pair.link.stats(SOON_S)
    pair.link.wake_by(b"it comes", waking(31, 7))
    pair.link.wake_by(b"another", waking(30, 9, peer="stranger"))
    for word in (b"", b"unheard of", b"another"):
        pair.link.expect_read(word)
    assert pair.link.stats(SOON_S) == counted
    assert pair.slots()[30:] == [0, 0]
    pair.link.expect_read(b"it comes")
    wait_until(lambda: pair.slots()[31] == 8)
    wait_until(lambda: not pair.movers[0][0].reads.woken)
    assert pair.link.stats(SOON_S) == counted, "what is counted are blocks"
    _, heard, ended = pair.read([1], [2])
    assert ended.wait(SOON_S)
    assert (heard[-1][1], pair.slots()[1]) == (None, 3)


def test_what_woke_a_lane_does_not_hold_up_the_read_that_it_was_for(pair, monkeypatch, wait_until):
    monkeypatch.setattr("kvstore.mover.process._AWAKE_S", 60.0)
    _, _, ended = pair.read([0], [1])
    assert ended.wait(SOON_S)
    pair.link.wake_by(b"it comes", waking(31, 7))
    pair.link.expect_read(b"it comes")
    wait_until(lambda: pair.slots()[31] == 8)
    _, _, ended = pair.read([1], [2])
    assert ended.wait(SOON_S)
    mover = pair.movers[0][0]
    assert len(mover.reads.woken) == 1, "to be released when there is nothing else to do"
    mover.awake_until_s = time.monotonic()
    wait_until(lambda: not mover.reads.woken)


def test_a_lane_that_cannot_be_woken_is_no_error_and_holds_nobody_up(pair, wait_until):
    _, _, ended = pair.read([0], [1])
    assert ended.wait(SOON_S)
    pair.link.wake_by(b"it comes", waking(31, 7))
    pair.transport.stopped_peers.add("p")
    for _ in range(3):
        pair.link.expect_read(b"it comes")
    mover = pair.movers[0][0]
    wait_until(lambda: len(mover.reads.woken) == 1)
    _, _, ended = pair.read([1], [2], peer="q")
    assert ended.wait(SOON_S)
    assert [request.peer for request in pair.transport.posted] == ["p", "p", "q"], "it is woken once at a time"
    pair.transport.fail_poll = TransferError("gone")
    wait_until(lambda: not mover.reads.woken)
    pair.transport.fail_poll, pair.transport.fail_post = None, PeerLost("gone")
    pair.link.expect_read(b"it comes")
    pair.transport.stopped_peers.clear()
    assert pair.link.stats(SOON_S)["num_reads"] >= 2
    pair.transport.fail_post = None
    _, heard, ended = pair.read([2], [3])
    assert ended.wait(SOON_S)
    assert (heard[-1][1], pair.slots()[2]) == (None, 4)


def test_reads_are_served_in_turn(pair):
    ends = [pair.read([i], [i + 10])[2] for i in range(8)]
    assert all(ended.wait(SOON_S) for ended in ends)
    assert pair.slots()[:8] == list(range(11, 19))
    assert pair.link.stats(2.0) == {"num_reads": 8, "num_descriptors": 8, "num_bytes": 8 * SLOT_BYTES}


def test_an_unknown_slot_is_an_error_and_the_next_read_goes_on(pair):
    _, heard, ended = pair.read([0, 1], [5, NUM_SLOTS])
    assert ended.wait(SOON_S)
    done, error = heard[-1]
    assert (done.last, done.terminal) == (True, True)
    assert type(error) is TransferError
    assert str(NUM_SLOTS) in str(error)
    _, heard, ended = pair.read([2], [3])
    assert ended.wait(SOON_S)
    assert heard[-1][1] is None
    assert pair.link.num_abandoned == 0


def test_a_peer_that_could_not_be_added_is_added_for_the_next_read(pair):
    add, failures = pair.transport.add_peer, [TransferError("metadata of p: not now")]

    def fail_once(peer, description):
        if failures:
            raise failures.pop()
        add(peer, description)

    pair.transport.add_peer = fail_once
    _, heard, ended = pair.read([0], [3])
    assert ended.wait(SOON_S)
    assert "not now" in str(heard[-1][1])
    assert heard[-1][0].terminal
    _, heard, ended = pair.read([0], [3])
    assert ended.wait(SOON_S)
    assert heard[-1][1] is None
    assert pair.slots()[0] == 4


def read_of(pair, peer, local=0, remote=3):
    _, heard, ended = pair.read([local], [remote], peer=peer)
    assert ended.wait(SOON_S)
    assert heard[-1][1] is None
    return peer


def test_of_a_peer_that_has_a_new_life_the_earlier_ones_are_forgotten(pair, wait_until):
    for epoch in range(20):
        read_of(pair, f"a/{epoch:016x}/1")
        read_of(pair, f"a/{epoch:016x}/2")
        read_of(pair, f"a/{epoch:016x}/2/1>1")
    kept = [f"a/{19:016x}/2", f"a/{19:016x}/2/1>1"]
    other = read_of(pair, "b/0000/1")
    wait_until(lambda: sorted(pair.transport.peers) == [*kept, other])
    mover = pair.movers[-1][0]
    assert set(mover.reads.told_of) == {*kept, other}
    assert mover.reads.to_forget == set()
    read_of(pair, f"a/{3:016x}/1")


def test_only_so_many_peers_are_kept_the_last_used_ones(pair, monkeypatch, wait_until):
    monkeypatch.setattr("kvstore.mover.link._MAX_PEERS", 3)
    for node in "abcad":
        read_of(pair, f"{node}/0/1")
    wait_until(lambda: sorted(pair.transport.peers) == ["a/0/1", "c/0/1", "d/0/1"])
    read_of(pair, "b/0/1", local=7)
    assert pair.slots()[7] == 4


def test_a_peer_is_not_forgotten_while_a_read_of_it_may_go_on(pair, give_up, wait_until):
    read_of(pair, "a/0/1")
    pair.transport.running = True
    stalled = pair.read([0], [3], peer="a/0/1")
    give_up(stalled, num_posted=2)
    pair.transport.running = False
    pair.transport.stopped_peers = {"a/0/1"}
    read_of(pair, "a/1/1")
    mover = pair.movers[-1][0]
    wait_until(lambda: mover.reads.to_forget == {"a/0/1"})
    assert set(pair.transport.peers) == {"a/0/1", "a/1/1"}
    pair.transport.stopped_peers = set()
    wait_until(lambda: set(pair.transport.peers) == {"a/1/1"})


def test_a_peer_that_comes_back_while_a_read_of_it_may_go_on_is_kept(pair, monkeypatch, give_up, wait_until):
    monkeypatch.setattr("kvstore.mover.link._MAX_PEERS", 1)
    added, poll, stalls = [], pair.transport.poll, set()
    monkeypatch.setattr(pair.transport, "poll", lambda it: ReadState.RUNNING if it in stalls else poll(it))
    add_peer = pair.transport.add_peer
    monkeypatch.setattr(pair.transport, "add_peer", lambda peer, it: (added.append(peer), add_peer(peer, it)))
    read_of(pair, "a/0/1")
    pair.transport.running = True
    stalled = pair.read([0], [3], peer="a/0/1")
    wait_until(lambda: len(pair.transport.posted) == 2)
    stalls.update(pair.transport.handles)
    pair.transport.running = False
    give_up(stalled, num_posted=2)
    read_of(pair, "b/0/1")
    mover = pair.movers[-1][0]
    wait_until(lambda: mover.reads.to_forget == {"a/0/1"})
    read_of(pair, "a/0/1", local=1)
    assert added == ["a/0/1", "b/0/1"], "what goes on is in the way of another connection"
    wait_until(lambda: set(pair.transport.peers) == {"a/0/1"})
    stalls.clear()
    wait_until(lambda: not mover.reads.abandoned)
    pair.link.stats(SOON_S)
    read_of(pair, "a/0/1", local=2)
    assert pair.slots()[:3] == [4, 4, 4]


def test_a_peer_is_not_forgotten_while_a_read_that_wakes_its_lane_goes_on(pair, monkeypatch, wait_until):
    monkeypatch.setattr("kvstore.mover.link._MAX_PEERS", 1)
    read_of(pair, "a/0/1")
    pair.link.wake_by(b"it comes", waking(31, 7, peer="a/0/1"))
    pair.link.wake_by(b"another", waking(30, 9, peer="b/0/1"))
    pair.transport.stopped_peers = {"a/0/1"}
    pair.link.expect_read(b"it comes")
    mover = pair.movers[-1][0]
    wait_until(lambda: len(mover.reads.woken) == 1)
    read_of(pair, "b/0/1")
    for _ in range(2):  # A round ends before the second answer.
        pair.link.stats(SOON_S)
    assert set(pair.transport.peers) == {"a/0/1", "b/0/1"}
    assert set(mover.reads.waking) == {b"another"}, "nobody says the word of a peer that is forgotten"
    pair.transport.stopped_peers = set()
    wait_until(lambda: set(pair.transport.peers) == {"b/0/1"})
    assert mover.reads.woken == []


def test_a_peer_with_reads_that_have_yet_to_begin_is_not_forgotten(pair, monkeypatch, wait_until):
    monkeypatch.setattr("kvstore.mover.link._MAX_PEERS", 1)
    read_of(pair, "a/0/1")
    pair.transport.stopped_peers = {"a/0/1"}
    reads = [pair.read([place], [3], peer="a/0/1") for place in range(2)]
    wait_until(lambda: len(pair.transport.posted) == 2)
    read_of(pair, "b/0/1", local=5)
    for _ in range(2):  # A round ends before the second answer.
        pair.link.stats(SOON_S)
    assert set(pair.transport.peers) == {"a/0/1", "b/0/1"}
    pair.transport.stopped_peers = set()
    assert all(ended.wait(SOON_S) for _, _, ended in reads)
    assert [heard[-1][1] for _, heard, _ in reads] == [None, None]
    wait_until(lambda: set(pair.transport.peers) == {"b/0/1"})


def test_a_peer_that_cannot_be_added_is_lost(pair):
    pair.network.slabs.pop(b"peer")
    _, heard, ended = pair.read([0], [0])
    assert ended.wait(SOON_S)
    assert type(heard[-1][1]) is PeerLost


@pytest.mark.parametrize("error", [PeerLost("gone"), TransferError("broken")])
def test_a_failed_poll_is_terminal_and_keeps_its_class(pair, error):
    pair.transport.fail_poll = error
    _, heard, ended = pair.read([0, 1], [2, 3])
    assert ended.wait(SOON_S)
    done, got = heard[-1]
    assert (type(got), done.last, done.terminal, done.num_blocks) == (type(error), True, True, 0)
    assert pair.link.num_abandoned == 0


def test_a_chunk_that_was_in_place_before_another_failed_is_told(pair, monkeypatch):
    def poll(handle):
        if len(pair.transport.posted) < 2:
            return ReadState.RUNNING
        if handle > 1:
            raise TransferError("broken")
        return ReadState.DONE

    monkeypatch.setattr(pair.transport, "poll", poll)
    _, heard, ended = pair.read(range(12), range(12))
    assert ended.wait(SOON_S)
    first = plan_chunks(12, 4)[0]
    assert [(done.num_blocks, done.last, error is None) for done, error in heard] == [
        (first, False, True),
        (first, True, False),
    ]
    assert heard[-1][0].terminal
    assert pair.transport.handles == {}


def test_a_peer_whose_connection_broke_is_added_anew(pair, monkeypatch):
    added, add = [], pair.transport.add_peer
    monkeypatch.setattr(
        pair.transport, "add_peer", lambda peer, description: (added.append(peer), add(peer, description))
    )
    for fails in (PeerLost("it disconnected"), None, None):
        pair.transport.fail_poll = fails
        _, heard, ended = pair.read([0], [1])
        assert ended.wait(SOON_S)
        assert type(heard[-1][1]) is type(fails)
    assert added == ["p", "p"], "once at first, and once after it was lost"


def test_a_peer_whose_connection_broke_is_not_added_while_a_read_of_it_may_go_on(pair, monkeypatch, wait_until):
    added, add, poll, stalls = [], pair.transport.add_peer, pair.transport.poll, set()
    monkeypatch.setattr(pair.transport, "add_peer", lambda peer, it: (added.append(peer), add(peer, it)))
    monkeypatch.setattr(pair.transport, "poll", lambda it: ReadState.RUNNING if it in stalls else poll(it))
    pair.transport.running, pair.transport.fail_post = True, PeerLost("it disconnected")
    _, heard, ended = pair.read(range(8), range(8))
    assert ended.wait(SOON_S)
    assert (type(heard[-1][1]), heard[-1][0].terminal) == (PeerLost, False)
    stalls.update(pair.transport.handles)
    pair.transport.running, pair.transport.fail_post = False, None
    read_of(pair, "p")
    assert added == ["p"]
    stalls.clear()
    wait_until(lambda: not pair.movers[-1][0].reads.abandoned)
    read_of(pair, "p")
    assert added == ["p", "p"]


def test_an_error_while_an_earlier_chunk_still_runs_is_not_terminal(pair, wait_until):
    pair.transport.running = True
    pair.transport.fail_post = TransferError("no more")
    read_id, heard, ended = pair.read(range(12), range(12))
    assert ended.wait(SOON_S)
    assert (heard[-1][0].terminal, type(heard[-1][1])) == (False, TransferError)
    assert pair.link.num_abandoned == 1
    time.sleep(0.1)
    assert pair.terminal == []
    pair.transport.running = False
    wait_until(lambda: pair.terminal == [read_id])
    assert pair.link.num_abandoned == 0


def test_a_read_that_never_ends_times_out_and_is_terminal_some_day(pair, clock, give_up, wait_until):
    pair.transport.running = True
    read_id, heard, ended = read = pair.read(range(12), range(12), timeout_s=30.0)
    wait_until(lambda: pair.transport.posted)
    clock.skip(15.0)
    assert not ended.wait(0.05)
    give_up(read, num_posted=3)
    done, error = heard[-1]
    assert (done.terminal, type(error), done.num_blocks) == (False, TransferTimeout, 0)
    assert pair.link.num_abandoned == 1
    time.sleep(0.1)
    assert pair.terminal == []
    pair.transport.running = False
    wait_until(lambda: pair.terminal == [read_id])
    # The next READ is not affected.
    _, heard, ended = pair.read([31], [1])
    assert ended.wait(SOON_S)
    assert heard[-1][1] is None


def test_a_peer_that_stopped_delays_no_other(pair, give_up):
    pair.transport.stopped_peers.add("p")
    _, heard, ended = stuck = pair.read(range(12), range(12), timeout_s=30.0)
    behind = pair.read([13], [13], timeout_s=20.0)
    others = [pair.read([20 + i], [10 + i], peer="q") for i in range(3)]
    assert all(other[2].wait(SOON_S) for other in others)
    assert [other[1][-1][0].num_descriptors for other in others] == [1, 1, 1]
    assert pair.slots()[20:23] == [11, 12, 13]
    assert not ended.is_set()
    # What waited its time out behind the stuck one is never begun, so that nothing of it is left to wait for.
    num_posted = len(pair.transport.posted)
    give_up(stuck, behind, num_posted=num_posted)
    assert (heard[-1][0].terminal, behind[1][-1][0].terminal) == (False, True)
    assert isinstance(behind[1][-1][1], TransferTimeout)
    assert len(pair.transport.posted) == num_posted


def test_no_notification_while_an_earlier_read_of_the_peer_may_still_go_on(pair, give_up, wait_until):
    pair.transport.stopped_peers.add("p")
    first, _, _ = read = pair.read([0], [0])
    give_up(read, num_posted=1)
    pair.transport.running, pair.transport.stopped_peers = False, set()
    pair.transport.poll, poll = (lambda handle: ReadState.RUNNING if handle == 1 else poll(handle)), pair.transport.poll
    note = NOTIFICATION.pack(7, b"12345678", b"readers.")
    _, heard, ended = pair.read([5], [5], note=note)
    assert ended.wait(SOON_S)
    assert heard[-1][1] is None
    assert pair.peer.notifications() == []
    pair.transport.poll = poll
    wait_until(lambda: pair.terminal == [first])
    _, _, ended = pair.read([6], [6], note=note)
    assert ended.wait(SOON_S)
    assert pair.peer.notifications() == [note]


def test_a_stalled_read_does_not_spin(pair, wait_until):
    pair.transport.running = True
    pair.read([0], [1], timeout_s=30.0)
    mover = pair.movers[0][0]
    wait_until(lambda: mover.reads.jobs)
    assert mover.pause_s() == 0.0, "what has just been asked for is polled for at once"
    wait_until(lambda: 0 < mover.pause_s() < 0.01)
    pair.transport.running = False


def test_a_descriptor_above_1023_is_served(pair):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limit[0]), limit[1]))
    held = []
    try:
        while not held or held[-1] < 1100:
            held.append(os.open("/dev/null", os.O_RDONLY))
        pair.die()
        pair.start("high")
        assert pair.movers[0][2].fileno() > 1023 or held[-1] > 1023
        _, heard, ended = pair.read([4], [5])
        assert ended.wait(SOON_S)
        assert heard[-1][1] is None
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_the_store_may_give_up_before_the_mover_does(pair, wait_until):
    pair.transport.running = True
    read_id, heard, _ = pair.read([0], [1], timeout_s=30.0)
    time.sleep(0.05)
    assert pair.link.abandon(read_id)
    assert pair.link.abandon(read_id)
    pair.hear_when_terminal(read_id)
    assert pair.link.num_abandoned == 1
    pair.transport.running = False
    wait_until(lambda: pair.terminal == [read_id])
    assert heard == []
    assert not pair.link.abandon(read_id)


def test_the_movers_death_ends_what_it_posted(pair, give_up, wait_until):
    pair.transport.running = True
    abandoned, _, _ = read = pair.read([0], [1])
    give_up(read, num_posted=1)
    read_id, heard, ended = pair.read([2], [3], timeout_s=30.0)
    wait_until(lambda: len(pair.transport.posted) == 2)
    pair.die()
    assert ended.wait(SOON_S)
    done, error = heard[-1]
    assert (done.read_id, done.last, done.terminal, type(error)) == (read_id, True, True, PeerLost)
    wait_until(lambda: pair.terminal == [abandoned])
    assert (pair.link.own, pair.link.pid, pair.link.num_abandoned) == (None, 0, 0)
    assert not pair.link.wait_ready(0.0)
    with pytest.raises(PeerLost, match="not running"):
        pair.read([0], [1])
    with pytest.raises(PeerLost):
        pair.link.stats(1.0)


def test_a_new_mover_is_a_new_generation_that_knows_slots_but_no_peers(pair):
    before = pair.link.own
    assert (before.generation, before.agent, before.address) == (1, b"own", 4096)
    assert pair.link.pid == os.getpid()
    _, _, ended = pair.read([0], [1])
    assert ended.wait(SOON_S)
    pair.die()
    pair.start("own-2")
    assert (pair.link.own.generation, pair.link.own.agent) == (2, b"own-2")
    _, heard, ended = pair.read([4], [5])
    assert ended.wait(SOON_S)
    assert heard[-1][1] is None
    assert pair.slots()[4] == 6


def test_notifications_are_passed_on_only_while_leases_are_open(pair, wait_until):
    note = NOTIFICATION.pack(9, b"abcdefgh", b"readers.")
    pair.network.inboxes[b"own"].append(note)
    time.sleep(0.1)
    assert pair.notes == []
    pair.network.inboxes[b"own"].append(b"of another size")
    pair.link.expect_notifications(1)
    wait_until(lambda: pair.notes == [(9, b"abcdefgh", b"readers.")])
    pair.link.expect_notifications(0)


def test_an_idle_mover_sleeps_and_wakes_for_work(pair):
    mover = pair.movers[0][0]
    assert mover.pause_s() == 5.0
    started_s = time.monotonic()
    _, _, ended = pair.read([0], [1])
    assert ended.wait(SOON_S)
    assert time.monotonic() - started_s < 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "what", ["again", "cut", "with more slots here than there", "of a peer that it was not told of"]
)
def test_a_mover_that_is_told_what_cannot_be_ends_and_writes_nothing(pair, monkeypatch, what):
    """A READ done twice would write to slots that are published, or somebody else's by now."""
    told = []
    send = Connection.send
    monkeypatch.setattr(Connection, "send", lambda own, *message: told.append(message) or send(own, *message))
    _, _, ended = pair.read([4], [5])
    assert ended.wait(SOON_S)
    assert pair.slots()[4] == 6
    pair.slab[:] = 0
    op, flag, request, payload = told[-1]
    assert op is Op.MOVER_READ
    if what == "cut":
        payload = encode(msgspec.structs.replace(decode_mover_read(payload), read_id=99))[:-4]
    elif what == "with more slots here than there":
        _, (peer, size, *_, note), *rest = msgspec.msgpack.decode(payload)
        payload = encode([99, [peer, size, bytes(8), bytes(4), note], *rest])
    elif what != "again":
        read = decode_mover_read(payload)
        other = msgspec.structs.replace(read.request, peer="q")
        payload = encode(msgspec.structs.replace(read, read_id=99, request=other))
    send(pair.link.connection, op, flag, request, payload)
    _, thread, _ = pair.movers[0]
    thread.join(SOON_S)
    assert not thread.is_alive(), "its process ends, and its store takes another"
    assert set(pair.slots()) == {0}


def test_a_mover_that_hears_nothing_more_ends(pair):
    _, thread, _ = pair.movers[0]
    pair.server.stop()
    thread.join(SOON_S)
    assert not thread.is_alive()

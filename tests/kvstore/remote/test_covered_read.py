"""A READ's blocks count only while the lease covers them, and slots that it may still write are nobody's."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import PeerLost, TransferError, TransferTimeout
from kvstore.mover.messages import MoverDone
from kvstore.mover.transport import PeerDescription, ReadRequest
from kvstore.pool.pool import Pool
from kvstore.remote.covered_read import Arrivals, Cover, CoveredRead, is_quarantine_full
from kvstore.rpc.messages import LoadReport
from kvstore.runtime import clock

PEER = PeerDescription(agent=b"peer", address=0, slot_bytes=64, num_slots=8)
READ_ID = 7


class Mover:
    """A link to a mover that says what a test has it say."""

    def __init__(self):
        self.abandoned, self.waiting, self.asked = set(), [], None
        self.running = False

    def read(self, request, peer, on_done, **asked):
        self.on_done, self.asked, self.running = on_done, asked, True
        return READ_ID

    def says(self, num_blocks, error=None, *, last=False, terminal=True):
        if last or error:
            self.running = False
            if not terminal:
                self.abandoned.add(READ_ID)
        self.on_done(
            MoverDone(
                read_id=READ_ID, num_blocks=num_blocks, last=last or error is not None, terminal=terminal,
                seconds=0.0, num_descriptors=3,
            ),
            error,
        )  # fmt: skip

    def abandon(self, read_id):
        if self.running:
            self.abandoned.add(read_id)
        self.running = False
        return read_id in self.abandoned

    def when_terminal(self, read_ids, then):
        if read_ids & self.abandoned:
            self.waiting.append(then)
        else:
            then()

    def turns_terminal(self):
        self.abandoned.clear()
        while self.waiting:
            self.waiting.pop()()


class Case:
    """A READ of four blocks that was posted, and what it told."""

    def __init__(self, cover_s=60.0, patience_s=60.0):
        self.mover, self.blocks, self.num_ends, self.current = Mover(), [], 0, True
        self.pool = Pool(8)
        self.write = self.pool.reserve(4, "w")
        self.read = CoveredRead(self.mover, lambda done: self.blocks.append(done.num_blocks), self._ended)
        self.cover = Cover(clock.now_s() + cover_s, clock.now_s() + patience_s, lambda: self.current)
        self.post()

    def post(self, remote=(0, 1, 2, 3)):
        request = ReadRequest(
            peer="p", block_bytes=64, local_slots=np.asarray(self.write.slots, np.int32),
            remote_slots=np.asarray(remote, np.int32), notification=b"",
        )  # fmt: skip
        self.read.post(request, PEER, self.cover, np.asarray([2, 4], np.int32), timeout_s=30.0)

    def _ended(self):
        self.num_ends += 1

    def settle(self):
        self.read.settle(self.pool, self.write.write_id, "w")
        stats = self.pool.stats()
        return stats.num_free, stats.num_quarantined


@pytest.fixture
def case():
    return Case()


def test_every_chunk_that_is_covered_counts(case):
    case.mover.says(2)
    assert (case.blocks, case.num_ends) == ([2], 0)
    case.mover.says(4, last=True)
    assert (case.blocks, case.num_ends, case.read.error, case.read.given_up_id) == ([2, 4], 1, None, 0)
    assert case.settle() == (8, 0)


def test_what_is_in_place_after_the_lease_does_not_count(case, monkeypatch):
    case.mover.says(2)
    until_s = case.cover.until_s
    monkeypatch.setattr(clock, "now_s", lambda: until_s)
    case.mover.says(4, last=True)
    assert (case.blocks, case.num_ends, case.read.error) == ([2], 1, None)


def test_nothing_counts_after_a_clearing(case):
    case.mover.says(2)
    case.current = False
    case.mover.says(4, last=True)
    assert (case.blocks, case.num_ends) == ([2], 1)


def test_a_failure_that_is_terminal_frees_the_slots_at_once(case):
    case.mover.says(2)
    case.mover.says(2, TransferError("no"))
    assert (case.num_ends, str(case.read.error)) == (1, "no")
    assert case.settle() == (8, 0)


def test_slots_that_a_failed_read_may_still_write_are_free_when_it_cannot(case):
    case.mover.says(0, TransferTimeout("late"), terminal=False)
    assert case.read.given_up_id == READ_ID
    assert case.settle() == (4, 4)
    case.mover.turns_terminal()
    assert (case.pool.stats().num_free, case.pool.stats().num_quarantined) == (8, 0)


def test_slots_of_a_read_that_turned_terminal_before_they_were_set_aside_are_free(case):
    case.mover.says(0, TransferTimeout("late"), terminal=False)
    case.mover.turns_terminal()
    assert case.settle() == (8, 0)


def test_after_giving_up_no_report_counts(case, monkeypatch):
    case.mover.says(2)
    assert not case.read.is_late(clock.now_s() + 30.0), "the mover reports by itself"
    assert case.read.is_late(clock.now_s() + 32.0)
    case.read.give_up()
    case.read.give_up()
    case.mover.says(4, last=True)
    assert (case.blocks, case.num_ends, type(case.read.error)) == ([2], 1, TransferTimeout)
    assert case.settle() == (4, 4)
    case.mover.turns_terminal()
    assert case.pool.stats().num_free == 8


@pytest.mark.parametrize(("nothing_for_s", "is_fault"), [(0.5, False), (1.5, True)])
def test_a_read_that_ends_with_its_time_is_the_peers_fault_only_if_nothing_came_for_long(
    case, monkeypatch, nothing_for_s, is_fault
):
    begun_s = clock.now_s()
    monkeypatch.setattr(clock, "now_s", lambda: begun_s + 9.0)
    case.mover.says(2)
    monkeypatch.setattr(clock, "now_s", lambda: begun_s + 9.0 + nothing_for_s)
    case.mover.says(2, TransferTimeout("late"), terminal=False)
    assert case.read.is_peers_fault() is is_fault


def test_another_failure_is_the_peers_fault(case):
    case.mover.says(0, PeerLost("gone"))
    assert case.read.is_peers_fault()


def test_giving_up_what_has_ended_changes_nothing(case):
    case.mover.says(4, last=True)
    case.read.give_up()
    assert (case.num_ends, case.read.error, case.read.given_up_id) == (1, None, 0)


@pytest.mark.parametrize(("cover_s", "patience_s", "wanted_s"), [(5, 60, 5), (60, 6, 6), (60, 60, 30), (-1, 60, 0.001)])
def test_the_mover_is_given_the_time_that_is_left(cover_s, patience_s, wanted_s):
    assert Case(cover_s, patience_s).mover.asked["timeout_s"] == pytest.approx(wanted_s, abs=0.5)


def test_slots_that_the_peer_has_not_are_not_read(case):
    case.mover.asked = None
    with pytest.raises(PeerLost, match="from 0 to 7"):
        case.post((0, 1, 2, 8))
    assert case.mover.asked is None


def test_arrivals_are_accounted_for_in_the_report():
    report = LoadReport()
    arrivals = Arrivals(report, "node-a", 64, clock.now_s() - 2.0)
    chunk = {"read_id": 1, "terminal": True, "seconds": 0.0, "num_descriptors": 5}
    arrivals.add(MoverDone(num_blocks=2, last=False, **chunk), 2)
    arrivals.add(MoverDone(num_blocks=3, last=True, **chunk), 1)
    assert (report.num_bytes, report.num_descriptors, report.peers) == (3 * 64, 5, ["node-a"])
    assert report.read_s == pytest.approx(2.0, abs=0.5)


def test_a_pool_has_a_share_of_slots_that_may_wait():
    pool = Pool(8)
    ticket = pool.reserve(4, "w")
    assert not is_quarantine_full(pool, 0.5)
    pool.abort_store(ticket.write_id, "w", quarantine="read-1")
    assert is_quarantine_full(pool, 0.5)

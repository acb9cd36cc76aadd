"""The store's view of its mover, heard word by word: what a report may say, and answers that come late."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest

from kvstore.blocks.codec import encode
from kvstore.errors import PeerLost, ProtocolError, RegistrationFailed, TransferError, TransferTimeout
from kvstore.mover.link import MoverLink
from kvstore.mover.messages import MoverDone, MoverReady, NewStage
from kvstore.mover.transport import PeerDescription, ReadRequest
from kvstore.rpc.framing import Flag, Message, Op, pack_error

STAGE = NewStage("GPU-0", 512, 4)


class Mover:
    """A connection on which nobody listens: each message is noted, and `on_send` hears of it."""

    def __init__(self):
        self.sent, self.closed, self.pid, self.takes, self.on_send = [], False, 1, True, lambda request: None

    def send(self, op, flag, request, payload):
        self.sent.append(op)
        self.on_send(request)
        return self.takes

    def kill(self):
        return True


class Pair:
    def __init__(self):
        self.link, self.mover, self.heard = MoverLink(), Mover(), []
        self.says(Op.MOVER_READY, encode(MoverReady(b"agent", 4096)))

    def says(self, op, payload, flag=Flag.ONE_WAY, request=0):
        self.link.serve(self.mover, Message(op, flag, request, payload), self.heard.append)

    def read(self, num_blocks=4, timeout_s=1.0):
        slots = np.arange(num_blocks, dtype=np.int32)
        return self.link.read(
            ReadRequest(peer="p", block_bytes=512, local_slots=slots, remote_slots=slots),
            PeerDescription(agent=b"p", address=0, slot_bytes=512, num_slots=8),
            lambda done, error: self.heard.append((done.num_blocks, done.last, error)),
            chunk_ends=np.array([num_blocks], np.int32), timeout_s=timeout_s,
        )  # fmt: skip

    def reports(self, read_id, num_blocks, *, last, terminal, error=b""):
        self.says(
            Op.MOVER_DONE,
            encode(
                MoverDone(
                    read_id=read_id, num_blocks=num_blocks, last=last, terminal=terminal, seconds=0.0,
                    num_descriptors=1, error=error,
                )
            ),
        )  # fmt: skip

    def answers(self, request, payload=b"made", flag=Flag.REPLY):
        self.says(Op.MOVER_STAGE, payload, flag, request)

    def ask(self, timeout_s=5.0, on_terminal=lambda: None):
        return self.link.ask(Op.MOVER_STAGE, STAGE, timeout_s, on_terminal)


def test_while_no_mover_can_begin_reads_say_why_until_there_is_one():
    link = MoverLink()
    link.problem = "could not start UCX"
    with pytest.raises(PeerLost, match=r"is not running, .*; no mover can begin: could not start UCX"):
        link.ask(Op.MOVER_STATS, None, 1.0)
    link.serve(Mover(), Message(Op.MOVER_READY, Flag.ONE_WAY, 0, encode(MoverReady(b"agent", 4096))), [].append)
    assert link.problem == ""


@pytest.fixture
def pair():
    return Pair()


FAILED = pack_error(TransferError("broke"))


# Reports on READs.


@pytest.mark.parametrize(
    "report",
    [
        {"num_blocks": 0, "last": False, "terminal": False},
        {"num_blocks": 5, "last": False, "terminal": False},
        {"num_blocks": 0, "last": True, "terminal": True},
        {"num_blocks": 3, "last": True, "terminal": True},
        {"num_blocks": 4, "last": True, "terminal": False},
        {"num_blocks": 0, "last": False, "terminal": True, "error": FAILED},
        {"num_blocks": 5, "last": True, "terminal": True, "error": FAILED},
    ],
)
def test_a_report_that_cannot_be_is_refused_and_the_right_one_counts_then(pair, report):
    read_id = pair.read()
    with pytest.raises(ProtocolError, match="wanted a report on 1 to 4 blocks"):
        pair.reports(read_id, **report)
    assert not pair.heard
    pair.reports(read_id, 4, last=True, terminal=True)
    assert pair.heard == [(4, True, None)]


def test_a_read_that_was_given_up_may_write_until_a_report_says_that_it_is_terminal(pair):
    ended, read_id = [], pair.read()
    assert pair.link.abandon(read_id)
    pair.link.when_terminal({read_id}, lambda: ended.append(1))
    pair.reports(read_id, 2, last=False, terminal=False)
    pair.reports(read_id, 2, last=True, terminal=False, error=FAILED)
    assert not ended
    assert pair.link.num_abandoned == 1
    pair.reports(read_id, 2, last=True, terminal=True, error=FAILED)
    assert ended == [1]
    assert not pair.heard


def test_a_read_that_was_not_sent_is_nobodys(pair):
    pair.mover.takes = False
    with pytest.raises(PeerLost, match="does not read its socket"):
        pair.read()
    pair.link.gone(pair.mover)
    assert not pair.heard, "who heard the error of `read` hears of no other end"


def test_a_read_that_cannot_be_encoded_is_nobodys(pair):
    with pytest.raises(TypeError):
        pair.read(timeout_s=object())
    pair.link.gone(pair.mover)
    assert not pair.heard


def test_a_mover_that_is_killed_is_nobodys_to_tell_peers_of(pair):
    assert pair.link.own is not None
    assert pair.link.fence()
    assert pair.link.own is None, "a grant would name it"
    assert not pair.link.wait_ready(0)


# Questions.


def test_an_answer_is_returned_and_a_refusal_raised(pair):
    pair.mover.on_send = pair.answers
    assert pair.ask() == b"made"
    pair.mover.on_send = lambda request: pair.answers(request, pack_error(RegistrationFailed("full")), Flag.ERROR)
    with pytest.raises(RegistrationFailed, match="full"):
        pair.ask()


def test_an_answer_that_comes_late_ends_the_question(pair):
    asked, ended = [], []
    pair.mover.on_send = asked.append
    with pytest.raises(TransferTimeout, match="MOVER_STAGE"):
        pair.ask(0.01, lambda: ended.append(1))
    assert pair.link.num_abandoned == 1
    assert not ended
    pair.answers(asked[0])
    assert ended == [1]
    assert pair.link.num_abandoned == 0


def test_an_answer_at_the_last_moment_is_heard(pair, monkeypatch):
    """It comes behind the wait for it, before anybody knows that it is late."""
    asked = []
    pair.mover.on_send = asked.append

    class TooShort(queue.SimpleQueue):
        def get(self, block=True, timeout=None):
            pair.answers(asked[0])
            raise queue.Empty

    monkeypatch.setattr("kvstore.mover.unfinished.queue.SimpleQueue", TooShort)
    assert pair.ask(0.01) == b"made"
    assert pair.link.num_abandoned == 0, "the mover would be killed for it"


def test_who_waits_for_reads_of_which_one_has_ended_waits_for_the_others_only(pair):
    first, second = pair.read(), pair.read()
    assert pair.link.abandon(first)
    assert pair.link.abandon(second)
    pair.reports(first, 4, last=True, terminal=True)
    ended = []
    pair.link.when_terminal({first, second}, lambda: ended.append(1))
    assert not ended
    pair.reports(second, 4, last=True, terminal=True)
    assert ended == [1]


def test_a_mover_that_is_being_killed_is_asked_nothing(pair):
    assert pair.link.fence()
    with pytest.raises(PeerLost, match="not running"):
        pair.read()
    with pytest.raises(PeerLost, match="not running"):
        pair.ask()


@pytest.mark.parametrize("how", ["not encoded", "not sent"])
def test_a_question_that_was_not_asked_is_not_waited_for(pair, how):
    if how == "not sent":
        pair.mover.takes = False
    with pytest.raises(PeerLost if how == "not sent" else TypeError):
        pair.link.ask(Op.MOVER_STAGE, STAGE if how == "not sent" else object(), 30.0)
    assert pair.link.num_abandoned == 0
    assert not pair.link.unfinished.questions


def test_an_asker_that_leaves_while_the_movers_death_is_told_leaves_nothing_behind(pair, monkeypatch):
    class Slow(queue.SimpleQueue):
        def put(self, item, block=True, timeout=None):
            super().put(item)
            time.sleep(0.02)  # The asker goes on meanwhile.

    monkeypatch.setattr("kvstore.mover.unfinished.queue.SimpleQueue", Slow)
    read, given_up, ended = pair.read(), pair.read(), []
    pair.link.abandon(given_up)
    pair.link.when_terminal({given_up}, lambda: ended.append(1))
    test_the_movers_death_answers_all_questions(pair)
    assert [type(error) for _, last, error in pair.heard if last] == [PeerLost], f"READ {read}"
    assert ended == [1]
    assert pair.link.abandoned_since_s() is None
    assert pair.link.unfinished.questions == {}


def test_the_movers_death_answers_all_questions(pair):
    asked, ended = threading.Semaphore(0), []
    pair.mover.on_send = lambda request: asked.release()

    def ask():
        with pytest.raises(PeerLost, match="died"):
            pair.ask(30.0)
        ended.append(1)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all(asked.acquire(timeout=5) for _ in threads)
    pair.link.gone(pair.mover)
    for thread in threads:
        thread.join(5)
    assert len(ended) == 4
    assert pair.link.num_abandoned == 0

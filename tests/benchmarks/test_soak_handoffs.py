"""What may have become of a ticket follows from its letter, and letters reach one client each."""

from __future__ import annotations

import multiprocessing
import os
import random
from dataclasses import replace

import pytest

from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.results import BlockFailure, MissReason
from tests.soak.handoffs import unexplained
from tests.soak.mailbox import Letter, Mailbox, owner_name
from tests.soak.run import still_held

LETTER = Letter(
    ticket=HandoffTicket(
        node_id="n", epoch=bytes(8), namespace=bytes(32), num_blocks=3, block_bytes=64, expires_s=0.0
    ),
    node=0, chain=1, first=2, good_until_s=100.0, num_clearings=5, owner="1-0.0", path="/socket",
)  # fmt: skip
#: What a plain letter does not explain, and what does.
EXPLAINED = {
    MissReason.USED: {"may_be_used": True},
    MissReason.EXPIRED: {"good_until_s": 10.0},
    MissReason.WITHDRAWN: {"may_be_withdrawn": True},
    MissReason.NOT_FOUND: {"may_be_missing": True},
}


def why_not(letter, reason, detail=""):
    failure = BlockFailure(index=0, block_ids=(), reason=reason, detail=detail or f"{reason.value}: because")
    return unexplained(letter, failure, now_s=50.0)


@pytest.mark.parametrize("reason", EXPLAINED)
def test_each_end_of_a_ticket_needs_somebody_who_ended_it(reason):
    assert reason.value in why_not(LETTER, reason)
    assert why_not(replace(LETTER, **EXPLAINED[reason]), reason) == ""
    for other, change in EXPLAINED.items():
        if other is not reason:
            assert why_not(replace(LETTER, **change), reason)


def test_reasons_of_a_load_need_no_explanation_and_unknown_ones_have_none():
    assert why_not(LETTER, MissReason.PEER_LOST) == why_not(LETTER, MissReason.TIMEOUT) == ""
    assert why_not(LETTER, MissReason.OTHER, "PoolExhausted: none left") == ""
    assert why_not(LETTER, MissReason.OTHER, "KeyError: 7")
    assert why_not(LETTER, MissReason.ABANDONED)


def test_a_letter_reaches_one_of_those_who_look(tmp_path):
    mailbox, other, rng = Mailbox(tmp_path), Mailbox(tmp_path), random.Random(1)
    for node in (0, 1):
        mailbox.send(replace(LETTER, node=node))
    assert {mailbox.take(rng, 0).node, other.take(rng, 0).node} == {0, 1}
    assert mailbox.take(rng, 0) is None
    mailbox.send(LETTER, num_copies=2)
    assert mailbox.take(rng, 0) == other.take(rng, 1) == replace(LETTER, may_be_used=True)


def test_a_delivery_is_the_first_one_once(tmp_path):
    assert Mailbox(tmp_path).is_first(b"key")
    assert not Mailbox(tmp_path).is_first(b"key")
    assert Mailbox(tmp_path).is_first(b"other")


def test_who_closed_or_died_has_left(tmp_path):
    mailbox = Mailbox(tmp_path)
    mine = owner_name(3)
    assert not mailbox.has_left(mine)
    mailbox.leaves(mine)
    assert mailbox.has_left(mine)
    assert not mailbox.has_left(owner_name(4))
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    assert mailbox.has_left(f"{process.pid}-1.0")
    # Ids are used again, also for threads of others.
    assert mailbox.has_left(f"{os.getpid()}-1.4")


@pytest.mark.parametrize("what", ["num_handoffs", "num_handoff_slots", "num_handoff_fetches", "num_pinned"])
def test_a_slot_that_is_still_held_is_seen(what):
    pool = dict.fromkeys(("num_pinned", "num_leases", "num_writing", "num_writes", "num_quarantined"), 0)
    beside = dict.fromkeys(("num_handoffs", "num_handoff_slots", "num_handoff_fetches", "num_abandoned_reads"), 0)
    assert still_held({"pool": pool, **beside}) == {}
    (pool if what in pool else beside)[what] = 2
    assert still_held({"pool": pool, **beside}) == {what: 2}

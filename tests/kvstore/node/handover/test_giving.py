"""Users of the slots of hand-offs when a store ends: publishers that write, and readers until their deadline."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstore.handoff.records import Place
from kvstore.handoff.table import HandoffTable
from kvstore.node.handover import giving
from kvstore.node.handover.giving import end_later, handoff_users
from kvstore.pool.pool import Pool
from kvstore.runtime import clock

KEY, SPACE, WRITER = b"k" * 16, b"n" * 32, 7


@pytest.fixture
def pool():
    return Pool(8)


@pytest.fixture
def table(pool):
    made = HandoffTable()
    made.prepare(KEY, WRITER, "client-1", SPACE, 0, 2, Place(pool, 8))
    return made


def users_of(table, pool):
    """Return the users of the only entry of slots that are held."""
    (held,) = pool.freeze().writers
    (owner,) = held.owners
    return handoff_users(table)[owner]


def test_a_publisher_that_writes_is_waited_for(table, pool):
    assert ("client-1", 0.0) in users_of(table, pool)


def test_what_is_published_and_not_claimed_is_waited_for_by_nobody(table, pool):
    table.complete(KEY, WRITER, "client-1", clock.now_s() + 60)
    assert users_of(table, pool) == [("", 0.0)]


def test_a_reader_is_waited_for_until_its_claim_ends(table, pool):
    table.complete(KEY, WRITER, "client-1", clock.now_s() + 60)
    until_s = clock.now_s() + 30
    table.claim(KEY, "client-2", SPACE, 0, until_s)
    assert users_of(table, pool) == [("", until_s)]


def test_a_copy_of_the_mover_is_waited_for_with_its_reader(table, pool):
    table.complete(KEY, WRITER, "client-1", clock.now_s() + 60)
    until_s = clock.now_s() + 30
    claim = table.claim(KEY, "client-2", SPACE, 0, until_s)
    table.move(claim.claim_id, Place(pool, 8))
    users = handoff_users(table)
    owners = {owner for held in pool.freeze().writers for owner in held.owners}
    assert users.keys() == owners
    assert sorted(map(sorted, (dict(each).items() for each in users.values()))) == [
        [("", until_s)], [("", until_s), ("!mover", 0.0)],
    ]  # fmt: skip


def test_a_store_that_nobody_ends_after_it_gave_says_why_it_ends(monkeypatch, caplog):
    done = []
    monkeypatch.setattr(giving.time, "sleep", done.append)
    monkeypatch.setattr(giving.os, "_exit", done.append)
    state = SimpleNamespace(config=SimpleNamespace(name="s"), node_id="n", epoch=b"e")
    with caplog.at_level("INFO", logger="kvstore.life"):
        end_later(SimpleNamespace(state=state))
    assert done == [giving.ENDS_ITSELF_S, 0]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("event=store_stopped ")
    assert line.endswith('store=s node=n epoch=65 reason="a restart"')

import itertools
from types import SimpleNamespace

import pytest

from kvstore.client.idle_connections import BrokenConnections, IdleConnections
from kvstore.errors import CopyStuck, StoreUnavailable


@pytest.fixture
def made():
    return []


@pytest.fixture
def idle(made):
    numbers = itertools.count(1)

    def connect(replaces, since, timeout_s):
        connection = SimpleNamespace(name=next(numbers), closed=False, next_question=5, replaces=(replaces, since))
        connection.close = lambda: setattr(connection, "closed", True)
        made.append(connection)
        return connection

    return IdleConnections(connect, BrokenConnections())


def test_one_job_after_the_other_has_the_same_connection(idle, made):
    for _ in range(3):
        with idle.taken() as connection:
            assert len(idle) == 0
        assert len(idle) == 1
    assert made == [connection]


def test_jobs_at_once_have_one_each(idle, made):
    with idle.taken() as one, idle.taken() as other:
        assert one is not other
    assert len(idle) == len(made) == 2


def test_a_broken_one_is_replaced_and_named_with_the_first_question_of_its_job(idle, made):
    with idle.taken() as connection:
        connection.next_question = 7
        connection.close()
    assert [each.replaces for each in made] == [(None, 0), (connection, 5)]
    with idle.taken() as connection:
        assert connection is made[1]


def test_of_a_job_whose_copies_are_stuck_nothing_is_given_back(idle, made):
    def fetch():
        with idle.taken() as connection:
            connection.close()
            raise CopyStuck("for ever")

    with pytest.raises(CopyStuck):
        fetch()
    assert [each.replaces for each in made] == [(None, 0), (None, 0)]


def test_a_store_that_is_gone_leaves_none(idle, made, monkeypatch):
    def refuse(*_):
        raise StoreUnavailable("gone")

    with idle.taken() as connection:
        connection.close()
        monkeypatch.setattr(idle, "connect", refuse)
    assert len(idle) == 0
    with pytest.raises(StoreUnavailable), idle.taken():
        pass
    monkeypatch.undo()
    idle.broken.name_again_s = 0.0
    with idle.taken():
        assert made[-1].replaces == (connection, 5), "the store was only late, and hears now what is given back"


def test_one_that_comes_back_to_a_closed_client_is_closed(idle, made):
    with idle.taken() as connection:
        idle.is_closed = True
    assert connection.closed


def test_a_broken_one_that_could_not_be_replaced_is_named_before_an_idle_one_is_taken(idle, made, monkeypatch):
    with idle.taken(), idle.taken():
        pass
    connect, now_s = idle.connect, [100.0]
    monkeypatch.setattr("kvstore.runtime.clock.now_s", lambda: now_s[0])

    def refuse(*_):
        raise StoreUnavailable("no descriptor is left")

    monkeypatch.setattr(idle, "connect", refuse)
    with idle.taken() as broken:
        broken.close()
    with idle.taken() as other:
        assert other in made, "others serve meanwhile"
    monkeypatch.setattr(idle, "connect", connect)
    with idle.taken() as found:
        assert found.replaces == (None, 0), "not asked for again at once"
    now_s[0] += 2.0
    with idle.taken() as found:
        assert found.replaces == (broken, 5)

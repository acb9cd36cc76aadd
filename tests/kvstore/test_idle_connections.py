import itertools
from types import SimpleNamespace

import pytest

from kvstore.errors import StoreUnavailable
from kvstore.idle_connections import IdleConnections


@pytest.fixture
def made():
    return []


@pytest.fixture
def idle(made):
    numbers = itertools.count(1)

    def connect(replaces):
        connection = SimpleNamespace(hello={"owner": f"local-{next(numbers)}"}, closed=False, replaces=replaces)
        connection.close = lambda: setattr(connection, "closed", True)
        made.append(connection)
        return connection

    found = IdleConnections(connect, lambda: found.is_client_closed)
    found.is_client_closed = False
    return found


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


def test_a_broken_one_is_replaced_and_its_owner_named(idle, made):
    with idle.taken() as connection:
        connection.close()
    assert [each.replaces for each in made] == ["", "local-1"]
    with idle.taken() as connection:
        assert connection is made[1]


def test_a_store_that_is_gone_leaves_none(idle, made, monkeypatch):
    def refuse(replaces):
        raise StoreUnavailable("gone")

    with idle.taken() as connection:
        connection.close()
        monkeypatch.setattr(idle, "_connect", refuse)
    assert len(idle) == 0
    with pytest.raises(StoreUnavailable), idle.taken():
        pass


def test_one_that_comes_back_to_a_closed_client_is_closed(idle, made):
    with idle.taken() as connection:
        idle.is_client_closed = True
    assert connection.closed

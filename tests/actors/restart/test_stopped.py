"""A stop that falls into the moment when a restart makes the store's next supervisor: nothing comes back after it."""

from __future__ import annotations

import contextlib
import threading
import zlib

import pytest
import ray

import kvstore
from kvstore.actors import ending
from kvstore.actors.calls import actor_name, call, find_actor
from kvstore.actors.ending import end_actors, end_left
from kvstore.actors.finding import actors_of, make_actor
from kvstore.actors.restart import changing
from kvstore.actors.restart.holder import Holder
from kvstore.actors.restart.turnstile import one_restart
from kvstore.actors.supervisor import ASKED_GROUP, Supervisor
from kvstore.config import StoreConfig
from kvstore.errors import StoreNotRunning

pytestmark = pytest.mark.ray


@pytest.fixture
def name(request, ray_cluster):
    name = f"stopped-{zlib.crc32(request.node.name.encode())}"
    yield name
    end_actors(name)


def make_supervisor(name, of_restart):
    config = StoreConfig(name=name, capacity_bytes=2 << 20).to_json()
    args = (config, "", True, of_restart)
    return make_actor(actor_name(name, "supervisor"), Supervisor, ASKED_GROUP, args, max_restarts=-1, max_concurrency=4)


def make_holder(name):
    return make_actor(actor_name(name, "handover", "n-1"), Holder, {}, (name, "n", 60.0, 60.0), max_restarts=0)


def free_name(name, eventually):
    """End the supervisor as a restart does that is about to make the next one."""
    old = find_actor(actor_name(name, "supervisor"))
    changing.give_way(old, "a restart makes another one")
    ray.kill(old)
    eventually(lambda: actor_name(name, "supervisor") not in actors_of(name), 20)


def when_listed(monkeypatch, do):
    """Do something when a stop has listed the actors that it will end."""
    made, list_ = [], ending.actors_of

    def listed(name):
        found = list_(name)
        if not made:
            made.append(None)
            made[0] = do()
        return found

    monkeypatch.setattr(ending, "actors_of", listed)
    return made


@pytest.mark.parametrize("num_nodes", [0, 1], ids=["of none", "of one"])
def test_a_restart_whose_supervisor_was_made_after_the_stop_ends_it(name, monkeypatch, node_ids, num_nodes):
    store, make, begun = kvstore.start("2MiB", name=name), changing.make_actor, []

    def stop_and_make(*args, **options):
        if not begun:
            end_actors(name)
            begun.append(actors_of(name))
        return make(*args, **options)

    monkeypatch.setattr(changing, "make_actor", stop_and_make)
    with pytest.raises(StoreNotRunning, match="was stopped while it was restarted"):
        store.restart(node_ids[:num_nodes], wait_s=0.0)
    assert begun == [[]]
    assert actors_of(name) == []


def test_a_stop_looks_again_for_the_supervisor_of_the_restart_that_it_interrupts(name, monkeypatch, eventually):
    """Even if the process of the restart is gone, and undoes nothing."""
    kvstore.start("2MiB", name=name)
    with one_restart(name, print) as check:
        of_restart = check()
        free_name(name, eventually)
        made = when_listed(monkeypatch, lambda: make_supervisor(name, of_restart))
        end_actors(name)
        assert made[0] is not None
        assert actors_of(name) == []


@pytest.mark.parametrize("of_restart", ["", "another one"], ids=["started", "restarted"])
def test_a_store_that_begins_during_the_stop_goes_on(name, monkeypatch, eventually, of_restart):
    kvstore.start("2MiB", name=name)
    with one_restart(name, print) as check:
        free_name(name, eventually)
        made = when_listed(monkeypatch, lambda: make_supervisor(name, of_restart))
        end_actors(name)
        with pytest.raises(StoreNotRunning, match="was stopped while it was restarted"):
            check()
    assert call("supervisor", made[0].config, timeout_s=20)["is_ending"] is False
    assert find_actor(actor_name(name, "supervisor")).config is not None


def test_what_nobody_leads_is_ended_but_not_while_a_restart_has_yet_to_make_the_supervisor(name, monkeypatch):
    make_holder(name)
    with one_restart(name, print):
        end_left(name, "", patience_s=0.5)
        assert actor_name(name, "handover", "n-1") in actors_of(name)
    end_left(name, "")
    assert actors_of(name) == []
    when_listed(monkeypatch, lambda: make_holder(name))
    end_actors(name)
    assert actors_of(name) == []


def test_a_restart_does_not_disturb_a_stop_that_is_ending_the_stores(name):
    with one_restart(name, print) as check:
        supervisor = make_supervisor(name, check())
        make_holder(name)
        own_id = check()
        ray.kill(find_actor(actor_name(name, "restart")))
        undo = threading.Thread(target=end_left, args=(name, own_id), kwargs={"spare_s": 5.0})
        undo.start()
        undo.join(2.5)
        assert call("supervisor", supervisor.config, timeout_s=20)["ends_stores"] is True
        assert actor_name(name, "handover", "n-1") in actors_of(name)
        undo.join(40)
        assert actors_of(name) == []


@pytest.mark.parametrize("is_new", [False, True], ids=["of the stopped store", "of a store that began since"])
def test_a_restart_that_waited_for_the_interrupted_one_makes_nothing(name, monkeypatch, eventually, is_new):
    kvstore.start("2MiB", name=name)
    checks, real = [], ending.end_left
    with contextlib.ExitStack() as running:

        def end_left_and_begin(*args):
            real(*args)
            if not checks:
                checks.append(running.enter_context(one_restart(name, print)))
                eventually(lambda: actor_name(name, "supervisor") not in actors_of(name), 20)
                make_supervisor(name, "" if is_new else checks[0]())

        monkeypatch.setattr(ending, "end_left", end_left_and_begin)
        end_actors(name)
        if is_new:
            assert checks[0]()
            assert actor_name(name, "supervisor") in actors_of(name)
        else:
            with pytest.raises(StoreNotRunning, match="was stopped while it was restarted"):
                checks[0]()
            assert actors_of(name) == []


def test_a_stop_does_not_wait_for_the_end_of_a_store_that_began_since(name, monkeypatch):
    kvstore.start("2MiB", name=name)
    real, made = ending.end_actors, []

    def end_and_start(name, *args):
        real(name, *args)
        made.append(make_supervisor(name, "since"))

    monkeypatch.setattr(ending, "end_actors", end_and_start)
    ending.end_store(name, lambda text: None)
    said = call("supervisor", find_actor(actor_name(name, "supervisor")).config, timeout_s=10.0)
    assert (len(made), said["of_restart"]) == (1, "since")

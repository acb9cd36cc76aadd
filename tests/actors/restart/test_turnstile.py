"""One restart of a store runs at a time; one that was killed stops no other."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest
import ray
from click.testing import CliRunner

import kvstore
from kvstore.actors.calls import actor_name, find_actor
from kvstore.actors.finding import actors_of
from kvstore.actors.restart import turnstile
from kvstore.actors.restart.turnstile import one_restart
from kvstore.cli import main
from kvstore.errors import StoreBusy, StoreNotRunning
from kvstore.runtime.threads.own_thread import on_thread

pytestmark = pytest.mark.ray


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(turnstile, "_ENDS_S", 0.5)


class Other:
    """A restart of another process."""

    def enter(self, name):
        from kvstore.actors.restart.turnstile import one_restart

        self.restart = one_restart(name, print)
        self.restart.__enter__()
        return os.getpid()

    def leave(self):
        self.restart.__exit__(None, None, None)


def test_a_second_restart_is_refused_and_changes_nothing_and_the_first_one_is_warm(
    ray_cluster, make_space, chain_of, node_ids, open_engine, eventually, impatient, get
):
    store, node, space, steps = kvstore.start("2MiB", name="busy"), node_ids[0], make_space("busy"), []
    try:
        engine, chain = open_engine(store, space, node), chain_of(space, 4)
        engine.save(chain)
        lease, results = engine.client.lease(chain, ttl_s=60.0), []

        def restart():
            results.append(store.restart([node], wait_s=30.0, on_step=lambda node_id, what: steps.append(what)))

        first = threading.Thread(target=restart, daemon=True)
        first.start()
        eventually(lambda: any("drains" in step for step in steps), 30)
        waits = []
        with pytest.raises(StoreBusy, match=rf"another restart of store 'busy' is running \(process {os.getpid()} on "):
            kvstore.connect("busy").restart(lease_ttl_s=7.0, on_step=lambda *step: waits.append(step))
        assert waits == [(min(node_ids), "waits for another restart of this store to end")]
        done = CliRunner().invoke(main, ["restart", "--name", "busy", "--json"])
        assert (done.exit_code, json.loads(done.stdout)["error"]) == (2, "StoreBusy")
        assert kvstore.connect("busy").config == store.config
        lease.release()
        first.join(60)
        assert (results[0][node]["is_warm"], results[0][node]["num_blocks"]) == (True, 4)
        assert open_engine(store, space, node).load(chain).num_local == 4
        assert not any("restart" in path for path in actors_of("busy")), "the name is free when a restart returns"
    finally:
        store.destroy()


def test_after_a_kill_of_the_first_the_second_runs_and_one_that_ends_is_waited_for(
    ray_cluster, impatient, monkeypatch, get
):
    other, said = ray.remote(num_cpus=0)(Other).remote(), []
    pid = get(other.enter.remote("killed"))
    with pytest.raises(StoreBusy, match=f"process {pid} on host"), one_restart("killed", said.append):
        pass
    os.kill(pid, signal.SIGKILL)
    began_s = time.monotonic()
    monkeypatch.setattr(turnstile, "_ENDS_S", 10.0)
    with one_restart("killed", said.append):
        assert actors_of("killed") == ["raykv/killed/restart"]
        assert time.monotonic() - began_s < 5.0
    assert actors_of("killed") == []
    other = ray.remote(num_cpus=0)(Other).remote()
    get(other.enter.remote("ends"))
    del said[:]
    threading.Timer(0.5, lambda: other.leave.remote()).start()
    with one_restart("ends", said.append):
        assert said == ["waits for another restart of this store to end"]
    assert actors_of("ends") == []


def test_a_restart_of_a_store_that_was_stopped_ends_and_touches_nothing_of_the_next_one(
    ray_cluster, node_ids, eventually
):
    store, steps, errors = kvstore.start("2MiB", name="stopped"), [], []

    def restart():
        try:
            store.restart(node_ids, wait_s=0.0, on_step=lambda node_id, what: (steps.append(what), gate.wait(60)))
        except StoreNotRunning as error:
            errors.append(error)

    gate, first = threading.Event(), threading.Thread(target=restart, daemon=True)
    first.start()
    eventually(lambda: steps, 30)
    kvstore.connect("stopped").destroy()
    other = kvstore.start("2MiB", name="stopped")
    try:
        before = [find_actor(actor_name("stopped", "node", node_id)) for node_id in node_ids]
        gate.set()
        first.join(60)
        assert "was stopped while it was restarted" in str(errors[0])
        assert [find_actor(actor_name("stopped", "node", node_id)) for node_id in node_ids] == before
    finally:
        other.destroy()


def test_an_interrupt_in_the_moment_when_the_name_is_given_leaves_no_name(
    ray_cluster, impatient, monkeypatch, eventually
):
    gate = threading.Event()
    monkeypatch.setattr(turnstile, "on_thread", lambda name, do: on_thread(name, lambda: (do(), gate.wait(30))[0]))
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), one_restart("interrupted", print):
        pass
    gate.set()
    eventually(lambda: actors_of("interrupted") == [], 10)


def test_without_an_answer_of_the_first_the_error_leaves_out_which_process_it_is(ray_cluster, impatient, monkeypatch):
    def silent(*args, **options):
        raise kvstore.KVStoreError("no answer")

    with one_restart("silent", print):
        monkeypatch.setattr(turnstile, "call", silent)
        with (
            pytest.raises(StoreBusy, match="'silent' is running; wait for its end, or end it, and run"),
            one_restart("silent", print),
        ):
            pass

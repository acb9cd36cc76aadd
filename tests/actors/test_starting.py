"""What a start waits for, without a cluster."""

from __future__ import annotations

import itertools
import time

import pytest
import ray

import kvstore
from kvstore.actors import starting
from kvstore.errors import (
    ConfigError,
    IncompatibleStore,
    PeerLost,
    RegistrationFailed,
    StoreUnavailable,
    TransferTimeout,
)


class Cluster:
    """A supervisor, and one node with a store; each question is answered by the next of its answers, or its last."""

    def __init__(self, **answers):
        self.asked = []
        self.answers = {"reconcile": [["n"]], "hopeless": [{}], "problems": [{}], "unfinished": [{}], "ready": [True]}
        self.answers |= {"join": [{}]}
        self.answers |= answers

    def __getattr__(self, what):
        def answer(*arguments):
            self.asked.append((what, *arguments))
            said = self.answers[what]
            found = said.pop(0) if len(said) > 1 else said[0]
            if isinstance(found, Exception):
                raise found
            return found

        return answer


def wait(monkeypatch, cluster, timeout_s=5.0, answered=(), nodes=("n",)):
    answered = iter(answered)
    monkeypatch.setattr(starting, "call", lambda what, method, *args, timeout_s: method(*args))
    monkeypatch.setattr(starting, "begin", lambda what, method: method)
    monkeypatch.setattr(starting, "is_answered", lambda what, method, timeout_s: next(answered, True))
    monkeypatch.setattr(starting, "answer", lambda what, method, timeout_s: method())
    monkeypatch.setattr(starting, "alive_nodes", lambda: {node: {} for node in nodes})
    monkeypatch.setattr(starting, "node_stores", lambda name: dict.fromkeys(nodes, cluster))
    monkeypatch.setattr(starting.ray, "is_initialized", lambda: True)
    starting._wait_ready("a", cluster, "own", time.monotonic() + timeout_s)


@pytest.mark.parametrize("question", ["reconcile", "hopeless", "ready"])
def test_an_answer_that_does_not_come_is_waited_for_until_the_deadline(monkeypatch, question):
    late = [TransferTimeout("no answer in time"), {"reconcile": ["n"], "hopeless": {}, "ready": True}[question]]
    wait(monkeypatch, Cluster(**{question: late}))


def test_a_node_whose_store_does_not_answer_now_is_waited_for(monkeypatch):
    wait(monkeypatch, Cluster(reconcile=[[], ["n"]], problems=[{"n": "does not answer its ping"}]))


def test_a_start_that_gives_up_says_once_what_to_do(monkeypatch):
    late = TransferTimeout("store: no answer in time: it hangs, or the machine is busy; try again")
    with pytest.raises(StoreUnavailable, match="or the machine is busy; try again when") as caught:
        wait(monkeypatch, Cluster(hopeless=[late]), 0.3)
    assert str(caught.value).count("try again") == 1
    with pytest.raises(StoreUnavailable) as caught:
        wait(monkeypatch, Cluster(hopeless=[late], problems=[late]), 0.3)
    assert str(caught.value).count("try again") == 1


def test_a_round_that_is_not_done_in_time_is_named(monkeypatch):
    with pytest.raises(StoreUnavailable, match="the supervisor looks after the nodes still; try again when"):
        wait(monkeypatch, Cluster(), 0.3, itertools.repeat(False))


def test_while_a_round_is_under_way_the_supervisor_hears_of_those_that_wait(monkeypatch):
    cluster = Cluster()
    wait(monkeypatch, cluster, 30.0, [False, False, True])
    assert cluster.asked[:4] == [("join", "own")] * 3 + [("reconcile",)]


def test_what_no_time_cures_is_final(monkeypatch):
    with pytest.raises(ConfigError, match=r"no node could start a store.*too little"):
        wait(monkeypatch, Cluster(reconcile=[[]], hopeless=[{"n": "too little memory"}]))


def test_a_mover_that_cannot_begin_says_why_at_once_and_a_lone_node_begins_without_it(monkeypatch, caplog):
    cannot = RegistrationFailed("could not start NIXL's UCX backend")
    wait(monkeypatch, Cluster(ready=[cannot]))
    assert "on its only node without a mover, which reads from others: could not start NIXL" in caplog.text
    with pytest.raises(RegistrationFailed, match=r"^node n has no mover, .*: could not start NIXL's UCX backend$"):
        wait(monkeypatch, Cluster(reconcile=[["n", "m"]], ready=[cannot]), 60.0, nodes=("n", "m"))


def test_a_supervisor_that_is_gone_is_looked_for_again(monkeypatch):
    with pytest.raises(PeerLost):
        wait(monkeypatch, Cluster(reconcile=[PeerLost("it died")]))


def test_at_the_deadline_it_is_said_what_is_missing(monkeypatch):
    with pytest.raises(StoreUnavailable, match=r"in time: node n: hangs; said no"):
        wait(monkeypatch, Cluster(reconcile=[StoreUnavailable("said no")], problems=[{"n": "hangs"}]), 0.3)
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="in time: of no use"):
        wait(monkeypatch, Cluster(reconcile=[[]], unfinished=[TransferTimeout("of no use")]), 0.3)
    assert time.monotonic() - began_s < 3


def failed(cause):
    """The error of a call that failed in Ray for a cause."""
    error = PeerLost("supervisor: away")
    error.__cause__ = cause
    return error


STOPPED, DEAD = ray.exceptions.ActorUnavailableError("away", None), ray.exceptions.ActorDiedError()


@pytest.mark.parametrize(
    ("tries", "said"),
    [
        ([TransferTimeout("late")], "did not answer in time: late; .*connect"),
        ([TransferTimeout("late"), failed(STOPPED)], "did not answer in time: supervisor: away; .*connect"),
        ([None, TransferTimeout("late")], "is being ended by another process"),
        ([None, failed(STOPPED)], "is being ended by another process"),
        ([failed(STOPPED), None], "goes away again and again"),
    ],
)
def test_a_supervisor_that_says_nothing_is_not_taken_for_an_ending_store(monkeypatch, tries, said):
    left = list(tries)

    def once(*args):
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(starting, "_start_once", once)
    monkeypatch.setattr(starting, "_give_up", lambda *args: None)
    config = starting.StoreConfig(capacity_bytes=1 << 20)
    with pytest.raises(StoreUnavailable, match=said):
        starting._start(config, time.monotonic() + 0.5, None)
    assert len(left) == 1, "it was tried until the time was up"


@pytest.mark.parametrize("cause", [STOPPED, DEAD])
def test_a_supervisor_that_ended_while_it_was_joined_is_looked_for_again(monkeypatch, cause):
    def fail(*args):
        raise failed(cause)

    monkeypatch.setattr(starting, "_find_supervisor", lambda *args: "a handle")
    monkeypatch.setattr(starting, "_join", fail)
    config = starting.StoreConfig(capacity_bytes=1 << 20)
    if cause is DEAD:
        assert starting._start_once(config, time.monotonic() + 5.0, None, "own") is None
        return
    with pytest.raises(PeerLost, match="away"):
        starting._start_once(config, time.monotonic() + 5.0, None, "own")


def test_a_supervisor_that_ended_while_it_was_made_is_made_again(monkeypatch):
    def none(*args):
        raise starting.StoreNotRunning("none")

    def fail(*args, **options):
        raise failed(ValueError("failed to look up the actor"))

    monkeypatch.setattr(starting, "_find_supervisor", none)
    monkeypatch.setattr(starting, "_check_room", lambda config: None)
    monkeypatch.setattr(starting, "make_actor", fail)
    config = starting.StoreConfig(capacity_bytes=1 << 20)
    assert starting._start_once(config, time.monotonic() + 5.0, None, "own") is None


def test_a_ray_that_cannot_be_reached_is_said_at_once(monkeypatch):
    def fail(*args):
        raise failed(OSError("the GCS is gone"))

    monkeypatch.setattr(starting, "_find_supervisor", fail)
    monkeypatch.setattr(starting, "_give_up", lambda *args: None)
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="away"):
        starting._start(starting.StoreConfig(capacity_bytes=1 << 20), began_s + 30.0, None)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("changes", [{"protocol": 1}, {"config": '{"of_a_later_version":1}'}])
def test_a_store_of_another_version_is_refused_with_both_versions(changes):
    running = {"protocol": starting.PROTOCOL_VERSION, "config": "{}", "version": "raykv 0.0.1", "host": "192.0.2.11"}
    said = rf"wanted a store of raykv {kvstore.__version__} .*, got one of raykv 0\.0\.1, .*192\.0\.2\.11.*install one"
    with pytest.raises(IncompatibleStore, match=said) as caught:
        starting.check_compatible(None, running | changes)
    assert ("got 'of_a_later_version', which is no setting" in str(caught.value)) == ("config" in changes)


def test_a_version_that_does_not_say_its_name_is_named_by_its_protocol():
    with pytest.raises(IncompatibleStore, match="got one of protocol 1; install"):
        starting.check_compatible(None, {"protocol": 1, "config": "{}"})


def test_a_node_whose_version_cannot_make_the_supervisor_is_no_store_that_ends(monkeypatch):
    def none(*args):
        raise starting.StoreNotRunning("none")

    def fail(*args, **options):
        text = "The actor died because of an error raised in its creation task, ... kvstore.errors.ConfigError: "
        raise PeerLost(f"{text}'new' is no setting of a store")

    monkeypatch.setattr(starting, "_find_supervisor", none)
    monkeypatch.setattr(starting, "_check_room", lambda config: None)
    monkeypatch.setattr(starting, "make_actor", fail)
    with pytest.raises(IncompatibleStore, match="refuses its settings: 'new' is no setting of a store; install one"):
        starting._start_once(starting.StoreConfig(capacity_bytes=1 << 20), time.monotonic() + 5.0, None, "own")


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_store_that_its_starter_ends_in_the_last_moment_is_none(monkeypatch, is_ending):
    def said(is_ending):
        return {"protocol": starting.PROTOCOL_VERSION, "config": "{}", "starter": "first", "is_ending": is_ending}

    cluster = Cluster(join=[said(False)], have=[said(is_ending)])
    monkeypatch.setattr(starting, "call", lambda what, method, *args, timeout_s: method(*args))
    monkeypatch.setattr(starting, "check_compatible", lambda config, running: config)
    monkeypatch.setattr(starting, "_wait_ready", lambda *args: None)
    monkeypatch.setattr(starting, "Store", lambda config, session, started_as: "a handle")
    config = starting.StoreConfig(capacity_bytes=1 << 20)
    found = starting._join(config, None, cluster, "own", time.monotonic() + 5.0)
    assert found == (None if is_ending else "a handle")

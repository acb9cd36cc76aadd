"""A restart that meets what another one is still making waits for it, and ends nothing. Without a cluster."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from kvstore.actors.restart import changing, rolling
from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError, PeerLost, StoreNotRunning, StoreUnavailable


@pytest.fixture
def turn(monkeypatch):
    """Makes the turn of a node; a wait takes no time but counts as a second. `turn.steps` is what it says."""
    now, steps = [0.0], []
    monkeypatch.setattr(rolling.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rolling.time, "sleep", lambda pause_s: now.__setitem__(0, now[0] + 1.0))
    made = rolling.Turn("name", "n", None, StoreConfig(), 1.0, steps.append, lambda: None)
    made.steps, made.now = steps, now
    return made


def find(monkeypatch, handles, pids):
    def find_actor(path):
        if (handle := handles.pop(0) if len(handles) > 1 else handles[0]) is None:
            raise StoreNotRunning("there is none")
        return handle

    monkeypatch.setattr(rolling, "find_actor", find_actor)
    monkeypatch.setattr(rolling, "constructor_pid", lambda handle: pids.pop(0) if len(pids) > 1 else pids[0])


def test_a_store_that_another_restart_is_making_is_waited_for(turn, monkeypatch):
    find(monkeypatch, ["store"], [0, 7, 7, 7, None])
    assert turn.find_old() == "store"
    assert turn.now == [4.0]
    assert turn.steps == ["waits for its store, which is being made"]


def test_after_one_that_could_not_be_made_the_node_has_none_or_the_next_one(turn, monkeypatch):
    find(monkeypatch, ["store", None], [7])
    assert turn.find_old() is None
    find(monkeypatch, ["store", "next"], [7, None])
    assert turn.find_old() == "next"


@pytest.mark.parametrize(("pid", "within_s"), [(7, rolling.SERVES_S), (0, rolling.PLACED_WITHIN_S)])
def test_one_that_is_never_made_is_not_waited_for_longer_than_any_other(turn, monkeypatch, pid, within_s):
    killed = []
    monkeypatch.setattr(rolling.ray, "kill", killed.append)
    monkeypatch.setattr(rolling, "ray_failures", contextlib.nullcontext)
    find(monkeypatch, ["store"], [pid])
    # One without a process has nothing to give: what is kept for it is the next one's.
    assert (turn.find_old(), killed) == (("store", []) if pid else (None, ["store"]))
    assert within_s < turn.now[0] < within_s + 3


@pytest.mark.parametrize("is_old", [False, True])
def test_a_supervisor_that_is_replaced_leaves_the_stores_that_it_makes_unless_it_cannot(monkeypatch, is_old):
    called = []
    supervisor = SimpleNamespace(stop="stop") if is_old else SimpleNamespace(stop="stop", give_way="give_way")
    monkeypatch.setattr(changing, "call", lambda what, method, *args, timeout_s: called.append(method))
    monkeypatch.setattr(changing, "stop_for", lambda what, handle, *args: called.append(handle.stop))
    changing.give_way(supervisor, "a restart makes another one")
    assert called == ["stop" if is_old else "give_way"]


@pytest.fixture
def given(monkeypatch):
    """Says how the giving ends after some calls of `undrain`."""

    def set_up(end, after=1):
        undrains = []
        old = SimpleNamespace(undrain="undrain", hand_over="hand_over")

        def answer(what, ref, timeout_s):
            if timeout_s > 0:
                raise KeyboardInterrupt
            if isinstance(end, Exception):
                raise end
            return end

        monkeypatch.setattr(rolling, "begin", lambda *args: "giving")
        monkeypatch.setattr(rolling, "is_answered", lambda what, ref, timeout_s: len(undrains) >= after)
        monkeypatch.setattr(rolling, "call", lambda what, method, timeout_s: undrains.append(method))
        monkeypatch.setattr(rolling, "answer", answer)
        return old, undrains

    return set_up


def test_a_node_whose_restart_is_interrupted_while_it_drains_serves_again(turn, given):
    old, undrains = given(rolling.StoreBusy("it was put back meanwhile"), after=3)
    with pytest.raises(KeyboardInterrupt):
        turn.give(old, "path")
    assert undrains == ["undrain"] * 3
    assert not turn.may_be_held, "its holder is ended"
    assert turn.steps == ["serves again with the settings that it had: the restart was interrupted"]


def test_a_node_that_a_person_puts_back_is_never_ended_for_that(turn, monkeypatch):
    asked = []

    def answer(what, ref, timeout_s):
        raise rolling.StoreBusy("wanted a drained node, got one that a person put back meanwhile; restart it again")

    monkeypatch.setattr(rolling, "begin", lambda what, method, where, wait_s: asked.append(wait_s))
    monkeypatch.setattr(rolling, "answer", answer)
    with pytest.raises(rolling.StoreBusy) as caught:
        turn.give(SimpleNamespace(hand_over="hand_over"), "path")
    assert (asked, turn.may_be_held) == ([1.0], False)
    assert "was not restarted, and its store serves on" in turn.outcome(caught.value)


@pytest.mark.parametrize(
    "end", [{"num_blocks": 4}, PeerLost("it ended"), KVStoreError("says nothing"), StoreUnavailable("being stopped")]
)
def test_what_may_have_been_given_before_an_interrupt_is_kept(turn, given, end):
    old, _ = given(end)
    with pytest.raises(KeyboardInterrupt):
        turn.give(old, "path")
    assert (turn.may_be_held, turn.steps) == (True, [])


def test_a_store_that_cannot_be_put_back_because_it_gives_is_waited_for_and_what_it_gave_is_kept(
    turn, given, monkeypatch
):
    old, undrains = given({"num_blocks": 4}, after=3)

    def refuse(what, method, timeout_s):
        undrains.append(method)
        raise StoreUnavailable("the store of node n is being stopped; make a new client")

    monkeypatch.setattr(rolling, "call", refuse)
    with pytest.raises(KeyboardInterrupt):
        turn.give(old, "path")
    assert (len(undrains), turn.may_be_held, turn.steps) == (3, True, [])


@pytest.mark.parametrize(
    ("gave", "has_memory", "ended"),
    [
        (rolling.StoreBusy("put back"), False, ["holder"]),
        (StoreUnavailable("being stopped: it gave to another call"), True, []),
        (StoreUnavailable("being stopped"), False, ["holder"]),
    ],
)
def test_after_a_failure_a_holder_is_ended_only_if_it_says_that_it_has_nothing(
    turn, monkeypatch, gave, has_memory, ended
):
    killed = []

    def fail(*_):
        raise gave

    old = SimpleNamespace(hand_over="hand_over", _actor_id="old")
    monkeypatch.setattr(turn, "find_old", lambda: old)
    monkeypatch.setattr(turn, "_next", fail)
    fakes = {
        "keep_longer": False, "check_node": None, "make_holder": ("holder", "path"), "begin": "giving",
        "tell_why": None, "has_nothing": not has_memory,
    }  # fmt: skip
    for name, value in fakes.items():
        monkeypatch.setattr(rolling, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(rolling, "answer", fail)
    monkeypatch.setattr(rolling, "end_holder", killed.append)
    with pytest.raises(StoreUnavailable):
        turn.run(cold=False)
    assert killed == ended

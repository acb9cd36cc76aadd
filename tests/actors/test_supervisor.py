"""The supervisor's rounds, without a cluster."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from kvstore.actors import supervisor as module
from kvstore.actors.supervisor import Supervisor
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, IncompatibleStore, PeerLost, TransferTimeout


class Idle(Supervisor):
    """Notes which nodes it saw to."""

    def __init__(self):
        super().__init__(StoreConfig(capacity_bytes=1 << 20).to_json(), watch=False)
        self.seen = []

    def _ensure_directory(self, number=0):
        self.seen.append("directory")

    def _ensure_node_store(self, node_id, resources):
        self.seen.append(node_id)
        if self.seen.count(node_id) == 1:
            raise SystemExit("of whoever raises that on a thread")


@pytest.fixture
def idle(monkeypatch):
    monkeypatch.setattr(module, "alive_nodes", lambda: {"n": {"memory": 1e12}})
    monkeypatch.setattr(module, "_ROUND_S", 5.0)
    return Idle()


def test_a_thread_that_cannot_be_started_is_tried_again_in_the_next_round(idle, monkeypatch):
    with monkeypatch.context() as patch:

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            idle.reconcile()
        assert "can't start new thread" in idle.problems()["n"]
    assert idle.seen == []
    idle.reconcile()
    assert sorted(idle.seen) == ["directory", "n"]


def test_each_shard_of_a_directory_is_seen_to_in_every_round(idle, monkeypatch):
    monkeypatch.setattr(idle, "_config", StoreConfig(capacity_bytes=1 << 20, num_directory_shards=3))
    seen = list[int]()
    monkeypatch.setattr(idle, "_ensure_directory", lambda number=0: seen.append(number))
    idle.reconcile()
    assert sorted(seen) == [0, 1, 2]

    def fail(number=0):
        if number == 2:
            raise PeerLost("shard 2 is gone")

    monkeypatch.setattr(idle, "_ensure_directory", fail)
    with pytest.raises(PeerLost, match="shard 2"):
        idle.reconcile()
    assert "n" in idle.seen, "nodes are seen to all the same"
    assert idle.unfinished() == {}


def test_whatever_ends_a_thread_the_node_is_seen_to_again(idle):
    assert idle.reconcile() == []
    assert "SystemExit" in repr(idle._running["n"].exception())
    assert idle.reconcile() == ["n"]


def test_why_a_node_has_no_store_is_one_line_for_each_reason(idle, monkeypatch, caplog):
    reasons = ["no memory", "no memory", "a folder of another user", None]

    def fail(node_id, resources):
        if reason := reasons.pop(0):
            raise ConfigError(reason)

    monkeypatch.setattr(idle, "_ensure_node_store", fail)
    while reasons:
        idle.reconcile()
    lines = [record.getMessage() for record in caplog.records if record.name == "kvstore.life"]
    said = [" ".join([line.split()[0], *line.partition(" store=")[2].split(" ", 1)]) for line in lines]
    assert said == [
        'event=node_without_store default node=n reason="no memory"',
        'event=node_without_store default node=n reason="a folder of another user"',
        "event=node_joined default node=n",
    ]


@pytest.fixture
def kept(monkeypatch):
    """Makes a supervisor of two nodes whose stores are in `alive`; "seen" is what its life lines say."""
    alive, nodes = {"n", "m"}, {"n": {"memory": 1e12}, "m": {"memory": 1e12}}
    monkeypatch.setattr(module, "alive_nodes", lambda: dict(nodes))
    monkeypatch.setattr(module, "NodeAffinitySchedulingStrategy", lambda node_id, soft: node_id)
    monkeypatch.setattr(module, "make_answering", lambda name, *arguments, **options: alive.add(name[-1]))
    made = Supervisor(StoreConfig(capacity_bytes=1 << 20).to_json(), watch=False)
    monkeypatch.setattr(made, "_ensure_directory", lambda number: None)
    monkeypatch.setattr(made, "_check_settings", lambda node_id, handle: None)
    monkeypatch.setattr(made, "_serving_actor", lambda name, *args, **options: name if name[-1] in alive else None)
    made.reconcile()
    return made, alive, nodes


def changes_in(caplog):
    lines = [record.getMessage() for record in caplog.records if record.name == "kvstore.life"]
    caplog.clear()
    return [" ".join((line.split()[0].partition("=")[2], line.partition(" node=")[2])) for line in lines]


def test_a_store_that_a_restart_ends_is_not_lost_but_the_next_one_is_if_it_ends(kept, caplog):
    supervisor, alive, _ = kept
    caplog.clear()
    supervisor.plan_end("n", 60.0)
    assert supervisor.hopeless() == {}
    supervisor.reconcile()  # It serves on until its end.
    alive.discard("n")
    supervisor.reconcile()
    assert changes_in(caplog) == ["node_joined n"]
    alive.discard("n")
    supervisor.reconcile()
    assert changes_in(caplog) == ['node_lost n reason="its store ended; another one is made"', "node_joined n"]


def test_an_end_later_than_planned_is_a_loss_for_a_restart_may_be_killed_before_it(kept, caplog):
    supervisor, alive, _ = kept
    supervisor.plan_end("n", 0.0)
    supervisor.plan_end("m", 60.0)
    caplog.clear()
    alive.difference_update({"n", "m"})
    supervisor.reconcile()
    lost = 'node_lost n reason="its store ended; another one is made"'
    assert changes_in(caplog) == [lost, "node_joined m", "node_joined n"]


def test_a_store_that_does_not_serve_while_a_restart_ends_it_is_not_lost_but_a_node_that_leaves_is(
    kept, caplog, monkeypatch
):
    supervisor, _, nodes = kept
    caplog.clear()
    supervisor.plan_end("n", 60.0)

    def is_silent(name, *args, **options):
        raise TransferTimeout("says nothing")

    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "_serving_actor", is_silent)
        supervisor.reconcile()
    said = [line for line in changes_in(caplog) if "without" not in line]
    assert said == ['node_lost m reason="says nothing"']
    supervisor.reconcile()
    assert changes_in(caplog) == ["node_joined m", "node_joined n"]
    del nodes["n"]
    supervisor.reconcile()
    assert changes_in(caplog) == ['node_lost n reason="left the cluster"']


def refuse(patch, supervisor, error):
    def check(node_id, handle):
        raise error

    patch.setattr(supervisor, "_check_settings", check)


def test_a_reason_whose_numbers_change_is_told_once_and_again_after_the_node_served(kept, caplog, monkeypatch):
    supervisor, _, _ = kept
    caplog.clear()
    for number in (123, 456.5, 7):
        with monkeypatch.context() as patch:
            refuse(patch, supervisor, ConfigError(f"wanted room, got {number} bytes"))
            supervisor.reconcile()
    told = [line for line in changes_in(caplog) if "without" in line]
    assert told == [f'node_without_store {node} reason="wanted room, got 123 bytes"' for node in "nm"]
    assert supervisor.problems()["n"] == "wanted room, got 7 bytes"
    supervisor.reconcile()
    refuse(monkeypatch, supervisor, ConfigError("wanted room, got 8 bytes"))
    caplog.clear()
    supervisor.reconcile()
    assert sum("without" in line for line in changes_in(caplog)) == 2


def test_nodes_that_wait_for_their_restart_are_no_warning_but_what_cannot_work_is(kept, caplog, monkeypatch):
    supervisor, _, _ = kept
    caplog.clear()
    supervisor.expect_restart(["n"], 60.0)
    for error in (IncompatibleStore("other settings"), TransferTimeout("says nothing")):
        refuse(monkeypatch, supervisor, error)
        supervisor.reconcile()
        assert {line.split()[1] for line in changes_in(caplog) if "without" in line} == {"m"}
    refuse(monkeypatch, supervisor, ConfigError("no such disk"))
    supervisor.reconcile()
    assert {line.split()[1] for line in changes_in(caplog) if "without" in line} == {"n", "m"}
    supervisor.expect_restart(["n"], 0.0)
    refuse(monkeypatch, supervisor, IncompatibleStore("other settings"))
    supervisor.reconcile()
    assert any("without_store n" in line for line in changes_in(caplog)), "the restart was killed"


def test_a_start_that_gives_up_and_the_end_of_a_supervisor_are_one_line_each(joined, caplog):
    shared = joined("first", "second")
    caplog.clear()
    with caplog.at_level("INFO", logger="kvstore.life"):
        for caller in ("first", "second"):
            shared.leave(caller)
        shared.stop()
        shared.stop("a restart makes another one")
    said = [record.getMessage().partition(" time=")[0] for record in caplog.records]
    assert said == ["event=start_gave_up"] * 2 + ["event=supervisor_stopped"] * 2
    ends = "ends_store=false", "ends_store=true", 'reason="stop was asked for"', 'reason="a restart makes another one"'
    assert all(record.getMessage().endswith(end) for record, end in zip(caplog.records, ends, strict=True))


def test_a_supervisor_that_is_stopped_in_a_round_calls_no_node_lost(kept, caplog, monkeypatch):
    supervisor, _, nodes = kept
    caplog.clear()

    def stopped():
        supervisor.stop()
        return dict(nodes)

    monkeypatch.setattr(module, "alive_nodes", stopped)
    assert supervisor.reconcile() == []
    assert [line.split()[0] for line in changes_in(caplog)] == ["supervisor_stopped"]


def test_all_that_ask_while_a_round_is_under_way_share_it(idle, monkeypatch):
    inside, go, rounds = threading.Event(), threading.Event(), []

    def nodes():
        rounds.append(1)
        inside.set()
        go.wait(10)
        return {}

    monkeypatch.setattr(module, "alive_nodes", nodes)
    served = []
    threads = [threading.Thread(target=lambda: served.append(idle.reconcile())) for _ in range(4)]
    threads[0].start()
    assert inside.wait(10)
    for thread in threads[1:]:
        thread.start()
    assert idle.config()["is_ending"] is False
    monkeypatch.setattr(module, "_SHARED_S", 0.1)
    with pytest.raises(TransferTimeout, match="a round is not done"):
        idle.reconcile()
    go.set()
    for thread in threads:
        thread.join(10)
    assert (served, len(rounds)) == ([[]] * 4, 1)
    idle.reconcile()
    assert len(rounds) == 2


@pytest.fixture
def joined(monkeypatch):
    """Makes supervisors that calls of `start` have joined, the starter "first"; `joined.now_s` is their time."""

    def make(*callers):
        made = Supervisor(StoreConfig(capacity_bytes=1 << 20).to_json(), "first", watch=False)
        assert [made.join(caller)["starter"] for caller in callers] == ["first"] * len(callers)
        return made

    make.now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: make.now_s)
    return make


def test_a_starter_that_fails_ends_the_store_only_if_no_other_call_wants_it(joined):
    alone = joined("first", "other")
    assert alone.leave("other") is False
    assert alone.leave("first") is True
    assert alone.join("late")["is_ending"] is True
    shared = joined("first", "second", "third")
    assert shared.leave("first") is False
    assert (shared.config()["starter"], shared.config()["is_ending"]) == ("second", False)
    assert shared.leave("third") is False
    assert shared.leave("second") is True


def test_a_store_is_left_to_none_that_was_killed_while_it_waited(joined):
    shared = joined("first", "killed", "third")
    joined.now_s += 8
    shared.join("first")
    shared.join("third")
    joined.now_s += 8
    assert shared.leave("first") is False
    assert shared.config()["starter"] == "third"
    assert shared.leave("third") is True


def test_the_last_that_fails_ends_the_store_of_a_starter_that_was_killed(joined):
    shared = joined("first", "second")
    joined.now_s += 11
    assert shared.join("third")["starter"] == "first"
    assert shared.leave("second") is False
    assert shared.config()["starter"] == "third"
    assert shared.leave("third") is True


def test_a_store_that_some_call_has_is_ended_by_none_that_fails(joined):
    shared = joined("first", "second")
    assert shared.have("first")["starter"] == "first"
    joined.now_s += 60
    assert shared.leave("second") is False
    assert shared.config()["is_ending"] is False
    late = joined("first", "second")
    late.have("second")
    assert late.leave("first") is False
    restarted = joined("second")  # By Ray: it has not heard of the starter, which has its handle.
    assert restarted.leave("second") is False


def test_of_calls_that_do_not_wait_nothing_is_kept(joined):
    busy = joined("first")
    busy.have("first")
    for number in range(50):
        busy.join(f"call {number}")
        if number % 2:
            busy.have(f"call {number}")
        joined.now_s += 1
    assert len(busy._heard_s) <= 10


def test_only_settings_that_cannot_work_leave_no_hope(idle, monkeypatch):
    errors = [PeerLost("suspended"), ConfigError("too little"), PeerLost("again")]

    def fail(node_id, resources):
        raise errors.pop(0)

    monkeypatch.setattr(idle, "_ensure_node_store", fail)
    seen = []
    for _ in range(3):
        assert idle.reconcile() == []
        seen.append((idle.problems(), idle.hopeless()))
    assert seen == [({"n": "suspended"}, {}), ({"n": "too little"}, {"n": "too little"}), ({"n": "again"}, {})]


@pytest.mark.parametrize("verb", ["stop", "give_way"])
def test_a_store_made_while_the_supervisor_stops_is_ended_unless_another_one_sees_to_it(kept, monkeypatch, verb):
    supervisor, alive, _ = kept
    alive.discard("n")
    ended = []

    def make(name, *args, **options):
        getattr(supervisor, verb)("why")
        return name

    monkeypatch.setattr(module, "_CALL_S", 0.1)
    monkeypatch.setattr(module, "make_answering", make)
    monkeypatch.setattr(module, "end_actor", lambda what, handle, reason, patience_s: ended.append((handle, reason)))
    assert supervisor.reconcile() == []
    # Not only killed: a store that began warm logs why it ended.
    assert ended == ([("raykv/default/node/n", "why")] if verb == "stop" else [])
    assert supervisor.config()["is_ending"] is True


def test_a_store_with_other_settings_ends_a_start_but_no_restart(kept, monkeypatch):
    supervisor, _, _ = kept
    refuse(monkeypatch, supervisor, IncompatibleStore("other settings"))
    supervisor.reconcile()
    assert supervisor.hopeless() == dict.fromkeys("nm", "other settings")
    assert supervisor.unworkable() == {}
    refuse(monkeypatch, supervisor, ConfigError("no such disk"))
    supervisor.reconcile()
    assert supervisor.unworkable() == dict.fromkeys("nm", "no such disk")


class Checks(Supervisor):
    def check(self, handle):
        self._check_settings("n", handle)


@pytest.mark.parametrize(
    ("is_of_restart", "says"),
    [(False, "left by one that is gone, with other settings"), (True, "runs with its old settings .*kvstore restart")],
)
def test_a_store_with_other_settings_is_called_old_only_after_a_restart(monkeypatch, is_of_restart, says):
    supervisor = Checks(StoreConfig(lease_ttl_s=7.0).to_json(), watch=False, of_restart="r" if is_of_restart else "")
    monkeypatch.setattr(module, "call", lambda *args, **options: StoreConfig().to_json())
    with pytest.raises(IncompatibleStore, match=rf"node n .*{says}"):
        supervisor.check(SimpleNamespace(_actor_id="store", settings=None))


def test_a_store_whose_settings_this_version_does_not_know_ends_no_restart(monkeypatch):
    supervisor = Checks(StoreConfig().to_json(), watch=False)
    monkeypatch.setattr(module, "call", lambda *args, **options: '{"of": "the future"}')
    with pytest.raises(IncompatibleStore, match="node n has a store of another version of raykv"):
        supervisor.check(SimpleNamespace(_actor_id="store", settings=None))

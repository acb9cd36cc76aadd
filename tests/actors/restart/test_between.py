"""A clearing while nodes are between two stores: their next stores ask the directory, so that has to know it."""

from __future__ import annotations

import pytest

from kvstore.actors import clearing
from kvstore.actors.clearing import clear_everywhere
from kvstore.errors import PeerLost, StoreUnavailable

SPACE = bytes(32)


class Handle:
    version = clear = hear_clearing = None


def answers(monkeypatch, between, **said):
    """Have the verbs answer so: an exception is one that a store or the directory raises."""

    def ask_all(methods, *args, timeout_s):
        verb = "ask" if len(args) == 1 else "clear"
        return {node: said[f"{verb}_{node.replace('/0', 'directory')}"] for node in methods}

    monkeypatch.setattr(clearing, "ask_all", ask_all)
    paths = ["raykv/default/node/a", *(f"raykv/default/handover/{node}-1" for node in between)]
    monkeypatch.setattr(clearing, "actors_of", lambda name: paths)


@pytest.mark.parametrize("verb", ["ask", "clear"])
def test_without_an_answer_of_the_directory_it_is_refused(monkeypatch, verb):
    said = {"ask_a": 0, "clear_a": 4, "ask_directory": 0, "clear_directory": True}
    said[f"{verb}_directory"] = PeerLost("away")
    answers(monkeypatch, ["b"], **said)
    with pytest.raises(StoreUnavailable, match="between two stores"):
        clear_everywhere(SPACE, {"a": Handle()}, Handle(), name="default")


def test_with_its_answer_it_holds_and_without_a_restart_its_answer_is_not_needed(monkeypatch):
    said = {"ask_a": 0, "clear_a": 4, "ask_directory": 0, "clear_directory": True}
    answers(monkeypatch, ["b"], **said)
    assert clear_everywhere(SPACE, {"a": Handle()}, Handle(), name="default") == 4
    answers(monkeypatch, [], **(said | {"ask_directory": PeerLost("away"), "clear_directory": PeerLost("away")}))
    assert clear_everywhere(SPACE, {"a": Handle()}, Handle(), name="default") == 4


def test_one_shard_that_knows_it_is_enough_because_the_next_store_asks_all(monkeypatch):
    said = {"ask_a": 0, "clear_a": 4, "ask_directory": PeerLost("away"), "clear_directory": PeerLost("away")}
    answers(monkeypatch, ["b"], **said, **{"ask_/1": 0, "clear_/1": True})
    assert clear_everywhere(SPACE, {"a": Handle()}, Handle(), Handle(), name="default") == 4

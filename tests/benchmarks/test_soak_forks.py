"""A forked child that is not refused is found, and so is one that dies of it."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

from kvstore.errors import InvalidRequest
from tests.soak.forks import use_in_child


def refuse(*args):
    raise InvalidRequest("wanted this process's own client, got its parent's")


def client_of(**verbs):
    names = ("lookup", "lease", "save", "load", "publish", "stats")
    return SimpleNamespace(client=SimpleNamespace(**{**dict.fromkeys(names, refuse), "close": lambda: None, **verbs}))


LEASE = SimpleNamespace(release=refuse, held=lambda: True)


def test_a_child_that_is_refused_everything_is_no_finding():
    assert use_in_child(client_of(), [b""], LEASE) == []


def test_what_is_not_refused_is_named():
    found = use_in_child(client_of(stats=lambda: 7, lookup=lambda run: 1 / 0), [b""], LEASE)
    assert found == ["lookup raised ZeroDivisionError: division by zero", "stats was not refused: 7"]


def test_a_child_that_dies_is_a_finding():
    found = use_in_child(client_of(lease=lambda run: os.kill(os.getpid(), signal.SIGKILL)), [b""], LEASE)
    assert found == ["it ended before it had said what was refused: ''"]

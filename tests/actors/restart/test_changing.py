"""Which settings a restart changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray import exceptions

from kvstore.actors.restart import changing
from kvstore.actors.restart.changing import changed, replace_supervisor
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, IncompatibleStore, PeerLost, StoreNotRunning, StoreUnavailable

SETTINGS = StoreConfig(capacity_bytes=1 << 20)


def test_sizes_are_given_as_to_start():
    assert changed(SETTINGS, {"capacity": "2MiB", "lease_ttl_s": 20.0}).capacity_bytes == 2 << 20


@pytest.mark.parametrize("changes", [{"name": "other"}, {"num_directory_shards": 2}, {"capacitance": 1}])
def test_what_a_restart_keeps_is_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        changed(SETTINGS, changes)
    assert changed(SETTINGS, {"name": "default", "num_directory_shards": 1}) == SETTINGS


OFF = (0.0, 0.0)


@pytest.mark.parametrize(
    ("runs_with", "changes", "found"),
    [
        (OFF, {"low_watermark": 0.1}, (0.1, 0.2)),
        (OFF, {"high_watermark": 0.1}, (0.05, 0.1)),
        (OFF, {"low_watermark": 0.0}, OFF),
        ((0.1, 0.2), {"low_watermark": 0.15}, (0.15, 0.2)),
        ((0.1, 0.2), {"low_watermark": 0.2}, (0.2, 0.2)),
        ((0.1, 0.2), {"high_watermark": 0.3}, (0.1, 0.3)),
        ((0.1, 0.2), {"high_watermark": 0.1}, (0.1, 0.1)),
        ((0.1, 0.2), {"low_watermark": 0}, OFF),
        ((0.1, 0.2), {"high_watermark": 0}, OFF),
        ((0.1, 0.2), {"low_watermark": 0.3, "high_watermark": 0.4}, (0.3, 0.4)),
        ((0.1, 0.3), {"low_watermark": None}, (0.15, 0.3)),
        ((0.1, 0.3), {"lease_ttl_s": 60.0}, (0.1, 0.3)),
    ],
)
def test_a_watermark_alone_keeps_the_other_one_or_has_it_chosen_where_there_is_none(runs_with, changes, found):
    running = StoreConfig(low_watermark=runs_with[0], high_watermark=runs_with[1])
    assert changed(running, changes).watermarks == found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"low_watermark": 0.25},
            "low_watermark: wanted 0 < low <= high with high_watermark=0.2, which the store runs with, got 0.25; "
            "change both, for example low_watermark=0.25 and high_watermark=0.5",
        ),
        (
            {"high_watermark": 0.08},
            "high_watermark: wanted 0 < low <= high with low_watermark=0.1, which the store runs with, got 0.08; "
            "change both, for example low_watermark=0.04 and high_watermark=0.08",
        ),
        ({"low_watermark": 0.7}, "wanted both 0, or 0 < low <= high <= 0.5, got 0.7 and 0.2"),
        ({"low_watermark": "much"}, "low_watermark: wanted a number, got 'much'"),
        ({"low_watermark": 0.3, "high_watermark": 0.2}, "wanted both 0, or 0 < low"),
    ],
)
def test_a_watermark_that_does_not_fit_the_running_one_says_what_to_give(changes, says):
    with pytest.raises(ConfigError) as caught:
        changed(StoreConfig(low_watermark=0.1, high_watermark=0.2), changes)
    assert says in str(caught.value)


def test_writing_back_turns_the_loop_on_where_it_was_off():
    disk = {"disk_path": "/d", "disk_capacity_bytes": 1 << 30}
    assert changed(StoreConfig(**disk), {"disk_write": "back"}).watermarks == (0.05, 0.1)
    running = StoreConfig(**disk, low_watermark=0.2, high_watermark=0.3)
    assert changed(running, {"disk_write": "back"}).watermarks == (0.2, 0.3)
    with pytest.raises(ConfigError, match="disk_write='back'"):
        changed(StoreConfig(**disk), {"disk_write": "back", "low_watermark": 0, "high_watermark": 0})


@pytest.mark.parametrize(
    ("cause", "error", "says"),
    [
        (exceptions.ActorDiedError(), StoreUnavailable, "another call changes the settings of store 's', or ends it"),
        (exceptions.ActorUnavailableError("away", None), PeerLost, "the supervisor is away"),
    ],
)
def test_a_supervisor_that_another_restart_ends_just_now_is_not_called_lost(monkeypatch, cause, error, says):
    def running(name, path):
        raise PeerLost("the supervisor is away") from cause

    monkeypatch.setattr(changing, "_running", running)
    with pytest.raises(error, match=says):
        replace_supervisor("s", {})


@pytest.mark.parametrize("ends_stores", [True, False])
def test_a_store_that_is_being_stopped_gets_no_other_supervisor(monkeypatch, ends_stores):
    """But one whose supervisor gave way to a restart that was killed then does."""
    said = {"protocol": 0, "config": "{}", "starter": "", "is_ending": True, "ends_stores": ends_stores}
    monkeypatch.setattr(changing, "find_actor", lambda path: SimpleNamespace(config=None))
    monkeypatch.setattr(changing, "call", lambda *args, **options: said)
    wanted = (StoreNotRunning, "is being stopped") if ends_stores else (IncompatibleStore, "of protocol")
    with pytest.raises(wanted[0], match=wanted[1]):
        replace_supervisor("s", {})

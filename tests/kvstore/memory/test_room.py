"""Room for a store: limits of the machine and of cgroups, and what Ray's memory monitor wants free."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.memory import room

GIB = 1 << 30
OFF = {"RAY_memory_monitor_refresh_ms": "0"}


def no_variables(monkeypatch) -> None:
    for name in ("memory_usage_threshold", "min_memory_free_bytes", "memory_monitor_refresh_ms"):
        monkeypatch.delenv(f"RAY_{name}", raising=False)


@pytest.mark.parametrize(
    ("environment", "kept_bytes", "kept_by"),
    [
        ({}, 5, "RAY_memory_usage_threshold=0.95"),
        ({"RAY_memory_usage_threshold": "0.5"}, 50, "RAY_memory_usage_threshold=0.5"),
        ({"RAY_memory_usage_threshold": "1"}, 0, "RAY_memory_usage_threshold=1"),
        ({"RAY_min_memory_free_bytes": "3"}, 3, "RAY_min_memory_free_bytes=3"),
        ({"RAY_min_memory_free_bytes": "0"}, 0, "RAY_min_memory_free_bytes=0"),
        # Of both limits of what is used, the higher one counts.
        ({"RAY_min_memory_free_bytes": "30"}, 5, "RAY_memory_usage_threshold=0.95"),
        ({"RAY_min_memory_free_bytes": "-1"}, 5, "RAY_memory_usage_threshold=0.95"),
        ({"RAY_memory_usage_threshold": "none"}, 5, "RAY_memory_usage_threshold=0.95"),
        ({"RAY_memory_usage_threshold": "0.5", **OFF}, 0, ""),
    ],
)
def test_what_rays_monitor_wants_free(environment, kept_bytes, kept_by):
    assert room.ray_kept_bytes(environment, 100) == (kept_bytes, kept_by)


@pytest.fixture
def group(monkeypatch, tmp_path):
    """The only cgroup, which is the outermost one: function that sets its limit and use."""

    def limit(most: int | str, used: int) -> None:
        (tmp_path / "memory.max").write_text(f"{most}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")

    no_variables(monkeypatch)
    monkeypatch.setattr(room, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(room, "_cgroup_folders", lambda: [tmp_path / "missing", tmp_path])
    return limit


def test_limits_of_cgroups_count(group, tmp_path):
    group(1000, 400)
    found = room.find_room()
    assert (found.free_bytes, found.source) == (600, f"cgroup limit {tmp_path / 'memory.max'}")
    group(1000, 1400)
    assert room.find_room().free_bytes == 0
    (tmp_path / "memory.stat").write_text("anon 900\ninactive_file 300\nactive_file 200\n")
    assert room.find_room().free_bytes == 100, "pages of files go when memory is wanted"
    (tmp_path / "memory.stat").write_text("inactive_file 3\ntotal_inactive_file 450\ntotal_active_file 200\n")
    assert room.find_room().free_bytes == 250
    group("max", 1400)
    assert room.find_room().source == "free memory of this machine"


def test_ray_keeps_a_share_of_what_it_watches(group, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.75")
    group(1000, 400)
    found = room.find_room()
    assert (found.kept_bytes, found.room_bytes) == (250, 350)
    group("max", 400)
    found = room.find_room()
    assert found.room_bytes == found.free_bytes - found.kept_bytes
    assert found.kept_bytes > 1 << 20
    # Of a machine, or its outermost group, and not of a group within.
    group(1000, 400)
    monkeypatch.setattr(room, "_CGROUP_ROOT", tmp_path / "elsewhere")
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.9999")
    assert room.find_room() == room.Room(600, f"cgroup limit {tmp_path / 'memory.max'}")


def test_the_error_says_what_is_kept_free_and_why(monkeypatch):
    monkeypatch.setattr(room, "find_room", lambda _: room.Room(4 * GIB, "a limit", GIB, "RAY_some_variable=1"))
    room.check_room(3 * GIB)
    room.check_room(4 * GIB, freed_bytes=GIB)
    with pytest.raises(ConfigError) as caught:
        room.check_room(3 * GIB + 1)
    assert str(caught.value) == (
        f"wanted {3 * GIB + 1} bytes of memory for the capacity, got {4 * GIB} bytes that are free (a limit); {GIB} of "
        "them stay free, or Ray ends processes of this node (RAY_some_variable=1); lower capacity= or free memory"
    )


def test_a_store_needs_room_for_its_capacity_and_nothing_more(monkeypatch):
    monkeypatch.setattr(room, "find_room", lambda _: room.Room(GIB, "a limit"))
    room.check_room(GIB)
    with pytest.raises(
        ConfigError, match=f"wanted {GIB + 1} bytes .*, got {GIB} bytes that are free \\(a limit\\); lower"
    ):
        room.check_room(GIB + 1)


def test_a_small_store_starts_also_near_the_threshold_of_ray(group, monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.5")
    group(4 * GIB, 3 * GIB)
    assert room.find_room().room_bytes == 0
    room.check_room(4 << 20)
    room.check_room(256 << 20)
    with pytest.raises(ConfigError, match=f"; {2 * GIB} of them stay free, or Ray ends .*usage_threshold=0.5"):
        room.check_room(257 << 20)
    group(4 * GIB, 4 * GIB - (3 << 20))
    with pytest.raises(ConfigError, match=f"wanted {4 << 20} bytes .*, got {3 << 20} bytes"):
        room.check_room(4 << 20)

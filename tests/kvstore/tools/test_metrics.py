"""From two statistics of a node store to samples: what grew, and what is."""

from __future__ import annotations

import copy

import pytest

from kvstore.config import StoreConfig
from kvstore.errors import PeerLost
from kvstore.node.core import NodeCore
from kvstore.remote.peers import PeerAddress
from kvstore.tools.metrics import METRICS, samples


@pytest.fixture(scope="module")
def stats(tmp_path_factory):
    """Those of a store with a disk tier and watermarks, so with all parts."""

    def nobody(*_: object) -> PeerAddress:
        raise PeerLost("no others")

    path, patch = tmp_path_factory.mktemp("metrics"), pytest.MonkeyPatch()
    patch.setenv("RAYKV_SOCKET_DIR", str(path / "s"))
    disk = {"disk_path": str(path / "kv"), "disk_capacity_bytes": 1 << 20}
    config = StoreConfig(capacity_bytes=1 << 18, low_watermark=0.1, tenants={"team-a": {}}, **disk)
    core = NodeCore("n", config, "127.0.0.1", nobody, nobody)
    try:
        core.state.pool_service.attach(bytes(32), 4096)
        core.state.disk.wait_begun({})
        yield core.counts()
    finally:
        core.stop()
        patch.undo()


def found(before, after):
    """All samples by name and by the values of their tags."""
    return {(each.metric.name, *each.tags.values()): each.value for each in samples(before, after)}


def test_a_store_that_did_nothing_has_gauges_and_no_counters(stats):
    gauges = {sample.metric.name for sample in samples(None, stats)}
    assert gauges == {metric.name for metric in METRICS if not metric.is_counter}


def test_every_counter_is_told_by_its_growth(stats):
    before, after = copy.deepcopy(stats), copy.deepcopy(stats)
    before["traffic"]["hit_blocks"] |= {"memory": 5, "disk": 1}
    after["traffic"]["hit_blocks"] |= {"memory": 7, "disk": 1, "peer": 4}
    before["traffic"]["miss_blocks"]["load"] = {"not_found": 1}
    after["traffic"]["miss_blocks"]["load"] = {"not_found": 3, "timeout": 2}
    after["traffic"]["miss_blocks"]["handoff"] = {"used": 8}
    after["pool"]["num_evicted"], after["reclaim"]["num_evicted"] = 6, 2
    after["disk"]["dropped"] = {"queue": 9}
    after["ports"]["num_malformed"] = 1
    after["tenants"]["team-a"] |= {"num_refused_pins": 5, "num_evicted": 4, "num_evicted_by_quota": 3}
    told = found(before, after)
    assert {key: value for key, value in told.items() if key not in found(None, stats)} == {
        ("raykv_hit_blocks", "memory"): 2,
        ("raykv_hit_blocks", "peer"): 4,
        ("raykv_miss_blocks", "load", "not_found"): 2,
        ("raykv_miss_blocks", "load", "timeout"): 2,
        ("raykv_miss_blocks", "handoff", "used"): 8,
        ("raykv_evicted_blocks",): 6,
        ("raykv_evicted_ahead_blocks",): 2,
        ("raykv_disk_dropped_blocks", "queue"): 9,
        ("raykv_socket_failures", "malformed"): 1,
        ("raykv_tenant_refused", "team-a", "pins"): 5,
        ("raykv_tenant_evicted_blocks", "team-a", "all"): 4,
        ("raykv_tenant_evicted_blocks", "team-a", "quota"): 3,
    }


def test_nothing_is_told_twice(stats):
    after = copy.deepcopy(stats)
    after["traffic"]["in_bytes"]["save"] = 100
    assert found(stats, after)["raykv_in_bytes", "save"] == 100
    assert ("raykv_in_bytes", "save") not in found(after, after)


def test_another_life_of_the_store_begins_at_zero(stats):
    before, after = copy.deepcopy(stats), copy.deepcopy(stats)
    before["traffic"]["in_bytes"]["save"], after["traffic"]["in_bytes"]["save"] = 100, 30
    assert found(before, after)["raykv_in_bytes", "save"] == 30  # A part of the store was replaced.
    after["epoch"], after["traffic"]["in_bytes"]["save"] = "ab", 130
    assert found(before, after)["raykv_in_bytes", "save"] == 130


def test_gauges_are_what_the_statistics_say(stats):
    after = copy.deepcopy(stats)
    after["pool"] |= {"num_free": 40, "num_pinned": 3}
    after["pins"]["lease"] = {"num": 2, "oldest_s": 7.5}
    after["disk"] |= {"num_unwritten": 11, "is_off": True}
    after["mover_pid"] = 17
    after["tenants"]["team-a"] |= {"num_bytes": 8192, "num_pinned_bytes": 4096, "num_handoffs": 2}
    told = found(None, after)
    assert told["raykv_slots", "memory", "free"] == 40
    assert told["raykv_slots", "disk", "free"] == stats["disk"]["pool"]["num_free"]
    assert told["raykv_slot_bytes", "memory"] == stats["pool"]["num_slots"] * 4096
    assert told["raykv_pinned_bytes",] == 3 * 4096
    assert told["raykv_pins", "lease"] == 2
    assert told["raykv_oldest_pin_s", "lease"] == 7.5
    assert told["raykv_queued", "disk"] == 11
    assert [told["raykv_tenant_bytes", "team-a", kind] for kind in ("memory", "pinned", "disk")] == [8192, 4096, 0]
    assert told["raykv_tenant_handoffs", "team-a"] == 2
    assert told["raykv_disk_off",] == told["raykv_mover_runs",] == 1


def test_a_store_without_clients_disk_and_watermarks_has_what_there_is(stats):
    bare = copy.deepcopy(stats) | {"pool": None, "disk": None, "reclaim": None, "slot_bytes": 0}
    names = {sample.metric.name for sample in samples(None, bare)}
    assert "raykv_pinned_bytes" in names
    assert not {"raykv_slots", "raykv_slot_bytes", "raykv_disk_off"} & names


def test_names_and_tags_are_those_of_one_store_and_few():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    tags = {tag for metric in METRICS for tag in metric.tags}
    assert tags == {"tier", "reason", "path", "state", "kind", "queue", "tenant", "quota"}

"""A node store's counts as Ray's metrics: Prometheus is told what the statistics say, and failures cost only counts."""

from __future__ import annotations

import threading
import urllib.request

import pytest

import kvstore
from kvstore.actors.metrics import Flusher
from kvstore.tools.metrics import METRICS, samples

#: What Prometheus calls a metric.
BY_NAME = {f"ray_{metric.name}{'_total' if metric.is_counter else ''}": metric for metric in METRICS}
#: Gauges that change while nothing is done.
MOVING = {"raykv_oldest_pin_s"}


@pytest.fixture
def counts():
    """Counts of a store with nothing but some saved bytes."""
    traffic = {name: {} for name in ("hit_blocks", "miss_blocks", "stored_blocks", "out_bytes")}
    return {
        "epoch": "e", "mover_pid": 1, "slot_bytes": 0, "draining": False, "pool": None, "disk": None, "reclaim": None,
        "pins": {}, "queues": {}, "ports": {}, "num_abandoned_reads": 0, "num_fenced_movers": 0, "num_handoffs": 0,
        "num_handoff_slots": 0, "num_handoff_fetches": 0, "traffic": {**traffic, "in_bytes": {"save": 0}},
    }  # fmt: skip


class Recorders:
    """Stands for Ray's metrics: what was recorded, by name; one name may fail."""

    def __init__(self):
        self.told, self.failing = [], ""

    def make(self):
        return {metric.name: self.recorder(metric.name) for metric in METRICS}

    def recorder(self, name):
        def record(value, tags):
            if name == self.failing:
                raise RuntimeError("no such metric")
            self.told.append((name, tags, value))

        return record

    def of(self, name):
        return [(tags, value) for told, tags, value in self.told if told == name]


def test_a_counter_is_told_its_growth_with_node_and_store(counts):
    recorders, saved = Recorders(), counts["traffic"]["in_bytes"]
    flusher = Flusher(
        "n", "s", lambda: {**counts, "traffic": {**counts["traffic"], "in_bytes": dict(saved)}}, recorders.make
    )
    for saved["save"] in (10, 10, 25):
        flusher.flush()
    tags = {"node": "n", "store": "s", "path": "save"}
    assert recorders.of("raykv_in_bytes") == [(tags, 10), (tags, 15)]
    assert [value for _, value in recorders.of("raykv_mover_runs")] == [1, 1, 1]


def test_what_a_failure_lost_is_not_told_twice(counts):
    recorders, saved = Recorders(), counts["traffic"]["in_bytes"]
    flusher = Flusher(
        "n", "s", lambda: {**counts, "traffic": {**counts["traffic"], "in_bytes": dict(saved)}}, recorders.make
    )
    recorders.failing, saved["save"] = "raykv_mover_runs", 10
    with pytest.raises(RuntimeError):
        flusher.flush()
    recorders.failing, saved["save"] = "", 15
    flusher.flush()
    assert [value for _, value in recorders.of("raykv_in_bytes")] == [10, 5]


@pytest.mark.parametrize("fails", ["counts", "make", "record"])
def test_a_flush_that_fails_is_tried_again_and_the_thread_ends_when_it_should(counts, fails, caplog):
    recorders, tries, went_on = Recorders(), [], threading.Event()

    def tried(what, value):
        tries.append(what)
        if what == fails and tries.count(what) < 3:
            raise RuntimeError("not yet")
        if tries.count("record" if fails == "record" else fails) >= 3:
            went_on.set()
        return value

    def make():
        made = tried("make", recorders.make())
        return {**made, "raykv_draining": lambda value, tags: tried("record", None)}

    flusher = Flusher("n", "s", lambda: tried("counts", counts), make, every_s=0.005)
    flusher.start()
    try:
        assert went_on.wait(10)
    finally:
        assert flusher.stop(10)
    assert "the flush of metrics failed, and is tried again" in caplog.text


def test_one_that_was_never_started_can_be_stopped(counts):
    assert Flusher("n", "s", lambda: counts, Recorders().make).stop()


def scraped(store_name):
    """What the metrics ports of all nodes say of one store, by name and values of tags, summed over processes."""
    import ray
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for node in [node for node in ray.nodes() if node["Alive"]]:
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        for sample in [sample for family in families for sample in family.samples]:
            metric = BY_NAME.get(sample.name)
            if metric is not None and metric.name not in MOVING and sample.labels["store"] == store_name:
                key = (metric.name, sample.labels["node"], *(sample.labels[tag] for tag in metric.tags))
                found[key] = found.get(key, 0) + sample.value
    return found


def truth(store):
    """What the statistics of all nodes say, in the same form."""
    return {
        (sample.metric.name, node, *sample.tags.values()): sample.value
        for node, stats in store.stats()["nodes"].items()
        for sample in samples(None, stats)
        if sample.metric.name not in MOVING
    }


@pytest.fixture
def store(ray_cluster, tmp_path):
    disk = {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 20}
    started = kvstore.start("1MiB", name="measured", low_watermark=0.1, **disk)
    yield started
    started.stop()


@pytest.mark.ray
def test_prometheus_is_told_what_the_statistics_say(store, node_ids, open_engine, make_space, chain_of, eventually):
    space = make_space()
    here, there = (open_engine(store, space, node) for node in node_ids)
    for seed in range(12):  # More than the memory of a node holds.
        here.save(chain_of(space, 16, seed))
    hashes = chain_of(space, 16, 11)
    assert here.load(hashes).num_local == 16
    assert there.load(hashes).num_peer == 16
    here.load(chain_of(space, 16, 0))  # From the disk, as far as it was written.
    assert there.load(chain_of(space, 5, 99)).num_blocks == 0
    ticket = here.publish(hashes[:4], [0, 1, 2, 3])
    assert there.fetch(ticket, hashes[:4], [0, 1, 2, 3]).num_blocks == 4
    with here.client.lease(hashes[:3]):
        # Ray's processes report every 10 s.
        told = eventually(lambda: (wanted := truth(store)) == scraped("measured") and wanted, 60, 0.5)
    first, second = node_ids
    block_bytes = space.shape.block_bytes
    assert told["raykv_in_bytes", first, "save"] == 12 * 16 * block_bytes
    assert told["raykv_in_bytes", second, "peer"] == told["raykv_out_bytes", first, "peer"] == 16 * block_bytes
    assert told["raykv_in_bytes", second, "handoff"] == told["raykv_out_bytes", first, "handoff"] == 4 * block_bytes
    assert told["raykv_hit_blocks", second, "peer"] == 16
    assert told["raykv_miss_blocks", second, "load", "not_found"] == 5
    assert told["raykv_evicted_blocks", first] > 0
    assert told["raykv_disk_written_blocks", first] > 0
    assert told["raykv_pins", first, "lease"] == 1

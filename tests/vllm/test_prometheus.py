"""The connector's counts on vLLM's own /metrics: with vLLM's classes, and of a real engine, equal to what was done."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
from asking import cached, fail_load_of, one_by_one

LABELS = {"model_name": "m", "engine": "0"}
TOKEN_BYTES = 4096


def values_of(text):
    """{(name, its own labels by their names): value} of the connector's metrics, by a real parser."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {name: sample.labels[name] for name in sorted(sample.labels.keys() - {"model_name", "engine"})}
            if sample.name.startswith("vllm:raykv_") and not sample.name.endswith("_created"):
                found[sample.name.removeprefix("vllm:raykv_"), *own.values()] = sample.value
    return found


@pytest.fixture
def stats_of(monkeypatch):
    """Makes a worker's stats, which give up what they have at each question."""
    from kvstore.integrations.vllm import stats

    monkeypatch.setattr(stats, "_INTERVAL_S", 0.0)
    return stats.Stats


@pytest.fixture
def transfer():
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="RaykvConnector", kv_connector_module_path="kvstore.integrations.vllm", kv_role="kv_both"
    )


@pytest.fixture
def prom(transfer):
    """vLLM's own object, with a registry for itself; and what that shows."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    registry = CollectorRegistry()

    class Prom(KVConnectorProm):
        _gauge_cls, _counter_cls, _histogram_cls = (
            staticmethod(functools.partial(each, registry=registry)) for each in (Gauge, Counter, Histogram)
        )

    made = Prom(SimpleNamespace(kv_transfer_config=transfer), list(LABELS), {0: list(LABELS.values()), 1: ["m", "1"]})
    return SimpleNamespace(
        observe=made.observe, text=lambda: generate_latest(registry).decode(), metrics=made.prom_metrics
    )


def test_vllm_makes_the_connectors_metrics_and_all_have_vllms_labels(prom, stats_of):
    worker = stats_of()
    worker.count("num_loaded_disk_blocks", 4)
    worker.count("num_saved_blocks", 2)
    prom.observe(worker.take().data, 1)
    assert type(prom.metrics).__name__ == "RaykvPromMetrics"
    lines = [line for line in prom.text().splitlines() if line.startswith("vllm:raykv_") and "_created" not in line]
    assert 'vllm:raykv_loaded_blocks_total{engine="1",model_name="m",tier="disk"} 4.0' in lines
    assert all('engine="1"' in line and 'model_name="m"' in line for line in lines)


def test_ranks_and_the_scheduler_are_added_up_and_an_interval_is_told_once(prom, stats_of):
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    workers, scheduler = [stats_of(), stats_of()], stats_of()
    for round_number in range(3):
        outputs = []
        for rank, worker in enumerate(workers):
            if not (round_number and rank):  # Later only one has news.
                worker.count("num_loaded_local_blocks", 10 + rank)
                worker.time("load", 0.02)
            scheduler.time("lookup", 0.001)
            output = ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])
            output.kv_connector_output = KVConnectorOutput(kv_connector_stats=worker.take())
            outputs.append(output)
        whole = KVOutputAggregator(expected_finished_count=2).aggregate(outputs).kv_connector_output.kv_connector_stats
        whole = whole.aggregate(scheduler.take())
        prom.observe(json.loads(json.dumps(whole.data)))  # It goes to another process.
    found = values_of(prom.text())
    assert found["loaded_blocks_total", "memory"] == 10 + 11 + 10 + 10
    assert found["load_seconds_count",] == 4
    assert found["lookup_seconds_count",] == 6
    assert workers[0].take() is None


def test_times_have_their_number_and_sum_and_lie_in_the_right_buckets(prom, stats_of):
    worker = stats_of()
    seconds = [0.0004, 0.003, 0.003, 0.07, 0.9, 100.0]
    for each in seconds:
        worker.time("save", each)
    prom.observe(worker.take().data)
    found = values_of(prom.text())
    assert found["save_seconds_count",] == len(seconds)
    assert found["save_seconds_sum",] == pytest.approx(sum(seconds))
    ends = ("0.0005", "0.0025", "0.005", "0.1", "1.0", "30.0", "+Inf")
    assert [found["save_seconds_bucket", end] for end in ends] == [1, 1, 3, 4, 5, 5, 6]


def test_failures_are_counted_by_what_failed_and_why(prom, stats_of):
    worker = stats_of()
    for name in ("loads_timeout", "loads_timeout", "fetches_used", "saves_PeerLost", "publications_PoolExhausted"):
        worker.count(f"num_failed_{name}")
        worker.count(f"num_failed_{name.partition('_')[0]}")
    worker.count("num_lookup_errors")
    worker.count("num_unknown_to_prometheus")
    prom.observe(worker.take().data)
    found = {key[1:]: value for key, value in values_of(prom.text()).items() if key[0] == "failures_total"}
    assert found == {
        ("timeout", "load"): 2, ("used", "fetch"): 1, ("PeerLost", "save"): 1, ("PoolExhausted", "publish"): 1,
        ("error", "lookup"): 1,
    }  # fmt: skip


def test_vllms_log_has_an_interval_and_forgets_it(transfer, stats_of):
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    log, lines, worker = KVConnectorLogging(transfer), [], stats_of()
    for _ in range(2):
        worker.count("num_saved_blocks", 3)
        log.observe(worker.take().data)
    for _ in range(2):
        log.log(lambda text, *values: lines.append(text % values))
    assert lines == ["KV Transfer metrics: num_saved_blocks=6"]


def test_an_engines_metrics_are_what_was_done(start_engine, model, connector, prompt_of, unit, eventually):
    engines = [start_engine(model, block_size=unit, connector=connector(node)) for node in (0, 1)]
    first, second = (engine.wait_started() for engine in engines)
    prompts = [(f"p{number}", prompt_of(size * unit + 3, 900 + number), {}) for number, size in enumerate((3, 5))]
    answers = one_by_one(first, prompts)
    assert cached(answers) == [0, 0]
    assert first.reset()
    assert cached(one_by_one(first, prompts)) == [3 * unit, 5 * unit]
    assert cached(one_by_one(second, prompts)) == [3 * unit, 5 * unit]
    assert first.reset()
    fail_load_of(0, first, prompts[0][1])

    def told(engine, name, *labels):
        """What the engine tells now: with the next step, and half a second after the last time."""
        engine.run([("tick", prompt_of(2, 7), {})], max_tokens=1)
        return values_of(engine.metrics()).get((name, *labels), 0)

    eventually(lambda: told(first, "failures_total", "store_lost", "load") == 1, 30)
    eventually(lambda: told(second, "loaded_blocks_total", "peer") == 8, 30)
    block_bytes, found = unit * TOKEN_BYTES, values_of(first.metrics())
    assert found["saved_blocks_total",] == found["loaded_blocks_total", "memory"] == 8
    assert found["saved_bytes_total",] == found["loaded_bytes_total", "memory"] == 8 * block_bytes
    assert found["load_seconds_count",] == 2
    assert found["save_seconds_count",] >= 2
    assert found["load_seconds_sum",] > 0
    counts = first.stats()["worker"]
    assert counts["num_loaded_local_bytes"] == 8 * block_bytes
    other = values_of(second.metrics())
    assert other["loaded_bytes_total", "peer"] == 8 * block_bytes
    assert ("loaded_blocks_total", "memory") not in other or other["loaded_blocks_total", "memory"] == 0

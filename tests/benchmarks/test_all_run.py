"""Every benchmark, study and example runs: here, small and on a CPU, or in the test that is named."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import types
from importlib import import_module

import click
import pytest

from kvstore.actors.plain_nodes import plain_nodes
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.config import StoreConfig

#: Module -> the test that runs it. Those of Ray Serve and vLLM run where these are installed.
ELSEWHERE = {
    "benchmarks.directory": "benchmarks/test_directory.py",
    "benchmarks.eviction": "benchmarks/test_eviction.py",
    "benchmarks.paged": "benchmarks/test_paged.py",
    "benchmarks.plot_gpu": "benchmarks/test_plot_gpu.py",
    "benchmarks.serve_choices": "serve/test_choices.py",
    "benchmarks.serve_routing": "serve/test_routing.py",
    "benchmarks.serving": "vllm/test_benchmarks.py",
    "benchmarks.serving_gpu": "vllm/test_benchmarks.py",
    "examples.actor_handle": "examples/test_actor_handle.py",
    "examples.prefill_decode": "examples/test_prefill_decode.py",
    "examples.serve_app": "serve/test_app.py",
    "examples.serve_check": "serve/test_app.py",
    "examples.serve_openai": "examples/test_serve_openai.py",
    "examples.serving_job": "examples/test_serving_job.py",
    "examples.submit_job": "examples/test_submit_job.py",
    "examples.transformers_generate": "examples/test_transformers_generate.py",
    "examples.vllm_cold_warm": "examples/test_vllm.py",
    "examples.vllm_prefill_decode": "examples/test_vllm.py",
}
#: Module that others import, or start -> the one of them that runs somewhere.
PARTS = {
    "benchmarks.gpu_rows": "benchmarks.gpu_client",
    "benchmarks.paged_sglang": "benchmarks.paged",
    "benchmarks.serve_mixes": "benchmarks.serve_choices",
    "benchmarks.serve_simulated": "benchmarks.serve_routing",
    "benchmarks.serving_cores": "benchmarks.serving_way",
    "benchmarks.serving_dict": "benchmarks.serving",
    "benchmarks.serving_disk": "benchmarks.serving",
    "benchmarks.serving_engine": "benchmarks.serving",
    "benchmarks.serving_report": "benchmarks.serving",
    "benchmarks.serving_way": "benchmarks.serving_gpu",
    "examples.demo_engine": "examples.prefill_decode",
    "examples.demo_models": "examples.demo_engine",
    "examples.demo_prompts": "examples.prefill_decode",
    "examples.demo_table": "examples.prefill_decode",
    "examples.job": "examples.submit_job",
    "examples.vllm_demo": "examples.vllm_cold_warm",
}
#: What these programs leave open ends with their process, which is that of the tests here.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16", block_size=16)
SHAPES = {"small": (4, 2, 64, "kv"), "MLA": (3, 1, 576, "single")}


def attacks(small):
    module = small.module("benchmarks.attacks")
    target = module.Target()
    try:
        for port in ("store", "directory"):
            for attack in module.OF_STRANGERS:
                attack(target, port, time.monotonic() + 0.1)
        for attack in module.OF_OTHERS:
            attack(target, "store", time.monotonic() + 0.1)
        assert target.times_ms()
    finally:
        target.stop()
    return small.rows(module, "--rounds", "1", "--seconds", "0.1", "--only", "malformed")


def codec(small):
    return small.rows(small.module("benchmarks.codec"), str(small.root), "--turns", "1")


def gpu_beside(small):
    small.module("kvstore.bench.gpu", OTHER_BYTES=1 << 16)
    small.module("kvstore.bench.gpu_beside", _SIZE=8, _LOAD_BYTES=1)
    module = small.module("benchmarks.gpu_beside", NUM_BLOCKS=2)
    small.patch("kvstore.bench.gpu.SHAPES", SHAPES)
    small.patch("benchmarks.gpu_beside.SHAPES", SHAPES)
    return small.gpu_rows(module, "--rounds", "1")


def gpu_client(small):
    def start(capacity_bytes, **_):
        """The same store without a Ray."""
        held = contextlib.ExitStack()
        node = held.enter_context(plain_nodes(StoreConfig(name="bench-gpu", capacity_bytes=capacity_bytes)))[0]
        return types.SimpleNamespace(client=lambda space: Client(node.control_path, space), stop=held.close)

    small.patch("kvstore.start", start)
    module = small.module("benchmarks.gpu_client", SHAPE=SHAPE, NUM_BLOCKS=3, COUNTS=(3,), STORE_BYTES=1 << 22)
    rows = small.gpu_rows(module, "--rounds", "1")
    assert {row["what"] for row in rows} == {"client", "paths"}
    return rows


def host_copy(small):
    module = small.module("benchmarks.host_copy", NUM_BLOCKS=8, ROUNDS=1)
    small.patch("benchmarks.host_copy.CASES", module.CASES[::4])
    return small.rows(module)


def in_turns(small):
    """Of a version that measures nothing."""
    rows = [{"op": "lookup", "p50_us": 2.0, "p99_us": 3.0}, {"way": "store", "gb_per_s": 4.0, "of_nixl": 1.0}]
    package = small.tmp_path / "kvstore"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cli.py").write_text(f"import json\ndef main():\n    print(json.dumps({rows}))\n")
    module = small.module("benchmarks.in_turns", HERE=small.tmp_path)
    found = small.rows(module, "--turns", "2", str(small.tmp_path), "control")
    assert [row["ratio"] for row in found] == [1.0, 1.0]
    return found


def pool(small):
    module = small.module("benchmarks.pool", MANY=8000)
    return small.rows(module, "--rounds", "4")


def replay_real(small):
    lines = [
        json.dumps(
            {"timestamp": 1000 * number, "input_length": 1024, "output_length": 1, "hash_ids": [0, number % 3 + 1]}
        )
        for number in range(8)
    ]
    (small.tmp_path / "trace.jsonl").write_text("\n".join(lines))
    module = small.module("benchmarks.replay_real")
    words = [str(small.tmp_path / "trace.jsonl"), "--output", str(small.tmp_path / "o.json")]
    small.run(module, *words)
    return json.loads((small.tmp_path / "o.json").read_text())["rows"]


def two_versions(small):
    """The processes of both versions make these sizes their own, too."""
    script = small.tmp_path / "small.py"
    script.write_text(
        "from benchmarks import two_versions as module\n"
        "module.LOAD_BYTES, module.NUM_SMALL = 8 << 20, 2\n"
        "module.SHAPES = {65536: module.SHAPES[65536]}\n"
        "module.main()\n"
    )
    module = small.module("benchmarks.two_versions", __file__=str(script))
    return small.rows(module, str(small.root), "--starts", "1", "--rounds", "2")


def waiting(small):
    return small.rows(small.module("benchmarks.waiting", NUM_AT_ONCE=4, NUM_ENGINE_BLOCKS=64), "--rounds", "1")


def disk_to_gpu(small):
    module = small.module("benchmarks.studies.disk_to_gpu", NUM_BLOCKS=2, TOTAL_BYTES=4 << 20)
    return small.gpu_rows(module, "--rounds", "1", "--folder", str(small.tmp_path))


def gpu_bounds(small, name="gpu_bounds", **sizes):
    """Its kernel is no kernel of the package: the launch of handle 0 does nothing."""
    bounds = small.module("benchmarks.studies.gpu_bounds")
    found = None, dict.fromkeys(bounds.ACTIONS, types.SimpleNamespace(ptr=0))
    module = small.module(f"benchmarks.studies.{name}", kernels=lambda: found, **sizes)
    return small.gpu_rows(module, "--rounds", "1")


def gpu_bounds_alone(small):
    return gpu_bounds(small, COUNTS=(1, 2), SHAPES=SHAPES)


def gpu_scatter(small):
    mib = 1 << 20
    return gpu_bounds(
        small, "gpu_scatter", NUM_BYTES=4 * mib, WINDOWS=(mib, 4 * mib), PIECES=(4096, mib), L2_BYTES=mib,
        L2_PAGES=(2, 8), MEMORY_BYTES=16 * mib,
    )  # fmt: skip


def gpu_strips(small):
    small.patch("kvstore.bench.gpu.SHAPES", SHAPES)
    sizes = {"SHAPES": SHAPES, "CASES": ((16, 4, 4), (16, 1, 4)), "OTHER_BYTES": 1 << 16, "NUM_PLACES": 2}
    return small.gpu_rows(small.module("benchmarks.studies.gpu_strips", **sizes), "--rounds", "1")


def handoff_agents(small):
    small.monkeypatch.chdir(small.tmp_path)
    module = small.module("benchmarks.studies.handoff_agents")
    rows = json.loads(small.run(module, "--dry", "--rounds", "1", "--only", "worker"))["rows"]
    assert [row for row in rows if "error" in row] == []
    return rows


def mover_process(small):
    return small.rows(small.module("benchmarks.studies.mover_process", ROUNDS=5, TRIALS=1))


def pack_blocks(small):
    small.on_gpu()
    said = small.run(small.module("examples.pack_blocks"))
    assert said.endswith("first 5 tokens: equal\n")
    return [said]


RUNS = {
    "benchmarks.attacks": attacks,
    "benchmarks.codec": codec,
    "benchmarks.gpu_beside": gpu_beside,
    "benchmarks.gpu_client": gpu_client,
    "benchmarks.host_copy": host_copy,
    "benchmarks.in_turns": in_turns,
    "benchmarks.pool": pool,
    "benchmarks.replay_real": replay_real,
    "benchmarks.two_versions": two_versions,
    "benchmarks.waiting": waiting,
    "benchmarks.studies.disk_to_gpu": disk_to_gpu,
    "benchmarks.studies.gpu_bounds": gpu_bounds_alone,
    "benchmarks.studies.gpu_scatter": gpu_scatter,
    "benchmarks.studies.gpu_strips": gpu_strips,
    "benchmarks.studies.handoff_agents": handoff_agents,
    "benchmarks.studies.mover_process": mover_process,
    "examples.pack_blocks": pack_blocks,
}


class Small:
    """What runs need: a module with smaller sizes, and what its program prints."""

    def __init__(self, request):
        self.request, self.root = request, request.getfixturevalue("repo_root")
        self.monkeypatch, self.capsys, self.tmp_path = map(
            request.getfixturevalue, ("monkeypatch", "capsys", "tmp_path")
        )

    def patch(self, place, value):
        self.monkeypatch.setattr(place, value)

    def module(self, name, **sizes):
        module = import_module(name)
        for size, value in sizes.items():
            self.monkeypatch.setattr(module, size, value)
        return module

    def run(self, module, *words):
        self.monkeypatch.setattr(sys, "argv", [module.__name__, *words])
        self.monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(self.root), os.environ.get("PYTHONPATH", "")]))
        self.capsys.readouterr()
        if isinstance(module.main, click.Command):
            module.main(list(words), standalone_mode=False)
        else:
            module.main()
        return self.capsys.readouterr().out

    def rows(self, module, *words):
        return json.loads(self.run(module, "--json", *words))["rows"]

    def on_gpu(self):
        self.request.getfixturevalue("cpu_as_gpu")

    def gpu_rows(self, module, *words):
        self.on_gpu()
        return self.rows(module, *words)


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name, request):
    assert RUNS[name](Small(request))
    gc.collect()  # here, where warnings of what is left open are ignored


def test_the_ways_of_bench_gpu_run(cpu_as_gpu, monkeypatch):
    """`kvstore bench gpu` is not of these folders; what is beside it here runs it."""
    from kvstore.bench import gpu, gpu_beside

    for module, name, value in (
        (gpu, "SHAPES", SHAPES), (gpu, "OTHER_BYTES", 1 << 16), (gpu, "NUM_PLACES", 2), (gpu_beside, "_SIZE", 8),
        (gpu_beside, "_LOAD_BYTES", 1),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    rows = gpu.run_gpu(["small"], [16], [1, 3], 1, 1 << 30, lambda _: None)
    assert {row["direction"] for row in rows} == {"pack", "unpack", "gpu_to_host", "host_to_gpu", "both", gpu.BESIDE}


def test_each_is_listed_once_and_runs_somewhere(repo_root):
    there = {
        ".".join(path.relative_to(repo_root).with_suffix("").parts)
        for folder in ("benchmarks", "examples")
        for path in (repo_root / folder).rglob("*.[ps][yh]")
        if path.name != "__init__.py"
    }
    assert sorted([*RUNS, *ELSEWHERE, *PARTS]) == sorted(there)
    for name, test in ELSEWHERE.items():
        assert name.rpartition(".")[2] in (repo_root / "tests" / test).read_text(encoding="utf-8"), (name, test)
    for name, user in PARTS.items():
        file = repo_root / user.replace(".", "/")
        file = file.with_suffix(".sh" if user == "examples.submit_job" else ".py")
        assert name.rpartition(".")[2] in file.read_text(encoding="utf-8"), (name, user)
        assert user in {*RUNS, *ELSEWHERE, *PARTS}

"""First tokens of vLLM on one GPU: prompts from this store, from vLLM's own ways to keep KV in host memory, computed.

Each engine in a process of its own, all in one run, asked in turns, so that what else the machine does falls on all
alike. They get the same prompts of random tokens, of so many tokens and one more, which every way computes:

cold   a prompt that nobody has seen;
again  the same one, in the engine's own prefix cache;
warm   the same one after `reset_prefix_cache`: from host memory, where a connector put it meanwhile.

Right before each of them the engine moves to the core that is fastest then, and answers something short that no cache
has. Prompts that are cached are asked four times in a row, with the reset in between; and again, or another one, where
the core was slow when the answer was there, which is counted ("num_slow").

The bound is the engine's own prefix cache and one pinned copy of the KV's bytes, both of the same run. The model has
the shape of an 8B Llama and random weights, the same ones in every engine, so that answers can be compared.

Run: `python -m benchmarks.serving --device cuda`, or this module. On a CPU it is a check of itself with a small model.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.serving_way import SHORT_TOKENS, WayProcess
from kvstore.actors.bench.process import InProcess
from kvstore.bounds import parse_bytes
from kvstore.errors import KVStoreError, StoreUnavailable
from kvstore.tools.documents import as_document

WAYS = ("none", "own", "raykv", "OffloadingConnector", "SimpleCPUOffloadConnector")
LENGTHS = (2_000, 10_000, 30_000)
#: How often a prompt of `SHORT_TOKENS` is asked in a round, each time another one: those times vary most.
NUM_SHORT = 3
#: Host memory of each way.
CAPACITY_BYTES = 12 << 30
IMPORT_S, START_S, CALL_S = 180.0, 150.0, 60.0
#: device -> fields of a Llama's config that make its size.
SIZES = {
    "cuda": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    "cpu": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048},
}  # fmt: skip
MAX_TOKENS = 32_768
SETTINGS = {
    "cuda": {"attention_backend": "FLASH_ATTN", "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.15,
             "kv_cache_memory_bytes": 5 << 30},
    "cpu": {"block_size": 32, "num_gpu_blocks_override": 2048},
}  # fmt: skip
#: What a way is asked, where that is not cold, then warm.
STATES = {"none": ("cold",), "own": ("cold", "again")}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled",
}  # fmt: skip

Rows = list[dict[str, Any]]
#: (way, state, tokens of the prompt) -> round -> the answer, as `WayProcess.ask` returns it.
Times = dict[tuple[str, str, int], dict[int, dict[str, Any]]]
Say = Callable[[str], None]


def connector(name: str, capacity_bytes: int, address: str) -> dict[str, Any] | None:
    """Return fields of vLLM's KVTransferConfig; None for the ways without a connector."""
    if name in ("none", "own"):
        return None
    found: dict[str, Any] = {"kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if name != "raykv":
        return found | {"kv_connector_extra_config": {"cpu_bytes_to_use": capacity_bytes}}
    extra = {"address": address, "load_timeout_s": 30.0}
    module = "kvstore.integrations.vllm"
    return found | {
        "kv_connector": "RaykvConnector", "kv_connector_module_path": module, "kv_connector_extra_config": extra,
    }  # fmt: skip


def kv_bytes_of_token(device: str) -> int:
    """Return what the model keeps of one token, in bfloat16."""
    size = SIZES[device]
    return size["num_hidden_layers"] * 2 * size["num_key_value_heads"] * size["head_dim"] * 2


def save_config(folder: str, device: str) -> str:
    """Write the config of a model without weights, which vLLM makes up."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": MAX_TOKENS,
        "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, **SIZES[device],
    }  # fmt: skip
    Path(folder, "config.json").write_text(json.dumps(config))
    return folder


@contextlib.contextmanager
def own_store(capacity_bytes: int, folder: str) -> Iterator[str]:
    """Run a store on a Ray of one node, with its files in a folder, and yield that Ray's address."""
    import ray

    import kvstore

    os.environ.update(RAY_TMPDIR=folder, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    os.environ.pop("RAY_ADDRESS", None)
    try:
        # What Ray may promise has to hold the store, whatever it takes the machine's free memory for.
        ray.init(
            address="local", num_cpus=4, object_store_memory=100 << 20, _memory=capacity_bytes + (4 << 30),
            include_dashboard=False, log_to_driver=False, configure_logging=False,
        )  # fmt: skip
    except Exception as error:  # of no class of its own
        raise StoreUnavailable(f"wanted a Ray of one node, got: {error}") from error
    store = None
    try:
        store = kvstore.start(capacity_bytes, timeout_s=120.0)
        yield ray.get_runtime_context().gcs_address
    finally:
        if store is not None:
            store.stop()
        ray.shutdown()


def measure(
    device: str, names: Sequence[str], lengths: Sequence[int], rounds: int, capacity_bytes: int, say: Say,
    write: Callable[[dict[str, Any]], None] = lambda found: None, process: type[WayProcess] = WayProcess,
    seconds: float = 3600.0,
) -> dict[str, Any]:  # fmt: skip
    """Measure some ways; `write` gets all that is known after each length of each round, of which none begins late."""
    until_s = time.monotonic() + seconds
    found: dict[str, Any] = {"rows": [], "ratios": [], "same_answers": [], "failed": {}, "start_s": {}}
    with contextlib.ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True))
        model, address = save_config(folder, device), ""
        say("importing vLLM, in a process for each way, and starting a store")
        environment = ENVIRONMENT | {"RAY_TMPDIR": folder} | ({"TORCH_COMPILE_DISABLE": "1"} if device == "cpu" else {})
        made = {name: held.enter_context(contextlib.closing(InProcess(process, environment))) for name in names}
        for name in names:
            made[name].begin("ready")
        if "raykv" in names:
            with failing("raykv", found, made, say):
                address = held.enter_context(own_store(capacity_bytes, folder))
        for name in made:
            made[name].answer(IMPORT_S)
        say(f"starting engines, at {time.strftime('%X')}")
        for name in made:
            settings = {"max_model_len": MAX_TOKENS, "load_format": "dummy", "dtype": "bfloat16", **SETTINGS[device]}
            settings |= {"enable_prefix_caching": name != "none"}
            made[name].begin("start", model, connector(name, capacity_bytes, address), settings)
        for name in list(made):
            with failing(name, found, made, say):
                started = made[name].answer(START_S)
                found["start_s"][name] = started["start_s"]
                found |= started["provenance"]  # Of an engine's process: this one knows no GPU.
        for name in ("none", "own"):
            if name in made:
                found["link_gb_per_s"] = made[name].ask("link_gb_per_s", CALL_S)
        times: Times = {}
        for number in range(rounds + 1):  # the first one is to get warm
            for num_tokens in lengths:
                if time.monotonic() > until_s:
                    say("the time is over")
                    break
                say(f"round {number} of {rounds}: {num_tokens} tokens, at {time.strftime('%X')}")
                num_asked = NUM_SHORT if number and num_tokens < SHORT_TOKENS else 1
                for at in range(number, number + num_asked * rounds, rounds):
                    first = at % max(1, len(made))
                    for name in [*list(made)[first:], *list(made)[:first]]:
                        with failing(name, found, made, say):
                            asked = (num_tokens, at, SIZES[device]["vocab_size"], STATES.get(name, ("cold", "warm")))
                            for state, answer in made[name].ask("ask", CALL_S, *asked).items():
                                times.setdefault((name, state, num_tokens), {})[at] = answer
                found |= {"rows": rows_of(times), "same_answers": same_answers(times)}
                found["ratios"] = ratios(found["rows"], found.get("link_gb_per_s"), device)
                write(found)
        for name in list(made):
            with failing(name, found, made, say):
                made[name].ask("stop", CALL_S)
    return found


@contextlib.contextmanager
def failing(name: str, found: dict[str, Any], made: dict[str, InProcess], say: Say) -> Iterator[None]:
    """Note why a way failed, and go on without it."""
    try:
        yield
    except KVStoreError as error:
        say(f"{name}: {error}")
        found["failed"][name] = f"{type(error).__name__}: {error}"
        made.pop(name).close()


def rows_of(times: Times) -> Rows:
    """Return medians of all rounds but the first, and how many tokens came from a cache at least."""
    rows = []
    for (name, state, num_tokens), answers in times.items():
        counted = [answer for number, answer in answers.items() if number]
        if counted:
            times_s = [time_s for answer in counted for time_s in answer["times_s"]]
            rows.append(
                {
                    "way": name, "state": state, "num_tokens": num_tokens,
                    "first_token_s": round(statistics.median(times_s), 6), "times_s": [round(t, 6) for t in times_s],
                    "num_cached": min(answer["num_cached"] for answer in counted),
                    "num_slow": sum(answer["num_slow"] for answer in counted),
                }
            )  # fmt: skip
    return rows


def same_answers(times: Times) -> Rows:
    """Count the answers that are those of the plain engine from its own prefix cache, token by token."""
    rows = []
    for name, state in dict.fromkeys((name, state) for name, state, _ in times):
        pairs = [
            (answer["tokens"], own["tokens"])
            for (other, its, num_tokens), answers in times.items()
            for number, answer in answers.items()
            if (other, its) == (name, state) and (own := times.get(("own", "again", num_tokens), {}).get(number))
        ]
        num_same, num_different = sum(one == own for one, own in pairs), len({tuple(one) for one, _ in pairs})
        rows.append({"way": name, "state": state, "num_prompts": len(pairs), "num_same": num_same,
                     "num_different_answers": num_different})  # fmt: skip
    return rows


def ratios(rows: Rows, link_gb_per_s: float | None, device: str) -> Rows:
    """Return, for each way and length, the bound and what the times of this run say about each other."""
    times = {(row["way"], row["state"], row["num_tokens"]): row["first_token_s"] for row in rows}
    found = []
    for (name, state, num_tokens), time_s in times.items():
        own_s, none_s = times.get(("own", "again", num_tokens)), times.get(("none", "cold", num_tokens))
        row = {"way": name, "num_tokens": num_tokens}
        if state == "warm" and link_gb_per_s and own_s:
            bound_s = own_s + num_tokens * kv_bytes_of_token(device) / (link_gb_per_s * 1e9)
            found.append(row | {"bound_s": round(bound_s, 6), "warm / bound": round(time_s / bound_s, 3)})
        if state == "cold" and name != "none" and none_s:
            found.append(row | {"cold / no connector": round(time_s / none_s, 3)})
    return found


def show(found: Mapping[str, Any]) -> None:
    """Print times, what they say about each other, and how many answers were the same."""
    for row in found["rows"]:
        took_ms = row["first_token_s"] * 1e3
        print(f"{row['way']:26} {row['state']:6} {row['num_tokens']:6} tokens {took_ms:9.2f} ms")
    for row in [*found["ratios"], *found["same_answers"], *({"failed": why} for why in found["failed"].items())]:
        print(json.dumps(row))


@click.command()
@click.option("--device", type=click.Choice(sorted(SIZES)), default="cuda", show_default=True)
@click.option("--way", "names", type=click.Choice(WAYS), multiple=True, default=WAYS, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Measurements of each kind.")
@click.option("--tokens", "lengths", type=click.IntRange(64, MAX_TOKENS - 64), multiple=True, default=LENGTHS,
              show_default=True, help="Lengths of prompts; may be given several times.")  # fmt: skip
@click.option("--capacity", default=str(CAPACITY_BYTES), show_default=True, help="Host memory of each way.")
@click.option("--seconds", type=float, default=3600.0, show_default=True, help="After so long no prompt is begun.")
@click.option("--output", type=click.Path(dir_okay=False), help="File for the results, written after each way.")
def main(
    device: str,
    names: Sequence[str],
    lengths: Sequence[int],
    rounds: int,
    capacity: str,
    seconds: float,
    output: str | None,
) -> None:
    """Time first tokens of vLLM on one GPU, from this store and from vLLM's own host memory."""

    def write(found: dict[str, Any]) -> None:
        if output is not None:
            Path(output).write_text(as_document(found))

    say: Say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    found = measure(device, names, lengths, rounds, parse_bytes(capacity), say, write, seconds=seconds)
    write(found)
    show(found)


if __name__ == "__main__":
    main()

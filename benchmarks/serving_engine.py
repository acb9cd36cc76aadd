"""Real vLLM engines, each in a process of its own, as `benchmarks.serving` asks them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvstore.actors.bench.process import InProcess
from kvstore.errors import ConfigError, StoreUnavailable

VOCABULARY = 2048
BLOCK_SIZE = 32
#: Of every engine, in tokens: one long prompt, but not all conversations.
CACHE_TOKENS = 3328
START_S, CALL_S = 240.0, 120.0
_SETTLE_S = 30.0


def save_model(folder: str) -> str:
    """Write a Llama of 175 million random weights, the same ones every time; 24 KiB of KV a token in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3584, num_hidden_layers=12, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class ServingEngine:
    """An engine, and the clock beside it. All times are seconds.

    Args:
        model: a folder with weights.
        environment: set before vLLM is imported.
        transfer: fields of vLLM's KVTransferConfig, None for an engine without a connector.
        settings: of the engine, beyond what all have in common.

    Raises:
        ConfigError: vLLM refused to make this engine; why.
    """

    def __init__(
        self,
        model: str,
        environment: Mapping[str, str],
        transfer: Mapping[str, Any] | None,
        settings: Mapping[str, Any],
    ) -> None:
        os.environ.update(environment)
        if transfer and transfer["kv_connector"] == "NixlConnector" and importlib.util.find_spec("nixl") is None:
            # The wheel with the bindings has the name of its CUDA version; vLLM asks for the one without.
            for part in ("", "._api", "._bindings"):
                sys.modules[f"nixl{part}"] = importlib.import_module(f"nixl_cu12{part}")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        try:
            llm = LLM(
                model, skip_tokenizer_init=True, enforce_eager=True, async_scheduling=False,
                disable_log_stats=True, kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
                **settings,
            )  # fmt: skip
        except Exception as error:
            raise ConfigError(f"{type(error).__name__}: {error}") from error
        self._engine = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._num_requests = 0

    def ready(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def first_token(
        self, tokens: list[int], cold: bool = False, params: dict[str, Any] | None = None, num_tokens: int = 1
    ) -> dict[str, Any]:
        """Answer a prompt, and time the first token of the answer.

        Args:
            tokens: the prompt.
            cold: read no cache.
            params: vLLM's kv_transfer_params of the request.
            num_tokens: of the answer.

        Returns:
            {"first_token_s", "num_cached", "params", "tokens"}: the last two are of the answer.
        """
        gc.collect()  # As timeit does: a pass over all objects takes as long as a short prompt.
        gc.disable()
        try:
            return self._time_first_token(tokens, cold, params, num_tokens)
        finally:
            gc.enable()

    def _time_first_token(
        self, tokens: list[int], cold: bool, params: dict[str, Any] | None, num_tokens: int
    ) -> dict[str, Any]:
        begin_s, first_s = time.perf_counter(), 0.0
        name = self._add(tokens, num_tokens, cold, params)
        while True:
            for output in self._engine.step():
                if output.request_id != name:
                    continue
                first_s = first_s or time.perf_counter() - begin_s
                if not output.finished:
                    continue
                if output.outputs[0].finish_reason == "error":
                    raise StoreUnavailable(f"wanted an answer to {len(tokens)} tokens, got an error of the engine")
                return {
                    "first_token_s": first_s,
                    "num_cached": output.num_cached_tokens or 0,
                    "params": output.kv_transfer_params,
                    "tokens": list(output.outputs[0].token_ids),
                }

    def turn(self, prompts: Sequence[list[int]], num_tokens: int) -> dict[str, Any]:
        """Answer prompts that come at once.

        Returns:
            {"wall_s", "first_token_s": of each prompt, "answers": tokens of each}.
        """
        begin_s = time.perf_counter()
        names = [self._add(tokens, num_tokens) for tokens in prompts]
        first_s: dict[str, float] = {}
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            for output in self._engine.step():
                first_s.setdefault(output.request_id, time.perf_counter() - begin_s)
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        wall_s = time.perf_counter() - begin_s
        return {
            "wall_s": wall_s,
            "first_token_s": [first_s[name] for name in names],
            "answers": [answers[name] for name in names],
        }

    def settle(self, num_steps: int = 0) -> None:
        """Step until nothing is left to do, saves included.

        Args:
            num_steps: steps that are made in any case: some connectors free blocks only while their engine steps.

        Raises:
            StoreUnavailable: something stays; the engine is of no more use.
        """
        deadline_s = time.monotonic() + _SETTLE_S
        while num_steps > 0 or self._engine.has_unfinished_requests() or self._scheduler.has_requests():
            num_steps -= 1
            self._engine.step()
            if time.monotonic() > deadline_s:
                raise StoreUnavailable(f"wanted an idle engine within {_SETTLE_S} s, got {self._scheduler.requests}")

    def reset(self) -> None:
        """Empty the engine's own prefix cache."""
        self.settle()
        if not self._engine.reset_prefix_cache():
            raise StoreUnavailable("wanted the engine's prefix cache to be empty, but blocks of it are in use")

    def apply(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the model, and return what it returns."""
        return self._engine.apply_model(function)[0]

    def stop(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()

    def _add(self, tokens: list[int], num_tokens: int, cold: bool = False, params: Any = None) -> str:
        from vllm import SamplingParams

        options = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, skip_reading_prefix_cache=cold,
            extra_args={"kv_transfer_params": params} if params else None,
        )  # fmt: skip
        self._num_requests += 1
        name = str(self._num_requests)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, options)
        return name


class Engines:
    """Engines by name; only those that are asked for run.

    Args:
        model: folder of the weights.
        ways: of each, (fields of KVTransferConfig or None, environment, settings).
    """

    def __init__(self, model: str, ways: Mapping[str, tuple[Any, Mapping[str, str], Mapping[str, Any]]]) -> None:
        common = {
            "block_size": BLOCK_SIZE, "max_model_len": CACHE_TOKENS, "max_num_batched_tokens": 4096,
            "max_num_seqs": 8, "num_gpu_blocks_override": CACHE_TOKENS // BLOCK_SIZE + 1,
        }  # fmt: skip
        self._made: dict[str, tuple[InProcess, int]] = {}
        #: Why vLLM did not make an engine.
        self.refused: dict[str, str] = {}
        try:
            for name, (transfer, environment, settings) in ways.items():
                process = InProcess(
                    ServingEngine, model, _environment() | dict(environment), transfer, common | settings
                )
                try:
                    self._made[name] = process, process.ask("ready", START_S)
                except ConfigError as error:
                    self.refused[name] = str(error)
                    process.close()
                    continue
                os.kill(self._made[name][1], signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def ask(self, name: str, verb: str, *args: object) -> Any:
        """Have one engine do something while all others stand still."""
        with self.running(name):
            return self._made[name][0].ask(verb, CALL_S, *args)

    @contextlib.contextmanager
    def running(self, *names: str) -> Iterator[None]:
        """Let engines run."""
        for name in names:
            os.kill(self._made[name][1], signal.SIGCONT)
        try:
            yield
        finally:
            for name in names:
                os.kill(self._made[name][1], signal.SIGSTOP)

    def close(self) -> None:
        """End all."""
        for process, pid in self._made.values():
            with contextlib.suppress(ProcessLookupError):  # It may have ended by itself; the others are still to end.
                os.kill(pid, signal.SIGCONT)
            process.close()


def _environment() -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0", "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1",
    }  # fmt: skip

"""One real vLLM engine in a process of its own, which does what it is told: vLLM has room for one a process.

Commands and answers are pickled over a connection; `engines.py` has the other end. What is imported here at the top is
imported once, by the process of which all engines are forks.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback

import prometheus_client
import ray  # noqa: F401 - imported once for all
import vllm.distributed.device_communicators.shm_broadcast
import vllm.v1.engine.core
import vllm.v1.engine.llm_engine
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
import zmq
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM

import kvstore.client.save
import kvstore.integrations.vllm
from kvstore.integrations.vllm.extension import RaykvWorker

DEVICE = os.environ.get("RAYKV_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    import vllm.v1.worker.cpu_worker

    # Workers and cores are forked as they are on a GPU. On a CPU vLLM has each import all of it again, which takes
    # longer than most tests here; that is for the sake of their threads for OpenMP, and here they have none.
    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
else:
    import vllm.v1.worker.gpu_worker

# Otherwise vLLM asks for what these can do in processes of their own, which import all of vLLM again.
ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
ModelRegistry.register_model("Gemma3ForCausalLM", Gemma3ForCausalLM)


def wait_for_message(condition, timeout_ms=None):
    """Sleep until a worker has a message, and look at least every 50 ms: the first notice may come too early for it."""
    events = dict(condition.poller.poll(min(timeout_ms or 50, 50)))
    if condition.local_notify_socket in events:
        condition.local_notify_socket.recv(flags=zmq.NOBLOCK, copy=False)


# vLLM's workers and their engine spin for a second after each message, which takes the processors from all others.
vllm.distributed.device_communicators.shm_broadcast.SpinCondition.wait = wait_for_message

#: Tokens that the cache of an engine on the CPU holds; with vLLM's least, 1 GiB, a dozen engines need too much memory.
CACHE_TOKENS = 1 << 17

#: Several engines share a GPU, a small part each; of the backends for float32 this one is fast.
ON_GPU = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}


def on_cpu(settings):
    return {"num_gpu_blocks_override": CACHE_TOKENS // settings.get("block_size", 16)}


def prepare_nixl():
    """Call this before vLLM imports NIXL: it asks for `nixl`, and the wheel's name has its CUDA version."""
    for part in ("", "._api", "._bindings"):
        sys.modules[f"nixl{part}"] = importlib.import_module(f"nixl_cu12{part}")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free.getsockname()[1])


def transfer_config(connector, policy, role, among):
    """Return what vLLM gets for a connector; `among` has the names of all connectors of a MultiConnector, in order."""
    own = {
        "kv_connector": "RaykvConnector", "kv_connector_module_path": "kvstore.integrations.vllm", "kv_role": role,
        "kv_connector_extra_config": connector,
    }  # fmt: skip
    if not among:
        return KVTransferConfig(**own, kv_load_failure_policy=policy)
    if "NixlConnector" in among:
        prepare_nixl()
    nixl = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": DEVICE}
    children = [{"RaykvConnector": own, "NixlConnector": nixl}[name] for name in among]
    return KVTransferConfig(
        kv_connector="MultiConnector", kv_role=role, kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": children},
    )  # fmt: skip


def own_connector(connector):
    """Return the RaykvConnector, also from inside a MultiConnector."""
    children = getattr(connector, "_connectors", [connector])
    return next(each for each in children if isinstance(each, kvstore.integrations.vllm.RaykvConnector))


# For each worker, in its own process where there are several.


def own_worker_side():
    return own_connector(get_kv_transfer_group()).worker_side


def make_buffers(worker):
    worker.model_runner._dummy_run(1)


def stats_of_rank(worker):
    return own_connector(get_kv_transfer_group()).stats.total()


def space_of_rank(worker):
    return RaykvWorker.raykv_space(worker)


def tracked_by_rank(worker):
    rank = own_worker_side()
    rank.landing.settle(list(rank.landing.loads), 20.0)  # vLLM has them; no step follows that would look
    return sum(len(held) for held in (rank.loads, rank.landing.loads, rank.saves, rank.unsent, rank.publishing.open))


def await_saves_of(worker, limit_s):
    saves = [save for held in own_worker_side().saves.values() for save in held]
    deadline_s = time.monotonic() + limit_s
    while not all(save.job.done() for save in saves):
        assert time.monotonic() < deadline_s, f"saves under way after {limit_s} s: {saves}"
        time.sleep(0.001)


def hold_saves_of(worker, until_wanted):
    rank, run_save = own_worker_side(), kvstore.client.save.run_save
    end_saves, may_save = rank.end_saves, threading.Event()

    def held(*args):
        may_save.wait(60.0)  # Before it copies, when it can be given up.
        return (yield from run_save(*args))

    def let_go():
        may_save.set()
        kvstore.client.save.run_save = run_save
        rank.__dict__.pop("end_saves", None)

    kvstore.client.save.run_save, rank.let_saves = held, let_go

    def end(req_ids, *more):
        if req_ids:  # Each step ends those of nobody.
            may_save.set()
        end_saves(req_ids, *more)

    if until_wanted:
        rank.end_saves = end


def let_saves_of(worker):
    own_worker_side().let_saves()


def take_store_of(worker, rank):
    if worker.rank == rank:
        own_worker_side().cache.client = lambda: None


def give_store_to(worker, rank):
    if worker.rank == rank:
        del own_worker_side().cache.client


# What is imported stays: no fork looks for garbage in it, which takes seconds and copies all of its memory. vLLM
# collects garbage several times for each engine.
gc.collect()
gc.freeze()


class EngineProcess:
    def __init__(self, model, *, connector=None, policy="recompute", role="kv_both", among=(), events=None, **settings):
        transfer = None if connector is None else transfer_config(connector, policy, role, among)
        given = {
            "dtype": "float32", "max_model_len": 4096, "max_num_batched_tokens": 4096, "max_num_seqs": 64,
            "enable_prefix_caching": True, "disable_log_stats": False, "skip_tokenizer_init": True,
        } | (ON_GPU if DEVICE == "cuda" else on_cpu(settings)) | settings  # fmt: skip
        llm = LLM(
            model, enforce_eager=True, async_scheduling=False,
            kv_transfer_config=transfer, kv_events_config=KVEventsConfig(**events) if events else None, **given,
        )  # fmt: skip
        self.engine = llm.llm_engine
        if settings.get("pipeline_parallel_size", 1) > 1:
            # vLLM 0.28 makes what later stages receive into while it compiles, and here nothing is compiled.
            self.engine.collective_rpc(make_buffers)
        #: None where the engine's core is a process of its own.
        self.core = getattr(self.engine.engine_core, "engine_core", None)
        self.scheduler = self.core.scheduler if self.core else None
        self.num_preemptions = 0
        self.finished, self._first_s = {}, {}

    # Requests one by one.

    def add(self, name, tokens, salt=None, max_tokens=8, cold=False, lora=None, transfer=None, audio=None, words=None):
        options = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False,
            skip_reading_prefix_cache=cold, extra_args={"kv_transfer_params": transfer} if transfer else None,
            allowed_token_ids=words,
        )  # fmt: skip
        prompt = {"prompt_token_ids": list(tokens)} | ({"cache_salt": salt} if salt else {})
        if audio is not None:
            prompt["multi_modal_data"] = {"audio": audio}
        adapter = LoRARequest(*lora) if lora else None
        self._first_s[name] = -time.perf_counter()
        self.engine.add_request(name, prompt, options, lora_request=adapter)

    def step(self, count=1):
        """Step, and return the status of each request that is not over."""
        for _ in range(count):
            self._step()
        return self.states()

    def _step(self):
        outputs = self.engine.step()
        for output in outputs:
            if self._first_s[output.request_id] < 0:
                self._first_s[output.request_id] += time.perf_counter()
            if output.finished:
                self.finished[output.request_id] = self._answer(output)
        self.num_preemptions = max(
            [self.num_preemptions, *(request.num_preemptions for request in self.scheduler.requests.values())]
        )
        return outputs

    def _step_or_wait(self):
        """Step, and leave the processor to others for a while if nothing came out, as vLLM's own loop does."""
        if not self._step():
            time.sleep(0.001)

    def states(self):
        return {request.request_id.rsplit("-", 1)[0] if "-" in request.request_id else request.request_id:
                request.status.name for request in self.scheduler.requests.values()}  # fmt: skip

    def step_until(self, name, status, limit_s=20.0):
        """Step until a request has a status; returns whether it came to that."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            self._step_or_wait()
            if self.states().get(name) == status:
                return True
        return False

    def abort(self, *names):
        self.engine.abort_request(list(names))

    def settle(self, limit_s=60.0):
        """Step until nothing is left, blocks that are kept for saves included."""
        deadline_s = time.monotonic() + limit_s
        while self.engine.has_unfinished_requests() or self.scheduler.has_requests():
            assert time.monotonic() < deadline_s, f"the engine still has {self.states()}"
            self._step_or_wait()

    def answer(self, name):
        return self.finished.pop(name, None)

    # All at once.

    def run(self, prompts, **options):
        """Answer prompts that come at once: [(name, tokens, options)], and options for all of them."""
        for name, tokens, more in prompts:
            self.add(name, tokens, **(options | more))
        while self.engine.has_unfinished_requests():
            self._step_or_wait()
        answers = [self.finished.pop(name) for name, _, _ in prompts]
        self.settle()
        return answers

    def _answer(self, output):
        text = output.outputs[0]
        logprobs = [step[token].logprob for step, token in zip(text.logprobs or [], text.token_ids, strict=True)]
        return {
            "tokens": list(text.token_ids), "logprobs": logprobs, "num_cached": output.num_cached_tokens or 0,
            "reason": text.finish_reason, "first_s": self._first_s[output.request_id],
            "transfer": output.kv_transfer_params,
        }  # fmt: skip

    def run_and_reset(self, prompts, **options):
        """Answer prompts, and empty the engine's own cache at once; returns the answers, and whether that was done."""
        for name, tokens, more in prompts:
            self.add(name, tokens, **(options | more))
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    self.finished[output.request_id] = self._answer(output)
        is_empty = self.empty()
        return [self.finished.pop(name) for name, _, _ in prompts], is_empty

    def empty(self, connector=False):
        """Empty the engine's own cache, without a step before it; returns whether that was done."""
        return self.engine.reset_prefix_cache(**({"reset_connector": True} if connector else {}))

    def await_saves(self, limit_s=30.0):
        """Wait for the saves of requests that ended: their blocks are vLLM's by then, and the engine stands still."""
        self.engine.collective_rpc(await_saves_of, args=(limit_s,))

    def hold_saves(self, until_wanted=False):
        """Let the copies of saves wait, until `let_saves`, or until somebody waits for their end."""
        self.engine.collective_rpc(hold_saves_of, args=(until_wanted,))

    def let_saves(self):
        """Let them go on, from now on without a wait."""
        self.engine.collective_rpc(let_saves_of)

    def reset(self, connector=False):
        self.settle()
        return self.empty(connector)

    # Questions.

    def blocks(self):
        """(free, all that can be free) of the engine's own blocks."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1

    def stats(self):
        """What the connector's halves counted; where there are several workers, "worker" is their sum."""
        ranks = self.rank_stats()
        worker = {name: sum(rank.get(name, 0) for rank in ranks) for name in set().union(*ranks)}
        return {"scheduler": own_connector(self.scheduler.connector).stats.total(), "worker": worker}

    def rank_stats(self):
        """What each worker counted."""
        return self.engine.collective_rpc(stats_of_rank)

    def spaces(self):
        """What each worker says its namespace is, as text for a router."""
        return self.engine.collective_rpc(space_of_rank)

    def tracked(self):
        """How many requests the connector's halves still know."""
        side = own_connector(self.scheduler.connector).scheduler_side
        return sum(self.engine.collective_rpc(tracked_by_rank), len(side.tracked) + len(side.ending.requests))

    def take_store(self, rank):
        """Let one worker have no store, as when its connection broke."""
        self.engine.collective_rpc(take_store_of, args=(rank,))

    def give_store(self, rank):
        """Let it have its store again."""
        self.engine.collective_rpc(give_store_to, args=(rank,))

    def metrics(self):
        """What vLLM's own /metrics would show now."""
        return prometheus_client.generate_latest().decode()

    def drafts(self):
        """How many tokens were drafted, and how many of those accepted."""
        found = {metric.name: metric.value for metric in self.engine.get_metrics() if hasattr(metric, "value")}
        return [int(found[f"vllm:spec_decode_num_{what}_tokens"]) for what in ("draft", "accepted")]

    def events(self):
        return self.scheduler.connector.take_events()

    def pid(self):
        return os.getpid()

    def stop(self):
        gc.freeze()  # The process ends: vLLM need not look for garbage before.
        self.engine.engine_core.shutdown()
        for connector in (self.scheduler.connector,):
            if connector is not None:
                connector.shutdown()


def serve(connection, log, environment):
    """Be an engine until the connection ends."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(environment)
    engine = None
    while True:
        try:
            verb, args, options = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            if verb == "start":
                engine, answer = EngineProcess(*args, **options), None
            else:
                answer = getattr(engine, verb)(*args, **options)
            connection.send(("is", answer))
        except Exception as error:
            connection.send(("error", f"{type(error).__name__}: {error}", traceback.format_exc()))
        if verb == "stop":
            os._exit(0)

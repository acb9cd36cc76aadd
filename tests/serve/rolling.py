"""A program for test_restart.py: two engines on two nodes, whose stores get a new setting while requests run.

It is a process of its own, as the other tests of a session share a Ray of one node. Prints what it saw as JSON.

Each engine is a model of one app, because on one machine an engine has to be told its node. Half of the prompts are
asked all the time; the others are kept, and only asked before and afterwards. So what is found of them later was not
saved anew meanwhile. The engines' own caches are smaller than the busy prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from running import ROOT, free_port
from serve_app import APP, BLOCK_SIZE, MODEL_ID, AppOptions, build_models, llm_config, private_environment, save_model

SETTING = ("lease_ttl_s", 7.0)
NUM_PROMPTS = 8  # of each half and engine
NUM_BLOCKS = 9  # of each prompt
STORY = "the night train left the coast at eleven, and nobody counted the lamps. " * 10
CALL_S, RESTART_S, SETTLE_S = 240.0, 400.0, 120.0


class TwoEngines:
    """Two Ray nodes on this machine, with a store and the app on them."""

    def __init__(self, folder: str) -> None:
        self.options = AppOptions(
            folder=save_model(f"{folder}/model"), port=free_port(),
            # Room for two prompts: what is found comes from the store.
            engine={"kv_cache_memory_bytes": 3 << 20, "max_model_len": 512, "max_num_seqs": 2},
        )  # fmt: skip

    @contextlib.contextmanager
    def running(self):
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        import kvstore

        cluster = Cluster()
        try:
            for only in ({"include_dashboard": False, "no_monitor": True}, {}):
                cluster.add_node(
                    num_cpus=8, memory=1 << 40, object_store_memory=160 << 20, include_log_monitor=False, **only
                )
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            cluster.wait_for_nodes(timeout=60)
            store = kvstore.start("64MiB", lease_ttl_s=5.0)
            # Two nodes of one machine have one port.
            serve.start(http_options={"host": "127.0.0.1", "port": self.options.port}, proxy_location="HeadOnly")
            serve.run(build_models(self._models(store)), name=APP, route_prefix="/")
            yield store
        finally:
            with contextlib.suppress(Exception):
                serve.shutdown()
            with contextlib.suppress(Exception):
                store.stop()
            ray.shutdown()
            cluster.shutdown()

    def _models(self, store):
        for number, node_id in enumerate(store.node_ids()):
            config = llm_config(self.options, store.address)
            config["model_loading_config"]["model_id"] = f"{MODEL_ID}-{number}"
            config["engine_kwargs"]["kv_transfer_config"]["kv_connector_extra_config"]["node_id"] = node_id
            yield config


class Asker:
    """Asks the engines, and counts their answers."""

    def __init__(self, url: str) -> None:
        import openai

        self._client = openai.AsyncOpenAI(base_url=url, api_key="none", timeout=CALL_S, max_retries=0)
        self._error = openai.APIError
        self.texts: dict[tuple[str, str], str] = {}
        self.num_answers, self.failures = 0, []

    async def ask(self, model: str, prompt: str) -> int:
        """Ask one thing; returns the cached tokens, and notes an answer that is none or another one than before."""
        try:
            answer = await self._client.completions.create(
                model=model, prompt=prompt, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
            )
        except self._error as error:
            self.failures.append(f"{model}: {type(error).__name__}: {error}")
            return 0
        text = answer.choices[0].text
        if self.texts.setdefault((model, prompt), text) != text:
            self.failures.append(f"{model}: wanted {self.texts[model, prompt]!r}, got {text!r}")
        self.num_answers += 1
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0

    async def round(self, prompts: dict[str, list[str]]) -> int:
        """Ask every engine its prompts, one after the other; returns the cached tokens of all."""

        async def ask_one_engine(model: str) -> int:
            return sum([await self.ask(model, prompt) for prompt in prompts[model]])

        return sum(await asyncio.gather(*map(ask_one_engine, prompts)))


def prompts_of(kind: str) -> dict[str, list[str]]:
    """Return prompts of some blocks and a few tokens for each engine, of which no two begin alike."""
    return {
        f"{MODEL_ID}-{engine}": [
            (f"{number} {kind} for {engine}: " + STORY)[: NUM_BLOCKS * BLOCK_SIZE + 5] for number in range(NUM_PROMPTS)
        ]
        for engine in range(2)
    }


def cache_tokens() -> list[int]:
    """Return how many tokens the cache of each engine holds."""
    from ray import serve

    names = [name for name in serve.status().applications[APP].deployments if name.startswith("LLMServer")]
    handles = [serve.get_deployment_handle(name, APP) for name in names]
    return [handle.collective_rpc.remote("raykv_cache_tokens").result(timeout_s=CALL_S)[0] for handle in handles]


def pools(store):
    return [node["pool"] for node in store.stats()["nodes"].values()]


async def restart_while_asking(asker: Asker, store, busy) -> dict:
    """Run `kvstore restart` and ask until it has ended; returns what it printed."""
    name, value = SETTING
    words = ["restart", "--address", store.address, "--set", f"{name}={value}", "--wait", "5", "--json"]
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from kvstore.cli import main; main()", *words,
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    over = asyncio.create_task(run.communicate())
    try:
        async with asyncio.timeout(RESTART_S):
            while not over.done():
                await asker.round(busy)
    finally:
        with contextlib.suppress(ProcessLookupError):
            run.kill()
    printed, said = await over
    if run.returncode:
        raise RuntimeError(f"kvstore restart: {run.returncode}: {said.decode()}")
    return json.loads(printed)


async def use(url: str, store) -> dict:
    """Ask, restart, ask again; returns what was seen."""
    import kvstore

    kept, busy = prompts_of("kept"), prompts_of("busy")
    asker = Asker(url)
    for prompts in (kept, busy):
        await asker.round(prompts)
    wanted_blocks = 2 * NUM_PROMPTS * NUM_BLOCKS
    end_s = time.monotonic() + SETTLE_S
    while any(pool is None or pool["num_idle"] < wanted_blocks for pool in pools(store)):
        if time.monotonic() > end_s:
            raise TimeoutError(f"the prompts were not saved: {pools(store)}")
        await asyncio.sleep(0.1)
    seen = {"kept_tokens_before": await asker.round(kept), "busy_tokens_before": await asker.round(busy)}
    seen["epochs_before"] = [node["epoch"] for node in store.stats()["nodes"].values()]
    num_before = asker.num_answers
    seen["restarted"] = await restart_while_asking(asker, store, busy)
    seen["num_answers_meanwhile"] = asker.num_answers - num_before
    end_s = time.monotonic() + SETTLE_S
    while await asker.round(busy) < 0.9 * seen["busy_tokens_before"]:
        if time.monotonic() > end_s:
            raise TimeoutError("the engines do not use the new stores")
    hits = [node["traffic"]["hit_blocks"]["memory"] for node in store.stats()["nodes"].values()]
    seen["kept_tokens_after"] = await asker.round(kept)
    nodes = store.stats()["nodes"].values()
    seen["kept_blocks_of_store"] = sum(node["traffic"]["hit_blocks"]["memory"] for node in nodes) - sum(hits)
    seen["epochs_after"] = [node["epoch"] for node in nodes]
    seen["setting"] = getattr(kvstore.connect().config, SETTING[0])
    return {**seen, "num_answers": asker.num_answers, "failures": asker.failures}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        private_environment(folder)
        engines = TwoEngines(folder)
        with engines.running() as store:
            seen = {"cache_tokens": cache_tokens(), **asyncio.run(use(engines.options.url, store))}
    sys.stdout.write(json.dumps(seen) + "\n")  # After what Ray prints while it ends.


if __name__ == "__main__":
    main()

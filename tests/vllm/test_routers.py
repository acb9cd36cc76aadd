"""What a router of Dynamo, which is that of Ray's KVAwareRouter, too, counts of engines with the connector."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest
import zmq
from asking import cached

import kvstore

#: Blocks that the store has room for on each node, and an engine in its own cache; one of those is vLLM's.
STORED, OWN = 40, 13


class Router:
    """Dynamo's router, which knows of engines what their events say."""

    def __init__(self, block_size):
        from dynamo.llm import SelectionService

        self.block_size, self.service = block_size, SelectionService(indexer_threads=1)

    def add(self, worker_id, endpoint):
        worker = {
            "worker_id": worker_id, "model_name": "m", "tenant_id": "default", "endpoint": f"ray://{worker_id}",
            "block_size": self.block_size, "max_num_batched_tokens": 4096, "data_parallel_start_rank": 0,
            "data_parallel_size": 1, "kv_events_endpoints": {0: endpoint},
        }  # fmt: skip
        asyncio.run(self._call("upsert_worker", worker))

    async def _call(self, verb, asked):
        return await getattr(self.service, verb)(asked)

    def counted(self, tokens):
        """By worker, the leading blocks that it takes to be in the engine's own cache, and in host memory or there."""
        asked = {"model_name": "m", "tenant_id": "default", "token_ids": list(tokens)}
        found = asyncio.run(self._call("overlap_scores", asked))["workers"]
        return {each["worker_id"]: (each["device_blocks"], each["host_pinned_blocks"]) for each in found}


@pytest.fixture(scope="module")
def make_router():
    """Makes routers of blocks of some size; all end with the module."""
    pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not in this environment; `make test-vllm` has it")
    made = []

    def make(block_size):
        made.append(Router(block_size))
        return made[-1]

    yield make
    for router in made:
        router.service.shutdown()


@pytest.fixture(scope="module")
def engines(cluster, start_engine, model, connector, unit, make_router):
    """Two engines on a node each, which publish events, and share a small store that does so, too."""
    name = "small"
    store = kvstore.start(
        STORED * unit * 4096, name=name, block_bytes=unit * 4096, lease_ttl_s=10.0, events_endpoint="tcp://127.0.0.1:0"
    )
    router, engines = make_router(unit), []
    for node in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
        engines.append(
            start_engine(
                model, block_size=unit, num_gpu_blocks_override=OWN, max_model_len=(OWN - 1) * unit,
                connector=connector(node, store=name, portable=True), events=events,
            )
        )  # fmt: skip
        router.add(node, f"tcp://127.0.0.1:{port}")
    for engine in engines:
        engine.wait_started()
    yield router, engines
    store.stop()


def test_a_router_counts_what_the_engine_and_the_store_have(engines, prompt_of, unit, eventually):
    router, (first, second) = engines
    seeds = iter(range(5000, 6000))

    def ask(engine, num_blocks=6):
        tokens = prompt_of(num_blocks * unit + 1, next(seeds))
        engine.run([("r", tokens, {})], max_tokens=1)
        engine.await_saves()
        engine.settle()
        return tokens

    for node, engine in enumerate((first, second)):  # Until its subscription has come through.
        asked = []
        while not any(router.counted(tokens).get(node, (0, 0)) == (1, 1) for tokens in asked):
            assert len(asked) < 100, [router.counted(tokens) for tokens in asked]
            asked.append(ask(engine, 1))

    tokens = ask(first)
    eventually(lambda: router.counted(tokens).get(0) == (6, 6))
    other = ask(first, 10)  # Takes the place of the first in the engine's cache, not in the store.
    eventually(lambda: router.counted(tokens)[0][0] < 2)
    assert router.counted(tokens)[0][1] == 6
    assert router.counted(tokens).get(1, (0, 0)) == (0, 0)

    # Found on the other node: no save of this engine brought it.
    assert cached(second.run([("r", tokens, {})], max_tokens=1)) == [6 * unit]
    eventually(lambda: router.counted(tokens)[1] == (6, 6))

    several = [tokens, other, *(ask(first, 10) for _ in range(3))]  # More than the store has room for.
    ask(first, OWN - 2)  # Now the engine's cache has none of them.
    eventually(lambda: sum(router.counted(each)[0][1] for each in several) <= STORED)
    assert first.reset(connector=True)
    for engine in (first, second):
        ask(engine, 1)  # vLLM publishes in a step.
    eventually(lambda: router.counted(tokens)[0] == (0, 0))
    assert router.counted(tokens)[1] == (6, 6)  # In the other engine's own cache.


def test_events_of_a_store_disturb_no_others(make_router, prompt_of, eventually):
    from kvstore.node.events import schema

    router, tokens, own = make_router(4), prompt_of(16), [bytes([at]) * 32 for at in range(4)]
    engines = schema.BlockStored(
        block_hashes=[1, 2, 3, 4], parent_block_hash=None, token_ids=tuple(tokens), block_size=4, lora_id=None,
        medium="GPU", lora_name=None,
    )  # fmt: skip
    stored = schema.stored(own, [b"", *own[:-1]], "CPU")
    batch = schema.EventBatch(1.0, [engines, *stored, *schema.removed(own[:2], "STORAGE")], 0)
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.linger = 0
        router.add(1, f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}")
        numbers = iter(range(1000))

        def counted():
            number = next(numbers).to_bytes(8, "big")
            publisher.send_multipart((b"kv@n@s", number, msgspec.msgpack.encode(batch)))
            return router.counted(tokens).get(1)

        eventually(lambda: counted() == (4, 4))

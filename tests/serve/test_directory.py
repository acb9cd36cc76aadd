"""The router beside a real store: it finds the directory by itself, and goes on when that is away."""

from __future__ import annotations

import asyncio
import tempfile

import pytest
from router_fakes import SHAPE, SPACE, TEXT, Replica, ask, make_router, names
from running import kill, wait_until

WAIT_S = 60.0
NAME = "beside"


@pytest.fixture(scope="module")
def store():
    """A store of one node that has the blocks of TEXT."""
    import ray
    import torch
    from serve_app import private_environment

    import kvstore

    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        is_first = not ray.is_initialized()  # Otherwise it is the Ray of the app, which goes on.
        if is_first:
            private_environment(folder)
            ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
        store = kvstore.start("16MiB", name=NAME)
        num_blocks = len(TEXT) // SHAPE.block_size
        with store.client(SPACE) as client:
            client.register_kv_caches([torch.ones(2, num_blocks, 4, 2, 32) for _ in range(SHAPE.num_layers)])
            hashes = SPACE.block_hashes(list(map(ord, TEXT)))
            assert client.save(hashes, list(range(num_blocks))).result(WAIT_S).num_written == num_blocks
        yield store
        store.stop()
        if is_first:
            ray.shutdown()


async def until(router, holds):
    """Route requests until something holds of the ranks of one for which the store answered."""
    async with asyncio.timeout(WAIT_S):
        while True:
            before = router.counts["by_store"]
            ranks = names(await router.choose_replicas(list(router.curr_replicas.values()), ask()))
            if router.counts["by_store"] > before and holds(ranks):
                return
            await asyncio.sleep(0.05)


@pytest.mark.ray
def test_the_directory_says_where_blocks_are_and_its_death_costs_a_prefix_at_most(store):
    (node_id,) = store.node_ids()

    async def test():
        replicas = [Replica("far", "elsewhere"), Replica("near", node_id)]
        # A busy machine may be slow to answer; what happens then is another test.
        router = make_router(replicas, store=NAME, store_wait_s=WAIT_S, store_pause_s=0.1, fetch_bytes_per_s=0)
        await until(router, lambda ranks: ranks == [["near"], ["far"]])
        assert router.counts["by_store"] >= 1
        (pid,) = pids_of_directory()
        kill(pid)
        for _ in range(20):
            assert await router.choose_replicas(replicas, ask())
        wait_until(lambda: pids_of_directory() not in ([], [pid]), "Ray restarts the directory")
        router.hints.clear()
        await until(router, lambda ranks: ranks == [["near"], ["far"]])

    asyncio.run(test())


def pids_of_directory():
    from ray._private import state

    return [
        actor["Pid"]
        for actor in state.actors().values()
        if actor["State"] == "ALIVE" and actor["Name"] == f"raykv/{NAME}/directory"
    ]

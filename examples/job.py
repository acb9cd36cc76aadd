"""A Ray job that uses the store: one process saves blocks, another finds and loads them.

Run it with examples/submit_job.sh, or on a cluster of yours that has no store:
    ray job submit --address http://HEAD:8265 --working-dir examples -- python job.py
"""

import ray
import torch

import kvstore

TIMEOUT_S = 30
SHAPE = kvstore.KVShape(num_layers=4, num_kv_heads=2, head_dim=16, dtype="float32", block_size=16)
NUM_BLOCKS = 8


def empty_caches() -> list[torch.Tensor]:
    return [torch.zeros(2, NUM_BLOCKS, 16, 2, 16) for _ in range(SHAPE.num_layers)]


@ray.remote(num_cpus=0)
def load(space: kvstore.Namespace, hashes: kvstore.BlockHashes) -> tuple[int, list[torch.Tensor]]:
    """Runs in a process of its own, and finds the store by its name."""
    caches = empty_caches()
    with kvstore.connect().client(space) as client:
        client.register_kv_caches(caches)
        result = client.load(hashes, list(range(NUM_BLOCKS))).result(TIMEOUT_S)
    return result.num_blocks, caches


def main() -> None:
    # Inside a job the address of the cluster is known. A store outlives the job unless the job stops it, and stop()
    # ends only what this job started: a store that was there before goes on.
    store = kvstore.start("64MiB")
    try:
        print(f"job: {store} on {len(store.node_ids())} node(s)")
        space = kvstore.Namespace(model="tiny", shape=SHAPE)
        hashes = space.block_hashes(range(NUM_BLOCKS * 16))
        caches = [torch.randn_like(cache) for cache in empty_caches()]
        with store.client(space) as client:
            client.register_kv_caches(caches)
            saved = client.save(hashes, list(range(NUM_BLOCKS))).result(TIMEOUT_S)
        print(f"job: saved {saved.num_written} blocks")
        num_loaded, found = ray.get(load.remote(space, hashes), timeout=TIMEOUT_S)
        same = num_loaded == NUM_BLOCKS and all(map(torch.equal, found, caches))
        print(f"job: another process loaded {num_loaded} blocks, identical: {'yes' if same else 'no'}")
    finally:
        store.stop()
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

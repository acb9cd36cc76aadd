"""A job that serves with a store which runs already: a worker on each node, and prompts that share their beginning.

The engine is a stand-in whose KV can be told apart, so every loaded byte is compared. On a cluster with a store:
    ray job submit --address http://HEAD:8265 --working-dir examples -- python serving_job.py
"""

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import kvstore

TIMEOUT_S = 60
SHAPE = kvstore.KVShape(num_layers=4, num_kv_heads=2, head_dim=16, dtype="float32", block_size=16)
SPACE = kvstore.Namespace(model="tiny", shape=SHAPE)
NUM_SHARED, NUM_OWN = 24, 8  # blocks of a system prompt, and of each question


def prompt(question: int) -> list[int]:
    own = range(10_000 * (question + 1), 10_000 * (question + 1) + NUM_OWN * SHAPE.block_size)
    return [*range(NUM_SHARED * SHAPE.block_size), *own]


def computed(hashes: kvstore.BlockHashes, caches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return caches with the KV of these blocks, as a model would compute it."""
    layers = [torch.zeros_like(cache) for cache in caches]
    for block, block_hash in enumerate(hashes):
        generator = torch.Generator().manual_seed(int.from_bytes(block_hash[:7], "big"))
        for layer in layers:
            layer[:, block] = torch.randn(layer[:, block].shape, generator=generator)
    return layers


@ray.remote(num_cpus=0)
class Worker:
    """A serving process of one node. Its client belongs to it, and ends with it."""

    def __init__(self) -> None:
        num_blocks = NUM_SHARED + NUM_OWN
        self.caches = [torch.zeros(2, num_blocks, 16, 2, 16) for _ in range(SHAPE.num_layers)]
        self.client = kvstore.connect().client(SPACE)
        self.client.register_kv_caches(self.caches)

    def answer(self, tokens: list[int]) -> tuple[int, int, bool]:
        """Load what the store has, compute and save the rest.

        Returns: the number of blocks that were found and saved, and whether all bytes that were found are right.
        """
        hashes = SPACE.block_hashes(tokens)
        ids = list(range(len(hashes)))
        found = self.client.load(hashes, ids).result(TIMEOUT_S).num_blocks
        layers = computed(hashes, self.caches)
        pairs = list(zip(self.caches, layers, strict=True))
        right = all(torch.equal(cache[:, :found], layer[:, :found]) for cache, layer in pairs)
        for cache, layer in pairs:
            cache[:, found:] = layer[:, found:]
        saved = self.client.save(hashes, ids).result(TIMEOUT_S).num_written
        return found, saved, right


def main() -> None:
    store = kvstore.connect()
    nodes = store.node_ids()
    workers = [
        Worker.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in nodes
    ]
    print(f"serving job: {store} with a worker on each of {len(nodes)} node(s)")
    all_right = True
    for question in range(2 * len(workers)):
        # One after the other, so that what an earlier one saved can be found.
        answer = workers[question % len(workers)].answer.remote(prompt(question))
        found, saved, right = ray.get(answer, timeout=TIMEOUT_S)
        print(f"serving job: question {question}: {found} blocks found, {saved} saved")
        all_right = all_right and right and found == (NUM_SHARED if question else 0)
    store.clear(SPACE)  # for the next run of this example
    print(f"serving job: each found the shared beginning, every byte right: {'yes' if all_right else 'no'}")
    if not all_right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

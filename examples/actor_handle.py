"""Serving code that holds a node store's actor handle: ask, pin and release over Ray, from anywhere.

$ python examples/actor_handle.py
started: Store('handles', 67108864 bytes a node)
saved 4 of 4 blocks
the router asks: node <this one> has 4 blocks
the handle finds 4 blocks, of a longer prompt 4 of 5
leased slots [0, 1, 2, 3] for 10 s
released: it was held
once more: it was not held
"""

import os

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a local Ray of our own

import ray
import torch

import kvstore

TIMEOUT_S = 30


def main() -> None:
    # "local" starts a Ray for this process alone, which ends with store.stop(). Without it a Ray of this machine is
    # joined; then store.stop() ends the store if it was started here, and never that Ray.
    store = kvstore.start("64MiB", name="handles", address="local")
    try:
        print(f"started: {store}")
        shape = kvstore.KVShape(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=16)
        space = kvstore.Namespace(model="tiny", shape=shape)
        hashes = space.block_hashes(range(5 * 16))

        # What an engine process does: its cache of 8 blocks, of which the prompt fills four.
        with store.client(space) as client:
            client.register_kv_caches([torch.randn(2, 8, 16, 2, 8) for _ in range(2)])
            saved = client.save(hashes[:4], [7, 0, 3, 5]).result(TIMEOUT_S)
            print(f"saved {saved.num_written} of {saved.num_blocks} blocks")

        # What a router does: which node has most of this prompt?
        node_id, num_blocks = store.locate(hashes)[0]
        here = "this one" if node_id == ray.get_runtime_context().get_node_id() else node_id
        print(f"the router asks: node <{here}> has {num_blocks} blocks")

        # What serving code on any node does, with the handle of that node's store.
        handle = kvstore.node_store(node_id, name="handles")
        found = ray.get([handle.lookup.remote(hashes[:4]), handle.lookup.remote(hashes)], timeout=TIMEOUT_S)
        print(f"the handle finds {found[0]} blocks, of a longer prompt {found[1]} of {len(hashes)}")
        grant = ray.get(handle.lease.remote(hashes, "my-server", ttl_s=10.0), timeout=TIMEOUT_S)
        print(f"leased slots {list(grant.slots)} for 10 s")
        for word in ("released", "once more"):
            held = ray.get(handle.release.remote(grant.lease_id, "my-server"), timeout=TIMEOUT_S)
            print(f"{word}: it {'was' if held else 'was not'} held")
    finally:
        store.stop()


if __name__ == "__main__":
    main()

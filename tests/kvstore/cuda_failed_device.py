"""Break this process's CUDA context while a client has a cache on it; says what its jobs then say."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import torch

from cuda_engine import CudaEngine
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError, PeerLost
from kvstore.node.core import NodeCore
from kvstore.remote.directory import DirectoryServer


def resolve(node_id, within_s):
    raise PeerLost("there is one node only")


def main():
    directory = DirectoryServer("127.0.0.1")
    core = NodeCore("a", StoreConfig(capacity_bytes=1 << 20), "127.0.0.1", resolve, directory.address)
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16", block_size=16)
    space = Namespace(model="m", shape=shape)
    engine = CudaEngine(Client(core.control_path, space), "PBTHD", num_blocks=16)
    hashes = [space.block_hashes(np.arange(64) + 1000 * seed) for seed in range(2)]
    engine.save(hashes[0], range(4))
    # An index out of range is found by the kernel, on the device.
    torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
    for verb, ids in (("save", hashes[1]), ("load", hashes[0])):
        try:
            getattr(engine, verb)(ids, range(4))
        except KVStoreError as error:
            print(verb, type(error).__name__)
    print("stored", engine.client.lookup(hashes[1]).num_local)
    engine.client.close()
    core.pool.check_integrity()
    print("closed", flush=True)
    core.stop()
    directory.stop()
    os._exit(0)  # What torch does at the end of a process with a broken context is not of interest.


with tempfile.TemporaryDirectory(prefix="rks", dir="/tmp") as folder:
    os.environ["RAYKV_SOCKET_DIR"] = folder
    main()

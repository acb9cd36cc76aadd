"""A worker process without an engine: loads one chain on several connections and says what the arena then holds.

    python loader.py CONTROL_PATH CHAIN_HEX NUM_THREADS TIMEOUT_S BLOCK_BYTES [hold]

It says "ready", begins at the first line of its standard input, and answers with a list of [number of blocks,
digest of their bytes], one for each connection. With "hold" it says "copying" while it reads the bytes under its
lease, and goes on at the next line.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading

from kvstore.blocks.chain import decode_chain
from kvstore.blocks.codec import encode
from kvstore.config import PROTOCOL_VERSION
from kvstore.memory.arena import attach_arena
from kvstore.rpc.connect import connect_local
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import AskLoad, decode_progress


def load(client, arena, chain, block_bytes, timeout_s, hold):
    slots, lease_id = [], 0
    for _, payload in client.call_stream(Op.LOAD, encode(AskLoad(chain, 30.0, timeout_s)), timeout_s=timeout_s + 5):
        progress = decode_progress(payload)
        lease_id = progress.lease_id
        slots += progress.slots.tolist()
    if hold:
        print("copying", flush=True)
        sys.stdin.readline()
    digest = hashlib.sha256()
    for slot in slots:
        digest.update(arena.memory[slot * block_bytes : (slot + 1) * block_bytes])
    client.send(Op.RELEASE, encode(lease_id))
    return [len(slots), digest.hexdigest()]


def main(path, encoded, num_threads, timeout_s, block_bytes, hold=""):
    chain, results = decode_chain(bytes.fromhex(encoded)), []
    clients, arena = [], None
    for _ in range(int(num_threads)):
        client, fd = connect_local(path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=5.0)
        clients.append(client)
        arena = attach_arena(fd, int(client.hello["arena_bytes"]))
    print("ready", flush=True)
    sys.stdin.readline()

    def one(client):
        results.append(load(client, arena, chain, int(block_bytes), float(timeout_s), hold))

    threads = [threading.Thread(target=one, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

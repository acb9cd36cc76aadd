"""One process of the hammer: talks to a real node store over its socket and touches slots in the shared arena.

python -m poolcheck.process SOCKET NAMESPACE_HEX BLOCK_BYTES SEED NUM_ROUNDS [die]

Prints what it did as JSON. With `die` it ends without a word while it holds a lease and slots half written.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter

import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import decode_count, encode
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import ChainBroken
from kvstore.memory.arena import attach_arena
from kvstore.rpc.client import ControlClient
from kvstore.rpc.connect import connect_local
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Ask, Prepare, Renew, WriteEnd, decode_grant, decode_ticket
from poolcheck.chains import chain_of

_CALL_S = 20.0
_NOTHING = {"indexes": (), "slots": (), "num_resident": 0, "num_refused": 0}


class Worker:
    """A worker's connection and its view of the slots."""

    def __init__(self, path: str, namespace: bytes, block_bytes: int, seed: int) -> None:
        hello = {"role": "client", "protocol": PROTOCOL_VERSION}
        self.control: ControlClient
        self.control, fd = connect_local(path, hello, timeout_s=_CALL_S)
        arena = attach_arena(fd, int(self.control.hello["arena_bytes"]))
        self.slots = arena.bytes_view()[: arena.num_bytes // block_bytes * block_bytes].reshape(-1, block_bytes)
        self.namespace, self.rng, self.counts = namespace, random.Random(seed), Counter[str]()
        self.epoch = bytes.fromhex(self.control.hello["epoch"])
        self.stale = [1]

    def call(self, op: Op, payload: bytes) -> bytes:
        """Ask the store."""
        return self.control.call(op, payload, timeout_s=_CALL_S)

    def tokens(self, letters: str = "ab") -> str:
        """Return a short chain."""
        return "".join(self.rng.choice(letters) for _ in range(self.rng.randint(1, 4)))

    def chain(self, tokens: str, start: int = 0) -> BlockHashes:
        """Return the chain of some letters."""
        return chain_of(tokens, self.namespace, start)

    def stamp(self, block_hash: bytes) -> np.ndarray:
        """Return the bytes of a block."""
        return np.resize(np.frombuffer(block_hash, np.uint8), self.slots.shape[1])

    def verify(self, tokens: str, slots: tuple[int, ...]) -> None:
        """Compare pinned slots with their blocks."""
        chain = self.chain(tokens)
        for index, slot in enumerate(slots):
            assert np.array_equal(self.slots[slot], self.stamp(chain.hash_at(index))), f"slot {slot}: wrong bytes"
        self.counts["blocks read"] += len(slots)

    def read(self) -> None:
        """Pin, compare several times, release, and once too often."""
        tokens = self.tokens()
        grant = decode_grant(self.call(Op.LEASE, encode(Ask(self.chain(tokens), 30.0))))
        if not grant.lease_id:
            return
        for _ in range(3):
            self.verify(tokens, grant.slots)
        assert decode_count(self.call(Op.RENEW, encode(Renew(grant.lease_id, 0.001)))), "a lease was gone"
        self.verify(tokens, grant.slots)
        assert decode_count(self.call(Op.RELEASE, encode(grant.lease_id))), "a lease was gone"
        assert not decode_count(self.call(Op.RELEASE, encode(grant.lease_id))), "a lease was released twice"
        self.stale.append(grant.lease_id)

    def write(self, tokens: str, *, publish: bool) -> None:
        """Claim, write in two halves, publish or give up."""
        chain = self.chain(tokens)
        ticket = decode_ticket(self.call(Op.PREPARE_STORE, encode(Prepare(chain))))
        if not ticket.write_id:
            return
        half = self.slots.shape[1] // 2
        for part in (slice(0, half), slice(half, None)):
            for index, slot in zip(ticket.indexes, ticket.slots, strict=True):
                self.slots[slot][part] = self.stamp(chain.hash_at(index))[part]
        if publish:
            self.call(Op.COMPLETE_STORE, encode(WriteEnd.of(ticket)))
        else:
            self.call(Op.ABORT_STORE, encode(WriteEnd.of(ticket)))
        self.counts["blocks written"] += len(ticket.slots)

    def lie(self) -> None:
        """Name leases and writes that are stale, of others, or never were; and a chain without its root."""
        # Ids are handed out in order, so those around our own latest one are other processes'.
        latest = self.stale[-1]
        for lease_id in (self.rng.choice(self.stale), latest + 1, latest + 2, self.rng.getrandbits(60)):
            assert not decode_count(self.call(Op.RELEASE, encode(lease_id)))
            assert not decode_count(self.call(Op.RENEW, encode(Renew(lease_id, 1.0))))
            end = encode(WriteEnd(lease_id, self.epoch))
            for op in (Op.COMPLETE_STORE, Op.ABORT_STORE):
                assert decode_count(self.call(op, end)) == 0
        try:
            self.call(Op.PREPARE_STORE, encode(Prepare(self.chain("zzz" + self.tokens(), 3))))
        except ChainBroken:
            self.counts["lies refused"] += 1

    def run(self, num_rounds: int) -> None:
        """Do everything in turn."""
        for number in range(num_rounds):
            self.read()
            self.write(self.tokens(), publish=self.rng.random() < 0.7)
            self.write(f"{number % 10}" + self.tokens(), publish=True)
            if number % 4 == 0:
                self.lie()


def main() -> None:
    """Run one worker."""
    path, namespace, block_bytes, seed, num_rounds = sys.argv[1:6]
    worker = Worker(path, bytes.fromhex(namespace), int(block_bytes), int(seed))
    worker.run(int(num_rounds))
    if "die" in sys.argv[6:]:
        worker.call(Op.LEASE, encode(Ask(worker.chain("a"), 600.0)))
        worker.call(Op.PREPARE_STORE, encode(Prepare(worker.chain("half written"))))
    sys.stdout.write(json.dumps(worker.counts))
    sys.stdout.flush()
    if "die" in sys.argv[6:]:
        os._exit(0)
    worker.control.send(Op.GOODBYE)
    worker.control.close()


if __name__ == "__main__":
    main()

"""A subscriber of a store's events, as a router has one: it applies them, and asks again for what it missed."""

from __future__ import annotations

import time

import zmq
from msgspec import msgpack

from kvstore.blocks.chain import event_hash

#: Far longer than any step of these tests takes.
SOON_S = 10.0
_END = (-1).to_bytes(8, "big", signed=True)


def named(hashes):
    """Return hashes as events have them."""
    return [event_hash(own) for own in hashes]


class Subscriber:
    """What it was told is here: hashes by medium, and the parent of each.

    Args:
        stats: of the store, with the addresses of its publisher.
        topic: it asks for.
        settings: of the SUB socket, by the names of zmq.
    """

    def __init__(self, stats, topic=b"", **settings):
        self.context = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        for name, value in {"LINGER": 0, **settings}.items():
            self.live.setsockopt(getattr(zmq, name), value)
        self.live.connect(stats["endpoint"])
        self.live.setsockopt(zmq.SUBSCRIBE, topic)
        self.asker = self.context.socket(zmq.DEALER)
        self.asker.setsockopt(zmq.LINGER, 0)
        if stats["replay_endpoint"]:
            self.asker.connect(stats["replay_endpoint"])
        self.here, self.parents = {"CPU": set(), "STORAGE": set()}, {}
        self.next, self.topics, self.kinds, self.num_gaps = 0, set(), [], 0

    def ask(self, *frames):
        self.asker.send_multipart(frames)

    def replayed(self, first):
        """Return the (sequence, payload) of a replay; its end marker has to come."""
        self.ask(b"", first.to_bytes(8, "big"))
        found = []
        while True:
            assert self.asker.poll(SOON_S * 1000), "wanted the next message of a replay"
            _, _, sequence, payload = self.asker.recv_multipart()
            if sequence == _END:
                return found
            found.append((int.from_bytes(sequence, "big"), payload))

    def begin_anew(self):
        """Forget all, and begin with what is kept; its first batch has to say that no block is here."""
        until_s = time.monotonic() + SOON_S
        while not (replayed := self.replayed(0)):  # Sockets that are made anew are there a moment before what is kept.
            assert time.monotonic() < until_s, "wanted the batches that are kept"
        self.next, _ = replayed[0]
        assert msgpack.decode(replayed[0][1])[1] == [{"type": "AllBlocksCleared"}]
        self.catch_up()

    def catch_up(self):
        for sequence, payload in self.replayed(self.next):
            assert sequence == self.next, "a replay has a gap"
            self.apply(payload)

    def read_until(self, condition):
        """Apply batches until a condition holds; where one is missing, or none comes, ask for old ones."""
        until_s = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < until_s, "waited in vain"
            self.read() or self.catch_up()

    def read(self, timeout_ms=50):
        """Apply the next live batch; return whether one came."""
        if not self.live.poll(timeout_ms):
            return False
        topic, sequence, payload = self.live.recv_multipart()
        self.topics.add(topic)
        number = int.from_bytes(sequence, "big")
        if number > self.next:
            self.num_gaps += 1
            self.catch_up()
        if number == self.next:
            self.apply(payload)
        return True

    def apply(self, payload):
        ts, events, rank = msgpack.decode(payload)
        assert abs(time.time() - ts) < 600
        assert rank == 0
        for event in events:
            kind, hashes = event["type"], event.get("block_hashes", ())
            self.kinds.append(kind)
            if kind == "AllBlocksCleared":
                self.here = {"CPU": set(), "STORAGE": set()}
            elif kind == "BlockStored":
                self.here[event["medium"]].update(hashes)
                self.parents.update(zip(hashes, [event["parent_block_hash"], *hashes[:-1]], strict=True))
            else:
                self.here[event["medium"]].difference_update(hashes)
        self.next += 1

    def close(self):
        self.context.destroy(linger=0)

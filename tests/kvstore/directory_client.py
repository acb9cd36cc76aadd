"""What a store is to a directory: a connection, and the batches on it; and what a directory makes of batches."""

from __future__ import annotations

import threading

from kvstore.blocks.chain import hashes_in
from kvstore.blocks.codec import encode
from kvstore.config import PROTOCOL_VERSION
from kvstore.remote.announcements import Batch
from kvstore.remote.directory_link import Hints
from kvstore.remote.peers import PeerAddress
from kvstore.rpc.connect import connect_remote
from kvstore.rpc.framing import Op


def connect(address: PeerAddress, **changes):
    hello = {"role": "store", "protocol": PROTOCOL_VERSION, "token": address.token, "node": "a"}
    hello |= {"epoch": "00" * 8, "owner": "11" * 8}
    return connect_remote(address.host, address.port, hello | changes, timeout_s=2.0)


def batch(sequence, added=(), removed=(), *, whole=False, begins=False, ends=False, versions=None) -> bytes:
    made = Batch(
        sequence=sequence, begins=begins or whole, ends=ends or whole, added=b"".join(added), removed=b"".join(removed),
        versions=versions or {},
    )  # fmt: skip
    return encode(made)


def tell(client, *args, **options) -> bytes:
    return client.call(Op.PUBLISH, batch(*args, **options), timeout_s=2.0)


def publish(hints: Hints) -> None:
    done = threading.Event()
    hints.publish_soon(done.set)
    assert done.wait(5)


class Reader:
    """What a directory makes of the batches."""

    def __init__(self):
        self.known, self.coming, self.sizes = set(), None, []

    def take(self, batch):
        added, removed = hashes_in(batch.added), hashes_in(batch.removed)
        self.sizes.append(len(added) + len(removed))
        if batch.begins:
            self.coming = set()
        for found in (self.known, self.coming):
            if found is not None:
                found.difference_update(removed)
        (self.known if self.coming is None else self.coming).update(added)
        if batch.ends:
            self.known, self.coming = self.coming, None

    def take_all(self, announcements):
        while True:
            self.take(announcements.next({}))
            if announcements.is_all_told:
                return

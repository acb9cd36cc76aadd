"""What tests of hand-offs do and ask, and a transport that holds its READs."""

import dataclasses
import itertools
import threading

from kvstore.blocks.ticket import HandoffTicket, expiry_after
from kvstore.mover.transport import ReadState
from tests.kvstore.conftest import SHAPE


def named(client, num_blocks, **changes):
    """A ticket for blocks that a client may publish later."""
    ticket = HandoffTicket(
        node_id=client.node_id, epoch=bytes.fromhex(client.epoch), namespace=client.space.digest,
        num_blocks=num_blocks, block_bytes=SHAPE.block_bytes, expires_s=expiry_after(10.0),
    )  # fmt: skip
    return dataclasses.replace(ticket, **changes)


def is_empty(core):
    """Whether a node holds nothing for hand-offs, and its pool agrees."""
    core.pool.check_integrity()
    stats = core.stats()
    counts = [stats[f"num_handoff{what}"] for what in ("s", "_slots", "_fetches")]
    pool = core.pool.stats()
    return counts == [0, 0, 0] and (pool.num_writing, pool.num_quarantined, pool.num_leases) == (0, 0, 0)


def same(source, source_ids, target, target_ids):
    pairs = zip(source_ids, target_ids, strict=True)
    return [source.block(a) == target.block(b) for a, b in pairs]


def fetch(worker, ticket, ids, **more):
    return worker.client.fetch(ticket, list(ids), **more).result(20)


def reason(result):
    assert result.num_blocks == 0
    assert len({failure.reason for failure in result.failed}) == 1
    return result.failed[0].reason


class Held:
    """A transport that begins its READs when `go` is set."""

    def __init__(self, transport):
        self._transport, self.go, self.waiting, self._begun = transport, threading.Event(), {}, {}
        self._handles = itertools.count()

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post(self, request):
        handle = 1000 + next(self._handles)
        self.waiting[handle] = request
        return handle

    def poll(self, handle):
        if not self.go.is_set():
            return ReadState.RUNNING
        if handle not in self._begun:
            self._begun[handle] = self._transport.post(self.waiting[handle])
        return self._transport.poll(self._begun[handle])

    def release(self, handle):
        self._transport.release(self._begun[handle])

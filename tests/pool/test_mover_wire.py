"""Every message between a store and its mover spoilt in every way: a load fails closed, the next one succeeds."""

from __future__ import annotations

import contextlib
import time

import pytest

from kvstore.blocks.codec import encode
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import KVStoreError, PeerLost
from kvstore.mover.messages import MoverDone
from kvstore.mover.transport import ReadState
from kvstore.rpc.connect import connect_local
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Op, pack_error
from poolcheck.wire_faults import Spoil, WireFaults

NUM_BLOCKS, NUM_SLOTS = 6, 16
#: What a load takes at most: its time limit, the mover's grace, and a busy machine.
BOUND_S = 3.0


class Nodes:
    """Node "a" has blocks, node "b" loads them; movers that die or are killed are replaced, as the actors do it."""

    def __init__(self, cluster, monkeypatch, faults, **changes):
        self.cluster, self.faults, self.num_replaced = cluster, faults, 0
        # Movers are threads of this process; killing one is its death and nobody else's.
        monkeypatch.setattr(Connection, "kill", lambda connection: self._kill(connection))
        monkeypatch.setattr("kvstore.remote.covered_read._MOVER_GRACE_S", 0.1)
        settings = {
            "capacity_bytes": 1 << 16, "block_bytes": (1 << 16) // NUM_SLOTS, "chunk_bytes": 1 << 13,
            "max_pinned_fraction": 1.0, "lease_ttl_s": 0.5, "lease_margin_s": 0.05, "call_timeout_s": 1.0,
            "transfer_timeout_s": 0.2, "max_quarantine_s": 0.2, "max_quarantined_fraction": 1.0,
        } | changes  # fmt: skip
        for node_id in "ab":
            core = cluster.add(node_id, **settings)
            core.control.on_mover_gone = lambda node_id=node_id: self._replace(node_id)
        self.one, self.two = cluster.worker("a", 16, seed=1), cluster.worker("b", 16, seed=2)
        self.hashes = cluster.hashes(NUM_BLOCKS)
        self.one.save(self.hashes, range(NUM_BLOCKS))

    def _kill(self, connection):
        (node_id,) = (i for i, core in self.cluster.nodes.items() if core.state.mover.is_present(connection))
        mover = self.cluster.movers[node_id]
        mover.say_goodbye(mover.sock)
        return True

    def _replace(self, node_id):
        self.num_replaced += 1
        self.cluster.movers[node_id].thread.join(6.0)
        self.cluster.movers[node_id].join()
        # The next one has another process id where movers are processes.
        self.cluster.nodes[node_id].control.fence.killed_pid = 0
        self.cluster.start_mover(node_id)

    def forget(self, wait_until):
        """Let "b" have nothing, know no peer's memory, and hold nothing against "a"."""
        self.cluster.nodes["b"].pool.clear(self.cluster.space.digest)
        generation = self.cluster.nodes["b"].state.mover.own.generation
        self._kill(self.cluster.nodes["b"].state.mover.connection)
        wait_until(lambda: (own := self.cluster.nodes["b"].state.mover.own) and own.generation > generation)

    def load(self):
        """Load all blocks; what is called usable has to be right."""
        self.two.caches[0].fill_(0.0)
        self.cluster.nodes["b"].state.peers.succeeded("a")
        begun_s = time.monotonic()
        result = self.two.load(self.hashes, range(NUM_BLOCKS), timeout_s=0.3)
        assert time.monotonic() - begun_s < BOUND_S
        assert all(self.two.block(i) == self.one.block(i) for i in range(result.num_blocks))
        assert [failure.index for failure in result.failed] == list(range(result.num_blocks, NUM_BLOCKS))
        return result.num_blocks == NUM_BLOCKS

    def is_at_rest(self):
        for core in self.cluster.nodes.values():
            core.pool.check_integrity()
            stats = core.pool.stats()
            if stats.num_pinned or stats.num_writing or stats.num_quarantined or stats.num_leases or stats.num_writes:
                return False
            if core.state.mover.num_abandoned or core.state.mover.own is None:
                return False
        return True


@pytest.fixture(name="faults")
def _faults(monkeypatch):
    made = WireFaults()
    made.install(monkeypatch)
    return made


@pytest.fixture(name="nodes")
def _nodes(cluster, monkeypatch, faults):
    return Nodes(cluster, monkeypatch, faults)


@pytest.mark.parametrize("spoil", Spoil, ids=lambda spoil: spoil.value)
def test_a_spoilt_message_at_every_step_leaves_nothing(nodes, faults, wait_until, spoil):
    faults.arm()
    assert nodes.load()
    wait_until(nodes.is_at_rest)
    steps = faults.disarm()
    kinds = {Op.MOVER_ADD_PEER, Op.MOVER_READ, Op.MOVER_DONE, Op.MOVER_EXPECT, Op.MOVER_NOTIFICATIONS}
    assert kinds <= set(steps)
    for spoil_at, op in enumerate(steps):
        nodes.forget(wait_until)
        wait_until(nodes.is_at_rest)
        faults.arm(spoil, spoil_at)
        with contextlib.suppress(KVStoreError):
            nodes.load()
        wait_until(nodes.is_at_rest)
        faults.disarm()
        wait_until(nodes.is_at_rest)
        assert nodes.load(), f"with message {spoil_at}, {op.name}, {spoil.value}, the same load fails"
        wait_until(nodes.is_at_rest)


# What only one process may say, and what none can.


def done(read_id, num_blocks, *, last=True, terminal=True, error=b""):
    word = MoverDone(
        read_id=read_id,
        num_blocks=num_blocks,
        last=last,
        terminal=terminal,
        seconds=0.0,
        num_descriptors=1,
        error=error,
    )
    return encode(word)


class Held:
    """A load whose READ is posted and does not end before `go_on`."""

    def __init__(self, nodes, wait_until):
        self.nodes, self.core = nodes, nodes.cluster.nodes["b"]
        transport = nodes.cluster.movers["b"].transport
        self._poll, self._transport = transport.poll, transport
        transport.poll = lambda handle: ReadState.RUNNING
        nodes.two.caches[0].fill_(0.0)
        self.num_published = self.core.pool.stats().num_published
        self.job = nodes.two.client.load(nodes.hashes, list(range(NUM_BLOCKS)), timeout_s=4.0)
        wait_until(lambda: len(transport.handles) > 0)
        (self.read_id,) = self.core.state.mover.unfinished.reads

    def has_published(self):
        return self.core.pool.stats().num_published > self.num_published

    def go_on(self):
        self._transport.poll = self._poll

    def end(self):
        result = self.job.result(10)
        assert all(self.nodes.two.block(i) == self.nodes.one.block(i) for i in range(result.num_blocks))
        return result.num_blocks


@pytest.fixture(name="held")
def _held(cluster, monkeypatch, faults, wait_until):
    return Held(Nodes(cluster, monkeypatch, faults, lease_ttl_s=5.0, transfer_timeout_s=4.0), wait_until)


def test_what_another_mover_reports_counts_for_nothing(held, wait_until):
    """One that has not taken over yet, or one of before: the ids of READs would fit."""
    stranger, fd = connect_local(held.core.control_path, {"role": "mover", "protocol": PROTOCOL_VERSION}, timeout_s=2.0)
    fd.close()
    stranger.send(Op.MOVER_DONE, done(held.read_id, NUM_BLOCKS))
    assert stranger.channel.sock.recv(100) == b"", "it is turned away"
    stranger.close()
    assert not held.has_published()
    assert held.core.stats()["num_fenced_movers"] == 0
    held.go_on()
    assert held.end() == NUM_BLOCKS


def test_a_report_on_a_read_of_the_mover_before_counts_for_nothing(held, wait_until):
    """READ ids go on counting, so it names none that is under way."""
    mover = held.nodes.cluster.movers["b"].mover
    for old in (held.read_id - 1, 0, 2**63):
        mover.send(Op.MOVER_DONE, done(old, 1))
        mover.send(Op.MOVER_DONE, done(old, 1, terminal=False))
        mover.send(Op.MOVER_TERMINAL, encode(old))
    held.go_on()
    assert held.end() == NUM_BLOCKS
    assert held.core.state.mover.num_abandoned == 0


@pytest.mark.parametrize(
    ("op", "word"),
    [
        (Op.MOVER_DONE, lambda read_id: done(read_id, NUM_BLOCKS + 1)),
        (Op.MOVER_DONE, lambda read_id: done(read_id, 0, last=False)),
        (Op.MOVER_DONE, lambda read_id: done(read_id, 1)),
        (Op.MOVER_DONE, lambda read_id: done(read_id, NUM_BLOCKS, terminal=False)),
        (Op.MOVER_DONE, lambda read_id: done(read_id, 1, last=False, terminal=False, error=pack_error(PeerLost("x")))),
        (Op.MOVER_DONE, lambda read_id: done(read_id, 1)[:-1]),
        (Op.MOVER_DONE, lambda read_id: done(read_id, 1, error=b"no error in JSON")),
        (Op.MOVER_TERMINAL, lambda read_id: b""),
        (Op.MOVER_TERMINAL, lambda read_id: encode(True)),
        (Op.MOVER_NOTIFICATIONS, lambda read_id: encode(b"half of one")),
        (Op.MOVER_STATS, lambda read_id: encode([1])),
        (Op.MOVER_READ, lambda read_id: b""),
    ],
    ids=[
        "too many",
        "none",
        "few",
        "not terminal",
        "error and more",
        "cut",
        "error",
        "terminal",
        "a truth value",
        "notification",
        "stats",
        "question",
    ],
)
def test_a_mover_that_says_what_cannot_be_is_replaced_and_nothing_is_published(held, wait_until, op, word):
    held.nodes.cluster.movers["b"].mover.send(op, word(held.read_id))
    assert held.end() == 0
    assert not held.has_published()
    wait_until(held.nodes.is_at_rest)
    assert held.nodes.num_replaced == held.core.stats()["num_fenced_movers"] == 1
    assert held.nodes.load()

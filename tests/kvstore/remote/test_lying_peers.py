"""A peer that answers nonsense is lost for a while, and the load goes on to the next one that has the blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstore.blocks.codec import encode, encode_object
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import LayoutMismatch, PeerLost
from kvstore.handoff.messages import PeerClaimed, claimed_of
from kvstore.mover.transport import PeerDescription
from kvstore.remote.answers import check_slots, grant_of, stages_of, transport_of
from kvstore.remote.messages import PeerGrant
from kvstore.remote.peers import PeerAddress
from kvstore.rpc.framing import Op
from kvstore.rpc.server import ControlServer

EPOCH = b"evilepch"
NUM_BLOCKS = 3


def grant(slots=range(NUM_BLOCKS), *, lease_id=9, epoch=EPOCH, version=0, generation=1):
    return encode(
        PeerGrant(
            lease_id=lease_id, epoch=epoch, namespace_version=version, mover_generation=generation,
            slots=np.asarray(slots, np.int32),
        )
    )  # fmt: skip


class Liar:
    """A peer that says what a test has it say."""

    def __init__(self, honest):
        own = honest.state.mover.own
        self.transport = {
            "generation": 1, "agent": own.agent, "address": own.address,
            "slot_bytes": honest.state.pool_service.slot_bytes, "num_slots": honest.pool.stats().num_slots,
        }  # fmt: skip
        self.hello = {"protocol": PROTOCOL_VERSION, "epoch": EPOCH.hex()}
        self.grant = grant()
        self.num_asked = 0
        self.server = ControlServer(self._serve, lambda connection: None)
        self.server.listen_remote("127.0.0.1")
        self.server.start()

    def _serve(self, connection, message):
        connection.role = "store"
        if message.op is Op.HELLO:
            return encode_object(self.hello) if isinstance(self.hello, dict) else self.hello
        if message.op is Op.PEER_LEASE:
            self.num_asked += 1
            if isinstance(self.grant, Exception):
                raise self.grant
            return self.grant
        if message.op is Op.PEER_TRANSPORT:
            return encode([*self.transport.values()]) if isinstance(self.transport, dict) else self.transport
        return b""


@pytest.fixture
def nodes(cluster, monkeypatch):
    """An honest node that has the blocks, a liar that says so, and a worker on a third that wants them."""
    good, reader = cluster.add("good"), cluster.add("reader")
    hashes = cluster.hashes(NUM_BLOCKS)
    written = cluster.worker("good", seed=1)
    written.save(hashes, range(NUM_BLOCKS))
    liar, resolve = Liar(good), reader.state.peers.resolve
    monkeypatch.setattr(
        reader.state.peers,
        "resolve",
        lambda node, s: PeerAddress("127.0.0.1", liar.server.port, "t") if node == "liar" else resolve(node, s),
    )
    reader.state.hints.remember(hashes.data[:32], [("liar", NUM_BLOCKS), ("good", NUM_BLOCKS)])
    worker = cluster.worker("reader", seed=2)
    yield liar, reader, worker, hashes, written
    liar.server.stop()
    reader.pool.check_integrity()
    stats = reader.pool.stats()
    assert (stats.num_writing, stats.num_quarantined) == (0, 0)


def lies():
    yield "short grant", {"grant": b"abc"}
    yield "more slots than asked for", {"grant": grant(range(50))}
    yield "slots beyond the slab", {"grant": grant([2**31 - 1] * 3)}
    yield "negative slots", {"grant": grant([-1, -2, -(2**31)])}
    yield "a clearing that cannot be", {"grant": grant(version=2**64 - 1)}
    yield "another life", {"grant": grant(epoch=b"whatever")}
    yield "half an epoch", {"hello": {"protocol": PROTOCOL_VERSION, "epoch": "ab"}}
    yield "no epoch", {"hello": {"protocol": PROTOCOL_VERSION}}
    yield "epoch that is none", {"hello": {"epoch": "zz" * 8}}
    yield "epoch of another type", {"hello": {"epoch": 7}}
    yield "hello that is no JSON", {"hello": b"\xff"}
    yield "a refusal", {"grant": LayoutMismatch("no")}
    yield "an empty transport", {"transport": {}}
    yield "a transport that is no array", {"transport": b"\xff\xff"}
    yield "a transport of another protocol", {"transport": b"{}"}
    for key, values in {
        "generation": (7, "x", None, 2**64 - 1, -1),
        "address": (2**64 - 1, 2**57, -1, None, "x"),
        "slot_bytes": (0, -64, 8, 2**64 - 1),
        "num_slots": (0, -1, 10**8, 2**64 - 1, 1e999),
        "agent": ("!!!", None, 7, bytes(1 << 20), b"nobody"),
    }.items():
        for value in values:
            yield f"{key} {str(value)[:20]}", {"transport": {key: value}}


@pytest.mark.parametrize("lie", [pytest.param(lie, id=name) for name, lie in lies()])
def test_a_load_goes_on_to_the_next_peer(nodes, lie):
    liar, reader, worker, hashes, written = nodes
    for name, value in lie.items():
        told = getattr(liar, name)
        is_part = name == "transport" and value and isinstance(value, dict)
        setattr(liar, name, told | value if is_part else value)
    result = worker.load(hashes, range(NUM_BLOCKS))
    assert (result.num_blocks, result.failed) == (NUM_BLOCKS, ())
    assert [worker.block(i) for i in range(NUM_BLOCKS)] == [written.block(i) for i in range(NUM_BLOCKS)]
    assert not reader.state.peers.is_usable("liar")


def test_a_peer_that_lied_is_left_alone_for_a_while(nodes, monkeypatch):
    monkeypatch.setattr("kvstore.remote.peers._BACK_OFF_S", (60.0,))
    liar, reader, worker, hashes, _ = nodes
    liar.grant = b"abc"
    for count in itertools.count(1):
        reader.pool.clear(hashes.namespace_digest)
        reader.state.hints.remember(hashes.data[:32], [("liar", NUM_BLOCKS), ("good", NUM_BLOCKS)])
        assert worker.load(hashes, range(NUM_BLOCKS)).num_blocks == NUM_BLOCKS
        if count == 20:
            break
    assert liar.num_asked == 1


@pytest.mark.parametrize(
    "payload", [b"", b"\xff" * 10, encode(PeerClaimed(1, EPOCH, 0, 1, np.arange(2))), b"\xff" * 44]
)
def test_claims_that_are_none(payload):
    with pytest.raises(PeerLost):
        claimed_of(payload, NUM_BLOCKS)


@pytest.mark.parametrize(("slots", "slot_bytes"), [([0, 8], 64), ([-1, 0], 64), ([2**31 - 1], 64), ([0, 1], 63)])
def test_slots_that_a_peer_cannot_have_never_reach_the_mover(slots, slot_bytes):
    slab = PeerDescription(agent=b"", address=0, slot_bytes=slot_bytes, num_slots=8)
    with pytest.raises(PeerLost, match="wanted slots of a peer"):
        check_slots(np.asarray(slots, np.int32), slab, 64)


def test_a_read_of_slots_that_a_peer_cannot_have_is_not_posted(nodes, monkeypatch):
    liar, reader, worker, hashes, _ = nodes
    sources, read = [], reader.state.mover.read
    monkeypatch.setattr(
        reader.state.mover, "read", lambda *args, **more: (sources.append(args), read(*args, **more))[1]
    )
    liar.grant = grant([2**31 - 1] * 3)
    assert worker.load(hashes, range(NUM_BLOCKS)).num_blocks == NUM_BLOCKS
    assert len(sources) == 1, "the one of the honest peer"


@pytest.mark.parametrize("stages", [{}, {"stages": 7}, 7, [{}], [[]], [[1]], [[1, 1, "u", b"", b"", 0, 0, 64, 8, 0]]])
def test_stages_that_are_none(stages):
    with pytest.raises(PeerLost):
        stages_of(encode(stages), 1)


def test_what_a_peer_may_answer(nodes):
    liar = nodes[0]
    assert len(grant_of(grant(), NUM_BLOCKS).slots) == NUM_BLOCKS
    assert transport_of(encode([*liar.transport.values()]), same_host=False)[0] == 1
    assert claimed_of(encode(PeerClaimed(0, EPOCH, 0, 1, slab=0, reason="gone: x")), NUM_BLOCKS).reason == "gone: x"

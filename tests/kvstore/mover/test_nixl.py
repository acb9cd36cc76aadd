"""Real NIXL over UCX, two agents in one process on the default lane."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from kvstore.config import UCX_DEFAULTS
from kvstore.errors import PeerLost, RegistrationFailed, TransferError
from kvstore.mover import nixl as nixl_transport
from kvstore.mover.nixl import LOST_PEER, NixlTransport, load_bindings, plugin_memory_types, translate_error
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState

SLOT_BYTES, BLOCK_BYTES, NUM_SLOTS = 8192, 8000, 64


class Side:
    def __init__(self, name: str):
        self.slab = np.zeros(SLOT_BYTES * NUM_SLOTS, np.uint8)
        self.transport = NixlTransport(f"{name}-{os.getpid()}", self.slab.ctypes.data, self.slab.nbytes)
        self.transport.set_slots(SLOT_BYTES, NUM_SLOTS)

    @property
    def slots(self):
        return self.slab.reshape(NUM_SLOTS, SLOT_BYTES)

    def description(self) -> PeerDescription:
        return PeerDescription(
            agent=self.transport.describe(),
            address=self.slab.ctypes.data,
            slot_bytes=SLOT_BYTES,
            num_slots=NUM_SLOTS,
        )


@pytest.fixture(scope="module")
def sides():
    before = {key: os.environ.get(key) for key in (*UCX_DEFAULTS, "UCX_LOG_LEVEL")}
    reader, source = Side("reader"), Side("source")
    source.slots[:] = np.arange(NUM_SLOTS, dtype=np.uint8)[:, None] + 1
    reader.transport.add_peer("p", source.description())
    yield reader, source
    reader.transport.close()
    source.transport.close()
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)


@pytest.fixture(autouse=True)
def _empty(sides):
    sides[0].slab[:] = 0
    sides[1].transport.notifications()


def request(local, remote, peer="p", notification=b"", block_bytes=BLOCK_BYTES):
    return ReadRequest(
        peer=peer,
        block_bytes=block_bytes,
        local_slots=np.array(local, np.int32),
        remote_slots=np.array(remote, np.int32),
        notification=notification,
    )


def run(transport, wanted) -> int:
    """Run a READ to its end; returns how many descriptors the engine needed, by its own count."""
    before = transport.totals.num_descriptors
    handle = transport.post(wanted)
    deadline_s = time.monotonic() + 10
    while transport.poll(handle) is ReadState.RUNNING:
        assert time.monotonic() < deadline_s
        time.sleep(0.0005)
    transport.release(handle)
    return transport.totals.num_descriptors - before


def test_blocks_arrive_and_nothing_else_is_touched(sides):
    reader, _ = sides
    local, remote = [7, 0, 63, 20], [3, 63, 0, 21]
    num_bytes = reader.transport.totals.num_bytes
    run(reader.transport, request(local, remote))
    for here, there in zip(local, remote, strict=True):
        assert (reader.slots[here, :BLOCK_BYTES] == there + 1).all()
    assert not reader.slots[:, BLOCK_BYTES:].any()
    assert not np.delete(reader.slots, local, axis=0).any()
    assert reader.transport.totals.num_bytes - num_bytes == 4 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("local", "remote", "most"),
    [
        (list(range(32)), list(range(32)), 1),
        (list(range(8)) + list(range(16, 24)), list(range(16)), 2),
        (list(range(0, 64, 2)), list(range(32)), 32),
    ],
)
def test_neighbours_merge_into_one_descriptor(sides, local, remote, most):
    reader, _ = sides
    # Blocks fill their slots here: between blocks with a gap there is nothing to merge.
    got = run(reader.transport, request(local, remote, block_bytes=SLOT_BYTES))
    assert got <= most
    assert (reader.slots[local, 0] == np.array(remote) + 1).all()


def test_scrambled_slots_need_a_descriptor_each(sides):
    reader, _ = sides
    order = np.random.default_rng(1).permutation(NUM_SLOTS)[:16]
    order = order[np.concatenate(([True], np.diff(order) != 1))]
    adjacent = run(reader.transport, request(range(len(order)), range(len(order)), block_bytes=SLOT_BYTES))
    scrambled = run(reader.transport, request(range(len(order)), order, block_bytes=SLOT_BYTES))
    assert adjacent == 1
    assert scrambled == len(order)


def test_lists_are_prepared_once_per_block_size(sides):
    reader, _ = sides
    for _ in range(3):
        run(reader.transport, request([0], [1]))
        run(reader.transport, request([0], [1], block_bytes=SLOT_BYTES))
    assert set(reader.transport.local_lists) >= {BLOCK_BYTES, SLOT_BYTES}
    assert len(reader.transport.local_lists) == len(reader.transport.peers["p"][2]) <= 3


def test_the_notification_arrives_once_and_only_at_the_source(sides):
    reader, source = sides
    run(reader.transport, request([0, 1], [2, 3], notification=b"lease 7"))
    found, deadline_s = [], time.monotonic() + 5
    while not found:
        assert time.monotonic() < deadline_s
        found = source.transport.notifications()
        time.sleep(0.001)
    assert found == [b"lease 7"]
    time.sleep(0.05)
    assert source.transport.notifications() == []
    assert reader.transport.notifications() == []


def test_without_a_notification_none_comes(sides):
    reader, source = sides
    run(reader.transport, request([0], [1]))
    time.sleep(0.05)
    assert source.transport.notifications() == []


@pytest.mark.parametrize("slot", [NUM_SLOTS, 2**31 - 1, -1])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_a_slot_out_of_range_is_refused(sides, side, slot):
    reader, source = sides
    local, remote = ([slot], [0]) if side == "local" else ([0], [slot])
    with pytest.raises(TransferError, match="READ from p"):
        reader.transport.post(request(local, remote, notification=b"never"))
    assert not reader.slab.any()
    assert not reader.transport.handles
    assert source.transport.notifications() == []
    run(reader.transport, request([0], [0]))


def test_an_unknown_peer_is_lost(sides):
    with pytest.raises(PeerLost, match="'q'"):
        sides[0].transport.post(request([0], [0], peer="q"))


def test_a_forgotten_peer_is_lost_and_may_come_back(sides):
    reader, source = sides
    reader.transport.forget_peer("p")
    reader.transport.forget_peer("p")
    with pytest.raises(PeerLost):
        reader.transport.post(request([0], [0]))
    reader.transport.add_peer("p", source.description())
    run(reader.transport, request([5], [6]))
    assert reader.slots[5, 0] == 7


def test_metadata_of_garbage_is_refused(sides):
    garbage = PeerDescription(agent=b"garbage", address=0, slot_bytes=1, num_slots=1)
    with pytest.raises(TransferError, match="metadata of g"):
        sides[0].transport.add_peer("g", garbage)
    with pytest.raises(PeerLost):
        sides[0].transport.post(request([0], [0], peer="g"))


def test_read_and_wait(sides):
    reader, _ = sides
    reader.transport.read_and_wait(request([9], [8]), 5.0)
    assert reader.slots[9, 0] == 9
    assert not reader.transport.handles


def test_every_error_of_the_bindings_is_one_of_ours():
    nixl = load_bindings()
    theirs = {n for n, value in vars(nixl).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert theirs == {
        "nixlBackendError", "nixlCancelledError", "nixlInvalidParamError", "nixlMismatchError", "nixlNoTelemetryError",
        "nixlNotAllowedError", "nixlNotFoundError", "nixlNotPostedError", "nixlNotSupportedError",
        "nixlRemoteDisconnectError", "nixlRepostActiveError", "nixlUnknownError",
    }, "another one may mean that a peer is lost"  # fmt: skip
    for name in theirs:
        ours = translate_error(getattr(nixl, name)("a cause"), "READ from p")
        assert type(ours) is (PeerLost if name in LOST_PEER else TransferError)
        assert str(ours) == f"READ from p: {name}: a cause"
    assert type(translate_error(ValueError("x"), "y")) is TransferError
    assert sorted(LOST_PEER) == ["nixlNotFoundError", "nixlRemoteDisconnectError"]


def test_without_a_wheel_the_remedy_is_named(monkeypatch):
    for name in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, f"{name}._bindings", None)
    with pytest.raises(RegistrationFailed, match="pip install nixl-cu12") as caught:
        load_bindings()
    assert "nixl_cu12" in str(caught.value)
    assert "nixl_cu13" in str(caught.value)


def test_memory_that_cannot_be_registered_is_a_typed_error(monkeypatch):
    bindings = load_bindings()

    class Refusing:
        def __getattr__(self, name):
            return getattr(bindings, name)

        def nixlRegDList(self, kind, rows):
            raise ValueError("no such memory")

    monkeypatch.setattr(nixl_transport, "load_bindings", Refusing)
    with pytest.raises(RegistrationFailed, match=r"4096 bytes.*no such memory"):
        NixlTransport(f"refused-{os.getpid()}", 0, 4096)


def test_a_backend_that_does_not_start_is_told_apart_from_memory_that_is_refused(monkeypatch):
    bindings = load_bindings()

    class Agent:
        def __init__(self, name, config):
            pass

        def createBackend(self, kind, settings):
            raise RuntimeError("NIXL_ERR_BACKEND")

    class Refusing:
        nixlAgent = Agent

        def __getattr__(self, name):
            return getattr(bindings, name)

    monkeypatch.setattr(nixl_transport, "load_bindings", Refusing)
    with pytest.raises(RegistrationFailed, match=r"UCX backend.*UCX_TLS.*cuda_copy.*NIXL_ERR_BACKEND") as caught:
        NixlTransport(f"refused-{os.getpid()}", 0, 4096)
    assert "4096 bytes" not in str(caught.value)


def test_the_ucx_plugin_loads_with_dram():
    assert "DRAM_SEG" in plugin_memory_types()["UCX"]


IDLE = """
import os, time, numpy as np
from kvstore.mover.nixl import NixlTransport
slab = np.zeros(1 << 20, np.uint8)
transport = NixlTransport(f"idle-{os.getpid()}", slab.ctypes.data, slab.nbytes)
time.sleep(0.3)
before = time.process_time()
time.sleep(1.0)
print(time.process_time() - before)
transport.close()
"""


def test_an_idle_agent_does_not_spin():
    done = subprocess.run([sys.executable, "-c", IDLE], timeout=60, check=True, capture_output=True, text=True)
    assert float(done.stdout) < 0.1


def test_an_agent_whose_name_is_no_text_is_refused_with_a_type(sides):
    reader, _ = sides
    slab = np.zeros(SLOT_BYTES, np.uint8)
    other = NixlTransport("A" * 12, slab.ctypes.data, slab.nbytes)
    agent = other.describe()
    assert b"A" * 12 in agent
    peer = PeerDescription(
        agent=agent.replace(b"A" * 12, b"\xff" * 12), address=slab.ctypes.data, slot_bytes=SLOT_BYTES, num_slots=1
    )
    with pytest.raises(TransferError, match="metadata of odd"):
        reader.transport.add_peer("odd", peer)
    other.close()


def test_a_peer_with_the_agent_of_another_one_takes_nothing_along_when_it_is_forgotten(sides):
    reader, source = sides
    reader.transport.add_peer("copycat", source.description())
    reader.transport.forget_peer("copycat")
    slots = np.arange(2, dtype=np.int32)
    request = ReadRequest(peer="p", block_bytes=BLOCK_BYTES, local_slots=slots, remote_slots=slots)
    reader.transport.read_and_wait(request, 5.0)
    assert (reader.slots[:2, :BLOCK_BYTES] == source.slots[:2, :BLOCK_BYTES]).all()

"""A store that answers nonsense costs an error of a known type, and never wrong bytes."""

import msgspec
import numpy as np
import pytest

from kvstore.blocks.indexes import pack_ints
from kvstore.client import lease as client_module
from kvstore.client import load, save
from kvstore.client.handoff import publication
from kvstore.errors import ProtocolError

replace = msgspec.structs.replace
SLOTS = {
    "beyond the arena": [0, 1, 2, 1 << 30],
    "first beyond the arena": [0, 1, 2, 128],
    "negative": [0, 1, 2, -5],
    "too many": list(range(9)),
}


@pytest.fixture
def pair(cluster):
    cluster.add("a")
    worker = cluster.worker("a", 80, 1)
    hashes = cluster.hashes(4)
    assert worker.save(hashes, range(4)).num_blocks == 4
    assert worker.client.num_slots == 128
    return worker, hashes


def spoil(monkeypatch, module, name, change):
    """Let what the store answers be decoded as something else."""
    decode = getattr(module, name)
    monkeypatch.setattr(module, name, lambda payload: change(decode(payload)))


@pytest.mark.parametrize("case", [*SLOTS, "a gap before it", "parts of a number", "in a stage that is not there"])
def test_a_load_fails_and_writes_nothing(pair, monkeypatch, case):
    worker, hashes = pair

    def change(progress):
        if not progress.packed_slots:
            return progress
        if case in SLOTS:
            return replace(progress, packed_slots=pack_ints(SLOTS[case]))
        if case == "a gap before it":
            return replace(progress, first=2)
        if case == "parts of a number":
            return replace(progress, packed_slots=progress.packed_slots[:-1])
        return replace(progress, lease_id=progress.lease_id | load.STAGE_BIT)

    before = worker.bytes()
    with monkeypatch.context() as patch:
        spoil(patch, load, "decode_progress", change)
        with pytest.raises(ProtocolError, match="wanted"):
            worker.load(hashes, range(10, 14))
    assert worker.bytes() == before
    assert worker.load(hashes, range(10, 14)).num_blocks == 4
    assert all(worker.block(10 + i) == worker.block(i) for i in range(4))


TICKETS = {
    "slots " + name: {"packed_slots": pack_ints(slots)} for name, slots in SLOTS.items() if name != "too many"
} | {
    "a slot twice": {"packed_slots": pack_ints([0, 1, 2, 2])},
    "a position beyond the run": {"packed_indexes": pack_ints([0, 1, 2, 99])},
    "a negative position": {"packed_indexes": pack_ints([0, 1, 2, -1])},
    "a position twice": {"packed_indexes": pack_ints([0, 0, 1, 2])},
    "positions in another order": {"packed_indexes": pack_ints([0, 2, 1, 3])},
    "more refused than there are": {"num_refused": 5},
    "a position behind those refused": {"num_refused": 1},
    "more here than there are": {"num_resident": 1},
    "nothing to write": {"write_id": 0},
    "more awaited than there are": {"num_awaited": 1},
}


@pytest.mark.parametrize("case", TICKETS)
def test_a_save_fails_and_stores_nothing(cluster, pair, monkeypatch, case):
    worker, _ = pair
    core, hashes = cluster.nodes["a"], cluster.hashes(4, 3)
    with monkeypatch.context() as patch:
        spoil(patch, save, "decode_ticket", lambda ticket: replace(ticket, **TICKETS[case]))
        with pytest.raises(ProtocolError, match="wanted"):
            worker.save(hashes, range(4))
    assert worker.client.lookup(hashes).num_local == 0
    assert worker.save(hashes, range(4)).num_blocks == 4
    assert worker.load(hashes, range(20, 24)).num_blocks == 4
    assert all(worker.block(20 + i) == worker.block(i) for i in range(4))
    core.pool.check_integrity()


@pytest.mark.parametrize("case", [*SLOTS, "twice"])
def test_a_publication_fails_and_its_ticket_with_it(pair, monkeypatch, case):
    worker, _ = pair
    slots = np.array(SLOTS.get(case, [0, 1, 2, 2]), np.int32)
    with monkeypatch.context() as patch:
        spoil(patch, publication, "decode_indexes", lambda _: slots)
        with pytest.raises(ProtocolError, match="wanted"):
            worker.client.publish(range(4))
    worker.client.withdraw(worker.client.publish(range(4)))


@pytest.mark.parametrize("case", SLOTS)
def test_a_lease_fails(cluster, pair, monkeypatch, case):
    worker, hashes = pair
    with monkeypatch.context() as patch:
        change = lambda grant: replace(grant, packed_slots=pack_ints(SLOTS[case]))  # noqa: E731
        spoil(patch, client_module, "decode_grant", change)
        with pytest.raises(ProtocolError, match="wanted"):
            worker.client.lease(hashes)
    assert cluster.nodes["a"].pool.num_leases() == 0

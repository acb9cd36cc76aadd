"""Beginning with an old life: what was cleared stays cleared, and what the disk lacks is offered to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from inner_parts import parts_of

from kvstore.blocks.codec import encode
from kvstore.node.handover import taking
from kvstore.node.pool_service import PoolService
from kvstore.remote.directory_link import Hints
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Prepare, decode_ticket
from tests.kvstore.node.handover.lives import NODE, SETTINGS, Lives


@pytest.fixture
def ended(monkeypatch):
    """The pidfds of the processes whose end was waited for; both lives run in this one."""
    seen = []
    monkeypatch.setattr(taking, "end", lambda pidfd, patience_s, killed_within_s: seen.append(pidfd) or True)
    monkeypatch.setattr(taking, "pid_of", lambda pidfd: 1)
    return seen


@pytest.fixture
def lives(cluster, ended):
    cluster.add(NODE, **SETTINGS)
    return Lives(cluster)


@pytest.fixture
def seen(monkeypatch):
    """Looks at the next life's pool service after it took blocks over, and before it meets the directory."""
    adopt, start = PoolService.adopt, Hints.start
    made = SimpleNamespace(before=lambda service: None, look=lambda service: None, found=[])
    services = []

    def adopt_here(self, *args):
        made.before(self)
        services.append(self)
        adopt(self, *args)

    def start_here(self, *args):
        made.found += [made.look(service) for service in services]
        services.clear()
        start(self, *args)

    monkeypatch.setattr(PoolService, "adopt", adopt_here)
    monkeypatch.setattr(Hints, "start", start_here)
    return made


def test_the_end_of_the_old_store_and_of_its_mover_is_waited_for(cluster, lives, ended):
    cluster.worker(NODE).save(cluster.hashes(2), range(2))
    assert lives.go_on().is_warm
    assert len(set(ended)) == 2


def test_clearings_of_the_old_life_are_known_before_the_directory_is_met(cluster, lives, seen):
    cluster.worker(NODE).save(cluster.hashes(2), range(2))
    cluster.nodes[NODE].state.pool_service.clear(cluster.space.digest)
    seen.look = lambda service: service.versions.get(cluster.space.digest)
    lives.go_on()
    assert seen.found == [1]


def test_what_was_computed_before_a_clearing_of_the_old_life_is_refused_in_the_next(cluster, lives):
    worker, space = cluster.worker(NODE), cluster.space.digest
    worker.save(cluster.hashes(2), range(2))
    before = cluster.nodes[NODE].pool.num_clears(space)
    cluster.nodes[NODE].state.pool_service.clear(space)
    count = cluster.nodes[NODE].pool.num_clears(space)
    lives.go_on()
    assert cluster.nodes[NODE].pool.num_clears(space) >= count > before
    late = parts_of(cluster.worker(NODE, seed=2).client)
    asked = encode(Prepare(late.chain(cluster.hashes(2)), 1, num_clears=before))
    ticket = decode_ticket(late.store.calls.call(Op.PREPARE_STORE, asked, timeout_s=5))
    assert len(ticket.slots) == 0


def test_a_later_clearing_that_the_disk_knows_clears_the_blocks_in_memory(cluster, lives, seen):
    hashes = cluster.hashes(2)
    cluster.worker(NODE).save(hashes, range(2))
    seen.before = lambda service: service.versions.hear(cluster.space.digest, 1)
    seen.look = lambda service: service.current.lookup(hashes)
    lives.go_on()
    assert seen.found == [0]


def test_blocks_that_the_disk_lacks_are_offered_to_it(cluster, lives, tmp_path, monkeypatch):
    cluster.stop_node(NODE)
    cluster.add(NODE, **(SETTINGS | {"block_bytes": 4096}))
    cluster.worker(NODE).save(cluster.hashes(6), range(6))
    offered = []
    monkeypatch.setattr(
        "kvstore.disk.tier.DiskTier.offer", lambda self, space, slots, *_: offered.append((space, len(slots)))
    )
    disk = {"disk_path": str(tmp_path), "disk_capacity_bytes": 1 << 20, "block_bytes": 4096}
    assert lives.go_on(**disk).is_warm
    assert offered == [(cluster.space.digest, 6)]

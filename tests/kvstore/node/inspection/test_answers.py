"""What a node store says when it is inspected: what its clients hold, by name and process, and no secret."""

import os
import threading

import pytest

from kvstore.errors import InvalidRequest
from kvstore.node.inspection.answers import answer
from kvstore.node.inspection.owners import ends_with, shown_owner, ticket_name
from kvstore.node.peer_service import owner_of
from tests.kvstore.conftest import SHAPE
from tests.kvstore.handed_off import Held, named


def ask(core, what, **options):
    return answer(core, what, options)


def test_a_namespace_has_its_blocks_bytes_pins_and_version(cluster):
    core, worker, hashes = cluster.add("a", mover=False), cluster.worker("a"), cluster.hashes(6)
    digest = cluster.space.digest
    assert ask(core, "namespaces")["namespaces"][0]["tiers"]["memory"]["num_blocks"] == 0, "attached, and empty"
    worker.save(hashes, range(6))
    with worker.client.lease(hashes[:2]):
        (found,) = ask(core, "namespaces", prefix=digest.hex()[:8])["namespaces"]
    memory = found["tiers"]["memory"]
    assert (found["namespace"], found["version"], found["block_bytes"]) == (digest.hex(), 0, SHAPE.block_bytes)
    assert (memory["num_blocks"], memory["num_bytes"], memory["num_pinned"]) == (6, 6 * SHAPE.block_bytes, 2)
    assert (memory["num_chains"], memory["num_low"], memory["num_high"]) == (1, 0, 0)
    assert 0 <= memory["last_use_age_s"] < 60
    core.state.pool_service.clear(digest)
    (found,) = ask(core, "namespaces")["namespaces"]
    assert (found["version"], found["tiers"]["memory"]["num_blocks"]) == (1, 0)
    assert ask(core, "namespaces", prefix="0" * 64) == {"namespaces": [], "num_all": 0, "num_cleared": {"memory": 0}}


def test_the_limit_bounds_an_answer_and_the_largest_comes_first(cluster, make_spaces):
    core = cluster.add("a", mover=False)
    for number, space in enumerate(make_spaces(3)):
        worker = cluster.worker("a", space=space)
        worker.save(space.block_hashes(range(4 * (number + 1))), range(number + 1))
    found = ask(core, "namespaces", limit=2)
    assert found["num_all"] == 3
    assert [each["tiers"]["memory"]["num_blocks"] for each in found["namespaces"]] == [3, 2]


@pytest.fixture
def make_spaces(cluster):
    import kvstore

    return lambda count: [kvstore.Namespace(model=f"m{number}", shape=SHAPE) for number in range(count)]


def test_a_chain_is_found_by_a_hash_of_it_and_on_both_tiers(cluster, tmp_path, wait_until):
    core = cluster.add("a", mover=False, disk_path=str(tmp_path), disk_capacity_bytes=8 << 20)
    worker, hashes = cluster.worker("a"), cluster.hashes(5)
    worker.save(hashes, range(5))
    wait_until(lambda: core.state.disk.pool.lookup(hashes) == 5)
    assert ask(core, "path", hashes=[hashes[3]]) == hashes[:4]
    assert ask(core, "path", hashes=[hashes[1], b"?" * 32]) == hashes[:2]
    assert ask(core, "path", hashes=[b"?" * 32]) is None
    memory, disk = ask(core, "chain", chain=hashes)["runs"]
    assert [(run["tier"], run["start"], run["num_blocks"], run["is_written"]) for run in (memory, disk)] == [
        ("memory", 0, 5, True), ("disk", 0, 5, True),
    ]  # fmt: skip
    assert memory["priority"] == "normal"
    assert disk["last_use_age_s"] is None
    assert ask(core, "chain", chain=hashes, limit=1)["num_all"] == 2


def test_a_lease_names_its_process_what_it_holds_and_what_ends_it(cluster):
    core, worker, hashes = cluster.add("a", mover=False), cluster.worker("a"), cluster.hashes(4)
    worker.save(hashes, range(4))
    with worker.client.lease(hashes, ttl_s=100.0):
        (found,) = ask(core, "leases")["leases"]
        detail = ask(core, "leases", lease_id=found["id"])
    assert (found["kind"], found["pid"], found["num_blocks"]) == ("lease", os.getpid(), 4)
    assert found["num_bytes"] == 4 * core.state.pool_service.slot_bytes
    assert found["namespace"] == cluster.space.digest.hex()
    assert 90 < found["left_s"] <= 100
    assert found["ends_with"] == ["release", "deadline", "end of its process"]
    (run,) = detail["runs"]
    assert (run["start"], run["num_blocks"], run["namespace"]) == (0, 4, cluster.space.digest.hex())
    assert ask(core, "leases") == {"leases": [], "num_all": 0}


def test_a_ticket_says_what_it_waits_for_and_hides_its_key(cluster, wait_until):
    core = cluster.add("a", mover=False)
    source, target = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    ticket = source.client.publish([1, 2, 3], ttl_s=50.0)
    (found,) = ask(core, "handoffs")["tickets"]
    assert (found["num_blocks"], found["num_bytes"], found["place"]) == (3, 3 * SHAPE.block_bytes, "memory")
    assert (found["waits_for"], found["pid"], found["void"]) == ("a fetch", os.getpid(), "")
    assert 0 <= found["age_s"] < 40
    assert 10 < found["left_s"] <= 50
    (key,) = core.control.handoffs.table.handoffs
    assert found["ticket"] == ticket_name(key)
    assert key.hex()[:12] != found["ticket"]
    target.client.fetch(ticket, [0, 1, 2]).result(10)
    wait_until(lambda: ask(core, "handoffs")["num_tickets"] == 0)


def test_a_reader_that_came_before_the_blocks_is_seen(cluster, wait_until):
    core = cluster.add("a", mover=False)
    source, target = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    ticket = named(source.client, 2, is_early=True)
    job = target.client.fetch(ticket, [0, 1], timeout_s=20.0)
    early = wait_until(lambda: ask(core, "handoffs")["early"])
    assert early[0]["num_readers"] == 1
    source.client.publish([4, 5], ticket=ticket)
    assert job.result(10).num_blocks == 2
    assert ask(core, "handoffs")["early"] == []


def test_a_fetch_from_another_node_says_where_it_waits(cluster, wait_until):
    held = []

    def hold(transport):
        held.append(Held(transport))
        return held[-1]

    cluster.add("a")
    core = cluster.add("b", mover=False)
    cluster.start_mover("b", hold)
    source, target = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    ticket = source.client.publish([0, 1])
    job = target.client.fetch(ticket, [0, 1])
    found = wait_until(lambda: [each for each in ask(core, "handoffs")["fetches"] if each["waits_for"] == "its READ"])
    (there,) = ask(cluster.nodes["a"], "handoffs")["tickets"]
    held[0].go.set()
    assert job.result(10).num_blocks == 2
    assert (found[0]["from_node"], found[0]["num_blocks"], found[0]["pid"]) == ("a", 2, os.getpid())
    assert found[0]["ticket"] == there["ticket"]
    assert there["waits_for"].startswith("its reader store-")


def test_leases_and_hand_offs_have_the_tenants_whose_quotas_they_count_in(cluster):
    core = cluster.add("a", mover=False, tenants={"batch": {}})
    mine, shared, hashes = cluster.worker("a", tenant="batch"), cluster.worker("a"), cluster.hashes(4)
    mine.save(hashes, range(4))
    with mine.client.lease(hashes), shared.client.lease(hashes):
        assert sorted(each["tenant"] for each in ask(core, "leases")["leases"]) == ["", "batch"]
    mine.client.publish([1, 2])
    (ticket,) = ask(core, "handoffs")["tickets"]
    assert ticket["tenant"] == "batch"


def test_the_name_of_a_peer_does_not_show_the_key_by_which_its_leases_end():
    owner = owner_of(bytes(range(16)))
    assert shown_owner(owner).startswith("store-")
    assert bytes(range(16)).hex()[:8] not in shown_owner(owner)
    assert shown_owner("client-0123") == "client-0123"


@pytest.mark.parametrize(
    ("owner", "options", "wanted"),
    [
        ("client-1", {"has_deadline": False}, ["release", "end of its process"]),
        ("ray:job", {"has_deadline": True}, ["release", "deadline"]),
        ("store-ab", {"has_deadline": True}, ["release", "end of its READ", "deadline"]),
        ("disk-writer", {"has_deadline": False, "is_of_tier": True}, ["the disk's write"]),
        ("adopt", {"has_deadline": True}, ["end of its load", "deadline"]),
        ("old-reader-3", {"has_deadline": True}, ["deadline"]),
    ],
)
def test_what_ends_a_lease_depends_on_its_owner(owner, options, wanted):
    assert ends_with(owner, **options) == wanted


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("everything", {}),
        ("namespaces", {"prefix": "xyz"}),
        ("namespaces", {"prefix": "0" * 65}),
        ("namespaces", {"limit": 0}),
        ("path", {}),
        ("path", {"hashes": [b"short"]}),
        ("path", {"hashes": [bytes(32)] * 5000}),
        ("chain", {"chain": b"no chain"}),
        ("leases", {"lease_id": -1}),
        ("handoffs", {"limit": 1 << 40}),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(cluster, what, options):
    with pytest.raises(InvalidRequest, match=r"wanted "):
        answer(cluster.add("a", mover=False), what, options)


def test_a_node_that_is_inspected_goes_on_serving(cluster):
    core, worker, hashes = cluster.add("a", mover=False), cluster.worker("a"), cluster.hashes(8)
    worker.save(hashes, range(8))
    ends = threading.Event()

    def look():
        while not ends.is_set():
            for what in ("namespaces", "leases", "handoffs"):
                ask(core, what)
            ask(core, "chain", chain=hashes)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(20):
            assert worker.load(hashes, range(10, 18)).num_blocks == 8
    finally:
        ends.set()
        thread.join(10)
    cluster.check()

"""One load that needs peers: what it pins, and how many there may be."""

import re
from types import SimpleNamespace

import pytest

from kvstore.pool.pool import Pool
from kvstore.pool.tenants.limits import TenantLimits
from kvstore.pool.tenants.table import TenantTable
from kvstore.remote import fetch
from kvstore.remote.load import Load
from poolcheck.chains import LATER_S, chain_of, store


def load_of(pool: Pool, versions: list[int], told: list) -> Load:
    """Return a load of three blocks that began under version 0; versions are those that it finds, one after another."""
    chain = chain_of("abc")
    lease = pool.pin_prefix(chain, "r", LATER_S)
    return Load(
        chain=chain, block_bytes=1024, owner="r", lease_id=lease.lease_id, ttl_s=30.0, deadline_s=LATER_S, pool=pool,
        version_now=lambda: versions.pop(0) if len(versions) > 1 else versions[0], version=0,
        send=lambda piece: told.append((piece, piece.report is not None)),
    )  # fmt: skip


def test_what_became_readable_is_pinned_and_told():
    pool, told = Pool(8), []
    load = load_of(pool, [0], told)
    store(pool, "abc")
    assert load.pin_more(limit=2) == 2
    assert load.pin_more() == 1
    assert [(len(progress.slots), progress.first, is_last) for progress, is_last in told] == [
        (2, 0, False),
        (1, 2, True),
    ]


def test_blocks_of_the_disk_that_are_told_later_are_counted_as_those_of_the_disk():
    """Two pieces come at once: the second is counted before the first is told."""
    pool, told = Pool(8), []
    load = load_of(pool, [0], told)
    store(pool, "abc")
    load.report.num_disk = 3
    load.pin_more(limit=2)
    load.pin_more()
    assert (load.report.num_disk, load.report.num_peer) == (3, 0)


def test_blocks_of_the_disk_that_found_no_room_among_the_pins_are_not_counted():
    pool, told = Pool(8), []
    load = load_of(pool, [0], told)
    store(pool, "ab")
    load.report.num_disk = 3
    load.pin_more()
    load.end("pool_full")
    assert (load.report.num_disk, load.report.num_peer) == (2, 0)


def test_what_others_brought_is_of_this_node():
    """A save, or another load: this load had nothing read for it."""
    pool, told = Pool(8), []
    load = load_of(pool, [0], told)
    store(pool, "abc")
    load.pin_more()
    report = told[-1][0].report
    assert (report.num_local, report.num_disk, report.num_peer) == (3, 0, 0)


def test_blocks_of_the_disk_of_peers_and_of_others_add_up():
    pool, told = Pool(8), []
    load = load_of(pool, [0], told)
    store(pool, "abc")
    load.report.num_disk = load.report.num_peer = 1
    load.pin_more()
    report = told[-1][0].report
    assert (report.num_local, report.num_disk, report.num_peer) == (1, 1, 1)


def test_blocks_of_peers_that_found_no_room_among_the_pins_are_not_counted():
    pool, told = Pool(8), []
    load = load_of(pool, [0], told)
    store(pool, "ab")
    load.report.num_disk, load.report.num_peer = 1, 3
    load.pin_more()
    load.end("pool_full")
    report = told[-1][0].report
    assert (report.num_local, report.num_disk, report.num_peer) == (0, 1, 1)


def test_blocks_that_were_stored_after_a_clearing_are_not_told_though_they_were_pinned():
    pool, told = Pool(8), []
    load = load_of(pool, [0], told)
    store(pool, "abc")
    pin = pool.pin_prefix

    class Cleared:
        """A pool with which a clearing comes between the question for the version and the pin."""

        def pin_prefix(self, *args, **more):
            load.version_now = lambda: 1
            return pin(*args, **more)

    load.pool = Cleared()
    assert load.is_current()
    assert load.pin_more() == 0
    assert (told, load.num_ready) == ([], 0)
    assert pool.release(load.lease_id, "r")
    assert pool.stats().num_pinned == 0


@pytest.mark.parametrize(("begun", "is_let_in"), [([], True), ([5], True), ([6], False), ([3, 3], False)])
def test_loads_have_so_many_bytes_of_chains_together(monkeypatch, begun, is_let_in):
    monkeypatch.setattr(fetch, "_MOST_BYTES", 8 * 32)
    hints = SimpleNamespace(publish_soon=None)
    made = fetch.Fetcher(SimpleNamespace(), hints, *[None] * 4)
    submitted, ended = [], []
    monkeypatch.setattr(made, "_submit", submitted.append)

    def begin(num_blocks):
        load = SimpleNamespace(chain=SimpleNamespace(data=bytes(32 * num_blocks)), end=ended.append)
        made.begin(load)
        return load

    for num_blocks in begun:
        begin(num_blocks)
    assert len(submitted) == len(begun)
    last = begin(3)
    assert (last in submitted, [reason.split(":")[0] for reason in ended]) == (is_let_in, [] if is_let_in else ["busy"])
    # What has ended counts no more.
    for load in [*submitted, last][: len(begun) + 1]:
        load.on_end()
    assert begin(8) in submitted
    made.stop()


@pytest.mark.parametrize(
    ("tenant", "most", "wanted"),
    [
        ("a", 8, "quota of tenant 'a'.*raise its max_pinned_bytes"),
        ("a", 1, "budget of pins.*raise max_pinned_fraction"),
        ("", 2, "budget of pins.*raise max_pinned_fraction"),
    ],
)
def test_why_blocks_found_no_room_names_the_bound_and_the_remedy(tenant, most, wanted):
    pool = Pool(8, max_pinned=most, tenants=TenantTable(8, {"a": TenantLimits(max_pinned=2)}))
    store(pool, "abc")
    chain = chain_of("abc")
    grant = pool.pin_prefix(chain, "r", LATER_S, tenant=tenant)
    load = Load(
        chain=chain, block_bytes=1024, owner="r", lease_id=grant.lease_id, ttl_s=30.0, deadline_s=LATER_S, pool=pool,
        version_now=lambda: 0, version=0, send=lambda piece: None, tenant=tenant,
    )  # fmt: skip
    assert load.why_unpinned() == ""
    load.num_unpinned = grant.num_refused
    assert re.search(rf"^pool_full: the {wanted}", load.why_unpinned())

"""Who holds the leases that a store grants to stores of other nodes, and what ends them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from kvstore.blocks.codec import encode
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import InvalidRequest, KVStoreError, ProtocolError
from kvstore.node.peer_service import PeerControl
from kvstore.remote.messages import PeerLease, decode_peer_grant
from kvstore.rpc.connect import connect_remote
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import NOTIFICATION

ONE, OTHER = b"epoch--1", b"epoch--2"
NUM_BLOCKS = 3


@pytest.fixture
def core(cluster):
    """A store with three blocks; its notifications come from a mover that copies by memcpy."""
    made = cluster.add("a")
    cluster.worker("a").save(cluster.hashes(NUM_BLOCKS), range(NUM_BLOCKS))
    return made


@pytest.fixture
def connect(core):
    """Connects as the store of another node, in a life of one's choice."""
    made = []

    def peer(epoch):
        address = core.peer_address()
        hello = {"role": "peer", "protocol": PROTOCOL_VERSION, "token": address.token, "node": "b"}
        hello["owner"] = epoch.hex() if isinstance(epoch, bytes) else epoch
        made.append(connect_remote(address.host, address.port, hello, timeout_s=2.0))
        return made[-1]

    yield peer
    for client in made:
        client.close()


@pytest.fixture
def lease(cluster):
    """Leases the three blocks over a connection; returns the lease's id."""
    chain = cluster.hashes(NUM_BLOCKS)

    def ask(peer, ttl_s=60.0):
        wanted = PeerLease(
            chain=chain,
            block_bytes=cluster.space.shape.block_bytes,
            slot_format=1,
            namespace_version=0,
            ttl_s=ttl_s,
            within_s=2.0,
        )
        grant = decode_peer_grant(peer.call(Op.PEER_LEASE, encode(wanted), timeout_s=2.0))
        assert len(grant.slots) == NUM_BLOCKS
        return grant.lease_id

    return ask


def release(peer, lease_id):
    peer.call(Op.PEER_RELEASE, encode(lease_id), timeout_s=2.0)


@pytest.fixture
def notify(cluster, core, wait_until):
    """Has a notification arrive at the store's mover, and waits until it has been taken."""
    inbox = cluster.network.inboxes[cluster.movers["a"].transport.describe()]

    def say(lease_id, epoch, reader):
        inbox.append(NOTIFICATION.pack(lease_id, epoch, reader))
        wait_until(lambda: not inbox)

    return say


def test_a_peer_cannot_release_the_lease_of_another_by_its_id(core, connect, lease):
    one, other = connect(ONE), connect(OTHER)
    mine = lease(one)
    for lease_id in (mine, mine + 1, 0, 2**64 - 1):
        release(other, lease_id)
    assert core.pool.num_leases() == 1
    assert core.pool.stats().num_pinned == NUM_BLOCKS
    release(one, mine)
    assert core.pool.num_leases() == 0


def test_a_peer_that_connects_anew_in_the_same_life_still_owns_its_leases(core, connect, lease):
    first = connect(ONE)
    mine = lease(first)
    first.close()
    release(connect(ONE), mine)
    assert core.pool.num_leases() == 0


def test_a_peer_in_its_next_life_owns_nothing_of_the_former(core, connect, lease):
    mine = lease(connect(ONE))
    release(connect(OTHER), mine)
    assert core.pool.num_leases() == 1


def test_the_leases_of_a_peer_that_is_gone_end_with_their_time_and_not_before(core, connect, lease, wait_until):
    """Its mover may live and read, so a closed connection ends nothing."""
    gone = connect(ONE)
    asked_s = time.monotonic()
    lease(gone, ttl_s=1.0)
    lease(connect(OTHER), ttl_s=60.0)
    gone.close()
    wait_until(lambda: core.pool.num_leases() == 1)
    assert time.monotonic() - asked_s >= 1.0
    assert core.pool.stats().num_pinned == NUM_BLOCKS


def test_a_peer_that_names_the_epoch_of_another_cannot_release_its_leases(core, connect, lease):
    mine = lease(connect(ONE))
    address = core.peer_address()
    hello = {"role": "peer", "protocol": PROTOCOL_VERSION, "token": address.token, "node": "b", "epoch": ONE.hex()}
    thief = connect_remote(address.host, address.port, hello | {"owner": OTHER.hex()}, timeout_s=2.0)
    release(thief, mine)
    thief.close()
    assert core.pool.num_leases() == 1


def test_the_key_of_a_store_is_another_one_at_each_peer(cluster):
    core, other = cluster.add("x", mover=False), cluster.add("y", mover=False)
    keys = {
        core.state.peers.get("y").owner_key,
        core.state.peers.get("x").owner_key,
        other.state.peers.get("x").owner_key,
    }
    assert len(keys) == 3
    assert not keys & {core.state.epoch, other.state.epoch}


@pytest.mark.parametrize("ttl_s", [1e300, 86400.0, float("inf"), float("nan"), -1.0, 0.0])
def test_a_peer_gets_no_lease_for_longer_than_stores_lease(core, connect, lease, ttl_s):
    with pytest.raises(InvalidRequest, match="ttl_s"):
        lease(connect(ONE), ttl_s)
    assert core.pool.num_leases() == 0


def test_a_notification_ends_the_lease_of_the_store_that_read(core, connect, lease, notify, wait_until):
    mine, others = lease(connect(ONE)), lease(connect(OTHER))
    notify(mine, core.state.epoch, OTHER)
    notify(others, core.state.epoch, ONE)
    # The next one comes on the same connection, so by then the others have been seen.
    notify(mine, core.state.epoch, ONE)
    wait_until(lambda: core.pool.num_leases() == 1)
    # It is still polled for.
    notify(others, core.state.epoch, OTHER)
    wait_until(lambda: core.pool.num_leases() == 0)


def test_a_notification_for_another_life_of_the_store_frees_nothing(core, connect, lease, notify, wait_until):
    """The mover of a peer that read from the store's former life says so to the present one."""
    peer = connect(ONE)
    mine, later = lease(peer), lease(peer)
    notify(mine, b"formerly", ONE)
    notify(later, core.state.epoch, ONE)
    wait_until(lambda: core.pool.num_leases() == 1)
    release(peer, later)
    assert core.pool.num_leases() == 1, "a lease was given back for another life of the store"
    release(peer, mine)
    assert core.pool.num_leases() == 0


@pytest.mark.parametrize("epoch", ["", "no hexadecimal", b"7 bytes", b"9 bytes..", 12, None, ["00"]], ids=repr)
def test_a_peer_that_does_not_name_its_key_is_refused(core, connect, epoch):
    with pytest.raises(ProtocolError, match="owner"):
        connect(epoch)


@pytest.mark.parametrize("payload", [b"", b"\x91", b"\xff" * 7, b"\xff" * 200])
@pytest.mark.parametrize("op", [Op.PEER_LEASE, Op.PEER_RELEASE])
def test_bytes_of_a_peer_that_are_no_request_change_nothing(core, connect, lease, op, payload):
    peer = connect(ONE)
    lease(peer)
    before = core.pool.stats()
    with pytest.raises(KVStoreError):
        peer.call(op, payload, timeout_s=2.0)
    assert core.pool.stats() == before
    assert core.pool.num_leases() == 1


def test_the_mover_is_told_the_last_number_of_leases_last():
    """A lease may begin on a thread of the disk while another one ends: else the mover would wait for neither."""
    told, threads = [], []

    class Mover:
        def expect_notifications(self, num_leases):
            if num_leases == 0:
                # Just now another thread grants a lease; it has time to be first.
                threads.append(threading.Thread(target=control.began, args=(2, 1e9)))
                threads[0].start()
                threads[0].join(0.2)
            told.append(num_leases)

    control = PeerControl(SimpleNamespace(mover=Mover(), pool_service=None), lambda: None)
    control.began(1, 1e9)
    control.ended(1)
    threads[0].join(5.0)
    assert told == [1, 0, 1]


def test_blocks_stored_after_a_clearing_are_not_granted_under_the_version_before(cluster, core, connect):
    """The clearing comes on another thread, just when the version was compared."""
    pool, service, original, done = core.pool, core.state.pool_service, core.pool.pin_prefix, []

    def pin_prefix(chain, owner, deadline_s, lease_id=0, **more):
        if owner.startswith("store-") and not done:
            done.append(service.clear(chain.namespace))
            ticket = pool.prepare_store(chain, "new weights")
            pool.complete_store(ticket.write_id, "new weights")
        return original(chain, owner, deadline_s, lease_id, **more)

    pool.pin_prefix = pin_prefix
    wanted = PeerLease(
        chain=cluster.hashes(NUM_BLOCKS), block_bytes=1024, slot_format=1, namespace_version=0, ttl_s=60.0, within_s=2.0
    )
    grant = decode_peer_grant(connect(ONE).call(Op.PEER_LEASE, encode(wanted), timeout_s=2.0))
    assert done == [NUM_BLOCKS]
    assert (grant.namespace_version, len(grant.slots), grant.lease_id) == (1, 0, 0)
    assert pool.num_leases() == 0


def test_a_lease_for_a_tenant_that_this_store_has_not_is_refused(cluster, core, connect):
    wanted = PeerLease(
        chain=cluster.hashes(NUM_BLOCKS), block_bytes=cluster.space.shape.block_bytes, slot_format=1,
        namespace_version=0, ttl_s=5.0, within_s=2.0, tenant="stranger",
    )  # fmt: skip
    with pytest.raises(KVStoreError, match=r"tenant of this store.*stranger"):
        connect(ONE).call(Op.PEER_LEASE, encode(wanted), timeout_s=2.0)
    assert core.pool.stats().num_pinned == 0

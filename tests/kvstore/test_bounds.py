"""Numbers of other types than Python's own: taken as plain ones, or refused as every wrong argument is."""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np
import pytest

from kvstore import bounds
from kvstore.blocks.hashing import BlockHashes
from kvstore.blocks.ticket import HandoffTicket
from kvstore.errors import InvalidRequest, KVStoreError

TIME = np.float64(2.0)


class Text(str):
    __slots__ = ()


class Data(bytes):
    pass


class Count(int):
    pass


def ticket(**fields) -> HandoffTicket:
    known = {"node_id": "n", "epoch": b"e" * 8, "namespace": b"n" * 32, "num_blocks": 1, "block_bytes": 1}
    return HandoffTicket(**{**known, "expires_s": 1.0, **fields})


def test_what_is_checked_is_of_the_plain_type():
    for check in (bounds.check_seconds, bounds.check_ttl):
        assert type(check("t", TIME)) is type(check("t", 2)) is float
        for value in (True, np.float32(2.0), np.int64(2), 10**400, math.nan):
            with pytest.raises(InvalidRequest, match="t: wanted a number of seconds"):
                check("t", value)
    assert bounds.check_seconds("t", 10**400, math.inf) == math.inf
    assert type(bounds.check_count("n", Count(3), 0, 9)) is int
    with pytest.raises(InvalidRequest, match="n: wanted an integer from 0 to 9, got"):
        bounds.check_count("n", np.int64(3), 0, 9)
    assert type(bounds.check_text("t", Text("a"))) is str
    assert type(bounds.check_bytes("b", Data(b"a"), 9)) is bytes
    assert type(bounds.check_digest("d", Data(b"a" * 32))) is bytes


@pytest.mark.parametrize(
    "fields",
    [
        {"expires_s": TIME}, {"expires_s": 10**30}, {"node_id": Text("n")}, {"node_id": np.str_("n")},
        {"nonce": Data(b"x" * 16)}, {"num_blocks": Count(3)}, {"slab": Count(1)},
        {"part": namedtuple("Ranks", "a b c d")(Count(0), 1, 0, 1)},
    ],
)  # fmt: skip
def test_a_ticket_holds_plain_values(fields):
    made = ticket(**fields)
    assert HandoffTicket.from_bytes(made.to_bytes()) == made
    assert len(made.name(made.namespace)) == 32


@pytest.mark.parametrize(
    "fields", [{"expires_s": 10**400}, {"node_id": "\ud800"}, {"num_blocks": np.int64(1)}, {"num_blocks": 1 << 32}]
)
def test_what_no_ticket_can_say_is_refused(fields):
    (name,) = fields
    with pytest.raises(InvalidRequest, match=f"{name}: wanted"):
        ticket(**fields)


@pytest.mark.parametrize(
    ("start", "wanted"),
    [
        (1 << 32, "to end at block"),
        (1 << 64, "to end at block"),
        (np.int64(1), "start as an int"),
        (True, "start as an"),
    ],
)
def test_a_run_begins_where_one_can(start, wanted):
    with pytest.raises(InvalidRequest, match=wanted):
        BlockHashes(b"n" * 32, b"p" * 32, start, b"h" * 32)


def test_a_run_of_a_subclass_of_bytes_is_sent():
    run = BlockHashes(Data(b"n" * 32), Data(b"p" * 32), 1, Data(b"h" * 32))
    assert run.encode() == BlockHashes(b"n" * 32, b"p" * 32, 1, b"h" * 32).encode()


def test_every_verb_of_a_client_takes_a_time_of_numpy(cluster):
    cluster.add("a")
    worker = cluster.worker("a")
    client, hashes = worker.client, cluster.hashes(4)
    worker.save(hashes, range(4))
    assert client.lookup(hashes, timeout_s=TIME).num_blocks == 4
    with client.lease(hashes, ttl_s=TIME) as lease:
        assert lease.renew(TIME)
    assert client.pin(hashes, ttl_s=TIME).num_blocks == 4
    assert client.pin(hashes, ttl_s=np.float64(math.inf), soft=np.bool_(True)).num_blocks == 4
    assert client.load(hashes, range(4), timeout_s=TIME, num_copy_threads=Count(1)).result(TIME).num_blocks == 4
    assert client.prefetch(hashes, timeout_s=TIME).result(TIME).num_blocks == 4
    published = client.publish(range(2), ttl_s=TIME)
    assert client.fetch(published, [5, 6], timeout_s=TIME, num_copy_threads=Count(1)).result(TIME).num_blocks == 2
    begun = client.begin_publish(range(2), ttl_s=TIME, ticket=client.prepare_ticket(Count(2), ttl_s=TIME))
    assert begun.job.result(TIME).num_blocks == 2
    begun.job.wait_on(timeout=TIME)
    assert begun.job.abandon(TIME)
    with pytest.raises(KVStoreError):
        client.prepare_ticket(np.int64(2))
    client.close(TIME)

"""Bytes between two nodes, over whatever lane UCX picks and over TCP: right ones, or a miss with a reason."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client.results import MissReason
from kvstore.errors import InvalidRequest, NamespaceMismatch
from kvstore.mover.transport import count_runs

pytestmark = [pytest.mark.ray]

_seeds = itertools.count(1)


@dataclasses.dataclass
class Side:
    """One node: its worker, asked about the engine of one store."""

    worker: Any
    key: str
    node_id: str
    get: Any

    def do(self, verb: str, *args: Any, **options: Any) -> Any:
        return self.get(self.worker.do.remote(self.key, verb, *args, **options))

    def ask(self, verb: str, *args: Any, **options: Any) -> Any:
        return self.get(self.worker.ask.remote(self.key, verb, *args, **options))


@dataclasses.dataclass
class Pair:
    """A store on two nodes, and an engine on each."""

    store: Any
    space: Any
    here: Side
    there: Side


@pytest.fixture(scope="module")
def workers(ray_cluster, node_ids, start_worker):
    return [start_worker(node_id) for node_id in node_ids]


@pytest.fixture(scope="module", params=["default", "tcp"])
def pair(request, workers, node_ids, get, make_space):
    lane, space = request.param, make_space()
    store = kvstore.start("16MiB", name=f"lane-{lane}", lane=lane, chunk_bytes=4 << 20)
    try:
        assert get([w.open.remote(lane, store, space, 768) for w in workers]) == node_ids
        there, here = (Side(w, lane, node_id, get) for w, node_id in zip(workers, node_ids, strict=True))
        yield Pair(store, space, here, there)
        get([w.close.remote(lane) for w in workers])
    finally:
        store.stop()


@pytest.fixture
def chain(pair, chain_of):
    """64 blocks that nothing holds yet."""
    return chain_of(pair.space, 64, next(_seeds))


def test_a_local_hit_moves_no_byte_between_nodes(pair, chain):
    assert pair.here.do("save", chain) == kvstore.SaveResult(num_blocks=64, num_written=64, num_refused=0)
    assert pair.here.ask("lookup", chain) == kvstore.Match(num_local=64)
    result = pair.here.do("load", chain, list(range(100, 164)))
    assert result == kvstore.LoadResult(num_blocks=64, num_local=64)


def test_what_is_stored_twice_is_written_once(pair, chain):
    pair.here.do("save", chain[:40])
    assert pair.here.do("save", chain) == kvstore.SaveResult(num_blocks=64, num_written=24, num_refused=0)


def test_a_peer_hit_brings_the_right_bytes_and_stays(pair, chain):
    pair.there.do("save", chain)
    assert pair.here.ask("lookup", chain) == kvstore.Match(num_local=0, nodes=((pair.there.node_id, 64),))
    first = pair.here.do("load", chain)
    assert (first.num_blocks, first.num_local, first.num_peer) == (64, 0, 64)
    assert first.peers == (pair.there.node_id,)
    assert first.num_bytes == 64 * pair.space.shape.block_bytes
    assert first.read_s > 0
    second = pair.here.do("load", chain, list(range(100, 164)))
    assert (second.num_blocks, second.num_local, second.num_bytes) == (64, 64, 0)
    assert dict(pair.store.locate(chain)) == {pair.here.node_id: 64, pair.there.node_id: 64}


def test_both_directions_at_once(pair, chain, chain_of):
    other = chain_of(pair.space, 64, next(_seeds))
    pair.there.do("save", chain)
    pair.here.do("save", other, list(range(64, 128)))
    loads = [
        pair.here.worker.do.remote(pair.here.key, "load", chain, list(range(128, 192))),
        pair.there.worker.do.remote(pair.there.key, "load", other, list(range(128, 192))),
    ]
    assert [result.num_peer for result in pair.here.get(loads)] == [64, 64]


def test_two_loads_of_the_same_blocks_fetch_them_once(pair, chain):
    pair.there.do("save", chain)
    results = pair.here.do("load_twice_at_once", chain, list(range(64)), list(range(100, 164)))
    assert [result.num_blocks for result in results] == [64, 64]
    assert sum(result.num_bytes for result in results) == 64 * pair.space.shape.block_bytes


def test_a_mixed_hit_fetches_only_what_is_missing_here(pair, chain):
    pair.there.do("save", chain)
    assert pair.here.do("load", chain[:24]).num_peer == 24
    result = pair.here.do("load", chain)
    assert (result.num_blocks, result.num_local, result.num_peer) == (64, 24, 40)
    assert result.num_bytes == 40 * pair.space.shape.block_bytes


def test_a_partial_hit_names_every_block_that_is_not_there(pair, chain):
    pair.there.do("save", chain[:40])
    assert pair.here.ask("lookup", chain).num_blocks == 40
    result = pair.here.do("load", chain)
    assert (result.num_blocks, result.num_peer, len(result.failed)) == (40, 40, 24)
    assert {failure.reason for failure in result.failed} == {MissReason.NOT_FOUND}


def test_a_miss_changes_nothing_in_the_engine(pair, chain):
    assert pair.here.ask("lookup", chain) == kvstore.Match(num_local=0)
    result = pair.here.do("load", chain, list(range(64)))
    assert (result.num_blocks, len(result.failed), result.num_bytes) == (0, 64, 0)
    assert {failure.reason for failure in result.failed} == {MissReason.NOT_FOUND}
    assert (pair.here.do("bits", 0) == 0x5A5A).all()


def test_engine_blocks_may_lie_in_any_order(pair, chain):
    rng = np.random.default_rng(5)
    pair.there.do("save", chain, rng.permutation(256)[:64].tolist())
    wanted = rng.permutation(256)[:64].tolist()
    assert pair.here.do("load", chain, wanted).num_peer == 64
    assert pair.here.do("load", chain, rng.permutation(256)[:64].tolist()).num_local == 64


@pytest.mark.parametrize("skip", [1, 16, 37, 64 * 16 - 1, 64 * 16])
@pytest.mark.parametrize("warm", [False, True], ids=["peer", "local"])
def test_no_byte_of_a_skipped_token_is_written(pair, chain, skip, warm):
    ids = np.random.default_rng(skip).permutation(256)[:64].tolist()
    pair.there.do("save", chain)
    if warm:
        assert pair.here.do("prefetch", chain).num_peer == 64
    result = pair.here.do("load", chain, ids, skip=skip)
    assert (result.num_blocks, result.failed) == (64, ())
    assert result.num_local + result.num_peer == max(0, 64 - skip // 16)
    for block, token in {(0, 0), divmod(skip - 1, 16), (min(skip // 16, 63), 15)}:
        if block >= 64:
            continue
        got = pair.here.do("bits", ids[block])[:, :, token]
        wanted = pair.here.do("stamp", chain[block])[:, :, token]
        assert (got == (0x5A5A if block * 16 + token < skip else wanted)).all(), (block, token)


def test_one_call_by_the_worker_two_by_the_stores_one_descriptor_a_run(pair, chain, chain_of):
    other, warm = (chain_of(pair.space, 64, next(_seeds)) for _ in range(2))
    pair.there.do("save", warm[:1])
    pair.here.do("load", warm[:1])  # the stores know each other now
    for at in range(0, 64, 16):  # runs of 16 slots at the source
        pair.there.do("save", chain[: at + 16])
        pair.there.do("save", other[: at + 16])
    nixl, served = pair.here.ask("stats")["nixl"], pair.there.ask("stats")["calls"]
    calls = pair.here.do("num_calls")

    result = pair.here.do("load", chain)

    assert (result.num_blocks, result.num_peer) == (64, 64)
    assert pair.here.do("num_calls") - calls == 1
    assert result.num_locate_calls + result.num_lease_calls <= 2
    after = pair.there.ask("stats")["calls"]
    assert after["PEER_LEASE"] - served["PEER_LEASE"] == 1
    assert after["PEER_TRANSPORT"] == served["PEER_TRANSPORT"]
    counted = pair.here.ask("stats")["nixl"]
    num_runs = count_runs(
        np.array(pair.here.do("slots", chain), np.int32), np.array(pair.there.do("slots", chain), np.int32)
    )
    assert 4 <= num_runs < 16
    assert result.num_descriptors <= num_runs
    assert counted["num_descriptors"] - nixl["num_descriptors"] == result.num_descriptors
    assert counted["num_bytes"] - nixl["num_bytes"] == result.num_bytes == 64 * pair.space.shape.block_bytes


def test_a_chain_longer_than_one_read_comes_whole(pair, chain_of):
    long = chain_of(pair.space, 640, next(_seeds))  # 5 MiB, and a chunk has 4 here
    pair.there.do("save", long)
    result = pair.here.do("load", long)
    assert (result.num_blocks, result.num_peer, result.failed) == (640, 640, ())
    assert result.num_descriptors > 1


def test_a_later_run_of_a_chain_is_loaded_without_its_beginning(pair, chain):
    pair.there.do("save", chain)
    result = pair.here.do("load", chain[48:])
    assert (result.num_blocks, result.num_peer) == (16, 16)


def test_lookup_ends_at_the_first_hole(pair, chain, chain_of):
    pair.there.do("save", chain[:10])
    fork = chain_of(pair.space, 64, next(_seeds))
    assert pair.here.ask("lookup", fork).num_blocks == 0
    assert pair.here.ask("lookup", chain).num_blocks == 10
    assert pair.store.locate(chain) == [(pair.there.node_id, 10)]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "2"},
        {"salt": b"tenant"},
        {"lora": "adapter"},
        {"quantization": "fp8-scaled"},
        {"dtype": "float16"},
        {"num_layers": 1},
        {"num_kv_heads": 1},
        {"head_dim": 16},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_same_tokens_of_another_namespace_never_hit(pair, chain_of, make_space, change):
    space, seed = make_space(**change), next(_seeds)
    chain, same_tokens = chain_of(pair.space, 64, seed), chain_of(space, 64, seed)
    pair.there.do("save", chain)
    stranger = Side(pair.here.worker, f"{pair.here.key}-stranger", pair.here.node_id, pair.here.get)
    stranger.get(stranger.worker.open.remote(stranger.key, pair.store, space))
    try:
        assert stranger.ask("lookup", same_tokens) == kvstore.Match(num_local=0)
        result = stranger.do("load", same_tokens)
        assert (result.num_blocks, result.num_bytes) == (0, 0)
        with pytest.raises(NamespaceMismatch, match="make them with this client's space"):
            stranger.do("load", chain)
    finally:
        stranger.get(stranger.worker.close.remote(stranger.key))


def test_the_same_tokens_with_other_media_or_adapter_share_only_the_blocks_before_it(pair, chain_of):
    seed = next(_seeds)

    def chain_with(*keys):
        return chain_of(pair.space, 8, seed, extra=keys)

    plain = chain_of(pair.space, 8, seed)
    image = chain_with(*[None] * 3, ["image:1"], *[None] * 4)
    other = chain_with(*[None] * 3, ["image:2"], *[None] * 4)
    lora = chain_with(*[["lora:a"]] * 8)
    pair.there.do("save", image)
    found = [pair.here.do("load", hashes).num_blocks for hashes in (plain, other, lora, image)]
    assert found == [3, 3, 0, 8]


def test_bad_arguments_are_refused_and_nothing_changes(pair, chain):
    pair.there.do("save", chain)
    for ids in ([0] * 64, list(range(63)), list(range(705, 769)), list(range(-1, 63))):
        with pytest.raises(InvalidRequest, match="block_ids"):
            pair.here.ask("load", chain, ids)
    assert pair.here.ask("lookup", chain).num_local == 0


def test_pools_are_whole_after_all_that(pair, get, eventually):
    for side in (pair.here, pair.there):
        handle = kvstore.node_store(side.node_id, name=pair.store.config.name)
        get(handle.check_integrity.remote())
        for key in ("num_pinned", "num_writing", "num_quarantined", "num_leases"):
            # Far below the 30 s of a lease: the source hears of the end of each READ.
            eventually(lambda handle=handle, key=key: get(handle.stats.remote())["pool"][key] == 0, 15)

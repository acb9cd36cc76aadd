"""Arguments that cannot work are refused by the call itself, and nothing changes."""

import math

import numpy as np
import pytest
import torch

from kvstore.client.client import Client
from kvstore.errors import InvalidRequest, LayoutMismatch, StoreUnavailable
from tests.kvstore.conftest import SHAPE

DIMS = (2, 80, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)


@pytest.fixture
def worker(cluster):
    cluster.add("a", mover=False)
    return cluster.worker("a", seed=1)


def test_what_is_to_be_called_can_be_called(cluster, worker):
    hashes = cluster.hashes(1)
    worker.save(hashes, [0])
    with pytest.raises(InvalidRequest, match="on_queued: wanted a function, got 3"):
        worker.client.load(hashes, [1], on_queued=3)
    job = worker.client.load(hashes, [1])
    with pytest.raises(InvalidRequest, match="callback: wanted a function, got 3"):
        job.add_done_callback(3)
    assert job.result(10).num_blocks == 1


def test_a_truth_is_no_number(cluster, worker):
    hashes = cluster.hashes(1)
    job = worker.client.save(hashes, [0])
    for ask in (job.result, job.abandon):
        with pytest.raises(InvalidRequest, match="timeout"):
            ask(True)
    assert job.result(10).num_written == 1
    with pytest.raises(InvalidRequest, match="skip_prefix_tokens"):
        worker.client.load(hashes, [0], True)


def test_a_lookup_says_which_argument_is_wrong(cluster, worker):
    hashes = cluster.hashes(1)
    for meanwhile in (1, "a"):
        with pytest.raises(InvalidRequest, match="meanwhile: wanted a function, got"):
            worker.client.lookup(hashes, meanwhile=meanwhile)
    for call in (worker.client.lookup, worker.client.is_surely_absent):
        with pytest.raises(InvalidRequest, match="remote: wanted True or False, got 'a'"):
            call(hashes, remote="a")
        call(hashes, remote=np.bool_(False))
    with pytest.raises(InvalidRequest, match="soft: wanted True or False, got 'a'"):
        worker.client.pin(hashes, soft="a")


def test_a_stream_is_one(cluster, worker):
    job = worker.client.save(cluster.hashes(1), [0])
    with pytest.raises(InvalidRequest, match="stream: wanted a torch"):
        job.wait_on("a")
    with pytest.raises(InvalidRequest, match="timeout: wanted a number of seconds, got a number of 16610 bits"):
        job.result(10**5000)
    assert job.result(10).num_written == 1


@pytest.mark.parametrize("axes", [1, b"PBTHD", list("PBTHD")])
def test_axes_are_text(worker, axes):
    with pytest.raises(LayoutMismatch, match="axes: wanted the letters"):
        worker.client.register_kv_caches([torch.zeros(DIMS) for _ in range(SHAPE.num_layers)], axes)


@pytest.mark.parametrize("staging", [0, -1, 1 << 63])
def test_a_stage_has_a_size(worker, staging):
    with pytest.raises(InvalidRequest, match="staging: wanted an integer from 1"):
        worker.client.attach_handoff(staging)


@pytest.mark.parametrize("peers", [1, None, "ab", [1], [""], ["\ud800"], torch.tensor(3)])
def test_peers_are_ids_of_nodes(worker, peers):
    with pytest.raises(InvalidRequest, match="peers: wanted"):
        worker.client.attach_handoff("1MiB", peers)


@pytest.mark.parametrize("path", ["", "a\0b", None])
def test_a_client_wants_the_path_of_a_socket(worker, path):
    with pytest.raises(InvalidRequest, match="control_path: wanted the path that Store"):
        Client(path, worker.client.space)


@pytest.mark.parametrize(
    ("ids", "got"),
    [
        ([2**63, 1, 2, 3], r"\[9223372036854775808, 1, 2, 3\]"), ({1, 2}, r"\{1, 2\}"), (iter([1]), "<list_iterator"),
        ([[1], [2, 3]], r"\[\[1\], \[2, 3\]\]"), (np.zeros((1, 2)), r"float64 of shape \(1, 2\)"),
    ],
)  # fmt: skip
def test_block_ids_are_shown_as_they_were_passed(cluster, worker, ids, got):
    with pytest.raises(InvalidRequest, match=f"block_ids: wanted a flat list of integers.* got {got}"):
        worker.client.save(cluster.hashes(4), ids)


def test_a_pin_without_end_has_none_or_an_infinite_time(cluster, worker):
    hashes = cluster.hashes(1)
    worker.save(hashes, [0])
    for ttl_s in (None, math.inf):
        assert worker.client.pin(hashes, ttl_s=ttl_s).num_blocks == 1
    with pytest.raises(InvalidRequest, match="ttl_s: wanted a number of seconds above 0, at most 86400"):
        worker.client.pin(hashes, ttl_s=86401)


def test_a_closed_client_is_not_entered(worker):
    worker.client.close()
    with pytest.raises(StoreUnavailable), worker.client:
        pass


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(DIMS).to_sparse(),
        torch.zeros(DIMS).to_mkldnn(),
        torch.zeros(DIMS, device="meta"),
        torch.zeros((2, 0, *DIMS[2:])),
    ],
)
def test_tensors_without_memory_of_their_own_form(worker, odd):
    with pytest.raises(LayoutMismatch, match="wanted dense tensors with memory, got tensor 0 of"):
        worker.client.register_kv_caches([odd, odd.clone()])

"""Arguments that cannot work are refused by the call itself, and nothing changes."""

import pytest
import torch

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

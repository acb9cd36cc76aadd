"""Hand-offs of tensor-parallel engines, by the connector's parts on a real store: each rank has its own ticket."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

NUM_BLOCKS, HEADS, HEAD_DIM, LAYERS = 6, 4, 8, 2


@pytest.fixture(scope="module")
def space(unit):
    import kvstore

    shape = kvstore.KVShape(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32", block_size=unit)
    return kvstore.Namespace(model="ranks", shape=shape)


class Ranks:
    """The connector's halves of one engine, without the engine: a client, a cache and a `Publishing` for each rank."""

    def __init__(self, store, space, node_id, tp_size, seed):
        import torch

        from kvstore.blocks.part import Part
        from kvstore.integrations.vllm.scheduler_side.handoffs import HandoffSide
        from kvstore.integrations.vllm.stats import Stats
        from kvstore.integrations.vllm.worker_side.publishing import Publishing

        block_size, random = space.shape.block_size, torch.Generator().manual_seed(seed)
        dims = (2, NUM_BLOCKS, block_size, HEADS, HEAD_DIM)
        self.cache = [torch.randn(dims, generator=random) for _ in range(LAYERS)]
        self.stats = Stats()
        self.side = HandoffSide(space, block_size, tp_size, True, 10.0, self.stats)
        self.clients, self.publishing, self.caches = [], [], []
        for rank in range(tp_size):
            part = Part(rank, tp_size, 0, 1)
            client = store.client(space, part, node_id=node_id)
            self.caches.append([layer.chunk(tp_size, dim=3)[rank].contiguous() for layer in self.cache])
            client.register_kv_caches(self.caches[-1], "PBTHD")
            self.clients.append(client)
            self.publishing.append(Publishing(rank, part, 10.0, 0))
            self.side.learn(self.publishing[-1].news(client))

    def whole(self):
        import torch

        return [torch.cat(layer, dim=3) for layer in zip(*self.caches, strict=True)]

    def close(self):
        for client in self.clients:
            client.close()


@pytest.fixture
def engine(store, space, node_ids):
    made = []

    def make(node, tp_size, seed):
        made.append(Ranks(store, space, node_ids[node], tp_size, seed))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def tracked(space, request_id, tokens, params=None):
    from kvstore.integrations.vllm.scheduler_side.tracked import Tracked

    request = SimpleNamespace(
        request_id=request_id, num_prompt_tokens=len(tokens), kv_transfer_params=params, status=None
    )
    return Tracked(request, hashes=space.block_hashes(tokens))


def published(engine, space, tokens, block_ids):
    """Have all ranks publish a prompt; returns the params as they come over HTTP."""
    from vllm.v1.request import RequestStatus

    from kvstore.integrations.vllm.plan import StepPlan

    begun, plan = tracked(space, "prefill", tokens, {"do_remote_decode": True}), StepPlan()
    engine.side.begin(begun)
    begun.block_ids = block_ids
    engine.side.plan(plan, begun, 0, len(tokens) - 1)
    assert not plan.publications, "the prompt's end is not computed yet"
    engine.side.plan(plan, begun, len(tokens) - 1, len(tokens))
    (publication,) = plan.publications
    for client, publishing in zip(engine.clients, engine.publishing, strict=True):
        publishing.publish(client, publication, publication.block_ids).result(20)
    begun.request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    return json.loads(json.dumps(engine.side.end(plan, begun)))


def test_each_rank_fetches_its_part(engine, space, unit, store, node_ids, eventually):
    import torch

    from kvstore.integrations.vllm.plan import LoadPlan

    source, target = engine(0, 2, seed=1), engine(1, 2, seed=2)
    tokens = list(range(3 * unit + 1))
    params = published(source, space, tokens, [5, 1, 2, 0])
    request = tracked(space, "decode", tokens, params)
    target.side.begin(request)
    assert target.side.num_arriving(request, request.hashes) == 3
    before = [layer.clone() for layer in target.whole()]
    plan = LoadPlan(
        req_id="decode", hashes=request.hashes, block_ids=[0, 3, 4], num_engine_tokens=unit,
        tickets=request.arriving.tickets,
    )  # fmt: skip
    for client, publishing in zip(target.clients, target.publishing, strict=True):
        ticket = plan.tickets[publishing.rank]
        job = client.fetch(ticket, plan.block_ids, plan.num_engine_tokens, timeout_s=10.0)
        assert job.result(20).num_blocks == 3
    for now, had, given in zip(target.whole(), before, source.whole(), strict=True):
        assert torch.equal(now[:, [3, 4]], given[:, [1, 2]])
        assert torch.equal(now[:, [0, 1, 2, 5]], had[:, [0, 1, 2, 5]])  # 0 is the engine's own
    eventually(lambda: not any(store.stats()["nodes"][node]["num_handoffs"] for node in node_ids), 20)


def test_other_sizes_are_not_used_and_say_what_to_change(engine, space, unit, caplog):
    source, target = engine(0, 2, seed=1), engine(1, 1, seed=2)
    tokens = list(range(2 * unit))
    params = published(source, space, tokens, [5, 1])
    request = tracked(space, "decode", tokens, params)
    target.side.begin(request)
    assert request.arriving is None
    assert target.stats.total()["num_bad_tickets"] == 1
    assert "the same tensor- and pipeline-parallel sizes" in caplog.text
    for publishing in source.publishing:
        assert publishing.withdraw(["prefill"]) == 1


def test_nothing_is_handed_off_before_all_ranks_have_a_store(space, unit):
    from kvstore.integrations.vllm.handover import Desk
    from kvstore.integrations.vllm.plan import StepPlan
    from kvstore.integrations.vllm.scheduler_side.handoffs import HandoffSide
    from kvstore.integrations.vllm.stats import Stats

    side, plan = HandoffSide(space, unit, 2, True, 10.0, Stats()), StepPlan()
    begun = tracked(space, "prefill", list(range(unit)), {"do_remote_decode": True})
    side.begin(begun)
    side.learn({0: Desk(node_id="a", epoch="00" * 8, part=(0, 2, 0, 1))})
    side.plan(plan, begun, 0, unit)
    assert (plan.publications, side.end(plan, begun)) == ([], None)
    side.learn({1: Desk(node_id="a", epoch="00" * 8, part=(1, 2, 0, 1), slab=3)})
    side.plan(plan, begun, 0, unit)
    assert [(ticket.part, ticket.slab) for ticket in plan.publications[0].tickets] == [
        ((0, 2, 0, 1), 0), ((1, 2, 0, 1), 3),
    ]  # fmt: skip

"""Hand-offs of tensor-parallel engines, by the connector's parts on a real store: each rank has its own ticket."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
from hashlib import sha256
from types import SimpleNamespace

import pytest
from sides import request

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


def tracked(space, request_id, tokens, params=None, **more):
    from kvstore.integrations.vllm.scheduler_side.keys import PromptHashes
    from kvstore.integrations.vllm.scheduler_side.tracked import Tracked

    asked = request(request_id, len(tokens), prompt_token_ids=list(tokens), kv_transfer_params=params, **more)
    return Tracked(asked, hashes=PromptHashes(space, asked).all())


def published(engine, space, tokens, block_ids, request_id="prefill"):
    """Have all ranks publish a prompt; returns the params as they come over HTTP."""
    from vllm.v1.request import RequestStatus

    from kvstore.integrations.vllm.plan import StepPlan

    begun, plan = tracked(space, request_id, tokens, {"do_remote_decode": True}), StepPlan()
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


def fetched(engine, tracked, block_ids, num_own=0):
    """Have all ranks fetch what a request brought tickets for; returns how many blocks each got."""
    prompt = engine.side.prompt_of(tracked)
    jobs = [
        client.fetch(tracked.arriving[publishing.rank], block_ids, num_own, hashes=prompt, timeout_s=10.0)
        for client, publishing in zip(engine.clients, engine.publishing, strict=True)
    ]
    return [job.result(20).num_blocks for job in jobs]


def test_each_rank_fetches_its_part(engine, space, unit, store, node_ids, eventually):
    import torch

    source, target = engine(0, 2, seed=1), engine(1, 2, seed=2)
    tokens = list(range(3 * unit + 1))
    params = published(source, space, tokens, [5, 1, 2, 0])
    decoded = tracked(space, "decode", tokens, params)
    target.side.begin(decoded)
    assert [ticket.num_blocks for ticket in decoded.arriving] == [3, 3]
    before = [layer.clone() for layer in target.whole()]
    assert fetched(target, decoded, [0, 3, 4], unit) == [3, 3]
    for now, had, given in zip(target.whole(), before, source.whole(), strict=True):
        assert torch.equal(now[:, [3, 4]], given[:, [1, 2]])
        assert torch.equal(now[:, [0, 1, 2, 5]], had[:, [0, 1, 2, 5]])  # 0 is the engine's own
    eventually(lambda: not any(store.stats()["nodes"][node]["num_handoffs"] for node in node_ids), 20)


def test_other_sizes_are_not_used_and_say_what_to_change(engine, space, unit, caplog):
    source, target = engine(0, 2, seed=1), engine(1, 1, seed=2)
    tokens = list(range(2 * unit))
    params = published(source, space, tokens, [5, 1])
    decoded = tracked(space, "decode", tokens, params)
    target.side.begin(decoded)
    assert not decoded.arriving
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


def change(field, value):
    """Change a field of the tickets of all ranks, in the params."""

    def forge(params, _):
        from kvstore.blocks.ticket import HandoffTicket

        parts = params["raykv_ticket"]["parts"]
        for at, part in enumerate(parts):
            ticket = dataclasses.replace(HandoffTicket.from_bytes(base64.b64decode(part)), **{field: value})
            parts[at] = base64.b64encode(ticket.to_bytes()).decode()

    return forge


def say(**what):
    """Say in the params what the blocks are."""

    def forge(params, theirs):
        params["raykv_ticket"] |= {name: value(theirs) for name, value in what.items()}
        params.update({name: value(theirs) for name, value in what.items()})

    return forge


def last_hash(tracked):
    return tracked.hashes[-1].hex()


def mix(params, theirs):
    """Send one rank's ticket for another prompt's publication."""
    params["raykv_ticket"]["parts"][1] = theirs.request.kv_transfer_params["raykv_ticket"]["parts"][1]


def swap(params, _):
    params["raykv_ticket"]["parts"].reverse()


#: How params for the prompt of three blocks and a tail are changed, and the request that brings them.
FORGED = {
    "another prompt": (say(), "other", {}),
    "another prompt, with its last hash": (say(last_hash=last_hash), "other", {}),
    "another prompt, with its hashes": (say(hashes=lambda it: [each.hex() for each in it.hashes]), "other", {}),
    "another prompt, with its tokens": (say(tokens=lambda it: it.request.prompt_token_ids), "other", {}),
    "another prompt, one ticket of which is right": (mix, "one", {}),
    "another tail": (say(), "tail", {}),
    "another tail, with its last hash": (say(last_hash=last_hash), "tail", {}),
    "a longer tail": (say(), "longer tail", {}),
    "a shorter tail": (say(), "shorter tail", {}),
    "no tail": (say(), "no tail", {}),
    "a longer prompt": (say(), "longer", {}),
    "a longer prompt, and so many blocks": (change("num_blocks", 4), "longer", {}),
    "a shorter prompt": (say(), "shorter", {}),
    "a shorter prompt, and so many blocks": (change("num_blocks", 2), "shorter", {}),
    "another salt": (say(), "one", {"cache_salt": "theirs"}),
    "an adapter": (say(), "one", {"lora_request": SimpleNamespace(lora_name="theirs")}),
    "another nonce": (change("nonce", bytes(16)), "one", {}),
    "another life": (change("epoch", bytes(8)), "one", {}),
    "another memory": (change("slab", 7), "one", {}),
    "early": (change("is_early", True), "one", {}),
    "another namespace": (change("namespace", sha256(b"x").digest()), "one", {}),
    "other ranks": (swap, "one", {}),
}


@pytest.mark.parametrize("name", FORGED)
def test_params_never_say_what_their_blocks_are(engine, space, unit, name):
    import torch

    source, target = engine(0, 2, seed=1), engine(1, 2, seed=2)
    tokens = [7 * at % 1000 for at in range(3 * unit + 5)]
    other = [at + 1 for at in tokens]
    prompts = {
        "one": tokens, "other": other, "tail": [*tokens[:-1], 3], "longer tail": [*tokens, 3],
        "shorter tail": tokens[:-1], "no tail": tokens[: 3 * unit], "longer": [*tokens, *tokens[:unit]],
        "shorter": tokens[: 2 * unit],
    }  # fmt: skip
    params = published(source, space, tokens, [5, 1, 2])
    theirs = published(source, space, other, [0, 3, 4], "another")
    assert sorted(params["raykv_ticket"]) == ["parts"]
    forge, prompt, more = FORGED[name]
    forged, before = copy.deepcopy(params), [layer.clone() for layer in target.whole()]
    forge(forged, tracked(space, "theirs", other, theirs))
    decoded = tracked(space, "decode", prompts[prompt], forged, **more)
    target.side.begin(decoded)
    if decoded.arriving:
        # Where one rank's ticket is right, vLLM uses what all ranks got: nothing.
        got = fetched(target, decoded, list(range(decoded.arriving[0].num_blocks)))
        assert got == ([3, 0] if forge is mix else [0, 0])
    heads = slice(HEADS // 2, None) if forge is mix else slice(None)
    for now, had in zip(target.whole(), before, strict=True):
        assert torch.equal(now[:, :, :, heads], had[:, :, :, heads])
    if forge is not mix:
        right = tracked(space, "right", tokens, params | {"raykv_ticket": params["raykv_ticket"] | {"last_hash": "00"}})
        target.side.begin(right)
        assert fetched(target, right, [0, 3, 4]) == [3, 3], "what else the params say does not matter"
        for now, given in zip(target.whole(), source.whole(), strict=True):
            assert torch.equal(now[:, [0, 3, 4]], given[:, [5, 1, 2]])

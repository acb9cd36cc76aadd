"""KV cache events of the connector, read as vLLM's own subscribers read them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest
from sides import SIZE, engine_hashes, request, scheduler_side

from kvstore.blocks.chain import event_hash


@pytest.fixture
def side():
    """A scheduler's half that emits events, and whose store clears at once."""
    made = scheduler_side(events=True)
    made.link = SimpleNamespace(clear=lambda: "")
    return made


@pytest.fixture
def read(side):
    """Return the events since the last call, over the wire."""
    from vllm.distributed import kv_events

    def read():
        batch = kv_events.KVEventBatch(ts=1.0, events=side.events.take(), data_parallel_rank=0)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=kv_events.KVEventBatch).events

    return read


def saved(side, asked, *nums_blocks, size=SIZE):
    """Let the workers report blocks of a request, each time from the root on; return the engine's hashes."""
    from kvstore.integrations.vllm.plan import WorkerReport
    from kvstore.integrations.vllm.scheduler_side.keys import PromptHashes

    side.begin(asked)
    tracked = side.tracked[asked.request_id]
    tracked.hashes = PromptHashes(side.space, asked).all()
    hashes = engine_hashes(asked, size)
    for num_blocks in nums_blocks:
        side.heard(set(), WorkerReport(stored=[(asked.request_id, num_blocks)]))
    return hashes


def names(side, asked):
    """Return the blocks of a request as the store's events name them."""
    from kvstore.integrations.vllm.scheduler_side.keys import PromptHashes

    return [event_hash(own) for own in PromptHashes(side.space, asked).all()]


@pytest.fixture
def published(monkeypatch):
    """What the store of this node publishes; filled by a test."""
    from kvstore.integrations.vllm.scheduler_side.subscription import Subscription

    found = []

    def changes(self):
        while found:
            yield found.pop(0)

    monkeypatch.setattr(Subscription, "changes", changes)
    return found


@pytest.fixture
def store():
    """A pool with a publisher, as a client sees them, and a subscription to it."""
    from kvstore.integrations.vllm.scheduler_side.subscription import Subscription
    from kvstore.node.events.publisher import EventPublisher
    from kvstore.pool.pool import Pool

    pool, publisher, subscription = Pool(4), EventPublisher("tcp://*:0", "", "n", "s"), Subscription()
    made = SimpleNamespace(pool=pool, publisher=publisher, subscription=subscription, epoch="1", heard=[])
    made.stats = lambda: {"epoch": made.epoch, "events": publisher.stats()}

    def hear():
        made.heard += subscription.changes()
        return made.heard

    def save(seed, num_blocks):
        run = scheduler_side().space.block_hashes([seed] * num_blocks * SIZE)
        pool.complete_store(pool.prepare_store(run, "w").write_id, "w")
        return [event_hash(own) for own in run]

    made.hear, made.save = hear, save
    yield made
    subscription.close()
    publisher.stop()


def kinds(events):
    return [type(event).__name__ for event in events]


def test_each_run_names_its_parent_and_only_the_new_blocks(side, read):
    asked = request(num_tokens=5 * SIZE)
    hashes = saved(side, asked, 2, 5)
    first, second = read()
    assert (first.block_hashes, first.parent_block_hash) == (hashes[:2], None)
    assert (second.block_hashes, second.parent_block_hash) == (hashes[2:], hashes[1])
    assert second.token_ids == asked.all_token_ids[2 * SIZE : 5 * SIZE]
    for event in (first, second):
        assert (event.block_size, event.medium, event.locality, event.extra_keys) == (SIZE, "CPU", "LOCAL", None)
    assert read() == []


def test_a_prefix_that_several_requests_share_is_told_once(side, read):
    saved(side, request("one", 3 * SIZE), 3)
    hashes = saved(side, request("two", 4 * SIZE), 4)
    first, second = read()
    assert (len(first.block_hashes), second.block_hashes, second.parent_block_hash) == (3, hashes[3:], hashes[2])


def test_an_engine_that_hears_of_a_prefix_only_now_tells_it_whole(side, read):
    hashes = saved(side, request(num_tokens=4 * SIZE), 4)  # Another engine stored the first blocks.
    assert [(event.block_hashes, event.parent_block_hash) for event in read()] == [(hashes, None)]


def test_blocks_that_went_are_told_and_told_again_when_they_return(side, read):
    asked = request("one", 4 * SIZE)
    hashes, own = saved(side, asked, 4), names(side, asked)
    side.events.removed([own[3], own[1], 7])
    saved(side, request("two", 4 * SIZE), 4)
    stored, removed, *again = read()
    assert kinds([stored, removed, *again]) == ["BlockStored", "BlockRemoved", "BlockStored", "BlockStored"]
    assert (removed.block_hashes, removed.medium, removed.locality) == ([hashes[3], hashes[1]], "CPU", "LOCAL")
    assert [(event.block_hashes, event.parent_block_hash) for event in again] == [
        ([hashes[1]], hashes[0]),
        ([hashes[3]], hashes[2]),
    ]


def test_a_clearing_removes_all_and_late_reports_bring_nothing_back(side, read):
    hashes = saved(side, request("one", 3 * SIZE), 3)
    assert side.reset()
    saved(side, request("two", 3 * SIZE), 3)
    from kvstore.integrations.vllm.plan import WorkerReport

    side.heard(set(), WorkerReport(stored=[("one", 3)]))
    stored, removed, again = read()
    assert stored.block_hashes == removed.block_hashes == again.block_hashes == hashes
    assert kinds([stored, removed, again]) == ["BlockStored", "BlockRemoved", "BlockStored"]
    assert side.reset()
    side.heard(set(), WorkerReport(stored=[("one", 3), ("two", 3)]))
    assert kinds(read()) == ["BlockRemoved"]


def test_adapters_and_salts_are_named(side, read):
    lora = SimpleNamespace(lora_name="poet", name="poet", adapter_id=7)
    saved(side, request(num_tokens=2 * SIZE, lora_request=lora, cache_salt="tenant", prompt_embeds=None), 2)
    (event,) = read()
    assert (event.lora_id, event.lora_name) == (7, "poet")
    assert event.extra_keys == [("poet", "tenant"), ("poet",)]


@pytest.mark.parametrize(("stored", "num_told"), [(2 * SIZE, 4), (SIZE // 2, 5)])
def test_blocks_of_another_size_are_told_as_those_of_the_engine(side, read, published, stored, num_told):
    side.space = type(side.space)(model="m", shape=dataclasses.replace(side.space.shape, block_size=stored))
    asked = request(num_tokens=5 * SIZE + SIZE // 2)
    hashes, own = saved(side, asked, 5 * SIZE // stored), names(side, asked)
    (event,) = read()
    assert (event.block_hashes, event.block_size) == (hashes[:num_told], SIZE)
    assert event.token_ids == asked.all_token_ids[: num_told * SIZE]
    published += [(False, own[1:2])]
    (removed,) = read()
    assert removed.block_hashes == (hashes[2:4] if stored > SIZE else hashes[:1])
    published += [(True, own[1:2])]
    saved(side, request("two", 5 * SIZE), 5 * SIZE // stored)
    (again,) = read()
    assert again.block_hashes == removed.block_hashes
    assert again.parent_block_hash == (hashes[1] if stored > SIZE else None)


def test_blocks_that_were_found_are_told_with_the_load_that_brought_them(side, read):
    asked, handed = request("found", 3 * SIZE), request("handed", 2 * SIZE)
    hashes = saved(side, asked)
    side.tracked["found"].num_saved = 3  # as when their load was planned
    saved(side, handed)
    side.heard({"found", "handed", "unknown"}, None)
    assert [(event.block_hashes, event.parent_block_hash) for event in read()] == [(hashes, None)]


def test_evictions_by_the_store_are_told_also_those_before_the_report(side, read, published):
    asked = request("one", 4 * SIZE)
    hashes, own = saved(side, asked), names(side, asked)
    published += [(True, own[:3]), (False, own[2:3])]
    saved(side, request("two", 3 * SIZE), 3)
    assert [event.block_hashes for event in read()] == [hashes[:2]]
    published += [(False, own[1:2])]
    (removed,) = read()
    assert (kinds([removed]), removed.block_hashes) == (["BlockRemoved"], hashes[1:2])
    published += [(True, own[1:])]
    saved(side, request("three", 4 * SIZE), 4)
    (again,) = read()
    assert (again.block_hashes, again.parent_block_hash) == (hashes[1:], hashes[0])
    published += [None]
    (removed,) = read()
    assert set(removed.block_hashes) == set(hashes)


def test_an_error_of_the_subscription_ends_no_engine(side, read, monkeypatch):
    from kvstore.integrations.vllm.scheduler_side.subscription import Subscription

    hashes = saved(side, request("one", 2 * SIZE), 2)
    monkeypatch.setattr(Subscription, "changes", lambda self: 1 // 0)
    stored, removed = read()
    assert (stored.block_hashes, removed.block_hashes) == (hashes, hashes)


def test_an_engine_hears_what_its_store_publishes(store, eventually):
    subscription = store.subscription
    subscription.opened(store)
    assert store.hear() == [None]
    eventually(lambda: store.publisher.follow([(store.pool, "CPU")]) or store.hear()[1:], pause_s=0.01)
    run = store.save(7, 3)
    eventually(lambda: (True, run) in store.hear())
    store.heard.clear()
    store.pool.evict(1)
    eventually(lambda: (False, run[2:]) in store.hear())
    subscription.opened(store)  # Over a new connection, to the same life of the store.
    assert store.hear() == [(False, run[2:])]
    store.epoch = "2"
    subscription.opened(store)
    assert store.hear()[1] is None


def test_a_store_without_events_or_without_an_answer_is_no_error(store):
    from kvstore.errors import PeerLost

    def no_answer():
        raise PeerLost("gone")

    store.subscription.opened(SimpleNamespace(stats=no_answer))
    assert store.hear() == []
    store.subscription.opened(SimpleNamespace(stats=lambda: {"epoch": "1", "events": None}))
    assert store.hear() == [None]
    assert store.hear() == [None]


def test_lost_batches_end_what_is_known_and_nonsense_ends_nothing(store, eventually):
    import zmq

    from kvstore.node.events import schema

    def batch(*events):
        return msgspec.msgpack.encode(schema.EventBatch(1.0, list(events), 0))

    (gone,) = schema.removed([b"h" * 32], "CPU")
    (elsewhere,) = schema.removed([b"h" * 32], "STORAGE")
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.linger = 0
        endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        store.subscription.opened(SimpleNamespace(stats=lambda: {"epoch": "1", "events": {"endpoint": endpoint}}))
        assert store.hear() == [None]
        assert socket.poll(10_000), "wanted its subscription"
        for number, payload in [(5, batch(gone)), (6, b"nonsense"), (7, batch(elsewhere)), (9, batch(gone))]:
            socket.send_multipart((b"kv@n@s", number.to_bytes(8, "big"), payload))
        eventually(lambda: len(store.hear()) >= 4)
        name = event_hash(b"h" * 32)
        assert store.heard == [None, (False, [name]), None, (False, [name])]
        store.subscription.close()


def test_what_is_remembered_is_bounded():
    from kvstore.integrations.vllm.scheduler_side.events import StoreEvents
    from kvstore.integrations.vllm.scheduler_side.keys import PromptHashes

    space, events = scheduler_side().space, StoreEvents(True, SIZE, most_told=3)
    asked = request(num_tokens=5 * SIZE)
    hashes = engine_hashes(asked)
    events.stored(space, asked, PromptHashes(space, asked).all())
    events.cleared()
    stored, removed = events.take()
    assert stored.block_hashes == hashes
    assert removed.block_hashes == hashes[2:]


def test_an_engine_without_events_keeps_none():
    side = scheduler_side()
    saved(side, request(num_tokens=2 * SIZE), 2)
    assert side.events.take() == []


def test_vllm_reads_the_events_of_a_store():
    from vllm.distributed import kv_events

    from kvstore.node.events import schema

    hashes = [bytes([at]) * 32 for at in range(3)]
    names = [event_hash(own) for own in hashes]
    events = [
        schema.AllBlocksCleared(),
        *schema.stored(hashes, [b"", hashes[0], b"p" * 32], "STORAGE"),
        *schema.removed(hashes[:1], "CPU"),
    ]
    batch = msgspec.msgpack.encode(schema.EventBatch(1.5, events, 0))
    read = msgspec.msgpack.decode(batch, type=kv_events.KVEventBatch)
    assert (read.ts, read.data_parallel_rank) == (1.5, 0)
    cleared, first, second, removed = read.events
    assert kinds([cleared, first, second, removed]) == [
        "AllBlocksCleared", "BlockStored", "BlockStored", "BlockRemoved"
    ]  # fmt: skip
    assert (first.block_hashes, first.parent_block_hash, first.medium) == (names[:2], None, "STORAGE")
    assert (second.block_hashes, second.parent_block_hash, second.token_ids) == (names[2:], event_hash(b"p" * 32), [])
    assert (removed.block_hashes, removed.medium, removed.locality) == (names[:1], "CPU", "LOCAL")

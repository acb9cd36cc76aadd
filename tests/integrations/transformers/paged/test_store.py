"""Pages from a store, from other nodes and from hand-offs: all groups of layers, or none."""

from __future__ import annotations

import dataclasses
import pickle
import random

import pytest

from kvstore.client.client import Client
from kvstore.client.results import MissReason
from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    NamespaceMismatch,
    PoolExhausted,
    StoreBusy,
    StoreDraining,
    StoreUnavailable,
    TransferTimeout,
)
from kvstore.integrations.transformers.paged import PagedStore
from kvstore.integrations.transformers.paged.store import wait_saved
from tests.integrations.transformers.paged.conftest import Small

PROMPT = random.Random(4).choices(range(211), k=150)


def _model_of_window(window_tokens):
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.MistralConfig(
        vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, sliding_window=window_tokens,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


KINDS = pytest.mark.parametrize("kind", ["full", "window", "both"])


def _raise(error):
    def refuse(*args, **more):
        raise error

    return refuse


def answer(engine, tokens, bring):
    """Returns what came, and the logits."""
    request = engine.index.acquire(tokens)
    try:
        brought = bring(request)
        request.insert(tokens, min(request.num_tokens, len(tokens)))
        return brought, engine.prefill(request, tokens)
    finally:
        request.release()


@KINDS
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("node", ["a", "b"])
def test_what_one_engine_saved_another_loads(small, stores, plain_logits, same, kind, page_size, node):
    writer = small(kind, stores["a"], page_size=page_size, num_pages=640 // page_size)
    reader = small(kind, stores[node], page_size=page_size, num_pages=640 // page_size)
    writer.fill(PROMPT)
    brought, logits = answer(reader, PROMPT, lambda request: reader.store.load(request, PROMPT))
    assert brought.num_tokens == 144
    assert all(result.num_peer > 0 if node == "b" else result.num_local > 0 for result in brought.results)
    assert same(logits, plain_logits(reader.model, PROMPT))


@KINDS
def test_a_load_goes_on_behind_the_engine_s_own_pages(small, store, plain_logits, same, kind):
    writer, reader = small(kind, store), small(kind, store)
    writer.fill(PROMPT)
    reader.fill(PROMPT[:70], saves=False)
    brought, logits = answer(reader, PROMPT, lambda request: reader.store.load(request, PROMPT))
    assert brought.num_tokens == 144 - 64
    assert same(logits, plain_logits(reader.model, PROMPT))


@pytest.mark.parametrize("kind", ["window", "both"])
@pytest.mark.parametrize("way", ["load", "fetch"])
def test_a_page_that_was_copied_in_part_and_lies_before_the_window_is_not_found_by_others(
    small, store, plain_logits, same, kind, way
):
    writer, reader = small(kind, store), small(kind, store)
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)
    ticket = writer.store.publish(request, PROMPT, len(PROMPT))
    request.release()
    writer.forget()
    writer.fill(PROMPT)
    reader.fill([*PROMPT[:20], *[1] * 20], saves=False)
    request = reader.index.acquire(PROMPT)
    reader.cache.copy(request.prepare_copy())
    assert request.complete_copy() == 4
    brought = reader.store.load(request, PROMPT) if way == "load" else reader.store.fetch(request, PROMPT, ticket)
    assert brought.num_tokens == 144 - 20
    request.insert(PROMPT, request.num_tokens)
    assert same(reader.prefill(request, PROMPT), plain_logits(reader.model, PROMPT))
    request.release()
    other = [*PROMPT[:32], 9, 8, 7]
    _, logits = answer(reader, other, lambda request: None)
    assert same(logits, plain_logits(reader.model, other))


@pytest.mark.parametrize("way", ["load", "fetch"])
def test_a_prompt_that_came_whole_has_the_window_of_its_last_token(stores, plain_logits, same, way):
    engines, prompt = [], PROMPT[:144]
    for _ in range(2):
        engines.append(Small(_model_of_window(17), stores["a"]))
    writer, reader = engines
    request = writer.index.acquire(prompt)
    request.extend(len(prompt))
    writer.runner.run(request, prompt, 0)
    for job in writer.store.save(request, prompt, len(prompt)):
        job.result(10)
    ticket = writer.store.publish(request, prompt, len(prompt))
    request.release()
    bring = reader.store.load if way == "load" else lambda held, _: reader.store.fetch(held, prompt, ticket)
    brought, logits = answer(reader, prompt, lambda held: bring(held, prompt))
    assert brought.num_tokens == len(prompt)
    assert same(logits, plain_logits(reader.model, prompt))
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, InvalidRequest])
def test_a_save_that_cannot_be_begun_for_all_groups_leaves_no_job(small, store, monkeypatch, ending):
    writer, save, jobs = small("both", store), Client.save, []

    def refuse(client, *args):
        if client.space == writer.store.spaces[1]:
            raise ending
        jobs.append(save(client, *args))
        return jobs[-1]

    monkeypatch.setattr(Client, "save", refuse)
    request = writer.index.acquire(PROMPT)
    request.extend(len(PROMPT))
    writer.runner.run(request, PROMPT, 0)
    with pytest.raises(ending):
        writer.store.save(request, PROMPT, len(PROMPT))
    request.release()
    assert [job.done() or job.abandon(0.0) for job in jobs] == [True]


def test_a_wait_for_saves_that_ends_early_ends_all_jobs():
    ended = []

    class Failed:
        def result(self, _):
            raise KVStoreError("no")

        def done(self):
            return True

    class Running:
        def done(self):
            return False

        def abandon(self):
            ended.append(self)
            return True

    running = Running()
    with pytest.raises(KVStoreError):
        list(wait_saved((Failed(), running)))
    assert ended == [running]


def test_layers_with_a_window_load_their_window_only(small, store):
    writer, reader = small("both", store), small("both", store)
    writer.fill(PROMPT)
    request = reader.index.acquire(PROMPT)
    brought = reader.store.load(request, PROMPT)
    assert [result.num_local for result in brought.results] == [9, 2]
    assert (request.pages(1) >= 0).tolist() == [False] * 7 + [True] * 2
    request.release()


@KINDS
def test_a_group_that_fails_in_part_makes_all_shorter(small, store, plain_logits, same, kind, monkeypatch):
    writer, reader = small(kind, store), small(kind, store)
    writer.fill(PROMPT)
    load, asked, space = Client.load, [], reader.store.spaces[-1]

    class Short:
        def __init__(self, job):
            self.job = job

        def done(self):
            return self.job.done()

        def result(self, timeout):
            whole = self.job.result(timeout)
            return dataclasses.replace(whole, num_blocks=whole.num_blocks - 1)

    def once(client, *args):
        job = load(client, *args)
        if client.space != space:
            return job
        asked.append(args)
        return Short(job) if len(asked) == 1 else job

    monkeypatch.setattr(Client, "load", once)
    brought, logits = answer(reader, PROMPT, lambda request: reader.store.load(request, PROMPT))
    assert brought.num_tokens == 128
    assert len(asked) == (1 if kind == "full" else 2)
    assert same(logits, plain_logits(reader.model, PROMPT))


def test_without_room_nothing_is_loaded_and_the_request_stays_as_it_was(small, store):
    writer, reader = small("both", store), small("both", store, num_pages=8)
    writer.fill(PROMPT)
    other = reader.index.acquire(PROMPT[::-1])
    other.extend(16 * 4)
    request = reader.index.acquire(PROMPT)
    assert reader.store.load(request, PROMPT).num_tokens == request.num_tokens == 0
    request.extend(3)
    request.release()
    other.release()


def test_a_load_that_cannot_be_begun_leaves_no_job_and_no_page(small, store, monkeypatch):
    writer, reader = small("both", store), small("both", store)
    writer.fill(PROMPT)

    load = Client.load

    def refuse(client, *args):
        if client.space == reader.store.spaces[1]:
            raise InvalidRequest("no")
        return load(client, *args)

    monkeypatch.setattr(Client, "load", refuse)
    request = reader.index.acquire(PROMPT)
    with pytest.raises(InvalidRequest):
        reader.store.load(request, PROMPT)
    assert request.num_tokens == 0
    request.release()
    assert [each.num_private for each in reader.index.stats()] == [0, 0]


def test_nothing_is_found_of_less_than_a_block_or_with_another_salt(small, stores, build_once):
    writer, reader = small("full", stores["a"]), small("full", stores["a"])
    writer.fill(PROMPT)
    request = reader.index.acquire(PROMPT[:15])
    assert reader.store.load(request, PROMPT[:15]).num_tokens == 0
    request.release()
    salted = PagedStore(stores["a"], reader.cache, salt=b"tenant")
    request = reader.index.acquire(PROMPT, salt=b"tenant")
    assert salted.load(request, PROMPT).num_tokens == 0
    request.release()
    salted.close()


@KINDS
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_hand_off_is_fetched_once_and_is_whole(small, stores, plain_logits, same, kind, node):
    writer, reader = small(kind, stores["a"]), small(kind, stores[node])
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT, 32)
    ticket = pickle.loads(pickle.dumps(writer.store.publish(request, PROMPT, len(PROMPT))))
    request.release()
    writer.forget()
    brought, logits = answer(reader, PROMPT, lambda held: reader.store.fetch(held, PROMPT, ticket))
    assert (ticket.num_tokens, brought.num_tokens) == (144, 144)
    assert same(logits, plain_logits(reader.model, PROMPT))
    reader.forget()
    again, logits = answer(reader, PROMPT, lambda held: reader.store.fetch(held, PROMPT, ticket))
    assert again.num_tokens == 0
    assert same(logits, plain_logits(reader.model, PROMPT))


@KINDS
def test_a_hand_off_goes_on_behind_the_engine_s_own_pages(small, stores, plain_logits, same, kind):
    writer, reader = small(kind, stores["a"]), small(kind, stores["b"])
    reader.fill(PROMPT[:50], saves=False)
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)
    ticket = writer.store.publish(request, PROMPT, len(PROMPT))
    request.release()
    brought, logits = answer(reader, PROMPT, lambda held: reader.store.fetch(held, PROMPT, ticket))
    assert brought.num_tokens == 144 - 48
    assert same(logits, plain_logits(reader.model, PROMPT))


def test_a_hand_off_that_is_not_needed_is_withdrawn(small, stores):
    writer, reader = small("both", stores["a"]), small("both", stores["a"])
    reader.fill(PROMPT, saves=False)
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)
    ticket = writer.store.publish(request, PROMPT, len(PROMPT))
    request.release()
    held = reader.index.acquire([*PROMPT, 1])
    assert reader.store.fetch(held, PROMPT, ticket).num_tokens == 0
    held.release()
    assert writer.store.withdraw(ticket, PROMPT)
    assert not writer.store.withdraw(ticket, PROMPT)


def test_a_ticket_is_for_its_own_prompt_model_and_salt(small, store):
    writer, reader = small("full", store), small("full", store)
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)
    ticket = writer.store.publish(request, PROMPT, len(PROMPT))
    request.release()
    held = reader.index.acquire(PROMPT[:100])
    with pytest.raises(InvalidRequest, match="this prompt"):
        reader.store.fetch(held, PROMPT[:100], ticket)
    assert held.num_tokens == 0
    held.release()
    other = [*PROMPT[:143], PROMPT[143] + 1]
    held = reader.index.acquire(other)
    brought = reader.store.fetch(held, other, ticket)
    assert (brought.num_tokens, held.num_tokens) == (0, 0)
    assert [result.failed[0].reason for result in brought.results] == [MissReason.NOT_FOUND]
    held.release()
    salted = PagedStore(store, reader.cache, salt=b"tenant")
    held = reader.index.acquire(PROMPT)
    with pytest.raises(NamespaceMismatch):
        salted.fetch(held, PROMPT, ticket)
    assert reader.store.fetch(held, [*PROMPT, 5], ticket).num_tokens == 144
    held.release()
    salted.close()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["full", "both"])
def test_a_changed_ticket_brings_no_tokens_to_another_place(small, store, kind, page_size, plain_logits, same):
    """Which tokens a ticket is for is said by the hashes of whoever publishes or fetches, never by the ticket."""
    num_pages = 400 if page_size == 1 else 64
    writer, reader = (small(kind, store, page_size=page_size, num_pages=num_pages) for _ in range(2))
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT, 32)
    ticket = writer.store.publish(request, PROMPT, len(PROMPT))
    request.release()
    longer = [*PROMPT, *PROMPT]
    for num_tokens in (-16, 0, 1, 128, 143, 145, 160, 10_000):
        held = reader.index.acquire(longer)
        try:
            brought = reader.store.fetch(held, longer, dataclasses.replace(ticket, num_tokens=num_tokens))
        except InvalidRequest:
            pass
        else:
            assert brought.num_tokens == 0, num_tokens
        assert held.num_tokens == 0
        held.release()
    for num_more in (-1, 1):
        parts = [dataclasses.replace(part, num_blocks=part.num_blocks + num_more) for part in ticket.tickets]
        held = reader.index.acquire(PROMPT)
        try:
            brought = reader.store.fetch(held, PROMPT, dataclasses.replace(ticket, tickets=tuple(parts)))
        except InvalidRequest:
            pass
        else:
            assert brought.num_tokens == 0, num_more
        assert held.num_tokens == 0
        held.release()
    brought, logits = answer(reader, PROMPT, lambda held: reader.store.fetch(held, PROMPT, ticket))
    assert brought.num_tokens == 144
    assert same(logits, plain_logits(reader.model, PROMPT))


def test_engines_with_other_steps_share_nothing(small, store):
    writer, reader = small("both", store), small("both", store, step_tokens=8)
    writer.fill(PROMPT)
    request = reader.index.acquire(PROMPT)
    assert reader.store.load(request, PROMPT).num_tokens == 0
    request.release()


def test_a_prompt_without_a_whole_block_is_not_handed_off(small, store):
    writer = small("full", store)
    request = writer.index.acquire(PROMPT[:15])
    writer.prefill(request, PROMPT[:15])
    assert writer.store.publish(request, PROMPT, 15) is None
    request.release()


def test_a_window_that_was_given_up_is_not_handed_off(small, store):
    writer = small("both", store)
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)
    with pytest.raises(InvalidRequest, match="trimmed"):
        writer.store.publish(request, PROMPT, 64)
    assert writer.store.publish(request, PROMPT, 150) is not None
    request.release()


def test_a_ticket_of_other_pages_is_refused_and_changes_nothing(small, store):
    writer, reader = small("both", store, page_size=16), small("both", store, page_size=64)
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)
    ticket = writer.store.publish(request, PROMPT, len(PROMPT))
    request.release()
    held = reader.index.acquire(PROMPT)
    with pytest.raises(InvalidRequest, match="one page size"):
        reader.store.fetch(held, PROMPT, ticket)
    with pytest.raises(InvalidRequest, match="groups"):
        reader.store.fetch(held, PROMPT, dataclasses.replace(ticket, tickets=ticket.tickets[:1]))
    assert held.num_tokens == 0
    held.release()
    other = small("full", store)
    held = other.index.acquire(PROMPT)
    with pytest.raises(InvalidRequest, match="groups"):
        other.store.fetch(held, PROMPT, ticket)
    held.release()


def test_a_fetch_without_room_is_refused_and_the_ticket_stays_good(small, store, plain_logits, same):
    writer, reader = small("full", store), small("full", store, num_pages=10)
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)
    ticket = writer.store.publish(request, PROMPT, len(PROMPT))
    request.release()
    other = reader.index.acquire(PROMPT[::-1])
    other.extend(40)
    held = reader.index.acquire(PROMPT)
    with pytest.raises(PoolExhausted):
        reader.store.fetch(held, PROMPT, ticket)
    held.release()
    other.release()
    brought, logits = answer(reader, PROMPT, lambda held: reader.store.fetch(held, PROMPT, ticket))
    assert brought.num_tokens == 144
    assert same(logits, plain_logits(reader.model, PROMPT))


def test_blocks_behind_ones_that_are_gone_are_not_saved_and_nothing_fails(small, store):
    writer = small("window", store)
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)  # Trimmed before anything was saved.
    assert list(wait_saved(writer.store.save(request, PROMPT, len(PROMPT)))) == [None]
    request.release()


def test_windows_that_begin_within_blocks_are_refused(store, build_once):
    from kvstore.integrations.transformers.paged import PagedKVCache

    cache = PagedKVCache(build_once("both"), page_size=16, align_tokens=16)
    with pytest.raises(InvalidRequest, match="align_tokens=32"):
        PagedStore(store, cache, block_size=32)


def test_a_store_that_has_ended_is_a_typed_error_and_leaves_the_request(small, stores):
    writer = small("both", stores["a"])
    writer.fill(PROMPT)
    writer.forget()
    stores["a"].cluster.stop_node("a")
    request = writer.index.acquire(PROMPT)
    try:
        brought = writer.store.load(request, PROMPT)
    except KVStoreError:
        pass
    else:
        assert brought.num_tokens == 0
    assert request.num_tokens == 0
    request.release()
    writer.index.check_integrity()


@pytest.mark.parametrize("refusal", [StoreDraining, StoreBusy])
def test_a_store_that_serves_and_refuses_keeps_what_was_published(small, stores, monkeypatch, refusal):
    writer, reader = small("both", stores["a"]), small("both", stores["b"])
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)
    ticket = writer.store.publish(request, PROMPT, len(PROMPT))
    if refusal is StoreDraining:
        stores["a"].cluster.nodes["a"].begin_drain(0)
    else:
        monkeypatch.setattr(Client, "publish", _raise(StoreBusy("too many of these wait")))
    with pytest.raises(refusal):
        writer.store.publish(request, PROMPT, len(PROMPT))
    request.release()
    held = reader.index.acquire(PROMPT)
    assert reader.store.fetch(held, PROMPT, ticket).num_tokens == 144
    held.release()


def test_what_cannot_be_withdrawn_does_not_hide_why_a_publication_failed(small, store, monkeypatch):
    writer, publish = small("both", store), Client.publish

    def refuse(client, *args, **more):
        if client.space == writer.store.spaces[1]:
            raise PoolExhausted("no room")
        return publish(client, *args, **more)

    monkeypatch.setattr(Client, "publish", refuse)
    monkeypatch.setattr(Client, "withdraw", _raise(TransferTimeout("no answer")))
    request = writer.index.acquire(PROMPT)
    writer.prefill(request, PROMPT)
    with pytest.raises(PoolExhausted):
        writer.store.publish(request, PROMPT, len(PROMPT))
    request.release()


def test_after_the_store_was_lost_the_next_calls_use_the_new_one(small, stores):
    engine, cluster = small("both", stores["a"]), stores["a"].cluster
    engine.fill(PROMPT)
    engine.forget()
    cluster.stop_node("a")
    request = engine.index.acquire(PROMPT)
    for _ in range(2):
        try:
            assert engine.store.load(request, PROMPT).num_tokens == 0
        except KVStoreError:
            continue
    request.release()
    cluster.add("a", capacity_bytes=4 << 20, block_bytes=1 << 15)
    engine.fill(PROMPT)
    engine.forget()
    request = engine.index.acquire(PROMPT)
    assert engine.store.load(request, PROMPT).num_tokens == 144
    request.release()
    engine.store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        engine.store.load(request, PROMPT)

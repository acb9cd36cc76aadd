"""Tensors that are not those that were registered are refused by every verb: nothing of theirs is stored."""

from __future__ import annotations

import threading

import pytest
import torch
from inner_parts import parts_of

from kvstore.engine.registered import Registered, RegisteredCache
from kvstore.errors import LayoutMismatch

IDS = list(range(10))


def entry(caches):
    caches[0] = torch.zeros_like(caches[0])


def data(caches):
    caches[0].data = torch.zeros_like(caches[0])


def moved(caches):
    caches[0].share_memory_()  # The same object of torch, elsewhere; the old memory is freed.


def resized(caches):
    caches[0].untyped_storage().resize_(1 << 20)


def of_another(caches):
    caches[0].set_(caches[1])


def of_another_dtype(caches):
    caches[0].data = caches[0].to(torch.int32)


def nothing(caches):
    caches[0] = None


def shorter(caches):
    del caches[1]


CHANGES = [entry, data, moved, resized, of_another, of_another_dtype, nothing, shorter]


@pytest.fixture
def pair(cluster):
    """Two engines of one node; blocks 0 to 9 of the first are stored."""
    cluster.add("a", mover=False)
    writer, other = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    writer.save(cluster.hashes(10), IDS)
    return writer, other


def verbs(worker, hashes, ticket):
    return {
        "save": lambda: worker.save(hashes, IDS),
        "load": lambda: worker.load(hashes, IDS),
        "publish": lambda: worker.client.publish(IDS),
        "begin_publish": lambda: worker.client.begin_publish(IDS).job.result(10),
        "fetch": lambda: worker.client.fetch(ticket, IDS).result(10),
    }


def num_stored(worker, hashes):
    return worker.client.lookup(hashes).num_blocks


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("verb", ["save", "load", "publish", "begin_publish", "fetch"])
def test_other_tensors_are_refused_until_they_are_registered(cluster, pair, verb, change):
    writer, other = pair
    hashes = cluster.hashes(10) if verb == "load" else cluster.hashes(10, seed=1)
    change(other.caches)
    ticket = writer.client.publish(IDS)

    with pytest.raises(LayoutMismatch, match=r"register|pass torch tensors"):
        verbs(other, hashes, ticket)[verb]()

    assert num_stored(writer, cluster.hashes(10, seed=1)) == 0
    other.caches = [torch.full_like(cache, 7.0) for cache in writer.caches]
    other.client.register_kv_caches(other.caches)
    verbs(other, hashes, writer.client.publish(IDS))[verb]()
    if verb in ("load", "fetch"):
        assert [other.block(i) for i in IDS] == [writer.block(i) for i in IDS]
    if verb == "save":
        writer.load(hashes, IDS)
        assert [writer.block(i) for i in IDS] == [other.block(i) for i in IDS]


@pytest.mark.parametrize("change", [entry, data])
@pytest.mark.parametrize("verb", ["save", "load", "publish", "begin_publish", "fetch"])
def test_tensors_that_are_replaced_while_a_job_copies_are_refused_too(cluster, pair, verb, change):
    writer, other = pair
    hashes = cluster.hashes(10) if verb == "load" else cluster.hashes(10, seed=1)
    ticket, copier, changed = writer.client.publish(IDS), parts_of(other.client).copier, threading.Event()
    name = "out_of_slots" if verb in ("load", "fetch") else "into_slots"
    copy, before = getattr(copier, name), list(other.caches)

    def copying(*args):
        change(other.caches)  # After the call was checked, and before its copy.
        changed.set()
        copy(*args)

    setattr(copier, name, copying)
    with pytest.raises(LayoutMismatch, match="register"):
        verbs(other, hashes, ticket)[verb]()

    assert changed.is_set()
    assert num_stored(writer, cluster.hashes(10, seed=1)) == 0
    assert not other.caches[0].any(), "nothing is written to what was not registered"
    assert all(len(cache) for cache in before), "the memory that was registered is still there"
    if verb == "fetch":  # What was not delivered may be fetched once more.
        other.client.register_kv_caches(other.caches)
        assert verbs(other, hashes, ticket)[verb]().num_blocks == 10
        assert [other.block(i) for i in IDS] == [writer.block(i) for i in IDS]


def test_what_was_copied_before_tensors_were_replaced_is_what_was_registered(cluster, pair):
    """A copier has the registered memory itself: what a caller does to its tensors never changes what is copied."""
    writer, _ = pair
    copier, right = parts_of(writer.client).copier, [cache.clone() for cache in writer.caches]
    data(writer.caches)
    copier.check_unchanged = lambda: None
    writer.save(cluster.hashes(4, seed=2), IDS[:4])
    reader = cluster.worker("a", seed=3)
    reader.load(cluster.hashes(4, seed=2), IDS[:4])
    assert [reader.block(i) for i in IDS[:4]] == [[cache[:, i].numpy().tobytes() for cache in right] for i in IDS[:4]]


def test_another_object_for_the_same_memory_is_the_same_tensor(cluster, pair):
    writer, other = pair
    other.caches[:] = [cache.view(cache.shape) for cache in other.caches]
    assert other.load(cluster.hashes(10), IDS).num_blocks == 10
    assert [other.block(i) for i in IDS] == [writer.block(i) for i in IDS]


def test_a_stage_is_not_attached_for_other_tensors_and_follows_those_that_are_registered_anew(cluster, pair):
    from kvstore.blocks.codec import encode
    from kvstore.client.handoff.stage_link import StageLink
    from kvstore.rpc.handoff_messages import StageFound

    _, other = pair
    made = []
    found = encode(StageFound(3, 1, "01", b"", b"", 0, 0, 512, 8, 1))
    link = StageLink(lambda *_: found, parts_of(other.client).copier.cache, 1 << 20, ())

    def make(caches: RegisteredCache, _):
        caches.registered.check()
        made.append(caches)
        return type("Side", (), {"close": lambda self: made.append("closed")})()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.client.handoff.stage_link.StageCopier", make)
        patch.setattr("kvstore.client.handoff.stage_link.stage_uuid", lambda _: "01")
        parts_of(other.client).stage = link
        data(other.caches)
        with pytest.raises(LayoutMismatch):
            link.attach()
        other.client.register_kv_caches(other.caches)
        stage = link.take()
        assert stage is not None
        assert made == [parts_of(other.client).copier.cache]
        link.leave(stage)
        other.client.register_kv_caches([cache.clone() for cache in other.caches])
        assert made[1:] == ["closed"]
        assert link.take() is not stage
        assert made[2:] == [parts_of(other.client).copier.cache]
    parts_of(other.client).stage = StageLink(parts_of(other.client).store.ask)


def test_side_tensors_and_dicts_count_as_well():
    caches, sides = {"0": torch.zeros(4), "1": torch.ones(4)}, [[torch.zeros(2)]]
    registered = Registered(caches, sides)
    registered.check()
    for given, key in ((caches, "1"), (sides[0], 0)):
        before, given[key] = given[key], given[key].clone()
        with pytest.raises(LayoutMismatch, match="other memory"):
            registered.check()
        given[key] = before
        registered.check()

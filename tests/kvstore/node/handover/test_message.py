"""What one life of a store says to the next one: it comes whole and unchanged, or is refused."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from kvstore.blocks.codec import encode
from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError, ProtocolError
from kvstore.node.handover import message as messages
from kvstore.node.handover.message import Held, Message, check_samples, image_of, pack_blocks, samples_of, seal, unseal
from kvstore.node.handover.old_life import check_is_of, uses_of
from kvstore.node.handover.processes import OldUse
from kvstore.pool.pool import Pool
from tests.kvstore.pool.pool_steps import SPACE, chain, store

SLOT_BYTES = 512


@pytest.fixture
def pool():
    made = Pool(8)
    store(made, chain(1, 2, 3))
    store(made, chain(4))
    made.pin_prefix(chain(4), "reader", 90.0)
    made.prepare_store(chain(5), "client-1")
    return made


@pytest.fixture
def memory():
    return memoryview(np.random.default_rng(1).integers(0, 256, 8 * SLOT_BYTES, np.uint8).tobytes())


@pytest.fixture
def message(pool, memory):
    image = pool.freeze()
    return Message(
        store="default", node="a", epoch=pool.epoch, capacity_bytes=8 * SLOT_BYTES, slot_bytes=SLOT_BYTES,
        block_bytes={SPACE: 500}, versions={SPACE: 3}, directory=b"", clears=b"",
        generations=image.generations.tobytes(), tenants=image.tenants, owners=image.owners.tobytes(),
        namespaces=image.namespaces, blocks=pack_blocks(image.blocks),
        writers=tuple(Held(held.until_s, held.slots.tobytes(), (0,)) for held in image.writers),
        readers=tuple(Held(held.until_s, held.slots.tobytes()) for held in image.readers),
        samples=samples_of(image.blocks, [500], SLOT_BYTES, memory),
    )  # fmt: skip


def test_a_message_comes_back_as_it_was(message, pool, memory):
    again = unseal(seal(message))
    assert again == message
    after = Pool(8)
    after.adopt(image_of(again))
    after.check_integrity()
    assert (after.lookup(chain(1, 2, 3)), after.lookup(chain(4)), after.lookup(chain(5))) == (3, 1, 0)
    assert after.stats().num_writing == after.stats().num_pinned == 1
    check_samples(again, memory)


def test_a_message_of_a_version_that_named_no_readers_is_read_with_what_it_meant(message):
    fields, names = msgspec.msgpack.decode(encode(message)), Message.__struct_fields__
    for name in ("writers", "readers"):
        at = names.index(name)
        assert fields[at]
        fields[at] = [held[:3] for held in fields[at]]
    again = unseal(seal(fields))
    assert again == message
    (writer,), (reader,) = again.writers, again.readers
    assert (writer.is_read, reader.processes) == (False, ())
    assert [(use.owner, use.pidfds, use.is_read) for use in uses_of(again, (7,))] == [("old-writer-0", (7,), False)]


def test_only_readers_with_processes_end_before_their_time(message):
    slots = message.readers[0].slots
    changes = {
        "writers": (Held(0.0, b"", (1,)), Held(5.0, b"", (2,), is_read=True), Held(6.0, b"", (), is_read=True)),
        "readers": (Held(7.0, slots, (), is_read=True), Held(8.0, slots, (0, 2), is_read=True)),
    }
    found = uses_of(msgspec.structs.replace(message, **changes), (10, 11, 12))
    assert found == [
        OldUse("old-writer-0", 0.0, (11,)),
        OldUse("old-writer-1", 5.0, (12,), is_read=True),
        OldUse("old-writer-2", 6.0, (), is_read=True),
        OldUse("old-reader-1", 8.0, (10, 12), is_read=True),
    ]


def test_a_message_that_was_cut_anywhere_is_refused(message):
    data = seal(message)
    for length in [*range(0, 64), *range(64, len(data), 7)]:
        with pytest.raises(ProtocolError):
            unseal(data[:length])


def test_a_message_with_one_changed_bit_is_refused(message):
    data, draw = bytearray(seal(message)), random.Random(0)
    for _ in range(200):
        at, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
        data[at] ^= bit
        with pytest.raises(ProtocolError):
            unseal(bytes(data))
        data[at] ^= bit


def test_a_message_of_another_format_is_refused_before_it_is_read(message, monkeypatch):
    data = seal(message)
    monkeypatch.setattr(messages, "FORMAT", 3)
    with pytest.raises(ProtocolError, match="wanted format 3, got 2"):
        unseal(data)


def test_memory_with_other_bytes_is_refused(message, memory):
    changed = bytearray(memory)
    changed[message.samples[0].slot * SLOT_BYTES] ^= 1
    with pytest.raises(ProtocolError, match="other bytes"):
        check_samples(message, memoryview(changed))


def changed_column(message, number, kind, place, value):
    columns = list(message.blocks)
    column = np.frombuffer(columns[number], kind).copy()
    column[place] = value
    columns[number] = column.tobytes()
    return msgspec.structs.replace(message, blocks=tuple(columns))


@pytest.mark.parametrize(
    ("number", "kind", "value"),
    [
        (0, "<i4", 8),
        (0, "<i4", -1),
        (1, "<i4", 1),
        (4, "<i8", -1),
        (6, "u1", 3),
        (7, "<f8", float("nan")),
        (8, "u1", 9),
    ],
)
def test_a_column_with_a_value_that_cannot_be_is_refused(message, number, kind, value):
    with pytest.raises(ProtocolError, match="contradicts itself"):
        image_of(changed_column(message, number, kind, 0, value))


def test_an_index_that_contradicts_itself_is_refused(message):
    slots = np.frombuffer(message.blocks[0], "<i4")
    twice = changed_column(message, 0, "<i4", 0, int(slots[1]))
    two_owners = msgspec.structs.replace(message, writers=(Held(0.0, slots[:1].tobytes()),))
    free_reader = msgspec.structs.replace(message, readers=(Held(0.0, np.array([7], "<i4").tobytes()),))
    circle = changed_column(message, 4, "<i8", slice(None), 5)
    short = msgspec.structs.replace(message, blocks=(message.blocks[0][:-4], *message.blocks[1:]))
    ragged = msgspec.structs.replace(message, blocks=(*message.blocks[:4], b"123", *message.blocks[5:]))
    few = msgspec.structs.replace(message, blocks=message.blocks[:-1])
    foreign = msgspec.structs.replace(message, block_bytes={})
    other_size = msgspec.structs.replace(message, block_bytes={bytes(32): 500})
    for wrong in (twice, two_owners, free_reader, circle, short, ragged, few, foreign, other_size):
        with pytest.raises(ProtocolError, match="index of the old store"):
            image_of(wrong)


@pytest.mark.parametrize(
    "changes",
    [
        {"store": "other"},
        {"node": "b"},
        {"generations": bytes(4 * 7)},
        {"slot_bytes": 0},
        {"slot_bytes": SLOT_BYTES - 2, "capacity_bytes": 8 * (SLOT_BYTES - 2)},  # As many slots, but elsewhere.
        {"block_bytes": {}},
        {"block_bytes": {SPACE: 0}},
        {"block_bytes": {SPACE: SLOT_BYTES + 1}},
    ],
)
def test_a_message_of_another_store_or_of_slots_that_cannot_be_is_refused(message, changes):
    config = StoreConfig(capacity_bytes=1 << 16)
    check_is_of(message, config, "a")
    with pytest.raises(KVStoreError, match=r"it (is|has)"):
        check_is_of(msgspec.structs.replace(message, **changes), config, "a")


def test_bytes_that_are_no_message_are_refused_though_their_checksum_is_right():
    with pytest.raises(ProtocolError):
        unseal(seal([1, 2]))

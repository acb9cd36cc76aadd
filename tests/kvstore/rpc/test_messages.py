import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import encode
from kvstore.blocks.grants import Grant, StoreTicket
from kvstore.blocks.indexes import pack_ints
from kvstore.blocks.priority import Priority
from kvstore.bounds import MAX_NODE_ID_CHARS
from kvstore.errors import ChainBroken, ProtocolError
from kvstore.rpc import handoff_messages, messages

CHAIN = BlockHashes(b"n" * 32, b"p" * 32, 3, bytes(range(96)))
SLOTS = np.array([5, 0, 2**31 - 1], dtype=np.int32)
KEY, EPOCH = b"k" * 32, b"epoch678"
ids = st.integers(0, 2**64 - 1)
ints = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@pytest.mark.parametrize("ttl_s", [0.1, 30.0, 1e9])
def test_lease(ttl_s):
    asked = messages.Ask(CHAIN, ttl_s)
    assert messages.decode_ask(encode(asked)) == asked


def test_lookup():
    asked = messages.AskLookup(CHAIN, 0.5, 0.05)
    assert messages.decode_ask_lookup(encode(asked)) == asked


def test_load():
    asked = messages.AskLoad(CHAIN, 1.5, 2.5)
    assert messages.decode_ask_load(encode(asked)) == asked


@given(ids, ints)
def test_grant(lease_id, slots):
    grant = Grant(lease_id, pack_ints(slots), bytes(4 * len(slots)), 7, EPOCH)
    back = messages.decode_grant(encode(grant))
    assert back == grant
    assert back.slots == tuple(slots)


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("ttl_s", [0.5, math.inf])
def test_pin(is_soft, ttl_s):
    asked = messages.AskPin(CHAIN, is_soft, ttl_s)
    assert messages.decode_ask_pin(encode(asked)) == asked


@pytest.mark.parametrize("kind", [0, 3, 255, None])
def test_another_kind_of_pin_is_refused(kind):
    with pytest.raises(ProtocolError, match="Expected `bool`"):
        messages.decode_ask_pin(encode([CHAIN, kind, 1.0]))


@pytest.mark.parametrize(("num_parts", "part"), [(1, 0), (2, 1), (65535, 65534)])
@pytest.mark.parametrize("num_clears", [None, 7, 2**64 - 1])
@pytest.mark.parametrize(("priority", "priority_s"), [(Priority.NORMAL, None), (Priority.LOW, 0.5), (Priority.HIGH, 9)])
def test_prepare(num_parts, part, num_clears, priority, priority_s):
    asked = messages.Prepare(CHAIN, num_parts, part, num_clears, priority, priority_s)
    back = messages.decode_prepare(encode(asked))
    assert back == asked
    assert back.priority is priority


@pytest.mark.parametrize("priority", [-1, 3, 255, 1.0, True, None, "low"])
def test_another_priority_is_refused(priority):
    with pytest.raises(ProtocolError, match="no Prepare"):
        messages.decode_prepare(encode([CHAIN, 1, 0, None, priority]))


@given(ids, st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 9999)), max_size=9))
def test_ticket(write_id, pairs):
    indexes, slots = [a for a, _ in pairs], [b for _, b in pairs]
    ticket = StoreTicket(
        write_id=write_id,
        packed_indexes=pack_ints(indexes),
        packed_slots=pack_ints(slots),
        num_resident=3,
        num_refused=4,
        num_awaited=2,
        num_clears=2**40,
        generations=b"life" * len(pairs),
        epoch=EPOCH,
    )
    back = messages.decode_ticket(encode(ticket))
    assert back == ticket
    assert (back.indexes, back.slots) == (tuple(indexes), tuple(slots))
    end = messages.decode_write_end(encode(messages.WriteEnd.of(ticket)))
    assert (end.write_id, end.epoch, end.generations) == (write_id, EPOCH, ticket.generations)


def test_arrays_of_another_length_are_refused_where_they_are_used():
    assert messages.decode_grant(encode(Grant(1, b"12345"))).packed_slots == b"12345"
    with pytest.raises(ProtocolError, match="whole int32"):
        _ = Grant(1, b"12345").slots
    with pytest.raises(ProtocolError, match="as many slots as positions"):
        StoreTicket(write_id=1, packed_indexes=bytes(8), packed_slots=bytes(4)).arrays(2, 9)
    with pytest.raises(ProtocolError, match="whole int32"):
        StoreTicket(write_id=1, packed_indexes=bytes(5), packed_slots=bytes(5)).arrays(1, 9)
    with pytest.raises(ProtocolError, match="whole int32"):
        _ = messages.Progress(1, 0, b"123").slots


@pytest.mark.parametrize("slots", [SLOTS, SLOTS[:0]])
@pytest.mark.parametrize("report", [None, messages.LoadReport(reason="x")])
def test_progress(slots, report):
    back = messages.decode_progress(encode(messages.Progress(9, 4, slots.tobytes(), report)))
    assert (back.lease_id, back.first, back.slots.tolist(), back.report) == (9, 4, slots.tolist(), report)


def test_a_report_comes_back_as_it_was_told():
    report = messages.LoadReport(
        num_local=1, num_peer=2, reason="timeout: für 3 s\0x", peers=["a", "b"], num_bytes=1 << 40, num_descriptors=5,
        read_s=0.25, num_locate_calls=6, num_lease_calls=7, note="no stage", waited_s=0.5, num_disk=8,
    )  # fmt: skip
    assert messages.decode_progress(encode(messages.Progress(1, 0, SLOTS.tobytes(), report))).report == report
    assert messages.LoadReport().peers == []


FETCH = handoff_messages.FetchRequest(
    key=KEY, namespace=KEY, epoch=EPOCH, node_id="nöde", num_blocks=3, ttl_s=1.0, timeout_s=2.0
)
MESSAGES = [
    (FETCH, handoff_messages.decode_fetch),
    (handoff_messages.PrepareHandoff(KEY, 2**64 - 1, KEY, 3, 1, 2, 3), handoff_messages.decode_prepare_handoff),
    (handoff_messages.CompleteHandoff(KEY, 7, 1.5), handoff_messages.decode_complete_handoff),
    (handoff_messages.AbortHandoff(KEY, 7), handoff_messages.decode_abort_handoff),
    (handoff_messages.End(1 << 63, True), handoff_messages.decode_end),
    (messages.Attach(KEY, 512), messages.decode_attach),
    (messages.Found([("a", 1), ("b", 2**64 - 1)], "a"), messages.decode_found),
    (messages.FoundByStore([("a", 1), ("b", 2)], 3, 4), messages.decode_found_by_store),
    (messages.Renew(1, 1.0), messages.decode_renew),
]


def test_the_id_of_a_node_has_a_bound():
    for message, decode in (
        (msgspec.structs.replace(FETCH, node_id="ö" * MAX_NODE_ID_CHARS), handoff_messages.decode_fetch),
        (messages.Found([("ö" * MAX_NODE_ID_CHARS, 1)]), messages.decode_found),
    ):
        assert decode(encode(message)) == message
        with pytest.raises(ProtocolError):
            decode(encode(message).replace("ö".encode() * MAX_NODE_ID_CHARS, b"nn" * MAX_NODE_ID_CHARS))


@pytest.mark.parametrize(("message", "decode"), MESSAGES, ids=lambda value: type(value).__name__)
def test_a_message_comes_back_and_what_is_none_is_refused(message, decode):
    payload = encode(message)
    assert decode(payload) == message
    others = [b"", payload[:-1], payload + b"\x00", b"\xff" * 8, b"\x91" * 5000, encode({}), encode(None)]
    fields = msgspec.msgpack.decode(payload)
    others += [
        encode([*fields, 0]),
        encode(fields[:1] if len(fields) > 2 else []),
        encode([object.__name__, *fields[1:]]),
    ]
    for other in others:
        with pytest.raises(ProtocolError, match=f"no {type(message).__name__} of this version"):
            decode(other)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, b"k" * 31),
        (1, b"k" * 33),
        (2, b"7 bytes"),
        (3, b"bytes"),
        (4, -1),
        (4, 1 << 32),
        (5, "1.0"),
        (7, -1),
        (10, 1),
    ],
)
def test_a_field_beyond_its_limits_is_refused(index, value):
    fields = msgspec.msgpack.decode(encode(FETCH))
    fields[index] = value
    with pytest.raises(ProtocolError):
        handoff_messages.decode_fetch(encode(fields))


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(ProtocolError, match="utf-8"):
        handoff_messages.decode_fetch(encode(FETCH).replace("nöde".encode(), b"n\xff\xffde"))


def test_a_run_of_half_hashes_breaks_its_chain_in_every_message():
    wrong = [CHAIN.namespace, CHAIN.parent, 0, b"half"]
    with pytest.raises(ChainBroken):
        messages.decode_ask(encode([wrong, 1.0]))

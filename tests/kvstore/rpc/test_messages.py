import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks.chain import Chain
from kvstore.blocks.grants import Grant, PinKind, StoreTicket
from kvstore.errors import ProtocolError
from kvstore.rpc import messages

CHAIN = Chain(b"n" * 32, b"p" * 32, 3, bytes(range(96)))
SLOTS = np.array([5, 0, 2**31 - 1], dtype=np.int32)
ids = st.integers(0, 2**64 - 1)
ints = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(ints)
def test_ints(values):
    back = messages.unpack_ints(messages.pack_ints(values))
    assert back.dtype == np.int32
    assert back.tolist() == values
    assert back.flags.writeable


def test_part_of_an_int_is_refused():
    with pytest.raises(ProtocolError, match="whole int32"):
        messages.unpack_ints(b"12345")


@pytest.mark.parametrize("ttl_s", [0.1, 30.0, 1e9])
def test_lease(ttl_s):
    assert messages.unpack_lease(messages.pack_lease(CHAIN, ttl_s)) == (CHAIN, ttl_s)


def test_load():
    assert messages.unpack_load(messages.pack_load(CHAIN, 1.5, 2.5)) == (CHAIN, 1.5, 2.5)


@given(ids, ints)
def test_grant(lease_id, slots):
    grant = Grant(lease_id, tuple(slots), bytes(4 * len(slots)), 7, b"epoch678")
    assert messages.unpack_grant(messages.pack_grant(grant)) == grant


@pytest.mark.parametrize("kind", [PinKind.HARD, PinKind.SOFT])
@pytest.mark.parametrize("ttl_s", [0.5, float("inf")])
def test_pin(kind, ttl_s):
    assert messages.unpack_pin(messages.pack_pin(CHAIN, kind, ttl_s)) == (CHAIN, kind, ttl_s)


@pytest.mark.parametrize("kind", [0, 3, 255])
def test_another_kind_of_pin_is_refused(kind):
    with pytest.raises(ProtocolError, match="hard or soft"):
        messages.unpack_pin(bytes([kind]) + messages.pack_pin(CHAIN, PinKind.HARD, 1.0)[1:])


@pytest.mark.parametrize(("num_parts", "part"), [(1, 0), (2, 1), (65535, 65534)])
def test_prepare(num_parts, part):
    assert messages.unpack_prepare(messages.pack_prepare(CHAIN, num_parts, part)) == (CHAIN, num_parts, part, None)
    assert messages.unpack_prepare(messages.pack_prepare(CHAIN, num_parts, part, 7)) == (CHAIN, num_parts, part, 7)


@given(ids, st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 9999)), max_size=9))
def test_ticket(write_id, pairs):
    ticket = StoreTicket(
        write_id=write_id,
        indexes=tuple(a for a, _ in pairs),
        slots=tuple(b for _, b in pairs),
        num_resident=3,
        num_refused=4,
        num_awaited=2,
        num_clears=2**40,
        generations=b"life" * len(pairs),
        epoch=b"epoch678",
    )
    assert messages.unpack_ticket(messages.pack_ticket(ticket)) == ticket
    assert messages.unpack_write_end(messages.pack_write_end(ticket)) == (write_id, b"epoch678", ticket.generations)


@pytest.mark.parametrize("slots", [SLOTS, SLOTS[:0]])
@pytest.mark.parametrize("report", [b"", b'{"reason":""}'])
def test_progress(slots, report):
    back = messages.unpack_progress(messages.pack_progress(messages.Progress(9, 4, slots, report)))
    assert (back.lease_id, back.first, back.slots.tolist(), back.report) == (9, 4, slots.tolist(), report)

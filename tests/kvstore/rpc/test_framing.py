import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import errors
from kvstore.blocks.codec import encode_object
from kvstore.errors import KVStoreError, ProtocolError
from kvstore.rpc.framing import (
    FRAGMENT_BYTES,
    HEADER,
    MAX_MESSAGE_BYTES,
    Decoder,
    Flag,
    Message,
    Op,
    pack_error,
    packets_of,
    unpack_error,
)


def message(num_bytes: int, request: int = 7) -> Message:
    return Message(Op.LOOKUP, Flag.REQUEST, request, random.Random(num_bytes).randbytes(num_bytes))


SIZES = [0, 1, FRAGMENT_BYTES - 1, FRAGMENT_BYTES, FRAGMENT_BYTES + 1, 3 * FRAGMENT_BYTES, 3 * FRAGMENT_BYTES + 5]


@pytest.mark.parametrize("num_bytes", SIZES)
def test_fragments_come_together(num_bytes):
    packets = packets_of(message(num_bytes))
    assert len(packets) == max(1, -(-num_bytes // FRAGMENT_BYTES))
    assert all(len(packet) <= HEADER.size + FRAGMENT_BYTES for packet in packets)
    decoder = Decoder()
    assert [decoder.packet(packet) for packet in packets[:-1]] == [None] * (len(packets) - 1)
    assert decoder.packet(packets[-1]) == message(num_bytes)
    # Nothing of it is left for the next message.
    assert decoder.packet(packets_of(message(3))[0]) == message(3)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    fragment_bytes=st.integers(1, 64),
    pieces=st.lists(st.integers(1, 97), min_size=1, max_size=20),
)
def test_a_stream_in_odd_pieces(sizes, fragment_bytes, pieces):
    wanted = [message(size, request) for request, size in enumerate(sizes)]
    data = b"".join(packet for m in wanted for packet in packets_of(m, fragment_bytes))
    decoder, got, at, turn = Decoder(), [], 0, 0
    while at < len(data):
        step = pieces[turn % len(pieces)]
        got += decoder.stream(data[at : at + step])
        at, turn = at + step, turn + 1
    assert got == wanted


def test_a_stream_byte_by_byte_yields_each_message_at_its_last_byte():
    data, decoder = b"".join(packets_of(message(5)) + packets_of(message(0))), Decoder()
    ends = [i for i, byte in enumerate(data) if decoder.stream(bytes([byte]))]
    assert ends == [HEADER.size + 5 - 1, len(data) - 1]


def packet(magic=b"RKV1", op=Op.LOOKUP, flag=Flag.REQUEST, more=0, length=4, request=1, payload=b"abcd"):
    return HEADER.pack(magic, op, flag, more, length, request) + payload


GARBAGE = {
    "empty": b"",
    "short": b"RKV1",
    "text": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "magic": packet(magic=b"RKV2"),
    "too long": packet(length=3),
    "too short": packet(length=5),
    "op": packet(op=9999),
    "flag": packet(flag=200),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_packet_of_garbage_is_refused(name):
    with pytest.raises(ProtocolError):
        Decoder().packet(GARBAGE[name])


@pytest.mark.parametrize("name", ["text", "magic", "op", "flag"])
def test_a_stream_of_garbage_is_refused(name):
    with pytest.raises(ProtocolError):
        Decoder().stream(GARBAGE[name])


def test_an_announced_length_is_not_waited_for():
    with pytest.raises(ProtocolError):
        Decoder().stream(packet(length=MAX_MESSAGE_BYTES + 1))


def test_fragments_without_end_are_cut_off():
    decoder = Decoder()
    endless = packet(more=1, length=1 << 20, payload=bytes(1 << 20))
    for _ in range(MAX_MESSAGE_BYTES >> 20):
        assert decoder.packet(endless) is None
    with pytest.raises(ProtocolError, match="at most"):
        decoder.packet(endless)


@pytest.mark.parametrize("name", sorted(errors.all_error_types()))
def test_errors_keep_their_class_and_text(name):
    error = errors.all_error_types()[name]("wanted ä, got b; do c")
    back = unpack_error(pack_error(error))
    assert type(back) is type(error)
    assert str(back) == str(error)


@pytest.mark.parametrize("error", [ValueError("bad"), struct.error("short"), KeyError("x")])
def test_foreign_errors_become_ours_and_say_what_they_were(error):
    back = unpack_error(pack_error(error))
    assert type(back) is KVStoreError
    assert type(error).__name__ in str(back)


def test_a_subclass_unknown_to_the_other_side_is_not_named():
    back = unpack_error(encode_object({"error": "SystemExit", "text": "bye"}))
    assert type(back) is KVStoreError
    assert str(back) == "bye"


def test_an_error_that_names_what_is_no_unicode_is_told():
    assert str(unpack_error(pack_error(ProtocolError("no \ud800 file")))) == "no ? file"


def test_ops_and_flags_fit_their_fields():
    assert max(Op) < 1 << 16
    assert max(Flag) < 1 << 8
    assert len(set(Op)) == len(Op)

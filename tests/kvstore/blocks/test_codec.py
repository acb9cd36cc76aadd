from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks import codec
from kvstore.blocks.codec import Record, encode
from kvstore.errors import ProtocolError


class Deep(Record, frozen=True):
    value: Any
    text: str = ""


decode_deep = codec.decoder(Deep)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_ints(values):
    back = codec.decode_indexes(encode(np.array(values, np.int32)))
    assert back.dtype == np.int32
    assert back.tolist() == values
    assert back.flags.writeable


@pytest.mark.parametrize("num_bytes", [0, 7, 9, 16])
def test_the_life_of_a_store_has_eight_bytes(num_bytes):
    decode = codec.decoder(codec.Epoch)
    assert decode(encode(b"12345678")) == b"12345678"
    with pytest.raises(ProtocolError):
        decode(encode(bytes(num_bytes)))


def test_integers_travel_with_the_lowest_byte_first():
    assert encode(np.array([1, 258], ">i8")).endswith(b"\x01\x00\x00\x00\x02\x01\x00\x00")


@pytest.mark.parametrize("value", [b"12345", [1, 2], 7, "1234", None])
def test_part_of_an_int_is_refused(value):
    with pytest.raises(ProtocolError, match="whole int32"):
        codec.decode_indexes(encode(value))


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"\x92", encode([]), encode([1, "", 2]), encode({}), encode([1, "x"])[:-1] + b"\xff", b"[1]",
        b"\x91" * 5000, b"\x91\xdd\xff\xff\xff\xff", b"\x91\xdf\xff\xff\xff\xff", b"\x91\xc6\xff\xff\xff\xff",
        encode([1, "x"]) + b"\x00",
    ],
    ids=lambda payload: repr(payload[:8]),
)  # fmt: skip
def test_whatever_is_wrong_with_bytes_is_one_error(payload):
    with pytest.raises(ProtocolError, match=r"bytes are no Deep of this version"):
        decode_deep(payload)


def test_an_error_is_short_however_long_the_message():
    with pytest.raises(ProtocolError) as caught:
        decode_deep(encode([1, bytes(1 << 20)]))
    assert len(str(caught.value)) < 400


def test_a_count_is_none_below_zero_and_may_be_a_yes():
    assert [codec.decode_count(encode(value)) for value in (0, 2**64 - 1, True)] == [0, 2**64 - 1, True]
    for wrong in (-1, 1.0, None, "1", b"1"):
        with pytest.raises(ProtocolError):
            codec.decode_count(encode(wrong))


def test_what_is_no_message_is_not_encoded():
    with pytest.raises(TypeError, match="object cannot be sent"):
        encode(object())


def test_json_round_trip():
    value = {"a": [1, "ä", None]}
    assert codec.decode_object(codec.encode_object(value)) == value


@pytest.mark.parametrize("payload", [b"", b"{", b"[1]", b"1", b"\xff\xfe{}", b'{"a":"\\ud800"}', b'{"a":' * 5000])
def test_bad_json_is_refused(payload):
    with pytest.raises(ProtocolError, match="no JSON object"):
        codec.decode_object(payload)

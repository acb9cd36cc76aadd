"""Encode and decode messages. A struct travels as a MessagePack array, and an integer array in it as bytes.

Two messages are JSON objects: the greeting of a connection, and an error. Other versions have to read these two as
well (docs/adr/0026-one-codec.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from kvstore.blocks.indexes import IndexArray, ints_in, pack_ints
from kvstore.bounds import DIGEST_BYTES, MAX_NODE_ID_CHARS, clip
from kvstore.errors import ProtocolError

_T = TypeVar("_T")

U16 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
#: MessagePack has no longer integers.
U64 = Annotated[int, msgspec.Meta(ge=0)]
#: The hash of a block, the digest of a namespace, or the key of a ticket.
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
NodeId = Annotated[str, msgspec.Meta(max_length=MAX_NODE_ID_CHARS)]
#: The life of a store.
Epoch = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """Base of all messages and of the records in them. Decoding checks the limits of each field."""


def _to_wire(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        return pack_ints(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _from_wire(_: type, value: object) -> IndexArray:
    return ints_in(value).astype(np.int32)


#: Returns a message as bytes.
encode: Callable[[object], bytes] = msgspec.msgpack.Encoder(enc_hook=_to_wire).encode


def decoder(kind: type[_T]) -> Callable[[bytes | memoryview], _T]:
    """Return a function that decodes messages of one type, and raises ProtocolError for all other bytes.

    Call it once per type, beside the type: making a decoder takes much longer than decoding a message.
    """
    return _strict(msgspec.msgpack.Decoder(kind, dec_hook=_from_wire).decode, getattr(kind, "__name__", str(kind)))


def _strict(decode: Callable[[Any], _T], name: str) -> Callable[[bytes | memoryview], _T]:
    def decoded(payload: bytes | memoryview) -> _T:
        try:
            return decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: invalid Unicode.
            raise ProtocolError(f"{len(payload)} bytes are no {name} of this version: {clip(error, 200)}") from error

    return decoded


decode_bytes = decoder(bytes)
decode_text = decoder(str)
#: The id of a lease or a READ; a bool is refused.
decode_id: Callable[[bytes], int] = decoder(U64)
#: A count, or a yes-or-no answer.
decode_count: Callable[[bytes], int] = decoder(U64 | bool)  # type: ignore[arg-type]
decode_indexes: Callable[[bytes], IndexArray] = decoder(IndexArray)
#: Counts by name, for people to read.
decode_counts = decoder(dict[str, Any])

#: Only for greetings and errors.
encode_object: Callable[[dict[str, Any]], bytes] = msgspec.json.encode
decode_object = _strict(msgspec.json.Decoder(dict[str, Any]).decode, "JSON object")

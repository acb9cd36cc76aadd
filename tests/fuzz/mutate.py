"""Frames made wrong: bits, numbers, lengths, fields, headers, and pieces of other frames."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from collections.abc import Callable, Sequence

import msgspec

from kvstore.rpc.framing import HEADER, Flag, Message, Op

_NUMBERS = [
    b"\xff" * 8, bytes(8), b"\x80" + bytes(7), b"\x7f" * 4, b"\xff" * 4,
    *(struct.pack("<d", value) for value in (math.nan, math.inf, -math.inf, -1.0, 1e300)),
    *(struct.pack("<q", value) for value in (1, -1, 2**31, 2**62, -(2**63))),
]  # fmt: skip
_VALUES = (
    None, True, -1, 0, 2**31, 2**32, 2**63, 2**64 - 1, 2**70, 1e300, math.nan, math.inf, [], {}, "",
    "\ud800", "x" * 3000, [[[]]], "zz" * 8,
    b"", b"123", bytes(8), bytes(31), bytes(32), bytes(3000),
)  # fmt: skip


def mutated(rng: random.Random, frames: Sequence[Message]) -> bytes:
    """Return one of the frames as bytes, mostly made wrong; a few are as they were, so that states change."""
    frame = rng.choice(frames)
    op, flag, more = int(frame.op), int(frame.flag), 0
    payload, length, magic = bytearray(frame.payload), None, b"RKV1"
    choice = rng.randrange(20)
    if choice < 12:
        for _ in range(rng.choice((1, 1, 1, 3))):
            payload = rng.choice(_WAYS)(rng, payload, frames)
    elif choice == 12:
        flag = rng.randrange(256)
    elif choice == 13:
        op = rng.choice([int(rng.choice(list(Op))), rng.randrange(1 << 16)])
    elif choice == 14:
        more = rng.choice((1, 1, 255))
    elif choice == 15:
        length = rng.choice((0, len(payload) + 1, len(payload) // 2, 1 << 31, (1 << 32) - 1, (64 << 20) + 1))
    elif choice == 16:
        magic = rng.randbytes(4)
    if op == Op.GOODBYE:
        op = int(Op.STATS)
    count = len(payload) if length is None else length
    return HEADER.pack(magic, op, flag, more, count, rng.choice((frame.request, rng.randrange(1 << 64)))) + payload


def answered(rng: random.Random, frames: Sequence[Message], question: Message) -> bytes:
    """Return an answer to a question: mostly of its own kind, and wrong."""
    fitting = [frame for frame in frames if frame.op is question.op] or list(frames)
    data = bytearray(mutated(rng, fitting))
    if rng.random() < 0.98:  # Else the other side waits for another one.
        data[: HEADER.size] = HEADER.pack(
            *HEADER.unpack_from(data)[:2], rng.choice((Flag.REPLY, Flag.REPLY, Flag.PROGRESS, Flag.ERROR)), 0,
            len(data) - HEADER.size, question.request,
        )  # fmt: skip
    return bytes(data)


def _flip(rng: random.Random, payload: bytearray, frames: Sequence[Message]) -> bytearray:
    if payload:
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    return payload


def _number(rng: random.Random, payload: bytearray, frames: Sequence[Message]) -> bytearray:
    number = rng.choice(_NUMBERS)
    at = rng.randrange(0, len(payload) + 1, rng.choice((1, 4, 8)))
    payload[at : at + len(number)] = number
    return payload


def _cut(rng: random.Random, payload: bytearray, frames: Sequence[Message]) -> bytearray:
    return payload[: rng.randrange(len(payload) + 1)]


def _grow(rng: random.Random, payload: bytearray, frames: Sequence[Message]) -> bytearray:
    return payload + rng.randbytes(rng.choice((1, 4, 31, 32, 33, 1000)))


def _random(rng: random.Random, payload: bytearray, frames: Sequence[Message]) -> bytearray:
    return bytearray(rng.randbytes(rng.randrange(200)))


def _splice(rng: random.Random, payload: bytearray, frames: Sequence[Message]) -> bytearray:
    other = rng.choice(frames).payload
    at, there = rng.randrange(len(payload) + 1), rng.randrange(len(other) + 1)
    return payload[:at] + other[there:]


def _field(rng: random.Random, payload: bytearray, frames: Sequence[Message]) -> bytearray:
    """Change, drop or add one field of a message: of an array of MessagePack, or of a JSON object."""
    codec = msgspec.json if payload.startswith(b"{") else msgspec.msgpack
    try:
        value = codec.decode(payload)
        if not isinstance(value, dict | list) or not value:
            return _random(rng, payload, frames)
        at = value
        while True:
            key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
            if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.3:
                break
            at = at[key]
        if rng.random() < 0.2:
            del at[key]
        elif isinstance(at, list) and rng.random() < 0.1:
            at.insert(key, copy.deepcopy(rng.choice(_VALUES)))
        elif isinstance(at[key], bytes | str) and rng.random() < 0.5:
            end = rng.randrange(len(at[key]) + 1)
            at[key] = at[key][:end] if rng.random() < 0.5 else at[key] + at[key][:end]
        else:
            at[key] = copy.deepcopy(rng.choice(_VALUES))
        return bytearray(json.dumps(value).encode() if codec is msgspec.json else codec.encode(value))
    except (ValueError, TypeError, OverflowError):
        return _number(rng, payload, frames)


_WAYS: list[Callable[[random.Random, bytearray, Sequence[Message]], bytearray]] = [
    _flip, _number, _number, _cut, _grow, _random, _splice, _field, _field, _field,
]  # fmt: skip

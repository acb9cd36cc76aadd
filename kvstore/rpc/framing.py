"""Encode control messages, small and binary. Unix SEQPACKET (own node) and TCP (peers) carry the same ones.

A message is a header and a payload (kvstore.blocks.codec). A message longer than one packet travels in fragments, each
with its own header; all but the last have MORE set. Errors travel as the name of a class of kvstore.errors and a text,
never as pickles.
"""

from __future__ import annotations

import secrets
import struct
from enum import IntEnum
from typing import NamedTuple

from kvstore.blocks.codec import decode_object, encode_object
from kvstore.errors import KVStoreError, ProtocolError, all_error_types

HEADER = struct.Struct("<4sHBBIQ")
_HEADER_BYTES = HEADER.size
_MAGIC = b"RKV1"
FRAGMENT_BYTES = 96 << 10
#: The most bytes read from a socket at once; a packet is shorter.
RECEIVE_BYTES = 256 << 10
#: Size of the kernel's buffer for sent bytes that the receiver has not read.
SOCKET_BUFFER_BYTES = 1 << 20
#: The longest message; the connection of a peer that announces more is closed.
MAX_MESSAGE_BYTES = 64 << 20
#: Length of the key that makes the connections of one client one owner.
OWNER_KEY_DIGITS = 32
#: The longest message that a connection may send before its HELLO is accepted; bounds its memory here, too.
STRANGER_BYTES = 4 << 10
_MAX_ERROR_CHARS = 2000


class Op(IntEnum):
    """The kind of request of a message; an answer has the op of its request."""

    HELLO = 1
    GOODBYE = 2
    ATTACH = 3
    LOOKUP = 4
    LEASE = 5
    RELEASE = 6
    RENEW = 7
    PREPARE_STORE = 8
    COMPLETE_STORE = 9
    ABORT_STORE = 10
    LOAD = 11
    LOOKUP_ALL = 12
    STATS = 13
    PIN = 14
    AWAIT_STORE = 15
    UNPIN_ALL = 16
    PEER_LEASE = 20
    PEER_RELEASE = 21
    PEER_TRANSPORT = 22
    MOVER_READY = 30
    MOVER_ADD_PEER = 31
    MOVER_READ = 32
    MOVER_DONE = 33
    MOVER_TERMINAL = 34
    MOVER_NOTIFICATIONS = 35
    MOVER_EXPECT = 36
    MOVER_STATS = 37
    MOVER_STAGE = 38
    MOVER_SPILL = 39
    MOVER_SOON = 60
    MOVER_WAKE = 62
    MOVER_FORGET_PEER = 65
    LOCATE = 40
    PUBLISH = 41
    HANDOFF_PREPARE = 50
    HANDOFF_COMPLETE = 51
    HANDOFF_WITHDRAW = 52
    HANDOFF_FETCH = 53
    HANDOFF_END = 54
    PEER_CLAIM = 55
    PEER_CLAIM_END = 56
    PEER_STAGES = 57
    HANDOFF_STAGE = 58
    HANDOFF_WARM = 59
    HANDOFF_SOON = 61
    HANDOFF_PACKING = 63
    HANDOFF_ABORT = 64


class Flag(IntEnum):
    """The role of a message in an exchange."""

    REQUEST = 0
    ONE_WAY = 1
    REPLY = 2
    PROGRESS = 3
    ERROR = 4


#: Calling the enums, or reading a member, would cost more than all other work on a header.
REQUEST, REPLY, PROGRESS, ERROR = Flag.REQUEST, Flag.REPLY, Flag.PROGRESS, Flag.ERROR
_OPS, _FLAGS = {int(op): op for op in Op}, {int(flag): flag for flag in Flag}


class Message(NamedTuple):
    """One whole message; `request` pairs answers with requests. A tuple, because each call makes two."""

    op: Op
    flag: Flag
    request: int
    payload: bytes


def packets_of(message: Message, fragment_bytes: int = FRAGMENT_BYTES) -> list[bytes]:
    """Return the packets of a message, in order."""
    payload = message.payload
    if len(payload) <= fragment_bytes:
        return [encode_short(*message)]
    packets = []
    for start in range(0, len(payload), fragment_bytes):
        part = payload[start : start + fragment_bytes]
        more = start + fragment_bytes < len(payload)
        packets.append(HEADER.pack(_MAGIC, message.op, message.flag, more, len(part), message.request) + part)
    return packets


def encode_short(op: Op, flag: Flag, request: int, payload: bytes) -> bytes:
    """Return the one packet of a message with a payload of at most `FRAGMENT_BYTES`."""
    return HEADER.pack(_MAGIC, op, flag, 0, len(payload), request) + payload


def short_reply(packet: memoryview, request: int) -> bytes | None:
    """Return the payload if the packet is the whole reply to a request, otherwise None."""
    if len(packet) < _HEADER_BYTES:
        return None
    magic, _, flag, more, length, answered = HEADER.unpack_from(packet)
    if answered != request or flag != REPLY or more or length != len(packet) - _HEADER_BYTES or magic != _MAGIC:
        return None
    return bytes(packet[_HEADER_BYTES:])


class Decoder:
    """Turns packets, or pieces of a TCP stream, into messages.

    The longest accepted message, `max_bytes`, may be changed between two messages.
    """

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._stream = bytearray()
        self._parts: list[bytes] = []
        self._num_bytes = 0

    @property
    def is_between(self) -> bool:
        """Whether no message is incomplete."""
        return not self._parts and not self._stream

    def packet(self, packet: bytes | memoryview) -> Message | None:
        """Take one packet, copying kept bytes; return the message that it completes, or None.

        Raises:
            ProtocolError: the packet is not of this protocol.
        """
        if len(packet) < _HEADER_BYTES:
            raise ProtocolError(f"wanted at least {_HEADER_BYTES} bytes of header, got {len(packet)}")
        magic, op, flag, more, length, request = HEADER.unpack_from(packet)
        if magic != _MAGIC or len(packet) != _HEADER_BYTES + length:
            raise ProtocolError(f"wanted a {_MAGIC!r} packet of {_HEADER_BYTES + length} bytes, got {len(packet)}")
        # A part costs more memory than its bytes, so the number of empty parts is bounded, too.
        if self._num_bytes + length > self.max_bytes or len(self._parts) * _HEADER_BYTES > self.max_bytes:
            raise ProtocolError(f"wanted at most {self.max_bytes} bytes in a message, got more")
        payload = bytes(packet[_HEADER_BYTES:])
        if more or self._parts:
            self._num_bytes += length
            self._parts.append(payload)
            if more:
                return None
            payload = b"".join(self._parts)
            self._parts.clear()
            self._num_bytes = 0
        try:
            return Message(_OPS[op], _FLAGS[flag], request, payload)
        except KeyError as error:
            raise ProtocolError(f"wanted a known op and flag, got op {op} and flag {flag}") from error

    def packets(self, packet: bytes | memoryview) -> list[Message]:
        """Take one packet; return the completed messages, as `stream` does."""
        message = self.packet(packet)
        return [] if message is None else [message]

    def stream(self, data: bytes | memoryview) -> list[Message]:
        """Take the next bytes of a stream, cut anywhere; return the completed messages.

        Raises:
            ProtocolError: the bytes are not of this protocol.
        """
        size = len(data)
        if size >= _HEADER_BYTES and not self._stream and HEADER.unpack_from(data)[4] == size - _HEADER_BYTES:
            return self.packets(data)  # The usual case: one whole packet.
        self._stream += data
        messages: list[Message] = []
        at = 0
        while len(self._stream) - at >= _HEADER_BYTES:
            magic, _, _, _, length, _ = HEADER.unpack_from(self._stream, at)
            if magic != _MAGIC or length > self.max_bytes:
                raise ProtocolError(
                    f"wanted a packet that begins with {_MAGIC!r} and has at most {self.max_bytes} bytes, "
                    f"got {bytes(magic)!r} and {length} bytes"
                )
            end = at + _HEADER_BYTES + length
            if len(self._stream) < end:
                break
            messages += self.packets(bytes(self._stream[at:end]))
            at = end
        del self._stream[:at]
        return messages


def is_secret(value: object, secret: str) -> bool:
    """Return whether a received value is the secret. The time does not depend on how much matches."""
    return isinstance(value, str) and secrets.compare_digest(value.encode("utf-8", "replace"), secret.encode())


def pack_error(error: BaseException) -> bytes:
    """Return an error as a payload; classes outside our tree become KVStoreError."""
    name, text = type(error).__name__, str(error)
    if not isinstance(error, KVStoreError) or name not in all_error_types():
        name, text = "KVStoreError", f"{name}: {text}"
    # File paths in the text may be invalid Unicode.
    return encode_object({"error": name, "text": text[:_MAX_ERROR_CHARS].encode("utf-8", "replace").decode()})


def unpack_error(payload: bytes) -> KVStoreError:
    """Return the error that `pack_error` packed."""
    value = decode_object(payload)
    cls = all_error_types().get(str(value.get("error")), KVStoreError)
    return cls(str(value.get("text"))[:_MAX_ERROR_CHARS])

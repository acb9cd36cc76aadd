"""Open control connections to this machine's node store, and to other nodes' stores and directories."""

from __future__ import annotations

import os
import socket
import struct
from io import FileIO
from typing import Annotated, Any

import msgspec

from kvstore.blocks.codec import decode_object, encode_object
from kvstore.bounds import clip
from kvstore.errors import ConfigError, PeerLost, ProtocolError, StoreNotRunning, StoreUnavailable
from kvstore.rpc.channel import prepare_remote, set_timeout
from kvstore.rpc.client import ControlClient
from kvstore.rpc.framing import RECEIVE_BYTES, SOCKET_BUFFER_BYTES, Decoder, Flag, Message, Op, packets_of, unpack_error

_FD = struct.Struct("i")


class Greeting(msgspec.Struct, frozen=True):
    """A node store's description of itself for its machine's processes; other versions may have more fields."""

    protocol: int
    epoch: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    node: str
    connection: str
    config: str
    arena_bytes: Annotated[int, msgspec.Meta(gt=0)]


def greeting_of(client: ControlClient) -> Greeting:
    """Return the checked greeting that a node store sent at the start of a connection.

    Raises:
        ProtocolError: a field is missing, or not valid in this protocol.
    """
    try:
        return msgspec.convert(client.hello, Greeting)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"{client.name}: wanted the greeting of a store of this version, got another one: {clip(str(error), 200)}; "
            "run one version of raykv everywhere"
        ) from error


def connect_local(
    path: str, hello: dict[str, Any], *, timeout_s: float, call_timeout_s: float | None = None
) -> tuple[ControlClient, FileIO]:
    """Connect to a node store on this machine.

    Args:
        path: its socket.
        hello: fields of the HELLO, such as the role.
        timeout_s: for its answer.
        call_timeout_s: for later messages; the same when None.

    Returns:
        (the connection with its `hello` answer, the arena's file, which the caller closes). A bare descriptor would
        have no owner if an error or interrupt comes before the caller has it.

    Raises:
        StoreNotRunning: no process listens there.
        StoreUnavailable: this process has no descriptor left.
        ConfigError: a process of another user listens there; nothing was sent to it.
        IncompatibleStore: the store has another protocol version or configuration.
        ProtocolError: the process that answered is no store.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise StoreUnavailable(f"no connection to the node store at {path} can be made here ({error})") from error
    try:
        _prepare(sock, timeout_s)
        sock.connect(path)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have.
        sock.close()
        raise StoreNotRunning(
            f"no node store answers at {path} ({error}); if the store was restarted, make a new client, else start one "
            "with kvstore.start()"
        ) from error
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.geteuid():
        sock.close()
        raise ConfigError(
            f"{path}: wanted a store of user {os.geteuid()}, got a process of user {uid}; run workers as the user that "
            "runs Ray"
        )
    client = ControlClient(sock, f"node store at {path}")
    received: list[Any] = []
    files: list[FileIO] = []
    try:
        try:
            for packet in packets_of(Message(Op.HELLO, Flag.REQUEST, 0, encode_object(hello))):
                sock.sendall(packet)
            # An interrupt comes between two instructions, and one instruction each fills these lists. So they always
            # have every descriptor that the kernel gave, and the handler below closes it.
            room = (socket.CMSG_SPACE(_FD.size),)
            received.extend(map(sock.recvmsg, (RECEIVE_BYTES,), room, (socket.MSG_CMSG_CLOEXEC,)))
            files.extend(map(FileIO, _fds_in(received)))
        except OSError as error:
            raise StoreNotRunning(f"the node store at {path} does not answer ({error})") from error
        message = Decoder().packet(received[0][0]) if received[0][0] else None
        if message is not None and message.flag is Flag.ERROR:
            raise unpack_error(message.payload)
        if message is None or not files:
            raise StoreNotRunning(f"the node store at {path} closed the connection")
        client.hello = decode_object(message.payload)
        if call_timeout_s is not None:
            _prepare(sock, call_timeout_s)
        return client, files[0]
    except BaseException:
        for file in files:
            file.close()
        for fd in _fds_in(received)[len(files) :]:
            os.close(fd)
        client.close()
        raise


def _fds_in(received: list[Any]) -> list[int]:
    """Return the descriptors in the ancillary data that `recvmsg` returned."""
    return [
        fd
        for _, ancillary, *_ in received
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _FD.iter_unpack(data[: len(data) // _FD.size * _FD.size])
    ]


def connect_remote(host: str, port: int, hello: dict[str, Any], *, timeout_s: float) -> ControlClient:
    """Connect to a store or directory on another node.

    Raises:
        PeerLost: no process answers there.
        IncompatibleStore: the other side has another protocol version or configuration.
    """
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise PeerLost(f"{host}:{port} does not answer: {error}") from error
    client = ControlClient(sock, f"peer at {host}:{port}")
    try:
        sock.settimeout(None)
        _prepare(sock, timeout_s)
        prepare_remote(sock)
        client.hello = decode_object(client.call(Op.HELLO, encode_object(hello), timeout_s=timeout_s))
    except BaseException:
        client.close()
        raise
    return client


def _prepare(sock: socket.socket, timeout_s: float) -> None:
    set_timeout(sock, socket.SO_SNDTIMEO, timeout_s)
    set_timeout(sock, socket.SO_RCVTIMEO, timeout_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)

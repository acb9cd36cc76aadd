"""How control connections begin: to the node store of this machine, and to stores and directories of other nodes."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

from kvstore.blocks.codec import decode_object, encode_object
from kvstore.errors import ConfigError, KVStoreError, PeerLost, StoreNotRunning, StoreUnavailable
from kvstore.rpc.channel import prepare_remote
from kvstore.rpc.client import ControlClient
from kvstore.rpc.framing import RECEIVE_BYTES, SOCKET_BUFFER_BYTES, Decoder, Flag, Message, Op, packets_of, unpack_error


def connect_local(
    path: str, hello: dict[str, Any], *, timeout_s: float, call_timeout_s: float | None = None
) -> tuple[ControlClient, int]:
    """Connect to a node store on this machine.

    Args:
        path: its socket.
        hello: who connects.
        timeout_s: for its answer.
        call_timeout_s: for what is sent afterwards; the same when None.

    Returns:
        (the connection with its `hello` answer, the arena's descriptor, which the caller owns).

    Raises:
        StoreNotRunning: nobody listens there.
        StoreUnavailable: this process has no descriptor left.
        ConfigError: what listens there is a process of another user; it was told nothing.
        IncompatibleStore: the store has another protocol version or configuration.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise StoreUnavailable(f"no connection to the node store at {path} can be made here ({error})") from error
    try:
        _prepare(sock, timeout_s)
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise StoreNotRunning(f"no node store answers at {path} ({error}); start one with kvstore.start()") from error
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.geteuid():
        sock.close()
        raise ConfigError(
            f"{path}: wanted a store of user {os.geteuid()}, got a process of user {uid}; run workers as the user that "
            "runs Ray"
        )
    client = ControlClient(sock, f"node store at {path}")
    fds: list[int] = []
    try:
        for packet in packets_of(Message(Op.HELLO, Flag.REQUEST, 0, encode_object(hello))):
            sock.sendall(packet)
        data, fds, _, _ = socket.recv_fds(sock, RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        client.close()
        raise StoreNotRunning(f"the node store at {path} does not answer ({error})") from error
    message = Decoder().packet(data) if data else None
    if message is None or message.flag is Flag.ERROR or not fds:
        for fd in fds:
            os.close(fd)
        client.close()
        if message is not None and message.flag is Flag.ERROR:
            raise unpack_error(message.payload)
        raise StoreNotRunning(f"the node store at {path} closed the connection")
    client.hello = decode_object(message.payload)
    if call_timeout_s is not None:
        _prepare(sock, call_timeout_s)
    return client, fds[0]


def connect_remote(host: str, port: int, hello: dict[str, Any], *, timeout_s: float) -> ControlClient:
    """Connect to a store or directory on another node.

    Raises:
        PeerLost: nobody answers there.
        IncompatibleStore: it has another protocol version or configuration.
    """
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise PeerLost(f"{host}:{port} does not answer: {error}") from error
    sock.settimeout(None)
    _prepare(sock, timeout_s)
    prepare_remote(sock)
    client = ControlClient(sock, f"peer at {host}:{port}")
    try:
        client.hello = decode_object(client.call(Op.HELLO, encode_object(hello), timeout_s=timeout_s))
    except KVStoreError:
        client.close()
        raise
    return client


def _prepare(sock: socket.socket, timeout_s: float) -> None:
    value = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
